"""`select` and `rank`: the torch references against loops, the compiled operations, and the kernels on a GPU."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from selection_cases import SCORES, assert_selection, draw_scores, make_rank_case
from triton_without_gpu import compile_for_hopper, run_interpreted

from prunevit.folding import fuse
from prunevit.keepmask import top_k
from prunevit.kernels import select as door
from prunevit.kernels.select import rank, select
from prunevit.packing import plan
from prunevit.tokens import RaggedTokens

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_kernels_through_the_interpreter() -> None:
    run_interpreted("interpreted_select_cases.py")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [1, 7, 22, 23, 100])
def test_reference_against_a_loop(kind: str, count: int) -> None:
    score = draw_scores(kind, 3 * 25 + 6)
    selection = select(score, batch_size=3, rows=25, prefix=2, count=count)
    assert_selection(selection, score, 3, 25, 2, count)


@pytest.mark.parametrize(("batch_size", "rows", "prefix"), [(1, 1, 1), (0, 5, 1), (2, 1, 0), (3, 2, 2)])
def test_small_batches(batch_size: int, rows: int, prefix: int) -> None:
    score = draw_scores("random", batch_size * rows + 3)
    selection = select(score, batch_size=batch_size, rows=rows, prefix=prefix, count=1)
    assert_selection(selection, score, batch_size, rows, prefix, 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_mean_over_heads(dtype: torch.dtype) -> None:
    score = draw_scores("random", 3, 2 * 20 + 4, 2).to(dtype).permute(1, 2, 0)[:, 1]
    selection = select(score, batch_size=2, rows=20, prefix=1, count=9)
    assert_selection(selection, score, 2, 20, 1, 9)
    assert selection.score.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [1, 9, 15, 16])
def test_same_as_the_verbs_that_rank(kind: str, count: int) -> None:
    tokens = RaggedTokens.from_padded(torch.randn(3, 17, 2), num_prefix_tokens=1, grid=(4, 4))
    tokens = replace(tokens, uniform=False)  # uniform ones are left to `select`
    score = draw_scores(kind, 3 * 17)
    selection = select(score, batch_size=3, rows=17, prefix=1, count=count)
    mask = top_k(tokens, score, count=count)
    fused = fuse(tokens, mask, score)
    for chosen, keep, destination, bounds in (
        (mask, selection.keep, selection.destination, selection.cu_seqlens),
        (fused, selection.keep_fused, selection.destination_fused, selection.cu_fused),
    ):
        layout = plan(tokens, chosen)
        assert torch.equal(keep, layout.kept)
        assert torch.equal(bounds, layout.cu_seqlens)
        assert torch.equal(destination[keep], layout.destination[layout.kept])
    if fused.merge_into is not None:
        assert torch.equal(selection.merge_into, fused.merge_into)
        torch.testing.assert_close(selection.merge_weight, fused.merge_weight, rtol=0, atol=0, equal_nan=True)


def test_gradient_flows_through_the_weight_of_what_is_fused() -> None:
    score = torch.tensor([9.0, 1.0, 4.0, 3.0, 2.0], requires_grad=True)
    selection = select(score, batch_size=1, rows=5, prefix=1, count=2)
    selection.merge_weight.sum().backward()
    assert score.grad is not None
    assert score.grad.tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [40, 1, 33]], ids=str)
def test_rank_reference_against_a_loop(lengths: list[int], kind: str) -> None:
    case = make_rank_case(lengths, kind, dead_rows=7)
    assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


@pytest.mark.parametrize(
    ("score", "numbers", "message"),
    [
        (torch.zeros(9), (2, 5, 1, 1), r"score must be floating \[T\] or \[T, H\] with at least 2 x 5 rows"),
        (torch.zeros(10).int(), (2, 5, 1, 1), r"got torch.int32 \[10\]"),
        (torch.zeros(10), (2, 5, 6, 1), r"prefix must be in \[0, 5\] and count at least 1, got 6 and 1"),
        (torch.zeros(10), (2, 5, 1, 0), "got 1 and 0"),
    ],
)
def test_what_cannot_be_is_refused(score: torch.Tensor, numbers: tuple[int, ...], message: str) -> None:
    batch_size, rows, prefix, count = numbers
    with pytest.raises(ValueError, match=message):
        select(score, batch_size=batch_size, rows=rows, prefix=prefix, count=count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_operations_are_well_formed(dtype: torch.dtype) -> None:
    torch.library.opcheck(door._select_op, (torch.randn(23, 2).to(dtype), 2, 10, 1, 4))
    case = make_rank_case([5, 0, 7], "tied", dead_rows=3)
    torch.library.opcheck(door._rank_op, (case.score.to(dtype), case.eligible, *case.layout.values()))


def test_compiled_without_a_break() -> None:
    def both(score: torch.Tensor, case: Any) -> tuple[torch.Tensor, ...]:
        position = rank(case.score, case.eligible, **case.layout)
        return (*select(score, batch_size=2, rows=10, prefix=1, count=4), position)

    score, case = torch.randn(23, 2), make_rank_case([5, 0, 7], "tied", dead_rows=3)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")(score, case)
    for got, right in zip(compiled, both(score, case), strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("rows", [50, 197, 577, 1025])
def test_select_kernel_compiles_for_hopper(
    rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_select

    score = torch.randn(6, 2 * rows, 2).permute(1, 2, 0)[:, 0]
    compiled = compile_for_hopper(
        monkeypatch,
        triton_select,
        lambda: triton_select.triton_select(score, 2, rows, 1, rows // 2),
        tmp_path,
    )
    assert compiled.spilled == 0
    assert "redux.sync.add" in compiled.ptx
    assert not re.search(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)


def test_rank_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prunevit.kernels import triton_select

    case = make_rank_case([197], "random")
    compiled = compile_for_hopper(
        monkeypatch,
        triton_select,
        lambda: triton_select.triton_rank(case.score, case.eligible, case.layout["cu_seqlens"], 197),
        tmp_path,
    )
    assert compiled.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SCORES)
def test_select_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    for batch_size, rows, prefix, count in (
        (3, 25, 2, 7),
        (5, 1, 1, 1),
        (16, 197, 1, 137),
        (2, 577, 5, 1),
        (2, 1025, 1, 2000),
    ):
        score = draw_scores(kind, batch_size * rows + 11).to("cuda", dtype)
        selection = select(score, batch_size=batch_size, rows=rows, prefix=prefix, count=count)
        assert_selection(selection, score, batch_size, rows, prefix, count)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype"), [(heads, torch.float32) for heads in (1, 3, 12)] + [(6, dtype) for dtype in DTYPES]
)
def test_mean_over_heads_on_a_gpu(heads: int, dtype: torch.dtype) -> None:
    score = draw_scores("random", heads, 2 * 197 + 3, 2).to("cuda", dtype).permute(1, 2, 0)[:, 1]
    selection = select(score, batch_size=2, rows=197, prefix=1, count=100)
    assert_selection(selection, score, 2, 197, 1, 100)
    on_cpu = select(score.cpu(), batch_size=2, rows=197, prefix=1, count=100)
    for got, right in zip(selection, on_cpu):
        assert torch.equal(got.cpu(), right)  # the same bits


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCORES)
def test_rank_on_a_gpu(kind: str) -> None:
    for lengths in ([1], [0, 5, 0], [197] * 3, [130, 1025, 2]):
        case = make_rank_case(lengths, kind, dead_rows=150, device="cuda")
        assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_never_synchronises() -> None:
    score = torch.randn(3 * 40, 3, device="cuda")
    case = make_rank_case([5, 0, 60], "random", dead_rows=4, device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            select(score, batch_size=3, rows=40, prefix=1, count=20)
            rank(case.score, case.eligible, **case.layout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gradients_and_fp64_take_the_reference() -> None:
    score = torch.randn(2 * 40, device="cuda", dtype=torch.float64, requires_grad=True)
    selection = select(score, batch_size=2, rows=40, prefix=1, count=20)
    assert_selection(selection, score.detach(), 2, 40, 1, 20)
    assert selection.merge_weight.requires_grad
    assert math.isfinite(torch.autograd.grad(selection.merge_weight.sum(), score)[0].sum().item())
