"""The selecting verbs against plain Python, image by image."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests_support import dense_tokens, rows_of

from prunevit import KeepMask, RaggedTokens, fuse, merge, nearest, pack, rank, sample, threshold, top_k, top_p
from prunevit.keepmask import keep_count, keep_everything


def kept_patches(tokens: RaggedTokens, mask: KeepMask, image: int) -> list[int]:
    return [i for i, row in enumerate(rows_of(tokens, image)[tokens.num_prefix_tokens :]) if mask.keep[row]]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 9), st.integers(0, 2), st.integers(1, 4), st.integers(0, 9999), st.sampled_from([0, 1, 3])
)
def test_rank_orders_by_score_then_by_row(
    patches: int, prefix: int, batch: int, seed: int, levels: int
) -> None:
    torch.manual_seed(seed)
    tokens = dense_tokens(batch, patches, prefix)
    score = torch.randn(batch * (prefix + patches))
    if levels:  # few distinct values: ties
        score = (score * levels).round()
    position = rank(tokens, score)
    for image in range(batch):
        rows = rows_of(tokens, image)[prefix:]
        expected = sorted(rows, key=lambda row: (-float(score[row]), row))
        assert [int(position[row]) for row in expected] == list(range(patches))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0])
def test_constant_and_extreme_scores_keep_the_first_rows(value: float) -> None:
    tokens = dense_tokens(2, 6, 1)
    mask = top_k(tokens, torch.full((14,), value), 0.5)
    assert kept_patches(tokens, mask, 0) == kept_patches(tokens, mask, 1) == [0, 1, 2]


def test_nan_ranks_last() -> None:
    tokens = dense_tokens(1, 3, 0)
    assert rank(tokens, torch.tensor([torch.nan, -torch.inf, 1.0])).tolist() == [1, 2, 0]
    assert kept_patches(tokens, threshold(tokens, torch.tensor([torch.nan, -5.0, 1.0]), -9.0), 0) == [1, 2]


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 200), st.integers(1, 100))
def test_counts_are_those_of_the_python_expression(patches: int, hundredths: int) -> None:
    rate = hundredths / 100
    for rounding, expression in (("ceil", math.ceil), ("floor", math.floor)):
        expected = max(1, expression(rate * patches))
        assert keep_count(patches, rate, rounding) == expected
        assert keep_count(torch.tensor([patches]), rate, rounding).tolist() == [expected]  # type: ignore[union-attr]


def test_the_rounding_traps_are_reproduced() -> None:
    assert keep_count(25, 0.28, "ceil") == 8
    assert keep_count(50, 0.58, "floor") == 28


def test_top_k_knows_its_rows_only_where_the_host_does() -> None:
    tokens = dense_tokens(2, 10, 1)
    score = torch.randn(22)
    assert top_k(tokens, score, 0.5).rows_per_image == 6
    assert top_k(tokens, score, count=99).rows_per_image == 11
    assert top_k(tokens, score, count=torch.tensor([2, 30])).rows_per_image is None
    few = threshold(tokens, score, 0.0)
    assert top_k(tokens, score, 0.5, within=few).rows_per_image is None


def test_top_k_takes_a_count_for_each_image() -> None:
    tokens = dense_tokens(3, 5, 1)
    mask = top_k(tokens, torch.randn(18), count=torch.tensor([0, 3, 9]))
    assert [len(kept_patches(tokens, mask, image)) for image in range(3)] == [1, 3, 5]


def test_verbs_chain_within_a_mask() -> None:
    tokens = dense_tokens(1, 6, 1)
    score = torch.tensor([9.0, 1, 2, 3, 4, 5, 6])
    first = top_k(tokens, -score, 0.5)
    second = top_k(tokens, score, count=2, within=first)
    assert kept_patches(tokens, first, 0) == [0, 1, 2]
    assert kept_patches(tokens, second, 0) == [1, 2]
    assert kept_patches(tokens, threshold(tokens, score, 100.0, within=first), 0) == [2]
    assert kept_patches(tokens, top_p(tokens, score, 0.5, within=first), 0) == [2]


def test_threshold_keeps_the_best_and_respects_its_bounds() -> None:
    tokens = dense_tokens(2, 4, 1)
    score = torch.tensor([0.0, 1, 2, 3, 4, 0, 8, 7, 6, 5])
    assert [kept_patches(tokens, threshold(tokens, score, 3.0), i) for i in (0, 1)] == [[2, 3], [0, 1, 2, 3]]
    assert kept_patches(tokens, threshold(tokens, score, 99.0), 0) == [3]
    assert kept_patches(tokens, threshold(tokens, score, 99.0, min_keep=2), 1) == [0, 1]
    assert kept_patches(tokens, threshold(tokens, score, 0.0, max_keep=3), 1) == [0, 1, 2]
    assert kept_patches(tokens, threshold(tokens, score, torch.tensor(3.0)), 0) == [2, 3]
    per_image = threshold(tokens, score, torch.tensor([4.0, 7.0]))
    assert [kept_patches(tokens, per_image, i) for i in (0, 1)] == [[3], [0, 1]]


def test_thresholds_relative_to_the_image() -> None:
    tokens = dense_tokens(2, 4, 1)
    score = torch.tensor([90.0, 1, 2, 3, 6, -90.0, 10, 10, 10, 10])
    # Mean 3, deviation sqrt(3.5) = 1.87; the second image has none.
    for value, kept in ((0.0, [2, 3]), (-0.6, [1, 2, 3]), (1.5, [3]), (9.0, [3])):
        mask = threshold(tokens, score, value, relative_to="deviation")
        assert kept_patches(tokens, mask, 0) == kept
        assert kept_patches(tokens, mask, 1) == [0, 1, 2, 3]
    assert kept_patches(tokens, threshold(tokens, score, 0.5, relative_to="maximum"), 0) == [2, 3]
    assert kept_patches(tokens, threshold(tokens, score, 1.0, relative_to="maximum"), 1) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="relative_to must be one of None, deviation, maximum, got 'mean'"):
        threshold(tokens, score, 1.0, relative_to="mean")


def test_top_k_of_the_rows_lets_the_prefix_compete() -> None:
    tokens = dense_tokens(2, 4, 1)
    score = torch.tensor([5.0, 1, 2, 3, 4, 0.0, 1, 2, 3, 4])
    mask = top_k(tokens, score, 0.7, of="rows")  # int(0.7 * 5) = 3 rows, the first image's CLS among them
    assert [kept_patches(tokens, mask, image) for image in (0, 1)] == [[2, 3], [1, 2, 3]]
    assert kept_patches(tokens, top_k(tokens, score, 0.2, of="rows"), 0) == [3]


def test_top_p_includes_the_crossing_patch() -> None:
    tokens = dense_tokens(1, 4, 1)
    score = torch.tensor([50.0, 0.1, 0.4, 0.3, 0.2])
    assert kept_patches(tokens, top_p(tokens, score, 0.4), 0) == [1]
    assert kept_patches(tokens, top_p(tokens, score, 0.41), 0) == [1, 2]
    assert kept_patches(tokens, top_p(tokens, score, 1.0), 0) == [0, 1, 2, 3]
    assert kept_patches(tokens, top_p(tokens, torch.zeros(5), 0.5), 0) == [0]


def test_sample_hits_by_the_share_of_the_score() -> None:
    tokens = dense_tokens(1, 4, 0)
    # Rising: 0.1, 0.2, 0.3, 0.4 -> running 0.1, 0.3, 0.6, 1 -> scaled 0, 2/9, 5/9, 1.
    score = torch.tensor([0.4, 0.2, 0.1, 0.3])
    assert kept_patches(tokens, sample(tokens, score, 2), 0) == [0, 1]
    assert kept_patches(tokens, sample(tokens, score, 3), 0) == [0, 1, 3]
    # Equal scores are told apart by their place alone; many points hit all but the smallest.
    assert kept_patches(tokens, sample(tokens, torch.ones(4), 50), 0) == [1, 2, 3]
    for points in (0, tokens.grid[0] * tokens.grid[1] + 1):
        with pytest.raises(
            ValueError, match=r"^sample: points must be from 1 to the \d+ patches of the grid"
        ):
            sample(tokens, score, torch.tensor([points]))


@pytest.mark.parametrize(
    "select",
    [
        lambda t, s: top_k(t, s, 0.5),
        lambda t, s: top_k(t, s, count=2),
        lambda t, s: threshold(t, s, 0.4, min_keep=2, max_keep=3),
        lambda t, s: top_p(t, s, 0.6),
        lambda t, s: sample(t, s, 4),
    ],
)
def test_dead_rows_change_nothing(select) -> None:  # type: ignore[no-untyped-def]
    """A batch packed to a larger capacity, ragged: no verb reads the rows behind it."""
    tokens = dense_tokens(3, 8, 1)
    keep = tokens.live & ~(tokens.image_index[tokens.image_id.long()] * 2 > tokens.source).logical_and(
        tokens.is_patch
    )
    exact, roomy = pack(tokens, KeepMask(keep)), pack(tokens, KeepMask(keep), capacity=40)
    live = exact.x.shape[0]
    score = torch.rand(40, dtype=torch.float64)
    score[live:] = torch.nan
    expected, got = select(exact, score[:live]), select(roomy, score)
    assert not exact.uniform
    assert got.keep[:live].tolist() == expected.keep.tolist()
    assert not got.keep[live:].any()


def test_keep_everything_and_bad_words() -> None:
    tokens = dense_tokens(2, 3, 1)
    assert keep_everything(tokens).rows_per_image == 4
    with pytest.raises(ValueError, match="exactly one of rate and count"):
        top_k(tokens, torch.randn(8))
    with pytest.raises(ValueError, match='rounding must be "ceil" or "floor"'):
        top_k(tokens, torch.randn(8), 0.5, rounding="up")
    with pytest.raises(ValueError, match='of must be "current", "initial" or "rows"'):
        top_k(tokens, torch.randn(8), 0.5, of="all")


def test_values_of_a_wrong_length_are_refused() -> None:
    tokens = dense_tokens(3, 4, 1)
    score = torch.randn(15)
    for call in (
        lambda: threshold(tokens, score, torch.zeros(2)),
        lambda: top_k(tokens, score, count=torch.tensor([1, 2])),
    ):
        with pytest.raises(ValueError, match="one value for each of the 3 images is needed"):
            call()
    with pytest.raises(ValueError, match="values must have 15 entries, one a row, got 14"):
        tokens.sum(score[:14])
    for rate in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match=r"rate must be in \(0, 1\]"):
            top_k(tokens, score, rate)
        with pytest.raises(ValueError, match=r"p must be in \(0, 1\]"):
            top_p(tokens, score.abs(), rate)
    with pytest.raises(ValueError, match="points must be at least 1"):
        sample(tokens, score.abs(), 0)
    x = torch.zeros(3, 5, 2)
    for index in (torch.tensor([1, 2]), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"image_index must be integers \[3\]"):
            RaggedTokens.from_padded(x, 1, (2, 2), image_index=index)
    for source in (torch.zeros(3, 5), torch.zeros(3, 4, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"source must be integers \[3, 5\], one a row"):
            RaggedTokens.from_padded(x, 1, (2, 2), source=source)
    with pytest.raises(ValueError, match=r"x must be \[B, N, C\], got \[5, 2\]"):
        RaggedTokens.from_padded(x[0], 1, (2, 2))
    long = torch.arange(-1, 4).expand(3, 5)
    assert RaggedTokens.from_padded(x, 1, (2, 2), source=long).source.dtype == torch.int32


@pytest.mark.parametrize(
    ("verb", "line"),
    [
        (lambda t, s: top_k(t, s[:14], 0.5), r"score: must be floating \[15\]"),
        (lambda t, s: sample(t, s.long(), 3), r"score: must be floating \[15\]"),
        (lambda t, s: rank(t, s[:, None, None]), r"score: must be floating \[15\]"),
        (lambda t, s: top_k(t, s, count=2.5), "count must be a whole number, got 2.5"),  # type: ignore[arg-type]
        (lambda t, s: top_k(t, s, count=torch.ones(3)), "counts of the images must be integers"),
        (lambda t, s: top_k(t, s, "0.5"), "rate must be in"),  # type: ignore[arg-type]
        (lambda t, s: top_k(t, s, 0.5, within=t.live), "within: must be a KeepMask, got Tensor"),
        (lambda t, s: top_k(t, s.to("meta"), 0.5), "score: must be on cpu, as the rows are, got meta"),
        (
            lambda t, s: top_k(t, s, 0.5, within=KeepMask(t.live.to("meta"))),
            "within: keep must be on cpu, as the rows are, got meta",
        ),
        (lambda t, s: fuse(t, s > 0, s), "fuse: mask must be a KeepMask, got Tensor; use the verbs"),  # type: ignore[arg-type]
        (
            lambda t, s: fuse(t, KeepMask(s), s),
            r"fuse: keep must be bool \[15\], .* got torch.float32 \[15\]",
        ),
        (
            lambda t, s: merge(t, KeepMask(t.live[:9]), t.source, s),
            r"merge: keep must be bool \[15\], .* \[9\]",
        ),
        (
            lambda t, s: merge(t, KeepMask(t.live), s, s),
            "merge: into must be of signed integers .* got torch.float32",
        ),
        (
            lambda t, s: merge(t, KeepMask(t.live), t.source, t.source),
            "and weight floating, got .* and torch.int32",
        ),
        (
            lambda t, s: nearest(t, s[:, None, None][:, :0], t.live, t.live),
            r"features must be .* got .* \[15, 0, 1\]",
        ),
        (lambda t, s: t.to_rows(s.view(5, 3)), r"padded must be \[3, 5, ...\], got \[5, 3\]"),
        (lambda t, s: t.sum(s[0]), "values must have 15 entries, one a row, got one number"),
        (lambda t, s: threshold(t, s, math.nan), "value must be a number"),
        (lambda t, s: top_p(t, s, 0.5, min_keep=3, max_keep=2), "must be at least min_keep=3, got 2"),
        (lambda t, s: pack(t, KeepMask([True] * 15)), "keep must be a tensor, got list"),  # type: ignore[arg-type]
        (
            lambda t, s: pack(t, KeepMask(t.live, order=t.source.to(torch.uint8))),
            "order must be bool, floating or of signed integers",
        ),
        (
            lambda t, s: pack(t, KeepMask(t.live, rows_per_image=5.0)),  # type: ignore[arg-type]
            "must be a whole number or None, got 5.0",
        ),
    ],
)
def test_what_is_of_another_kind_is_refused_in_one_line(verb: Any, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        verb(dense_tokens(3, 4, 1), torch.randn(15))
