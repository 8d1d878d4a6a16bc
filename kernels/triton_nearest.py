"""The most alike row of the same image: products of the rows that look with those that may be found, and no others."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

MEAN_BLOCK = 32
SHORT = (
    256  # bound on the rows of an image up to which few programs read a row, so that each may take its mean
)
NARROW = 64  # channels up to which the rows of all heads that a program adds up fit into its registers


def triton_nearest(
    features: Tensor, queries: Tensor, keys: Tensor, cu_seqlens: Tensor, max_seqlen: int, cosine: bool
) -> tuple[Tensor, Tensor]:
    """Compute `nearest`."""
    num_rows, batch_size = len(features), len(cu_seqlens) - 1
    features = features if features.stride(-1) == 1 else features.contiguous()
    if features.dim() == 3 and (max_seqlen > SHORT or features.shape[2] > NARROW):
        features = _mean_over_heads(features)
    value = torch.empty(num_rows, dtype=torch.float32, device=features.device)
    partner = torch.empty(num_rows, dtype=torch.int64, device=features.device)
    places = torch.empty(2 * num_rows, dtype=torch.int32, device=features.device)
    shape, strides = tuple(features.shape[1:]), features.stride()[:-1]
    # Where a program reads the heads of all rows that it compares, the fewer programs the better.
    block = 128 if features.dim() == 3 and features.dtype != torch.float32 else 64
    tiles = triton.cdiv(max_seqlen, block)
    start = _bound_nearest(shape, strides, features.dtype, cosine, block)
    start(
        batch_size * tiles, features, queries.contiguous(), keys.contiguous(), cu_seqlens, places, partner, value,
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
def _bound_nearest(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, cosine: bool, block: int
) -> Bound:
    num_heads, by_head = (shape[0], strides[1]) if len(shape) == 2 else (1, 0)
    # Products of halves are exact in fp32. Three of tf32 are as good as one of fp32, which means over heads are.
    exact, width = dtype != torch.float32 and num_heads == 1, max(16, triton.next_power_of_2(shape[-1]))
    step = min(width, 64 if exact or width <= 64 else 32)
    tile = {"BLOCK": block, "BLOCK_OTHER": 64, "num_warps": 4}
    if block == 128:  # with 128 registers, none of them spilled, a multiprocessor holds two programs
        tile |= {"BLOCK_OTHER": 32, "num_warps": 8} | ({} if torch.version.hip else {"maxnreg": 128})
    return Bound(
        nearest_kernel, D=shape[-1], H=num_heads, ROW=strides[0], HEAD=by_head, COSINE=cosine,
        PRECISION="ieee" if exact else "tf32x3", STEP=step, CHUNK=256,
        num_stages=3 if exact else 1 if width == step else 2, **tile,
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
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the mean over the heads, [T, D] of [T, H, D]."""
    wait_for_previous(OVERLAP)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (row < num_rows) & (channel < D)
    total = tl.zeros([BLOCK, WIDTH], tl.float32)
    for head in tl.static_range(H):
        total += tl.load(values + row * ROW + head * HEAD + channel, mask=mask, other=0.0).to(tl.float32)
    tl.store(mean + row * D + channel, total * (1.0 / H), mask=mask)


