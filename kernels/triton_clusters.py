"""Distances between the patches of each image, and what clusterings read off them a row of distances at a time."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

TILE = 64


def triton_medoids(
    x: Tensor, weight: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, turns: int
) -> Tensor:
    """Compute `medoids`."""
    batch_size, block = len(cu_seqlens) - 1, _block(max_seqlen)
    source, weight = source.contiguous(), weight.contiguous()
    distance = _distances(x, source, cu_seqlens, max_seqlen, 1.0)
    previous = keep.contiguous()
    for medoid in torch.zeros((max(turns, 1), len(source)), dtype=torch.bool, device=x.device):
        start = _bound_turn(block, turns > 0)
        start(batch_size, medoid, previous, distance, weight, source, cu_seqlens, max_seqlen)
        previous = medoid
    return previous


def triton_peaks(
    x: Tensor, noise: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Compute `density_peaks`."""
    source, noise = source.contiguous(), noise.contiguous()
    distance = _distances(x, source, cu_seqlens, max_seqlen, x.shape[1] ** -0.5)
    density, farthest = torch.empty((2, len(source)), dtype=torch.float32, device=x.device)
    peaks = torch.zeros_like(density)
    block, rows = _block(max_seqlen), _rows(max_seqlen)
    tiles = triton.cdiv(max_seqlen, rows)
    programs = (len(cu_seqlens) - 1) * tiles
    _bound_density(block, rows, neighbours)(
        programs, density, farthest, distance, noise, cu_seqlens, max_seqlen, tiles
    )
    _bound_gap(block, rows)(
        programs, peaks, density, farthest, distance, source, cu_seqlens, max_seqlen, tiles
    )
    return peaks, distance


