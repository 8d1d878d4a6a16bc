"""Inputs and oracles of the tests of `nearest` and `merge`: loops over the images, in fp64 and over plain numbers."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from prunevit.kernels.merge import Merged, merge
from prunevit.kernels.nearest import nearest

FEW = 5
LENGTHS = ([1], [0, 5, 0], [70, 33], [130, 2, 1], [3])
FLAGS = ("by turns", "some", "all", "no keys", "no queries", "few queries")


@dataclass
class MergingCase:
    """Ragged images whose first row is a prefix row, and rows that are dead, of which nothing is true."""

    features: Tensor
    queries: Tensor
    keys: Tensor
    lengths: list[int]
    layout: dict[str, Any]
    source: Tensor = field(init=False)

    def __post_init__(self) -> None:
        source = torch.arange(len(self.queries), dtype=torch.int32)
        source[sum(self.lengths) :] = -1
        for rows in self.images():
            source[rows.start : rows.start + min(1, len(rows))] = -1
        self.source = source.to(self.queries.device)

    def nearest(self, cosine: bool = False) -> tuple[Tensor, Tensor]:
        return nearest(self.features, self.queries, self.keys, cosine=cosine, **self.layout)

    def merge(self, keep: Tensor, into: Tensor, weight: Tensor, **options: Any) -> Merged:
        return merge(keep, into, weight, source=self.source, **options, **self.layout)

    def images(self) -> list[range]:
        starts = [sum(self.lengths[:image]) for image in range(len(self.lengths))]
        return [range(start, start + length) for start, length in zip(starts, self.lengths)]


def make_merging_case(
    lengths: list[int],
    channels: int = FEW,
    dtype: torch.dtype = torch.float32,
    flags: str = "by turns",
    heads: int | None = None,
    dead_rows: int = 7,
    bound: int | None = None,
    device: str = "cpu",
) -> MergingCase:
    """Draw a case; with a few channels of whole numbers, whose products are exact and often tie."""
    rows = sum(lengths) + dead_rows
    generator = torch.Generator().manual_seed(rows + channels)
    shape = (rows, channels) if heads is None else (rows, heads, channels)
    features = torch.randn(shape, generator=generator)
    if channels == FEW:
        features = features.round()
    drawn, turn = torch.rand(2, rows, generator=generator), torch.arange(rows) % 2 == 0
    queries, keys = {
        "by turns": (turn, ~turn),
        "some": (drawn[0] < 0.6, drawn[1] < 0.6),
        "all": (turn | True, turn | True),
        "no keys": (turn | True, turn & False),
        "no queries": (turn & False, turn | True),
        "few queries": (drawn[0] < 0.05, drawn[1] < 0.8),
    }[flags]
    counts = torch.tensor([*lengths, dead_rows])
    layout = {
        "image_id": torch.arange(len(counts)).repeat_interleave(counts).int().to(device),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        "max_seqlen": max(lengths) if bound is None else bound,
    }
    on = (features.to(device, dtype), queries.to(device), keys.to(device))
    return MergingCase(*on, lengths, layout)


def assert_nearest(case: MergingCase, found: tuple[Tensor, Tensor], cosine: bool = False) -> None:
    """Compare values with fp64, and partners: where products are exact, the first of the best rows must be found."""
    exact = case.features.detach().cpu().double()
    exact = exact.mean(1) if exact.dim() == 3 else exact
    exact = exact / exact.norm(dim=1, keepdim=True).clamp(min=1e-12) if cosine else exact
    wide = torch.promote_types(case.features.dtype, torch.float32)
    is_exact = exact.shape[1] == FEW and case.features.dim() == 2 and not cosine
    scale = exact.square().sum(1).max().item() if len(exact) else 0.0
    slack = 0.0 if is_exact else 16 * torch.finfo(wide).eps * scale
    partner, value = (each.cpu() for each in found)
    assert (partner.dtype, value.dtype) == (torch.int64, wide)
    queries, keys = case.queries.tolist(), case.keys.tolist()
    seen: set[int] = set()
    for rows in case.images():
        for row in rows:
            others = [other for other in rows if keys[other] and other != row]
            if not queries[row] or not others:
                continue
            seen.add(row)
            product = (exact[others] @ exact[row]).tolist()
            got, best = int(partner[row]), max(product)
            assert got in others
            assert abs(float(value[row]) - best) <= slack
            assert product[others.index(got)] >= best - slack
            assert not is_exact or got == others[product.index(best)]
    for row in set(range(len(queries))) - seen:
        assert (int(partner[row]), float(value[row])) == (-1, -math.inf)


def make_folds(case: MergingCase) -> tuple[Tensor, Tensor, Tensor]:
    """Draw what stays, where the others go (anywhere, -1 and rows that leave included) and weights, eighths."""
    rows = len(case.queries)
    generator = torch.Generator().manual_seed(rows)
    keep = torch.rand(rows, generator=generator) < 0.4
    into = torch.full((rows,), -1)
    for own in case.images():
        if own:
            into[list(own)] = torch.randint(own.start - 1, own.stop + 1, (len(own),), generator=generator)
    into = into.clamp(-1, rows - 1)
    weight = torch.randint(1, 40, (rows,), generator=generator) / 8
    return tuple(each.to(case.queries.device) for each in (keep, into, weight))  # type: ignore[return-value]


def assert_merged(
    case: MergingCase,
    given: tuple[Tensor, Tensor, Tensor],
    got: Merged,
    normalise: bool = True,
    eps: float = 0.0,
) -> None:
    """Compare with a loop over the rows."""
    keep, into, weight = (each.tolist() for each in given)
    is_patch = (case.source >= 0).tolist()
    stays, target, share = [False] * len(keep), [-1] * len(keep), [1.0] * len(keep)
    for rows in case.images():
        for row in rows:
            stays[row] = keep[row] or not is_patch[row]
            target[row] = row if stays[row] else -1
        for row in rows:
            heir = into[row]
            if not stays[row] and heir in rows and stays[heir] and is_patch[heir]:
                target[row] = heir
        for heir in rows:
            group = [row for row in rows if target[row] == heir and is_patch[row]]
            total = math.fsum(weight[row] for row in group) + eps if normalise else 1.0
            for row in group:
                share[row] = weight[row] / total
    assert got.keep.tolist() == stays
    assert got.into.tolist() == target
    assert (got.into.dtype, got.weight.dtype) == (torch.int64, given[2].dtype)
    limit = 2 * torch.finfo(given[2].dtype).eps
    torch.testing.assert_close(
        got.weight.double().cpu(), torch.tensor(share, dtype=torch.float64), rtol=limit, atol=0
    )
