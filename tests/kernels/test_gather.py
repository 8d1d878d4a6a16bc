"""`gather`: the torch reference against a loop, the compiled operation, the kernel on a GPU."""

import math
import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gather_cases import FOLDED, FOLDS, assert_gathered, assert_members, draw_members, make_gather_case
from torch import Tensor
from triton_without_gpu import Compiled, compile_for_hopper, run_interpreted

from prunevit.kernels import gather as door
from prunevit.kernels.gather import gather

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
OPTIONAL = ("size", "key_weight", "soft", "merge_weight", "size_in", "key_weight_in")


def test_kernel_through_the_interpreter() -> None:
    run_interpreted("interpreted_gather_cases.py")


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_reference_against_a_loop(dtype: torch.dtype, fold: str) -> None:
    case = make_gather_case([20, 0, 33], 24, dtype, fold, spare=21, dead_rows=9)
    assert_gathered(gather(**case), case)


@pytest.mark.parametrize("fold", ["none", "selection", "pairs"])
def test_what_is_absent(fold: str) -> None:
    for here in product([True, False], repeat=len(OPTIONAL)):
        absent = tuple(name for name, there in zip(OPTIONAL, here) if not there)
        case = make_gather_case([12], 3, torch.float32, fold, spare=2, absent=absent)
        assert_gathered(gather(**case), case)


@pytest.mark.parametrize("fold", ["none", "one heir"])
def test_never_writes_beyond_capacity(fold: str) -> None:
    case = make_gather_case([20, 30], 8, torch.float32, fold, spare=-6)
    assert_gathered(gather(**case), case)


def test_gradients_flow() -> None:
    case = make_gather_case([9, 4], 3, torch.float64, "one heir")
    names = ("x", "merge_weight", "size_in", "key_weight_in")
    leaves = [case.pop(name).nan_to_num(0.5).requires_grad_() for name in names]

    def packed(*values: Tensor) -> list[Tensor]:
        moved = gather(**(case | dict(zip(names, values))))
        return [values for values in (moved.x, moved.size, moved.key_weight) if values is not None]

    assert torch.autograd.gradcheck(packed, leaves)


@pytest.mark.parametrize(("fold", "dtype"), list(product(["none", "pairs"], [torch.float16, torch.float32])))
def test_operation_is_well_formed(fold: str, dtype: torch.dtype) -> None:
    for absent in ((), OPTIONAL):
        case = make_gather_case([6, 0, 5], 3, dtype, fold, spare=2, dead_rows=1, absent=absent)
        torch.library.opcheck(door._gather_op, positional(case))


@pytest.mark.parametrize("fold", ["none", "pairs"])
def test_compiled_without_a_break(fold: str) -> None:
    compiled = torch.compile(lambda case: gather(**case), fullgraph=True, backend="aot_eager")
    for absent in ((), ("size", "size_in", "soft")):
        case = make_gather_case([6, 0, 5], 3, torch.float32, fold, spare=2, absent=absent)
        case["x"] = case["x"].nan_to_num(7.0)
        for got, right in zip(compiled(case), gather(**case), strict=True):
            assert (got is None) == (right is None)
            if right is not None:
                torch.testing.assert_close(got, right, rtol=0, atol=0)


