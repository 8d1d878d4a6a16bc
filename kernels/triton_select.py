"""Selecting and ranking within each image as one launch each: no sort, no atomics, no host synchronisation.

Both go by a uint32 key that orders as the score does and puts whatever cannot be selected below everything.
"""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound

RANK_BLOCK = 128


def triton_select(
    score: Tensor, batch_size: int, rows: int, prefix: int, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `select`; returns its planes (see `select.Planes`)."""
    num_rows, device = score.shape[0], score.device
    by_heads = score if score.dim() == 2 else score[:, None]
    ints = torch.empty((3, num_rows), dtype=torch.int64, device=device)
    floats = torch.empty((2, num_rows), dtype=torch.float32, device=device)
    flags = torch.empty((2, num_rows), dtype=torch.bool, device=device)
    bounds = torch.empty((2, batch_size + 1), dtype=torch.int32, device=device)
    start = _bound_select(by_heads.shape[1], by_heads.stride(0), 1 << (rows - 1).bit_length())
    start(
        batch_size, by_heads, ints, floats, flags, bounds, num_rows, batch_size, rows, prefix, count,
        by_heads.stride(1),
    )  # fmt: skip
    return ints, floats, flags, bounds


def triton_rank(score: Tensor, eligible: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Compute `rank`."""
    position = torch.empty(score.shape, dtype=torch.int64, device=score.device)
    batch_size, tiles = len(cu_seqlens) - 1, triton.cdiv(max_seqlen, RANK_BLOCK)
    start = _bound_rank(score.stride(0))
    start(
        batch_size * tiles, score, eligible.contiguous(), cu_seqlens, position, len(score), batch_size, tiles
    )
    return position


@functools.cache
def _bound_select(num_heads: int, row_stride: int, block: int) -> Bound:
    # Measured on an H200: one warp needs no barriers, but four have so much less to do each that they win.
    warps = 1 if block <= 32 else 4 if block <= 1024 else 8
    return Bound(select_kernel, ROW=row_stride, H=num_heads, BLOCK=block, num_warps=warps)


@functools.cache
def _bound_rank(row_stride: int) -> Bound:
    return Bound(rank_kernel, ROW=row_stride, BLOCK=RANK_BLOCK, BLOCK_OTHER=128, num_warps=4)


@triton.jit
def _key(score, can_be_selected):
    """Map fp32 to uint32 of the same order: NaN as -inf, -0 as 0; what cannot be selected gets 0, lowest of all."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(score < 0.0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(can_be_selected, key, 0)


@triton.jit
def _store_rows(
    ints, floats, flags, num_rows, row, mask, destination, destination_fused, merge_into, merge_weight, mean,
    keep, keep_fused,
):  # fmt: skip
    plane = num_rows.to(tl.int64)
    tl.store(ints + row, destination, mask=mask)
    tl.store(ints + plane + row, destination_fused, mask=mask)
    tl.store(ints + 2 * plane + row, merge_into, mask=mask)
    tl.store(floats + row, merge_weight, mask=mask)
    tl.store(floats + plane + row, mean, mask=mask)
    tl.store(flags + row, keep, mask=mask)
    tl.store(flags + plane + row, keep_fused, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "rows", "prefix", "count", "head_stride"])
def select_kernel(
    score, ints, floats, flags, bounds, num_rows, batch_size, rows, prefix, count, head_stride,
    ROW: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the planes of a `Selection`; a program holds the scores of one image.

    The heir is the patch that `count` others are ahead of. Its key is the largest one that more than `count`
    keys reach. It is found by bisection, which ends early at a number that just `count + 1` keys reach, and
    everything else follows from it.
    """
    image = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    row = image.to(tl.int64) * rows + column
    is_live = column < rows
    mean = tl.zeros([BLOCK], tl.float32)
    for head in tl.static_range(H):
        head_score = score + head * head_stride.to(tl.int64) + row * ROW
        mean += tl.load(head_score, mask=is_live, other=0.0).to(tl.float32)
    mean *= 1.0 / H

    is_patch = is_live & (column >= prefix)
    key = _key(mean, is_patch)
    low = tl.min(tl.where(is_patch, key, 0xFFFFFFFF), 0)
    high = tl.max(key, 0)
    reached = 0
    while (low < high) & (reached != count + 1):
        middle = high - ((high - low) >> 1)
        reached = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(reached > count, middle, low)
        high = tl.where(reached > count, high, middle - 1)
    heir_key = tl.min(tl.where(key >= low, key, 0xFFFFFFFF), 0)

    is_ahead = key > heir_key
    is_tied = is_patch & (key == heir_key)
    tied_rank = tl.sum(is_ahead.to(tl.int32), 0) + tl.cumsum(is_tied.to(tl.int32), 0) - 1
    keep = (is_live & (column < prefix)) | is_ahead | (is_tied & (tied_rank < count))
    is_heir = is_tied & (tied_rank == count)
    has_heir = count < rows - prefix
    heir = tl.sum(tl.where(is_heir, column, 0), 0)
    loses = is_patch & (keep == 0)
    keep_fused = keep | is_heir

    kept = prefix + tl.minimum(count, rows - prefix)
    kept_fused = kept + has_heir.to(tl.int32)
    slot = tl.cumsum(keep.to(tl.int32), 0) - 1
    slot_fused = slot + (has_heir & (column >= heir)).to(tl.int32)
    _store_rows(
        ints, floats, flags, num_rows, row, is_live,
        tl.where(keep, image.to(tl.int64) * kept + slot, -1),
        tl.where(keep_fused, image.to(tl.int64) * kept_fused + slot_fused, -1),
        tl.where(loses, image.to(tl.int64) * rows + heir, row),
        tl.where(loses, mean, 1.0), mean, keep, keep_fused,
    )  # fmt: skip
    bound = image + tl.arange(0, 2)  # the neighbour writes the same value
    tl.store(bounds + bound, bound * kept)
    tl.store(bounds + batch_size + 1 + bound, bound * kept_fused)

    for first in range(batch_size * rows + image * BLOCK, num_rows, batch_size * BLOCK):
        dead = first + column
        none = tl.full([BLOCK], -1, tl.int64)
        zero = tl.zeros([BLOCK], tl.float32)
        nowhere = dead < 0
        _store_rows(
            ints, floats, flags, num_rows, dead, dead < num_rows, none, none, none, zero + 1.0, zero, nowhere, nowhere
        )  # fmt: skip


@triton.jit
def _load_keys(score, eligible, start, column, length, ROW: tl.constexpr):
    row = start.to(tl.int64) + column
    is_live = column < length
    can_be_selected = tl.load(eligible + row, mask=is_live, other=0) != 0
    return _key(tl.load(score + row * ROW, mask=is_live, other=0.0).to(tl.float32), can_be_selected)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def rank_kernel(
    score, eligible, cu_seqlens, position, num_rows, batch_size, num_tiles,
    ROW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr,
):  # fmt: skip
    """Write `position` [T]: how many rows of its image are ahead of a row. A program holds a tile of one image.

    Rows that cannot be selected all have the lowest key, so they come last, in row order.
    """
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    column = first + tl.arange(0, BLOCK)
    key = _load_keys(score, eligible, start, column, length, ROW)
    ahead = tl.zeros([BLOCK], tl.int32)
    for first_other in range(0, tl.where(first < length, length, 0), BLOCK_OTHER):
        other = first_other + tl.arange(0, BLOCK_OTHER)
        other_key = _load_keys(score, eligible, start, other, length, ROW)
        is_ahead = (other_key[:, None] > key[None, :]) | (
            (other_key[:, None] == key[None, :]) & (other[:, None] < column[None, :])
        )
        ahead += tl.sum(is_ahead.to(tl.int32), 0)
    tl.store(position + start.to(tl.int64) + column, ahead.to(tl.int64), mask=column < length)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK)
        tl.store(position + row, (row - total).to(tl.int64), mask=row < num_rows)
