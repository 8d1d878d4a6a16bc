"""`join`: the torch reference against a loop, the compiled operation, and the kernel compiled and on a GPU."""

from pathlib import Path

import pytest
import torch
from join_cases import LENGTHS, assert_joined, make_join_case
from triton_without_gpu import compile_for_hopper

from prunevit.kernels import join as door


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_reference_against_a_loop(lengths: list[int]) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        case = make_join_case(lengths, dtype)
        assert_joined(case, case.join())


def test_no_rows() -> None:
    for lengths, dead_rows in (([0], 3), ([], 0)):
        case = make_join_case(lengths, dead_rows=dead_rows)
        assert_joined(case, case.join())


def test_gradients_reach_the_best_of_a_group() -> None:
    case = make_join_case([2], torch.float64, heads=2, dead_rows=0)
    case.similarity, case.partner = torch.tensor([0.0, 1.0]), torch.tensor([-1, 0])
    case.score = torch.tensor([[1.0, 2.0], [4.0, 5.0]], dtype=torch.float64, requires_grad=True)
    keep, best = case.join()
    assert (keep.tolist(), best.tolist()) == ([True, False], [4.5, 4.5])
    (best * torch.tensor([3.0, 7.0])).sum().backward()
    assert case.score.grad is not None
    assert case.score.grad.tolist() == [[0, 0], [5, 5]]


def test_operation_is_well_formed_and_compiles_without_a_break() -> None:
    case = make_join_case([5, 0, 7])
    given = (case.similarity, case.partner, case.limit, case.score, case.cu_seqlens)
    torch.library.opcheck(door._join_op, given)
    assert_joined(case, torch.compile(case.join, fullgraph=True, backend="aot_eager")())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernel_compiles_for_hopper(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_join

    case = make_join_case([197], dtype)
    given = (case.similarity, case.partner, case.limit, case.score, case.cu_seqlens)
    compiled = compile_for_hopper(monkeypatch, triton_join, lambda: triton_join.triton_join(*given), tmp_path)
    assert compiled.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    for lengths in (*LENGTHS, [197] * 9, [5, 9] * 700):
        for _ in range(3):
            case = make_join_case(lengths, dtype, dead_rows=400, device="cuda")
            assert_joined(case, case.join())


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_join_case([5, 0, 60], device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            case.join()
        finally:
            torch.cuda.set_sync_debug_mode("default")
