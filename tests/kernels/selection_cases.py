"""Inputs and independent oracles of the tests of `select` and `rank`: loops over plain numbers."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from prunevit.kernels.select import Selection

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


def assert_selection(
    selection: Selection, score: Tensor, batch_size: int, rows: int, prefix: int, count: int
) -> None:
    """Compare all fields with a loop over the images, over the kernel's own mean where there are several heads."""
    if score.dim() == 2:
        live = batch_size * rows
        torch.testing.assert_close(
            selection.score[:live].double(),
            score[:live].double().mean(1),
            rtol=1e-5,
            atol=1e-7,
            equal_nan=True,
        )
        numbers = selection.score.tolist()
    else:
        numbers = score.double().tolist()
    num_rows = len(numbers)
    keep, keep_fused = [False] * num_rows, [False] * num_rows
    merge_into, weight, mean = [-1] * num_rows, [1.0] * num_rows, [0.0] * num_rows
    for image in range(batch_size):
        own = list(range(image * rows, (image + 1) * rows))
        ordered = by_falling_score(numbers, own[prefix:])
        for row in own:
            keep[row] = keep_fused[row] = row < own[0] + prefix or row in ordered[:count]
            merge_into[row], mean[row] = row, numbers[row]
        for row in ordered[count:]:
            merge_into[row], weight[row] = ordered[count], numbers[row]
            keep_fused[row] = row == ordered[count]
    for mask, got, destination, bounds in (
        (keep, selection.keep, selection.destination, selection.cu_seqlens),
        (keep_fused, selection.keep_fused, selection.destination_fused, selection.cu_fused),
    ):
        assert got.tolist() == mask
        assert destination.tolist() == [sum(mask[:row]) if mask[row] else -1 for row in range(num_rows)]
        assert bounds.tolist() == [sum(mask[: image * rows]) for image in range(batch_size + 1)]
        assert (got.dtype, destination.dtype, bounds.dtype) == (torch.bool, torch.int64, torch.int32)
    assert selection.merge_into.tolist() == merge_into
    same: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}
    torch.testing.assert_close(
        selection.merge_weight.double().cpu(), torch.tensor(weight, dtype=torch.float64), **same
    )
    torch.testing.assert_close(
        selection.score.double().cpu(), torch.tensor(mean, dtype=torch.float64), **same
    )


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
    """Make `torch.empty` give NaN, -77 and True, so that an output that is not written fails its test."""
    empty = torch.empty

    def poisoned(*args: Any, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(math.nan if tensor.is_floating_point() else -77)

    monkeypatch.setattr(torch, "empty", poisoned)
