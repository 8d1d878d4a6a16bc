"""Inputs and independent oracles of the tests of `select` and `rank`: loops over plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from prunevit.kernels.select import Rule, Selection, select
from prunevit.kernels.select_reference import mean_over_heads

SCORES = ("random", "tied", "constant", "nan", "extreme")
EXTREMES = (math.inf, -math.inf, math.nan, 0.0, -0.0, 3e38, -3e38, 1e-45, -1e-45, 1e-38, 1.0, 1.0000001)


def draw_scores(kind: str, *shape: int) -> Tensor:
    """Draw fp32 scores; but for "random" and "constant" most of them tie."""
    generator = torch.Generator().manual_seed(sum(shape))
    random = torch.randn(shape, generator=generator)
    if kind == "tied":
        return random.round()
    if kind == "constant":
        return torch.full(shape, 0.25)
    if kind == "nan":
        return random.masked_fill(random < 0.3, math.nan)
    if kind == "extreme":
        return torch.tensor(EXTREMES)[torch.randint(len(EXTREMES), shape, generator=generator)]
    return random


def by_falling_score(score: list[float], rows: list[int]) -> list[int]:
    """Sort rows by falling score, then by their number; NaN stands for -inf."""
    return sorted(rows, key=lambda row: (math.inf if math.isnan(score[row]) else -score[row], row))


def count_by_rule(
    rule: Rule, score: list[float], own: list[int], prefix: int, image: int, patches: list[int]
) -> int:
    """Count what a rule asks for in one image; sums in fp64, each comparison in fp32."""
    value = rule.value if rule.each is None else float(rule.each[image])
    ordered = by_falling_score(score, patches)
    if rule.kind == "count":
        count = int(value)
    elif rule.kind == "ceil":
        count = math.ceil(value * len(patches))
    elif rule.kind == "floor":
        count = math.floor(value * len(patches))
    elif rule.kind == "rows":
        count = len(
            [row for row in by_falling_score(score, own)[: int(value * len(own))] if row >= own[0] + prefix]
        )
    elif rule.kind == "mass":
        mass = [score[row] if score[row] > 0 else 0.0 for row in ordered]
        total, before, count = math.fsum(mass), 0.0, 0
        for each in mass:
            share = 1.0 if total == 0 or math.isinf(before) else rounded(before / total)
            count += share < rounded(value)
            before += each
    else:
        numbers = numpy.array([score[row] for row in patches], dtype=numpy.float64)
        with numpy.errstate(all="ignore"):
            limit: Any = value
            if rule.kind == "deviation":
                limit = numbers.mean() + value * numbers.std() if patches else math.nan
            elif rule.kind == "maximum":
                there = numbers[~numpy.isnan(numbers)]
                limit = value * (there.max() if len(there) else -math.inf)
            count = int((numbers >= rounded(limit)).sum())
    most = len(patches) if rule.most is None else rule.most
    return min(max(count, rule.least), most, len(patches))


def rounded(number: float) -> float:
    """Round to fp32."""
    return torch.tensor(number, dtype=torch.float64).float().item()


def assert_selection(
    selection: Selection,
    score: Tensor,
    rule: Rule,
    lengths: list[int],
    prefix: int,
    eligible: Tensor | None = None,
    order: Tensor | None = None,
) -> None:
    """Compare all fields with a loop over the images, over the mean of several heads in order."""
    if score.dim() == 2:
        mean = mean_over_heads(score)
        torch.testing.assert_close(
            mean.double(), score.double().mean(1), rtol=1e-5, atol=1e-7, equal_nan=True
        )
        numbers = mean.tolist()
    else:
        numbers = score.double().tolist()
    num_rows, starts = len(numbers), [sum(lengths[:image]) for image in range(len(lengths) + 1)]
    keep, keep_fused = [False] * num_rows, [False] * num_rows
    merge_into, weight = [-1] * num_rows, [1.0] * num_rows
    for image, length in enumerate(lengths):
        own = list(range(starts[image], starts[image] + length))
        patches = [row for row in own[prefix:] if eligible is None or eligible[row]]
        ordered = by_falling_score(numbers, patches)
        count = count_by_rule(rule, numbers, own, prefix, image, patches)
        for row in [*own[:prefix], *ordered[:count]]:
            keep[row] = keep_fused[row] = True
            merge_into[row] = row
        for row in ordered[count:]:
            merge_into[row], weight[row] = ordered[count], numbers[row]
            keep_fused[row] = row == ordered[count]

    def goes_first(one: int, other: int) -> bool:
        image = next(image for image in reversed(range(len(lengths))) if starts[image] <= one)
        first = starts[image] + prefix  # patch
        by = [(row >= first and order is not None and bool(order[row]), row) for row in (one, other)]
        return by[0] < by[1]

    s = selection
    for mask, got, destination, bounds, extent in (
        (keep, s.keep, s.destination, s.cu_seqlens, s.extent),
        (keep_fused, s.keep_fused, s.destination_fused, s.cu_fused, s.extent_fused),
    ):
        assert got.tolist() == mask
        image_of = [image for image, length in enumerate(lengths) for _ in range(length)]
        places = [
            sum(goes_first(other, row) for other in range(starts[image], starts[image + 1]) if mask[other])
            for row, image in enumerate(image_of)
        ]
        places += [-1] * (num_rows - len(image_of))
        assert destination.tolist() == [place if kept else -1 for place, kept in zip(places, mask)]
        assert bounds.tolist() == [sum(mask[:start]) for start in starts]
        counts = [sum(mask[start : start + length]) for start, length in zip(starts, lengths)]
        assert extent.tolist() == [sum(counts), max(counts, default=0), min(counts, default=0)]
        assert (got.dtype, destination.dtype, bounds.dtype) == (torch.bool, torch.int32, torch.int32)
    assert selection.merge_into.tolist() == merge_into
    torch.testing.assert_close(
        selection.merge_weight.double().cpu(),
        torch.tensor(weight, dtype=torch.float64),
        rtol=0.0,
        atol=0.0,
        equal_nan=True,
    )


def select_ragged(
    score: Tensor,
    rule: Rule,
    lengths: list[int],
    prefix: int,
    bound: int | None = None,
    eligible: Tensor | None = None,
    order: Tensor | None = None,
) -> Selection:
    """Call `select` on images of these lengths."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return select(
        score,
        rule,
        batch_size=len(lengths),
        rows=max(*lengths, prefix) if bound is None else bound,
        prefix=prefix,
        cu_seqlens=starts.to(score.device),
        eligible=eligible,
        order=order,
    )


