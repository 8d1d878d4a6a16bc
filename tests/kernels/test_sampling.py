"""`sample`: the torch reference against exact fractions, the compiled operation, and the kernel on a GPU."""

from pathlib import Path

import pytest
import torch
from sample_cases import LENGTHS, SCORES, assert_sample, make_sample_case
from triton_without_gpu import compile_for_hopper

from prunevit.kernels import sample as door


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_reference_against_fractions(lengths: list[int], kind: str) -> None:
    for points in (1, 2, 17, 60):
        case = make_sample_case(lengths, kind, points, prefix=2)
        assert_sample(case, case.sample())
    for differ, some in ((True, False), (False, True), (True, True)):
        case = make_sample_case(lengths, kind, 40, differ=differ, some=some)
        assert_sample(case, case.sample())


def test_a_point_between_two_takes_the_lower_one() -> None:
    """The shares of 33 equal patches and the points are multiples of 1/512, which fp64 adds without rounding."""
    case = make_sample_case([34], "constant", 17)
    # (16 + 31 p) / 512 for p = 8 is 16.5 / 32, between the patches 16 and 17.
    places = [(16 + 31 * point) // 16 + ((16 + 31 * point) % 16 > 8) for point in range(17)]
    assert case.sample().nonzero()[:, 0].tolist() == sorted({0, *(1 + place for place in places)})


def test_operation_is_well_formed_and_compiles_without_a_break() -> None:
    for differ in (False, True):
        case = make_sample_case([5, 0, 7], "random", 6, differ=differ, some=differ)
        arguments = (case.score, case.source, case.within, case.each, 6, *case.layout.values())
        torch.library.opcheck(door._sample_op, arguments)
        assert_sample(case, torch.compile(case.sample, fullgraph=True, backend="aot_eager")())


@pytest.mark.parametrize("rows", [50, 197, 577, 1025])
def test_kernel_compiles_for_hopper(rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prunevit.kernels import triton_sample

    case = make_sample_case([rows], "random", 196, differ=True, some=True)
    starts = case.layout["cu_seqlens"]
    compiled = compile_for_hopper(
        monkeypatch,
        triton_sample,
        lambda: triton_sample.triton_sample(
            case.score, case.source, case.within, case.each, 196, starts, rows
        ),
        tmp_path,
    )
    assert compiled.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SCORES)
def test_sample_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for lengths in (*LENGTHS, [197] * 3, [577, 0, 1025]):
        for points, differ in ((1, False), (17, True), (196, False)):
            case = make_sample_case(lengths, kind, points, differ=differ, some=differ, device="cuda")
            case.score = case.score.to(dtype)
            assert_sample(case, case.sample())


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_sample_case([5, 0, 60], "random", 40, device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            case.sample()
        finally:
            torch.cuda.set_sync_debug_mode("default")