def triton_nearest(
    distance: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `nearest_kept`."""
    row = torch.empty(len(source), dtype=torch.int64, device=source.device)
    block, rows = _block(max_seqlen), _rows(max_seqlen)
    tiles = triton.cdiv(max_seqlen, rows)
    _bound_nearest(block, rows)(
        (len(cu_seqlens) - 1) * tiles, row, distance.contiguous(), keep.contiguous(), source.contiguous(),
        cu_seqlens, max_seqlen, tiles, len(source),
    )  # fmt: skip
    return row


def _distances(x: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float) -> Tensor:
    """Distances times `scale` between the patches of each image, fp32 [B, max_seqlen, max_seqlen]."""
    batch_size, channels = len(cu_seqlens) - 1, x.shape[1]
    distance = torch.empty((batch_size, max_seqlen, max_seqlen), dtype=torch.float32, device=x.device)
    tiles = triton.cdiv(max_seqlen, TILE)
    _bound_distance(channels, scale)(
        batch_size * tiles * tiles, distance, x.contiguous(), source, cu_seqlens, max_seqlen, tiles
    )
    return distance


def _block(max_seqlen: int) -> int:
    return max(16, 1 << (max_seqlen - 1).bit_length())


def _rows(max_seqlen: int) -> int:
    """Rows of a tile whose distances fit into the registers of four warps."""
    return min(16, 4096 // _block(max_seqlen))


@functools.cache
def _bound_distance(channels: int, scale: float) -> Bound:
    return Bound(distance_kernel, C=channels, SCALE=scale, TILE=TILE, BLOCK_C=32, num_warps=4)


@functools.cache
def _bound_turn(block: int, moves: bool) -> Bound:
    return Bound(turn_kernel, MOVES=moves, ROWS=min(16, 8192 // block), BLOCK=block, num_warps=8)


@functools.cache
def _bound_density(block: int, rows: int, neighbours: int) -> Bound:
    return Bound(density_kernel, NEIGHBOURS=neighbours, ROWS=rows, BLOCK=block, num_warps=4)


@functools.cache
def _bound_gap(block: int, rows: int) -> Bound:
    return Bound(gap_kernel, ROWS=rows, BLOCK=block, num_warps=4)


@functools.cache
def _bound_nearest(block: int, rows: int) -> Bound:
    return Bound(nearest_kernel, ROWS=rows, BLOCK=block, num_warps=4)


@triton.jit(do_not_specialize=["width", "num_tiles"])
def distance_kernel(
    distance, x, source, cu_seqlens, width, num_tiles, C: tl.constexpr, SCALE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_C: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write a tile of the distances of one image: `|a|^2 + |b|^2 - 2 ab`, 0 from a row to itself."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    tile = program % (num_tiles * num_tiles)
    image = program // (num_tiles * num_tiles)
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    i = tile // num_tiles * TILE + tl.arange(0, TILE)
    j = tile % num_tiles * TILE + tl.arange(0, TILE)
    channel = tl.arange(0, BLOCK_C)
    a_row = x + (start.to(tl.int64) + i)[:, None] * C
    b_row = x + (start.to(tl.int64) + j)[:, None] * C
    product = tl.zeros([TILE, TILE], tl.float32)
    a_square = tl.zeros([TILE], tl.float32)
    b_square = tl.zeros([TILE], tl.float32)
    is_there = (tile // num_tiles * TILE < length) & (tile % num_tiles * TILE < length)
    for first in range(0, tl.where(is_there, C, 0), BLOCK_C):
        is_channel = (first + channel < C)[None, :]
        a = tl.load(a_row + (first + channel)[None, :], mask=is_channel & (i < length)[:, None], other=0.0)
        b = tl.load(b_row + (first + channel)[None, :], mask=is_channel & (j < length)[:, None], other=0.0)
        product = tl.dot(a, tl.trans(b), product, input_precision="tf32x3")
        a_square += tl.sum(a.to(tl.float32) * a.to(tl.float32), 1)
        b_square += tl.sum(b.to(tl.float32) * b.to(tl.float32), 1)
    square = tl.maximum(a_square[:, None] + b_square[None, :] - 2.0 * product, 0.0)
    square = tl.where(i[:, None] == j[None, :], 0.0, square)
    start = start.to(tl.int64)
    i_is_patch = tl.load(source + start + i, mask=i < length, other=-1) >= 0
    j_is_patch = tl.load(source + start + j, mask=j < length, other=-1) >= 0
    far = tl.where(i_is_patch[:, None] & j_is_patch[None, :], tl.sqrt(square) * SCALE, float("inf"))
    cell = image.to(tl.int64) * width * width + i[:, None] * width + j[None, :]
    tl.store(distance + cell, far, mask=(i < width)[:, None] & (j < width)[None, :])


@triton.jit
def _load_distances(distance, image, row, column, length, width):
    """Load the distances from some rows of an image to all; infinite where there is no row or column."""
    cell = image.to(tl.int64) * width * width + row[:, None] * width + column[None, :]
    return tl.load(
        distance + cell, mask=(row < length)[:, None] & (column < length)[None, :], other=float("inf")
    )


@triton.jit
def _nearest(far, may_be, column):
    """Find the nearest of the columns that may be it, the first of equals, and how far it is."""
    far = tl.where(may_be[None, :], far, float("inf"))
    low = tl.min(far, 1)
    return tl.min(tl.where(far == low[:, None], column[None, :], 0x7FFFFFFF), 1), low


@triton.jit
def _is_kept_patch(keep, source, start, column, length):
    row = start.to(tl.int64) + column
    is_patch = tl.load(source + row, mask=column < length, other=-1) >= 0
    return is_patch & (tl.load(keep + row, mask=column < length, other=0) != 0)


@triton.jit(do_not_specialize=["width"])
def turn_kernel(
    medoid, previous, distance, weight, source, cu_seqlens, width, MOVES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Mark the medoids after a turn, and prefix rows, in `medoid` [T], all False before; a program holds one image.

    A column that is a medoid remembers the cheapest row so far of those that are nearest to it.
    """
    wait_for_previous(OVERLAP)
    image = tl.program_id(0)
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    column = tl.arange(0, BLOCK)
    was_medoid = _is_kept_patch(previous, source, start, column, length)
    cheapest = tl.where(was_medoid, column, 0x7FFFFFFF)
    if MOVES:
        cheapest = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        for first in range(0, length, ROWS):
            row = first + tl.arange(0, ROWS)
            far = _load_distances(distance, image, row, column, length, width)
            here = start.to(tl.int64) + row
            is_patch = tl.load(source + here, mask=row < length, other=-1) >= 0
            total = tl.sum(tl.where(far < float("inf"), far, 0.0), 1)
            cost = tl.load(weight + here, mask=row < length, other=0.0).to(tl.float32) * total
            cost = tl.where(cost == cost, cost, float("inf"))
            nearest, _low = _nearest(far, was_medoid, column)
            nearest = tl.where(_is_kept_patch(previous, source, start, row, length), row, nearest)
            joins = is_patch[:, None] & (nearest[:, None] == column[None, :])
            lowest = tl.min(tl.where(joins, cost[:, None], float("inf")), 0)
            is_lowest = joins & (cost[:, None] == lowest[None, :])
            candidate = tl.min(tl.where(is_lowest, row[:, None], 0x7FFFFFFF), 0)
            wins = (lowest < least) | ((lowest == least) & (candidate < cheapest))
            cheapest = tl.where(wins, candidate, cheapest)
            least = tl.where(wins, lowest, least)
    is_true = column >= 0
    here = start.to(tl.int64)
    tl.store(medoid + here + cheapest, is_true, mask=was_medoid & (cheapest < length))
    is_prefix = tl.load(source + here + column, mask=column < length, other=0) < 0
    tl.store(medoid + here + column, is_true, mask=is_prefix & (column < length))


@triton.jit(do_not_specialize=["width", "num_tiles"])
def density_kernel(
    density, farthest, distance, noise, cu_seqlens, width, num_tiles, NEIGHBOURS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the density of each row, and how far it is from the farthest patch."""
    wait_for_previous(OVERLAP)
    image = tl.program_id(0) // num_tiles
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    row = tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    far = _load_distances(distance, image, row, column, length, width)
    farthest_here = tl.max(tl.where(far < float("inf"), far, 0.0), 1)
    total = tl.zeros([ROWS], tl.float32)
    number = tl.zeros([ROWS], tl.float32)
    for _neighbour in range(NEIGHBOURS):
        at, low = _nearest(far, column >= 0, column)
        total += tl.where(low < float("inf"), low * low, 0.0)
        number += tl.where(low < float("inf"), 1.0, 0.0)
        far = tl.where(column[None, :] == at[:, None], float("inf"), far)
    here = start.to(tl.int64) + row
    tie_break = 1e-6 * tl.load(noise + here, mask=row < length, other=0.0).to(tl.float32)
    tl.store(density + here, tl.exp(-total / tl.maximum(number, 1.0)) + tie_break, mask=row < length)
    tl.store(farthest + here, farthest_here, mask=row < length)


@triton.jit(do_not_specialize=["width", "num_tiles"])
def gap_kernel(
    peaks, density, farthest, distance, source, cu_seqlens, width, num_tiles, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the density of each patch times its distance to the nearest denser one."""
    wait_for_previous(OVERLAP)
    image = tl.program_id(0) // num_tiles
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    row = tl.program_id(0) % num_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    far = _load_distances(distance, image, row, column, length, width)
    start = start.to(tl.int64)
    own = tl.load(density + start + row, mask=row < length, other=0.0)
    other = tl.load(density + start + column, mask=column < length, other=0.0)
    diameter = tl.max(tl.load(farthest + start + column, mask=column < length, other=0.0), 0)
    is_denser = (other[None, :] > own[:, None]) & (far < float("inf"))
    gap = tl.min(tl.where(is_denser, far, diameter), 1)
    is_patch = tl.load(source + start + row, mask=row < length, other=-1) >= 0
    tl.store(peaks + start + row, tl.where(is_patch, gap * own, 0.0), mask=row < length)


@triton.jit(do_not_specialize=["width", "num_tiles", "num_rows"])
def nearest_kernel(
    nearest, distance, keep, source, cu_seqlens, width, num_tiles, num_rows, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the row of the nearest kept patch, -1 for rows that are no patches."""
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    image = program // num_tiles
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    row = program % num_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    far = _load_distances(distance, image, row, column, length, width)
    at, low = _nearest(far, _is_kept_patch(keep, source, start, column, length), column)
    here = start.to(tl.int64)
    tl.store(nearest + here + row, tl.where(low < float("inf"), here + at, -1), mask=row < length)

    total = tl.load(cu_seqlens + tl.num_programs(0) // num_tiles)
    for dead in range(total + program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        behind = dead + tl.arange(0, ROWS)
        tl.store(nearest + behind, tl.full([ROWS], -1, tl.int64), mask=behind < num_rows)
