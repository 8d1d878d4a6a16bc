"""Inputs of the tests of `sample` and its oracle, a loop over exact fractions."""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from prunevit.kernels.sample import sample

LENGTHS = ([1], [0, 5, 0], [2, 34, 1], [120, 7])
SCORES = ("random", "tied", "constant", "zeros", "nan", "wide")


@dataclass
class SampleCase:
    """Scores of ragged images, with dead rows of NaN."""

    score: Tensor
    source: Tensor
    within: Tensor | None
    each: Tensor | None
    points: int
    layout: dict[str, Any]
    lengths: list[int]

    def sample(self) -> Tensor:
        return sample(self.score, self.source, self.points, each=self.each, within=self.within, **self.layout)


def make_sample_case(
    lengths: list[int],
    kind: str,
    points: int,
    prefix: int = 1,
    differ: bool = False,
    some: bool = False,
    bound: int | None = None,
    device: str = "cpu",
) -> SampleCase:
    """Draw a case: `differ` in points from image to image, `some` patches alone can be hit."""
    live, dead_rows = sum(lengths), 9
    generator = torch.Generator().manual_seed(live + points)
    score = torch.rand(live + dead_rows, generator=generator)
    if kind == "tied":
        score = (score * 4).floor() / 4
    elif kind in ("constant", "zeros"):
        score = torch.full_like(score, 0.25 if kind == "constant" else 0.0)
    elif kind == "nan":
        score = score.masked_fill(score < 0.3, math.nan)
    elif kind == "wide":
        score = score.mul(60).sub(50).exp2()
    score[live:] = math.nan
    source = torch.cat([*(torch.arange(length) - prefix for length in lengths), torch.full((dead_rows,), -1)])
    counts = torch.tensor([*lengths, dead_rows])
    layout = {
        "image_id": torch.arange(len(counts)).repeat_interleave(counts).int().to(device),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        "max_seqlen": max(lengths) if bound is None else bound,
    }
    each = torch.randint(1, points + 1, (len(lengths),), generator=generator) if differ else None
    within = torch.rand(len(score), generator=generator) < 0.6 if some else None
    return SampleCase(
        score.to(device),
        source.clamp(min=-1).int().to(device),
        None if within is None else within.to(device),
        None if each is None else each.to(device),
        points,
        layout,
        lengths,
    )


def assert_sample(case: SampleCase, keep: Tensor) -> None:
    """Hold what was kept against exact fractions; patches that differ from it by rounding alone may be kept or not."""
    score, source, start = case.score.tolist(), case.source.tolist(), 0
    got = keep.tolist()
    for image, length in enumerate(case.lengths):
        own = range(start, start + length)
        may = [source[row] >= 0 and (case.within is None or bool(case.within[row])) for row in own]
        patches = [row for row, it_may in zip(own, may) if it_may]
        points = case.points if case.each is None else int(case.each[image])
        surely, perhaps = hit(score, patches, points)
        kept = {row for row in own if got[row] and source[row] >= 0}
        assert surely <= kept <= surely | perhaps
        assert kept or not patches
        assert all(got[row] for row in own if source[row] < 0)
        start += length
    assert not any(got[start:])
    assert keep.dtype == torch.bool


def hit(score: list[float], patches: list[int], points: int) -> tuple[set[int], set[int]]:
    """Rows that points certainly hit, and those beside a point which is, to within 1e-12, as near to another."""
    if not patches:
        return set(), set()
    rising = sorted(
        patches, key=lambda row: (math.isnan(score[row]), 0 if math.isnan(score[row]) else score[row], row)
    )
    running, total = [], Fraction(0)
    for row in rising:
        total += 0 if math.isnan(score[row]) else Fraction(score[row])
        running.append(total)
    low, span = running[0], running[-1] - running[0]
    share = [(value - low) / span if span else Fraction(0) for value in running]
    first = min((value for value in share if value > 0), default=Fraction(1))
    surely, perhaps = set(), set()
    for point in range(points):
        level = first + (1 - first) * Fraction(point, max(points - 1, 1))
        above = next((place for place, value in enumerate(share) if value >= level), len(share) - 1)
        below = max(above - 1, 0)
        apart = (level - share[below]) - (share[above] - level)
        is_exact = share[above] == level or are_dyadic([*share, level])
        if abs(apart) < Fraction(1, 10**12) and not is_exact:
            perhaps |= {rising[below], rising[above]}
        else:
            surely.add(rising[below if apart <= 0 else above])
    return surely, perhaps


def are_dyadic(values: list[Fraction]) -> bool:
    """Whether fp64 holds each of these short fractions exactly."""
    return all(value.denominator & (value.denominator - 1) == 0 for value in values)
