"""`plan`: the torch reference against lists, the compiled operation, and the kernel on a GPU."""

from pathlib import Path

import pytest
import torch
from plan_cases import LENGTHS, ORDERS, assert_fits, assert_plan, make_plan_case
from triton_without_gpu import compile_for_hopper, run_interpreted

from prunevit.kernels import plan as door
from prunevit.kernels.plan import plan

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32)


def test_kernels_through_the_interpreter() -> None:
    """Those of `sample`, `clusters` and `draws` too: most of the time it takes goes to starting a process."""
    names = ("plan", "sample", "clusters", "draws")
    run_interpreted(*(f"interpreted_{name}_cases.py" for name in names))


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_reference_against_lists(lengths: list[int], kind: str) -> None:
    for prefix in (0, 2):
        case = make_plan_case(lengths, kind, prefix, dead_rows=7)
        assert_plan(case, case.plan())
        assert_plan(case, plan(case.source, None, case.order, **case.layout), keeps_all=True)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_fit_against_lists(lengths: list[int]) -> None:
    assert_fits(make_plan_case(lengths, "random", dead_rows=7))


def test_no_images() -> None:
    case = make_plan_case([0], "random", dead_rows=3)
    case.layout |= {"cu_seqlens": torch.zeros(1).int(), "image_id": torch.zeros(3).int()}
    case.lengths = []
    assert_plan(case, case.plan())


def test_operation_is_well_formed_and_compiles_without_a_break() -> None:
    for kind in ("present", "tied"):
        case = make_plan_case([5, 0, 7], kind, dead_rows=3)
        torch.library.opcheck(door._plan_op, (case.source, case.keep, case.order, *case.layout.values()))
        assert_plan(case, torch.compile(case.plan, fullgraph=True, backend="aot_eager")())


@pytest.mark.parametrize("dtype", [None, *DTYPES, torch.int64], ids=str)
def test_kernel_compiles_for_hopper(
    dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_plan

    case = make_plan_case([197], "present")
    order = None if dtype is None else torch.zeros(197, dtype=dtype)
    starts = case.layout["cu_seqlens"]
    compiled = compile_for_hopper(
        monkeypatch,
        triton_plan,
        lambda: triton_plan.triton_plan(case.source, case.keep, order, starts, 197),
        tmp_path,
    )
    assert compiled.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ORDERS)
def test_plan_on_a_gpu(kind: str) -> None:
    for lengths in (*LENGTHS, [197] * 4, [1025, 0, 577], [5, 9] * 700):
        case = make_plan_case(lengths, kind, dead_rows=150, device="cuda")
        assert_plan(case, case.plan())
        assert_plan(case, plan(case.source, None, case.order, **case.layout), keeps_all=True)
        assert_fits(case)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_orders_of_any_dtype_on_a_gpu(dtype: torch.dtype) -> None:
    case = make_plan_case([197, 40], "tied", device="cuda")
    assert case.order is not None
    case.order = case.order.to(dtype)
    assert_plan(case, case.plan())


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_plan_case([5, 0, 60], "random", dead_rows=4, device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            case.plan()
        finally:
            torch.cuda.set_sync_debug_mode("default")
