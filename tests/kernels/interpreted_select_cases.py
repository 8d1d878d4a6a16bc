"""The kernels of `select` and `rank` on a CPU, interpreted; bf16 is wrong there.

`test_select.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from selection_cases import (
    RULES,
    SCORES,
    assert_selection,
    draw_scores,
    make_rank_case,
    poison,
    select_ragged,
    select_uniform,
)

from prunevit.kernels import select as door
from prunevit.kernels import triton_select
from prunevit.kernels.launch import Bound
from prunevit.kernels.select import Rule, rank

# Numpy, which interprets, warns of 0/0, inf/inf and overflow; a GPU computes them all the same.
pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "takes_triton", lambda values: True)
    poison(monkeypatch)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [1, 7, 22, 23, 100])
def test_select_ties_and_extremes(kind: str, count: int) -> None:
    score, rule = draw_scores(kind, 3 * 25 + 6), Rule("count", count)
    assert_selection(select_uniform(score, rule, 3, 25, 2), score, rule, [25] * 3, 2)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", RULES)
def test_rules(name: str, kind: str) -> None:
    lengths = [21, 0, 1, 30]
    score = draw_scores(kind, sum(lengths) + 6)
    assert_selection(select_ragged(score, RULES[name], lengths, 2), score, RULES[name], lengths, 2)


@pytest.mark.parametrize("name", RULES)
def test_rules_among_eligible_patches(name: str) -> None:
    score = draw_scores("tied", 4 * 13 + 6)
    eligible = draw_scores("random", len(score)) < 0.3
    selection = select_ragged(score, RULES[name], [13] * 4, 1, eligible=eligible)
    assert_selection(selection, score, RULES[name], [13] * 4, 1, eligible)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("name", ["count", "score", "least and most", "mass"])
def test_patches_that_go_behind(name: str, kind: str) -> None:
    lengths = [21, 0, 1, 30]
    score = draw_scores(kind, sum(lengths) + 6)
    order, eligible = draw_scores("random", 2, len(score)) < 0.2
    for within in (None, eligible):
        selection = select_ragged(score, RULES[name], lengths, 2, eligible=within, order=order)
        assert_selection(selection, score, RULES[name], lengths, 2, within, order)


@pytest.mark.parametrize(("batch_size", "name"), [(1, "mass"), (1, "the mean"), (3, "score"), (11, "mass")])
def test_rules_on_uniform_batches(batch_size: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_at_a_time = Bound(triton_select.bounds_kernel, BLOCK=4)
    monkeypatch.setattr(triton_select, "_bound_bounds", lambda: few_at_a_time)
    score = draw_scores("random", 9 * batch_size + 2)
    selection = select_uniform(score, RULES[name], batch_size, 9, 1)
    assert_selection(selection, score, RULES[name], [9] * batch_size, 1)


@pytest.mark.parametrize(("rows", "prefix"), [(1, 1), (2, 1), (5, 0), (64, 1), (197, 1), (577, 5), (1025, 1)])
def test_select_lengths(rows: int, prefix: int) -> None:
    score, rule = draw_scores("random", 2 * rows), Rule("count", max(1, (rows - prefix) * 7 // 10))
    assert_selection(select_uniform(score, rule, 2, rows, prefix), score, rule, [rows] * 2, prefix)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_select_by_the_mean_over_heads(heads: int, dtype: torch.dtype) -> None:
    emitted = draw_scores("random", heads, 2 * 50 + 3, 2).to(dtype)  # as attention leaves it: [H, T, P]
    score, rule = emitted.permute(1, 2, 0)[:, 0], Rule("count", 20)
    selection = select_uniform(score, rule, 2, 50, 2)
    assert_selection(selection, score, rule, [50, 50], 2)  # the weights are the mean's bits


def test_select_many_dead_rows() -> None:
    score, rule = torch.cat([draw_scores("random", 10), torch.full((300,), torch.nan)]), Rule("count", 2)
    assert_selection(select_uniform(score, rule, 2, 5, 1), score, rule, [5, 5], 1)
    assert_selection(select_ragged(score, rule, [4, 6], 1), score, rule, [4, 6], 1)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [40, 1, 33], [130, 300]], ids=str)
def test_rank(lengths: list[int], kind: str) -> None:
    case = make_rank_case(lengths, kind, dead_rows=150)
    assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


def test_rank_within_a_loose_bound_and_by_strides() -> None:
    case = make_rank_case([9, 40], "tied")
    case.layout["max_seqlen"] = 300
    score = torch.stack([case.score, case.score], 1)[:, 0]
    assert rank(score, case.eligible, **case.layout).tolist() == case.expected