@pytest.mark.parametrize("channels", [192, 384, 1664])
@pytest.mark.parametrize("fold", ["none", "pairs", "selection"])
@pytest.mark.parametrize("many", [False, True])
def test_kernel_compiles_for_hopper(
    many: bool, fold: str, channels: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_gather
    from prunevit.kernels.triton_members import Members

    lists = torch.zeros(2, 12, dtype=torch.int32)
    monkeypatch.setattr(triton_gather, "list_members", lambda into, cu, *values: Members(lists, *values))
    chosen = triton_gather.choose_tile
    monkeypatch.setattr(
        triton_gather,
        "choose_tile",
        lambda *sizes: chosen(1000 if many else 1, 197 * (1000 if many else 1), *sizes[2:]),
    )
    for dtype in DTYPES if channels == 384 else DTYPES[1:2]:
        arguments = positional(make_gather_case([12], channels, dtype, fold))
        call = partial(triton_gather.triton_gather, *arguments)
        compiled = compile_for_hopper(monkeypatch, triton_gather, call, tmp_path)
        assert compiled.spilled <= (
            32 if fold == "selection" else 8
        )  # a few scalars of the longer of two paths
        assert compiled.shared <= 8 * 1024
        assert re.search(r"ld\.global[\w.:]*\.v4", compiled.ptx)
        assert re.search(r"st\.global[\w.:]*\.v4", compiled.ptx)
        check(compiled)


def test_kernel_of_members_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prunevit.kernels import triton_members

    for length, absent in ((197, ()), (1025, ()), (197, FOLDED)):
        case = draw_members([length], 0.1, 0) | dict.fromkeys(absent)
        call = partial(triton_members.list_members, **case)
        compiled = compile_for_hopper(monkeypatch, triton_members, call, tmp_path)
        assert compiled.spilled == 0
        assert compiled.shared <= 8 * 1024
        check(compiled)


def check(compiled: Compiled) -> None:
    assert not re.search(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)
    assert "griddepcontrol.wait" in compiled.ptx


def positional(case: dict[str, Any]) -> tuple[Any, ...]:
    """Put a case in the order that the operation takes."""
    order = (
        "x", "image_id", "source", "size_in", "key_weight_in", "soft", "destination", "cu_old", "cu_new",
        "capacity", "merge_into", "merge_weight", "plain",
    )  # fmt: skip
    folds_key_weight = case["merge_into"] is not None and case["key_weight_in"] is not None
    return (*(case[name] for name in order), folds_key_weight)


@pytest.mark.gpu
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(
    ("channels", "dtype"),
    [(5, torch.float16), (192, torch.float32), (1664, torch.bfloat16), *((384, dtype) for dtype in DTYPES)],
)
def test_on_a_gpu(channels: int, dtype: torch.dtype, fold: str) -> None:
    lengths = [197, 0, 33, 300]
    for spare in (210, -40):
        case = make_gather_case(lengths, channels, dtype, fold, spare=spare, dead_rows=9, device="cuda")
        assert_gathered(gather(**case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[197] * 20, [5, 0, 1300], [4000], [1]], ids=str)
def test_lists_of_members_on_a_gpu(lengths: list[int]) -> None:
    from prunevit.kernels.triton_members import list_members

    for density, absent in product((0.1, 1.0), ((), FOLDED)):
        case = draw_members(lengths, density, 0) | dict.fromkeys(absent)
        arguments: dict[str, Any] = {
            name: None if values is None else values.cuda() for name, values in case.items()
        }
        assert_members(list_members(**arguments), case)


@pytest.mark.gpu
def test_many_images_on_a_gpu_same_bits_twice() -> None:
    for fold in FOLDS:
        case = make_gather_case([197] * 90, 64, torch.bfloat16, fold, spare=3, device="cuda")
        first, second = gather(**case), gather(**case)
        assert_gathered(first, case)
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.gpu
def test_what_is_absent_on_a_gpu() -> None:
    for fold in ("none", "selection", "pairs"):
        for absent in ((), OPTIONAL, OPTIONAL[3:], OPTIONAL[:3], ("size_in", "key_weight_in")):
            case = make_gather_case([40, 12], 24, torch.float16, fold, spare=2, absent=absent, device="cuda")
            assert_gathered(gather(**case), case)


@pytest.mark.gpu
def test_rows_beyond_two_to_the_31_elements() -> None:
    rows, channels = 1_400_000, 1664
    x = torch.zeros(rows, channels, dtype=torch.float16, device="cuda")
    x[:, 0] = torch.arange(rows, device="cuda") % 2000
    assert x.numel() > 2**31
    every = torch.arange(rows, device="cuda")
    bounds = torch.arange(0, rows + 1, 200, dtype=torch.int32, device="cuda")
    ids = torch.arange(rows // 200, device="cuda", dtype=torch.int32).repeat_interleave(200)
    moved = gather(
        x,
        ids,
        ids,
        destination=(199 - every % 200).int(),
        cu_old=bounds,
        cu_new=bounds,
        capacity=rows,
    )
    assert torch.equal(moved.x[:, 0], x[:, 0].view(-1, 200).flip(1).flatten())
    assert torch.equal(moved.source, ids)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_gather_case([40, 12], 24, torch.float16, "one heir", spare=2, device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gather(**case)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gradients_take_the_reference() -> None:
    case = make_gather_case([40, 12], 24, torch.float32, "pairs", device="cuda")
    case["x"] = case["x"].nan_to_num().requires_grad_()
    (gradient,) = torch.autograd.grad(gather(**case).x.sum(), case["x"])
    assert math.isfinite(gradient.sum().item())
