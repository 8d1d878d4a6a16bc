"""The most alike row of the same image: products of the rows that look with those that may be found, and no others."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound

BLOCK = 64  # rows that look in a program
MEAN_BLOCK = 32


def triton_nearest(
    features: Tensor, queries: Tensor, keys: Tensor, cu_seqlens: Tensor, max_seqlen: int, cosine: bool
) -> tuple[Tensor, Tensor]:
    """Compute `nearest`."""
    num_rows, batch_size, tiles = len(features), len(cu_seqlens) - 1, triton.cdiv(max_seqlen, BLOCK)
    features = features if features.stride(-1) == 1 else features.contiguous()
    if features.dim() == 3:
        features = _mean_over_heads(features)
    value = torch.empty(num_rows, dtype=torch.float32, device=features.device)
    partner = torch.empty(num_rows, dtype=torch.int64, device=features.device)
    start = _bound_nearest(features.shape[1], features.stride(0), features.dtype, cosine)
    start(
        batch_size * tiles, features, queries.contiguous(), keys.contiguous(), cu_seqlens, partner, value,
        num_rows, batch_size, tiles,
    )  # fmt: skip
    return partner, value


def _mean_over_heads(features: Tensor) -> Tensor:
    num_rows, num_heads, channels = features.shape
    mean = torch.empty(num_rows, channels, dtype=torch.float32, device=features.device)
    start = _bound_mean(num_heads, channels, features.stride(0), features.stride(1))
    start(triton.cdiv(num_rows, MEAN_BLOCK), features, mean, num_rows)
    return mean


@functools.cache
def _bound_nearest(channels: int, row_stride: int, dtype: torch.dtype, cosine: bool) -> Bound:
    # Products of halves are exact in fp32. Three of tf32 are as good as one of fp32, and ask for more registers.
    exact, width = dtype != torch.float32, max(16, triton.next_power_of_2(channels))
    step = min(width, 64) if exact or width <= 64 else 32
    return Bound(
        nearest_kernel, D=channels, ROW=row_stride, COSINE=cosine, PRECISION="ieee" if exact else "tf32x3",
        BLOCK=BLOCK, BLOCK_OTHER=64 if exact else 32, STEP=step, CHUNK=32, num_warps=4,
        num_stages=3 if exact else 2,
    )  # fmt: skip


@functools.cache
def _bound_mean(num_heads: int, channels: int, row_stride: int, head_stride: int) -> Bound:
    width = triton.next_power_of_2(channels)
    return Bound(
        mean_kernel, H=num_heads, D=channels, ROW=row_stride, HEAD=head_stride, BLOCK=MEAN_BLOCK,
        WIDTH=width, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def mean_kernel(
    values, mean, num_rows, H: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the mean over the heads, [T, D] of [T, H, D]."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows) & (channel < D)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for head in tl.static_range(H):
        total += tl.load(values + row * ROW + head * HEAD + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(mean + row * D + channel, total * (1.0 / H), mask=mask)


@triton.jit
def _pick(flags, start, length, first, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Find where in an image its flagged rows number `first` and up lie (`length` if there are no more), and count all.

    A row that is sought lies behind as many rows as have no more flagged ones up to them than come before it.
    """
    number = first + tl.arange(0, BLOCK)
    column = tl.zeros([BLOCK], tl.int32)
    count = 0
    for first_here in range(0, length, CHUNK):
        here = first_here + tl.arange(0, CHUNK)
        is_live = here < length
        flag = tl.load(flags + (start.to(tl.int64) + here), mask=is_live, other=0) != 0
        upto = count + tl.cumsum(flag.to(tl.int32), 0)
        is_before = is_live[:, None] & (upto[:, None] <= number[None, :])
        column += tl.sum(is_before.to(tl.int32), 0)
        count += tl.sum(flag.to(tl.int32), 0)
    return column, count


@triton.jit
def _load_rows(features, start, column, length, channel, D: tl.constexpr, ROW: tl.constexpr):
    row = (start.to(tl.int64) + column)[:, None]
    mask = (column < length)[:, None] & (channel < D)[None, :]
    return tl.load(features + row * ROW + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _squares(values):
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _inverse_length(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def nearest_kernel(
    features, queries, keys, cu_seqlens, partner, value, num_rows, batch_size, num_tiles,
    D: tl.constexpr, ROW: tl.constexpr, COSINE: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr, STEP: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write `partner` and `value` [T]. A program takes `BLOCK` of the rows of an image that look.

    A lane keeps its best key of all tiles, an earlier tile winning ties; in the end the lanes are compared.
    """
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    own = first + tl.arange(0, BLOCK)
    own_row = start.to(tl.int64) + own
    idle = (own < length) & (tl.load(queries + own_row, mask=own < length, other=0) == 0)
    tl.store(partner + own_row, tl.full([BLOCK], -1, tl.int64), mask=idle)
    tl.store(value + own_row, tl.full([BLOCK], float("-inf"), tl.float32), mask=idle)

    column, num_queries = _pick(queries, start, length, first, BLOCK, CHUNK)
    if first < num_queries:
        squares = tl.zeros([BLOCK], tl.float32)
        if COSINE:
            for channel in range(0, D, STEP):
                squares += _squares(
                    _load_rows(features, start, column, length, channel + tl.arange(0, STEP), D, ROW)
                )
        best = tl.full([BLOCK, BLOCK_OTHER], float("-inf"), tl.float32)
        found = tl.zeros([BLOCK, BLOCK_OTHER], tl.int32)
        other, num_keys = _pick(keys, start, length, 0, BLOCK_OTHER, CHUNK)
        for first_other in range(0, num_keys, BLOCK_OTHER):
            if first_other > 0:
                other, _ = _pick(keys, start, length, first_other, BLOCK_OTHER, CHUNK)
            product = tl.zeros([BLOCK, BLOCK_OTHER], tl.float32)
            other_squares = tl.zeros([BLOCK_OTHER], tl.float32)
            for channel in range(0, D, STEP):
                channels = channel + tl.arange(0, STEP)
                mine = _load_rows(features, start, column, length, channels, D, ROW)
                theirs = _load_rows(features, start, other, length, channels, D, ROW)
                product = tl.dot(mine, tl.trans(theirs), product, input_precision=PRECISION)
                if COSINE:
                    other_squares += _squares(theirs)
            if COSINE:
                product *= _inverse_length(other_squares)[None, :]
            allowed = (other < length)[None, :] & (other[None, :] != column[:, None])
            product = tl.where(allowed, product, float("-inf"))
            is_better = product > best
            best = tl.where(is_better, product, best)
            found = tl.where(is_better, other[None, :], found)
        top = tl.max(best, 1)
        has_any = top > float("-inf")
        place = tl.min(tl.where(best == top[:, None], found, 0x7FFFFFFF), 1)
        if COSINE:
            top *= _inverse_length(squares)
        row = start.to(tl.int64) + column
        tl.store(partner + row, tl.where(has_any, start.to(tl.int64) + place, -1), mask=column < length)
        tl.store(value + row, tl.where(has_any, top, float("-inf")), mask=column < length)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(partner + row, tl.full([BLOCK], -1, tl.int64), mask=row < num_rows)
        tl.store(value + row, tl.full([BLOCK], float("-inf"), tl.float32), mask=row < num_rows)