def select_uniform(score: Tensor, rule: Rule, batch_size: int, rows: int, prefix: int) -> Selection:
    """Call `select` on images of the same length."""
    return select(score, rule, batch_size=batch_size, rows=rows, prefix=prefix)


RULES = {
    "count": Rule("count", 7),
    "counts": Rule("count", each=torch.tensor([3, 0, 99, 12], dtype=torch.int32)),
    "ceil": Rule("ceil", 0.28),
    "floor": Rule("floor", 0.58),
    "score": Rule("score", 0.25),
    "scores": Rule("score", each=torch.tensor([-0.5, 9.0, 1.0, -9.0])),
    "least and most": Rule("score", 0.25, least=3, most=5),
    "below the mean": Rule("deviation", -0.4),
    "the mean": Rule("deviation", 0.0, least=2),
    "maximum": Rule("maximum", 0.6),
    "the largest": Rule("maximum", 1.0),
    "mass": Rule("mass", 0.7),
    "little mass": Rule("mass", 0.05, most=4),
    "most mass": Rule("mass", 0.999, least=4),
    "rows": Rule("rows", 0.6),
}
"""A rule of each kind, for up to four images."""


@dataclass
class RankCase:
    """Scores of ragged images with some rows that cannot be selected, and NaN in dead rows."""

    score: Tensor
    eligible: Tensor
    layout: dict[str, Any]
    expected: list[int]


def make_rank_case(lengths: list[int], kind: str, dead_rows: int = 0, device: str = "cpu") -> RankCase:
    live = sum(lengths)
    score = torch.cat([draw_scores(kind, live), torch.full((dead_rows,), math.nan)])
    eligible = torch.rand(live + dead_rows, generator=torch.Generator().manual_seed(live)) < 0.8
    eligible[live:] = False
    starts = torch.tensor([0, *lengths]).cumsum(0)
    numbers, expected = score.tolist(), []
    for start, length in zip(starts.tolist(), lengths):
        own = range(start, start + length)
        ordered = by_falling_score(numbers, [row for row in own if eligible[row]])
        ordered += [row for row in own if not eligible[row]]
        expected += [ordered.index(row) for row in own]
    counts = torch.tensor([*lengths, dead_rows])
    layout = {
        "image_id": torch.arange(len(counts)).repeat_interleave(counts).int().to(device),
        "cu_seqlens": starts.int().to(device),
        "max_seqlen": max(lengths),
    }
    return RankCase(score.to(device), eligible.to(device), layout, [*expected, *range(dead_rows)])


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make new tensors hold NaN, -77 and True, so that an output that is not written fails its test."""

    def poisoned(make: Any) -> Any:
        def empty(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(math.nan if tensor.is_floating_point() else -77)

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))
