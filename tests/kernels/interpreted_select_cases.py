"""The kernels of `select` and `rank` on a CPU, interpreted; bf16 is wrong there.

`test_select.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from selection_cases import SCORES, assert_selection, draw_scores, make_rank_case, poison

from prunevit.kernels import select as door
from prunevit.kernels.select import rank, select

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "takes_triton", lambda values: True)
    poison(monkeypatch)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("count", [1, 7, 22, 23, 100])
def test_select_ties_and_extremes(kind: str, count: int) -> None:
    score = draw_scores(kind, 3 * 25 + 6)
    selection = select(score, batch_size=3, rows=25, prefix=2, count=count)
    assert_selection(selection, score, 3, 25, 2, count)


@pytest.mark.parametrize(("rows", "prefix"), [(1, 1), (2, 1), (5, 0), (64, 1), (197, 1), (577, 5), (1025, 1)])
def test_select_lengths(rows: int, prefix: int) -> None:
    count = max(1, (rows - prefix) * 7 // 10)
    score = draw_scores("random", 2 * rows)
    assert_selection(
        select(score, batch_size=2, rows=rows, prefix=prefix, count=count), score, 2, rows, prefix, count
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("heads", [1, 3, 6])
def test_select_by_the_mean_over_heads(heads: int, dtype: torch.dtype) -> None:
    emitted = draw_scores("random", heads, 2 * 50 + 3, 2).to(dtype)  # as attention leaves it: [H, T, P]
    score = emitted.permute(1, 2, 0)[:, 0]
    selection = select(score, batch_size=2, rows=50, prefix=2, count=20)
    assert_selection(selection, score, 2, 50, 2, 20)
    assert torch.equal(selection.score[:100], door.mean_over_heads(score)[:100])


def test_select_many_dead_rows() -> None:
    score = torch.cat([draw_scores("random", 10), torch.full((300,), torch.nan)])
    assert_selection(select(score, batch_size=2, rows=5, prefix=1, count=2), score, 2, 5, 1, 2)


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
