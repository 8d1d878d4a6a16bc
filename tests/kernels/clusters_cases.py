"""Inputs of the tests of `clusters` and its oracles: loops over the squared distances as whole numbers."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunevit.kernels.clusters import density_peaks, medoids, nearest_kept

LENGTHS = ([1], [0, 5, 0], [21, 2, 35])


@dataclass
class ClusterCase:
    """Features of ragged images in small whole numbers: no product or sum is rounded, and many distances tie."""

    x: Tensor
    weight: Tensor
    keep: Tensor
    source: Tensor
    layout: dict[str, Any]
    lengths: list[int]


def make_cluster_case(
    lengths: list[int],
    channels: int = 5,
    prefix: int = 1,
    bound: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> ClusterCase:
    """Draw a case: some patches alike, some weights NaN, dead rows of NaN."""
    live, dead_rows = sum(lengths), 9
    generator = torch.Generator().manual_seed(live + channels)
    x = torch.randint(-1, 2, (live + dead_rows, channels), generator=generator).to(dtype)
    x[live:] = math.nan
    weight = torch.rand(live + dead_rows, generator=generator) + 0.01
    weight = weight.masked_fill(weight > 0.95, math.nan)
    source = torch.cat([*(torch.arange(length) - prefix for length in lengths), torch.full((dead_rows,), -1)])
    source = source.clamp(min=-1).int()
    keep = (torch.rand(live + dead_rows, generator=generator) < 0.3) | (source <= 0)
    layout = {
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().to(device),
        "max_seqlen": max(lengths) if bound is None else bound,
    }
    return ClusterCase(x.to(device), weight.to(device), keep.to(device), source.to(device), layout, lengths)


def squares(case: ClusterCase) -> list[tuple[range, list[int], dict[tuple[int, int], int]]]:
    """For each image its rows, its patches, and the squared distances between these."""
    x, source, start, images = case.x.double().cpu(), case.source.tolist(), 0, []
    for length in case.lengths:
        own = range(start, start + length)
        patches = [row for row in own if source[row] >= 0]
        apart = {(a, b): int((x[a] - x[b]).square().sum()) for a in patches for b in patches}
        images.append((own, patches, apart))
        start += length
    return images


def assert_medoids(case: ClusterCase, turns: int) -> None:
    """Hold `medoids` against loops."""
    got = medoids(case.x, case.weight, case.keep, case.source, **case.layout, turns=turns)
    expected = [False] * len(case.source)
    for own, patches, apart in squares(case):
        cost = {
            a: float(case.weight[a]) * math.fsum(math.sqrt(apart[a, b]) for b in patches) for a in patches
        }
        cost = {a: math.inf if math.isnan(each) else each for a, each in cost.items()}
        centres = [row for row in patches if case.keep[row]]
        for _ in range(turns):
            clusters: dict[int, list[int]] = {centre: [] for centre in centres}
            for a in patches:
                near = a if a in centres else min(centres, key=lambda b: (apart[a, b], b))
                clusters[near].append(a)
            centres = sorted(min(members, key=lambda a: (cost[a], a)) for members in clusters.values())
        for row in own:
            expected[row] = row in centres or row not in patches
    assert got.tolist() == expected


def assert_peaks(case: ClusterCase, neighbours: int) -> None:
    """Hold `density_peaks` and `nearest_kept` against loops."""
    noise = case.weight.nan_to_num(0.5) * 1e4  # so large that no rounding changes which of two is denser
    peaks, distance = density_peaks(case.x, noise, case.source, **case.layout, neighbours=neighbours)
    nearest = nearest_kept(distance, case.keep, case.source, **case.layout)
    channels, rows = case.x.shape[1], len(case.source)
    expected, nearest_expected = [0.0] * rows, [-1] * rows
    apart_expected = torch.full(distance.shape, math.inf, dtype=torch.float64)
    for image, (own, patches, apart) in enumerate(squares(case)):
        density = {}
        for a in patches:
            near = sorted(apart[a, b] / channels for b in patches)[:neighbours]
            density[a] = math.exp(-math.fsum(near) / len(near)) + 1e-6 * float(noise[a])
        farthest = max(apart.values(), default=0)
        for a in patches:
            gap = min((apart[a, b] for b in patches if density[b] > density[a]), default=farthest)
            expected[a] = math.sqrt(gap / channels) * density[a]
            nearest_expected[a] = min(
                (b for b in patches if case.keep[b]),
                key=lambda b: (apart[a, b], b),
            )
            for b in patches:
                apart_expected[image, a - own[0], b - own[0]] = math.sqrt(apart[a, b] / channels)
    wide = torch.promote_types(case.x.dtype, torch.float32)
    assert peaks.dtype == distance.dtype == wide
    torch.testing.assert_close(distance.double().cpu(), apart_expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(
        peaks.double().cpu(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6
    )
    assert nearest.tolist() == nearest_expected
    assert nearest.dtype == torch.int64
