"""Inputs of the tests of `plan` and its oracle: a loop over the images, sorted as lists of plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunevit.kernels.fit import fit
from prunevit.kernels.plan import Places, plan

LENGTHS = ([1], [0, 5, 0], [33, 150, 2])
ORDERS = ("present", "random", "tied", "nan", "extreme", "bool", "int8", "int64")


@dataclass
class PlanCase:
    """Rows of ragged images, some of which leave, with dead rows that must go nowhere."""

    source: Tensor
    keep: Tensor
    order: Tensor | None
    layout: dict[str, Any]
    lengths: list[int]

    def plan(self) -> Places:
        return plan(self.source, self.keep, self.order, **self.layout)


def draw_order(kind: str, rows: int) -> Tensor | None:
    """Draw an order; all but "random" have ties."""
    generator = torch.Generator().manual_seed(rows)
    random = torch.randn(rows, generator=generator)
    if kind == "present":
        return None
    if kind == "tied":
        return random.round()
    if kind == "nan":
        return random.round().masked_fill(random > 0.5, math.nan)
    if kind == "extreme":
        some = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 3e38, math.nan])
        return some[torch.randint(len(some), (rows,), generator=generator)]
    if kind == "bool":
        return random > 0
    if kind == "int8":
        return torch.randint(-128, 128, (rows,), generator=generator).to(torch.int8)
    if kind == "int64":  # apart only where fp64 is not
        return torch.randint(2**62, 2**62 + 9, (rows,), generator=generator)
    return random


def make_plan_case(
    lengths: list[int],
    kind: str,
    prefix: int = 1,
    dead_rows: int = 0,
    bound: int | None = None,
    device: str = "cpu",
) -> PlanCase:
    """Draw a case; dead rows say that they stay, which nothing may believe."""
    live = sum(lengths)
    source = torch.cat(
        [*(torch.arange(length) - prefix for length in lengths), torch.full((dead_rows,), -1)]
    ).clamp(min=-1)
    keep = torch.rand(live + dead_rows, generator=torch.Generator().manual_seed(live)) < 0.6
    keep[live:] = True
    order = draw_order(kind, live + dead_rows)
    counts = torch.tensor([*lengths, dead_rows])
    layout = {
        "image_id": torch.arange(len(counts)).repeat_interleave(counts).int().to(device),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        "max_seqlen": max(lengths) if bound is None else bound,
    }
    order = None if order is None else order.to(device)
    return PlanCase(source.int().to(device), keep.to(device), order, layout, lengths)


def assert_plan(case: PlanCase, places: Places, keeps_all: bool = False) -> None:
    """Hold a plan against what lists say."""
    source, keep, start = case.source.tolist(), case.keep.tolist(), 0
    order = list(range(len(source))) if case.order is None else case.order.tolist()
    destination, counts = [-1] * len(source), []
    for length in case.lengths:
        own = range(start, start + length)
        stay = [row for row in own if keeps_all or keep[row] or source[row] < 0]
        stay.sort(key=lambda row: (source[row] >= 0, *by_rising(order[row], source[row]), row))
        for place, row in enumerate(stay):
            destination[row] = place
        counts.append(len(stay))
        start += length
    assert places.destination.tolist() == destination
    assert places.cu_seqlens.tolist() == [sum(counts[:image]) for image in range(len(counts) + 1)]
    assert places.extent.tolist() == [sum(counts), max(counts, default=0), min(counts, default=0)]
    assert all(part.dtype == torch.int32 for part in places)


def assert_fits(case: PlanCase) -> None:
    """Hold a plan in rooms that are just enough, or a row too small in one way, against lists."""
    places = case.plan()
    rows, longest, _ = places.extent.tolist()
    destination, bounds = places.destination.tolist(), places.cu_seqlens.tolist()
    for room in ((rows, longest), (rows + 1, longest + 9)):
        fitted, starts = fit(places.destination, places.cu_seqlens, places.extent, *room, 2)
        assert (fitted.tolist(), starts.tolist()) == (destination, bounds)
    for room in ((rows - 1, longest), (rows, longest - 1), (rows - 1, longest - 1)):
        fitted, starts = fit(places.destination, places.cu_seqlens, places.extent, *room, 2)
        assert fitted.tolist() == [place if place < 2 else -1 for place in destination]
        assert starts.tolist() == [2 * image for image in range(len(bounds))]
        assert fitted.dtype == starts.dtype == torch.int32


def by_rising(value: float, source: int) -> tuple[bool, float]:
    """Sort key of a row: prefix rows are all alike, NaN comes last."""
    if source < 0:
        return False, 0
    return math.isnan(value), 0 if math.isnan(value) else value
