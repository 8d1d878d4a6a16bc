"""`select` and `rank`: the torch references against loops, the compiled operations, and the kernels on a GPU."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import (
    RULES,
    SCORES,
    assert_selection,
    draw_scores,
    make_rank_case,
    select_ragged,
    select_uniform,
)
from triton_without_gpu import compile_all_for_hopper, compile_for_hopper, run_interpreted

from prunevit.folding import fuse
from prunevit.keepmask import KeepMask
from prunevit.kernels import select as door
from prunevit.kernels.select import Rule, rank, select
from prunevit.packing import plan
from prunevit.selection import Selected
from prunevit.tokens import RaggedTokens

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_kernels_through_the_interpreter() -> None:
    run_interpreted("interpreted_select_cases.py")


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [1, 7, 22, 23, 100])
def test_reference_against_a_loop(kind: str, count: int) -> None:
    score, rule = draw_scores(kind, 3 * 25 + 6), Rule("count", count)
    assert_selection(select_uniform(score, rule, 3, 25, 2), score, rule, [25] * 3, 2)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("lengths", [[25], [40, 3, 1, 33], [0, 5, 0]], ids=str)
def test_rules_against_a_loop(lengths: list[int], name: str, kind: str) -> None:
    score, rule = draw_scores(kind, sum(lengths) + 6), for_images(RULES[name], len(lengths))
    assert_selection(select_ragged(score, rule, lengths, 2, bound=50), score, rule, lengths, 2)
    if len(set(lengths)) == 1:
        assert_selection(select_uniform(score, rule, len(lengths), lengths[0], 2), score, rule, lengths, 2)
    eligible = draw_scores("random", len(score)) < 0.5
    chosen = select_ragged(score, rule, lengths, 2, eligible=eligible)
    assert_selection(chosen, score, rule, lengths, 2, eligible)
    order = draw_scores("random", len(score) + 1)[1:] < 0.2
    for within in (None, eligible):
        chosen = select_ragged(score, rule, lengths, 2, bound=50, eligible=within, order=order)
        assert_selection(chosen, score, rule, lengths, 2, within, order)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rules_on_any_scores(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    numbers = st.floats(width=32) | st.sampled_from([0.0, 0.25, 0.5, 1.0])
    drawn = data.draw(st.lists(numbers, min_size=sum(lengths), max_size=sum(lengths)))
    kind = data.draw(st.sampled_from(["count", "ceil", "floor", "score", "maximum", "mass", "rows"]))
    value = data.draw(st.integers(0, 12) if kind == "count" else st.floats(0, 1))
    most = data.draw(st.none() | st.integers(1, 9))
    rule = Rule(kind, value, least=data.draw(st.integers(1, 4)), most=most)
    score = torch.tensor([*drawn, 1.0])
    assert_selection(select_ragged(score, rule, lengths, 1), score, rule, lengths, 1)


@pytest.mark.parametrize(("batch_size", "rows", "prefix"), [(1, 1, 1), (0, 5, 1), (2, 1, 0), (3, 2, 2)])
def test_small_batches(batch_size: int, rows: int, prefix: int) -> None:
    score, rule = draw_scores("random", batch_size * rows + 3), Rule("count", 1)
    chosen = select_uniform(score, rule, batch_size, rows, prefix)
    assert_selection(chosen, score, rule, [rows] * batch_size, prefix)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_mean_over_heads(dtype: torch.dtype) -> None:
    score, rule = draw_scores("random", 3, 2 * 20 + 4, 2).to(dtype).permute(1, 2, 0)[:, 1], Rule("count", 9)
    selection = select_uniform(score, rule, 2, 20, 1)
    assert_selection(selection, score, rule, [20, 20], 1)
    assert selection.merge_weight.dtype == torch.promote_types(dtype, torch.float32)


def for_images(rule: Rule, batch_size: int) -> Rule:
    return rule if rule.each is None else rule._replace(each=rule.each[:batch_size])


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", ["count", "score", "mass"])
def test_verbs_that_fold_and_plan_without_a_selection_agree(name: str, kind: str) -> None:
    """What `fuse` and `plan` take from a selection is what they find out themselves where there is none."""
    tokens = RaggedTokens.from_padded(torch.randn(3, 17, 2), num_prefix_tokens=1, grid=(4, 4))
    score, rule = draw_scores(kind, 3 * 17), RULES[name]
    chosen = select_uniform(score, rule, 3, 17, 1)
    mask = KeepMask(chosen.keep, selection=Selected.of(tokens, score, chosen))
    bare = replace(mask, selection=None)
    for quick, slow in ((mask, bare), (fuse(tokens, mask, score), fuse(tokens, bare, score))):
        assert torch.equal(quick.keep, slow.keep)
        layout, right = plan(tokens, quick), plan(tokens, slow)
        assert layout.is_sound
        assert not right.is_sound
        assert layout.extent.tolist() == right.extent.tolist()
        assert torch.equal(layout.destination, right.destination)
        assert torch.equal(layout.cu_seqlens, right.cu_seqlens)
        if quick.merge_into is not None:
            assert slow.merge_into is not None
            assert slow.merge_weight is not None
            assert torch.equal(quick.merge_into, slow.merge_into)
            torch.testing.assert_close(quick.merge_weight, slow.merge_weight, rtol=0, atol=0, equal_nan=True)


def test_gradient_flows_through_the_weight_of_what_is_fused() -> None:
    score = torch.tensor([9.0, 1.0, 4.0, 3.0, 2.0], requires_grad=True)
    selection = select_uniform(score, Rule("count", 2), 1, 5, 1)
    selection.merge_weight.sum().backward()
    assert score.grad is not None
    assert score.grad.tolist() == [0, 1, 0, 0, 1]


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [40, 1, 33]], ids=str)
def test_rank_reference_against_a_loop(lengths: list[int], kind: str) -> None:
    case = make_rank_case(lengths, kind, dead_rows=7)
    assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


@pytest.mark.parametrize(
    ("score", "kind", "prefix", "message"),
    [
        (torch.zeros(9), "count", 1, "score must have at least 2 x 5 rows, got 9"),
        (
            torch.zeros(10).int(),
            "count",
            1,
            r"score must be floating \[T\] or \[T, H\], got torch.int32 \[10\]",
        ),
        (torch.zeros(10), "count", 6, r"prefix in \[0, 5\], got 'count' and 6"),
        (torch.zeros(10), "best", 1, "rule must be one of count, ceil, .* got 'best' and 1"),
    ],
)
def test_what_cannot_be_is_refused(score: torch.Tensor, kind: str, prefix: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_uniform(score, Rule(kind, 1), 2, 5, prefix)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_operations_are_well_formed(dtype: torch.dtype) -> None:
    score, most = torch.randn(23, 2).to(dtype), 2**31 - 1
    torch.library.opcheck(door._select_op, (score, None, None, None, None, 2, 10, 1, "count", 4.0, 1, most))
    case = make_rank_case([5, 0, 7], "tied", dead_rows=3)
    starts = case.layout["cu_seqlens"]
    each = torch.tensor([1, 2, 3])
    torch.library.opcheck(
        door._select_op,
        (case.score.to(dtype), starts, case.eligible, ~case.eligible, each, 3, 9, 1, "count", 0.0, 1, most),
    )
    torch.library.opcheck(
        door._select_op, (case.score.to(dtype), starts, None, None, None, 3, 9, 1, "mass", 0.4, 1, 5)
    )
    torch.library.opcheck(door._rank_op, (case.score.to(dtype), case.eligible, *case.layout.values()))


def test_compiled_without_a_break() -> None:
    def all_three(score: torch.Tensor, case: Any) -> tuple[torch.Tensor, ...]:
        position = rank(case.score, case.eligible, **case.layout)
        uniform = select_uniform(score, Rule("count", 4), 2, 10, 1)
        ragged = select(
            case.score,
            Rule("mass", 0.6),
            batch_size=3,
            rows=9,
            prefix=1,
            cu_seqlens=case.layout["cu_seqlens"],
        )
        return (*uniform, *ragged, position)

    score, case = torch.randn(23, 2), make_rank_case([5, 0, 7], "random", dead_rows=3)
    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")(score, case)
    for got, right in zip(compiled, all_three(score, case), strict=True):
        torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "name"),
    [
        (197, "ordered"),
        *((rows, "uniform") for rows in (50, 197, 577, 1025)),
        *(
            (197, name)
            for name in ("counts", "ceil", "floor", "score", "the mean", "maximum", "mass", "rows")
        ),
        (1025, "mass"),
    ],
)
def test_select_kernel_compiles_for_hopper(
    rows: int, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_select

    score = torch.randn(6, 2 * rows, 2).permute(1, 2, 0)[:, 0]
    order = torch.arange(len(score)) % 2 == 0 if name == "ordered" else None
    rule = (
        Rule("count", rows // 2)
        if name == "uniform"
        else for_images(RULES["score" if name == "ordered" else name], 2)
    )
    bounds = None if name == "uniform" else torch.tensor([0, rows, 2 * rows]).int()
    kernels = compile_all_for_hopper(
        monkeypatch,
        triton_select,
        lambda: triton_select.triton_select(
            score, bounds, order, order, rule.each, 2, rows, 1, rule.kind, rule.value, 1, 2**31 - 1
        ),
        tmp_path,
    )
    assert len(kernels) == (1 if name == "uniform" else 2)
    for compiled in kernels:
        assert compiled.spilled == 0
        assert not re.search(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)
    assert "redux.sync.add" in kernels[0].ptx


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
        score, rule = draw_scores(kind, batch_size * rows + 11).to("cuda", dtype), Rule("count", count)
        selection = select_uniform(score, rule, batch_size, rows, prefix)
        assert_selection(selection, score, rule, [rows] * batch_size, prefix)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", RULES)
def test_rules_on_a_gpu(name: str, kind: str) -> None:
    for lengths in ([25], [197] * 4, [0, 5, 0], [577, 40, 1025, 1]):
        rule = for_images(RULES[name], len(lengths))
        each = None if rule.each is None else rule.each.cuda()
        score = draw_scores(kind, sum(lengths) + 11)
        for eligible in (None, draw_scores("random", len(score)) < 0.5):
            on_gpu = None if eligible is None else eligible.cuda()
            for order in (None, draw_scores("tied", len(score)) < 0.2):
                turns = None if order is None else order.cuda()
                chosen = select_ragged(
                    score.cuda(), rule._replace(each=each), lengths, 1, eligible=on_gpu, order=turns
                )
                assert_selection(chosen, score, rule, lengths, 1, eligible, order)
        if len(set(lengths)) == 1:
            size = len(lengths), lengths[0], 1
            chosen = select_uniform(score.cuda(), rule._replace(each=each), *size)
            assert_selection(chosen, score, rule, lengths, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 2, 511, 512, 513, 3000])
def test_many_images_on_a_gpu(batch_size: int) -> None:
    lengths = (torch.arange(batch_size) % 23).tolist()
    score, rule = draw_scores("random", sum(lengths) + 5), Rule("mass", 0.5)
    got = select_ragged(score.cuda(), rule, lengths, 1, bound=30)
    for mine, right in zip(got, select_ragged(score, rule, lengths, 1, bound=30)):
        assert torch.equal(mine.cpu(), right)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype"), [(heads, torch.float32) for heads in (1, 3, 12)] + [(6, dtype) for dtype in DTYPES]
)
def test_mean_over_heads_on_a_gpu(heads: int, dtype: torch.dtype) -> None:
    score = draw_scores("random", heads, 2 * 197 + 3, 2).to("cuda", dtype).permute(1, 2, 0)[:, 1]
    for rule in (Rule("count", 100), Rule("mass", 0.6)):
        selection = select_uniform(score, rule, 2, 197, 1)
        on_cpu = select_uniform(score.cpu(), rule, 2, 197, 1)
        assert_selection(on_cpu, score.cpu(), rule, [197, 197], 1)
        for got, right in zip(selection, on_cpu):
            assert torch.equal(got.cpu(), right)  # the same bits


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SCORES)
def test_rank_on_a_gpu(kind: str) -> None:
    for lengths in ([1], [0, 5, 0], [197] * 3, [130, 1025, 2]):
        case = make_rank_case(lengths, kind, dead_rows=150, device="cuda")
        assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


@pytest.mark.gpu
def test_never_synchronises() -> None:
    score = torch.randn(3 * 40, 3, device="cuda")
    case = make_rank_case([5, 0, 60], "random", dead_rows=4, device="cuda")
    layout = {"batch_size": 3, "rows": 60, "prefix": 1, "cu_seqlens": case.layout["cu_seqlens"]}
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            select_uniform(score, Rule("count", 20), 3, 40, 1)
            select(case.score, Rule("mass", 0.5), **layout)
            rank(case.score, case.eligible, **case.layout)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    score = torch.randn(2 * 40, device="cuda", dtype=dtype, requires_grad=True)
    selection = select_uniform(score, Rule("count", 20), 2, 40, 1)
    assert_selection(selection, score.detach(), Rule("count", 20), [40, 40], 1)
    assert selection.merge_weight.requires_grad
    assert math.isfinite(torch.autograd.grad(selection.merge_weight.sum(), score)[0].sum().item())