@triton.jit
def _list_rows(queries, keys, query_places, key_places, length, CHUNK: tl.constexpr):
    """Write where in an image its queries lie, one behind the other, and where its keys do; return how many they are.

    All programs of an image write the same, and each reads only what it has written.
    """
    num_queries, num_keys = 0, 0
    for first in range(0, length, CHUNK):
        column = first + tl.arange(0, CHUNK)
        is_query = tl.load(queries + column, mask=column < length, other=0) != 0
        is_key = tl.load(keys + column, mask=column < length, other=0) != 0
        both = is_query.to(tl.int32) + (is_key.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        tl.store(query_places + num_queries + (before & 0xFFFF), column, mask=is_query)
        tl.store(key_places + num_keys + (before >> 16), column, mask=is_key)
        count = tl.sum(both, 0)
        num_queries += count & 0xFFFF
        num_keys += count >> 16
    tl.debug_barrier()
    return num_queries, num_keys


@triton.jit
def _load_places(places, first, count, BLOCK: tl.constexpr):
    number = first + tl.arange(0, BLOCK)
    return tl.load(places + number, mask=number < count, other=-1)


@triton.jit
def _load_rows(
    features, place, channel, H: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Load rows of an image, or their means over the heads."""
    column = channel + tl.arange(0, STEP)
    mask = (place >= 0)[:, None]
    if D % STEP != 0:
        mask = mask & (column < D)[None, :]
    values = features + place.to(tl.int64)[:, None] * ROW + column[None, :]
    rows = tl.load(values, mask=mask, other=0.0)
    if H > 1:
        rows = rows.to(tl.float32)
        for head in tl.static_range(1, H):
            rows += tl.load(values + head * HEAD, mask=mask, other=0.0).to(tl.float32)
        rows *= 1.0 / H
    return rows


@triton.jit
def _squares(values):
    wide = values.to(tl.float32)
    return tl.sum(wide * wide, 1)


@triton.jit
def _inverse_length(squares):
    return 1.0 / tl.maximum(tl.sqrt(squares), 1e-12)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def nearest_kernel(
    features, queries, keys, cu_seqlens, places, partner, value, num_rows, batch_size, num_tiles,
    D: tl.constexpr, H: tl.constexpr, ROW: tl.constexpr, HEAD: tl.constexpr, COSINE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr, STEP: tl.constexpr,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `partner` and `value` [T]. A program takes `BLOCK` of the rows of an image that look.

    Keys come in the order of their rows, so an earlier tile wins ties.
    """
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    start = start.to(tl.int64)
    queries += start
    own = first + tl.arange(0, BLOCK)
    idle = (own < length) & (tl.load(queries + own, mask=own < length, other=0) == 0)
    tl.store(partner + start + own, tl.full([BLOCK], -1, tl.int64), mask=idle)
    tl.store(value + start + own, tl.full([BLOCK], float("-inf"), tl.float32), mask=idle)

    query_places, key_places = places + start, places + num_rows + start
    num_queries, num_keys = _list_rows(queries, keys + start, query_places, key_places, length, CHUNK)
    if first < num_queries:
        features += start * ROW
        column = _load_places(query_places, first, num_queries, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        found = tl.full([BLOCK], -1, tl.int32)
        squares = tl.zeros([BLOCK], tl.float32)
        if D <= STEP:
            mine = _load_rows(features, column, 0, H, D, ROW, HEAD, STEP)
            if COSINE:
                squares = _squares(mine)
        for first_other in range(0, num_keys, BLOCK_OTHER):
            other = _load_places(key_places, first_other, num_keys, BLOCK_OTHER)
            product = tl.zeros([BLOCK, BLOCK_OTHER], tl.float32)
            if D > STEP:
                squares = tl.zeros([BLOCK], tl.float32)
            other_squares = tl.zeros([BLOCK_OTHER], tl.float32)
            for channel in range(0, D, STEP):
                if D > STEP:
                    mine = _load_rows(features, column, channel, H, D, ROW, HEAD, STEP)
                    if COSINE:
                        squares += _squares(mine)
                theirs = _load_rows(features, other, channel, H, D, ROW, HEAD, STEP)
                product = tl.dot(mine, tl.trans(theirs), product, input_precision=PRECISION)
                if COSINE:
                    other_squares += _squares(theirs)
            if COSINE:
                product *= _inverse_length(other_squares)[None, :]
            allowed = (other >= 0)[None, :] & (other[None, :] != column[:, None])
            product = tl.where(allowed, product, float("-inf"))
            top = tl.max(product, 1)
            place = tl.min(tl.where(product == top[:, None], other[None, :], 0x7FFFFFFF), 1)
            found = tl.where(top > best, place, found)
            best = tl.maximum(top, best)
        if COSINE:
            best *= tl.where(found >= 0, _inverse_length(squares), 1.0)
        row, looks = start + column, column >= 0
        tl.store(partner + row, tl.where(found >= 0, start + found, -1), mask=looks)
        tl.store(value + row, best, mask=looks)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(partner + row, tl.full([BLOCK], -1, tl.int64), mask=row < num_rows)
        tl.store(value + row, tl.full([BLOCK], float("-inf"), tl.float32), mask=row < num_rows)
