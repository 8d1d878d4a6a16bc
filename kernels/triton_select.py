"""Selecting and ranking within each image as one launch each: no sort, no atomics, no host synchronisation.

Both go by a uint32 key that orders as the score does and puts whatever cannot be selected below everything.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous
from prunevit.kernels.parts import pitches
from prunevit.kernels.select_reference import FLAG_MULTIPLE, INT_MULTIPLE, Planes, flag_lengths, int_lengths

RANK_BLOCK = 128
_DOUBLE, _LONG = struct.Struct("<d"), struct.Struct("<q")


def triton_select(
    score: Tensor,
    cu_seqlens: Tensor | None,
    eligible: Tensor | None,
    order: Tensor | None,
    each: Tensor | None,
    batch_size: int,
    rows: int,
    prefix: int,
    kind: str,
    value: float,
    least: int,
    most: int,
) -> Planes:
    """Compute `select`; returns its planes (see `select_reference.Planes`)."""
    num_rows = score.shape[0]
    num_heads, row_stride, head_stride = 1, score.stride(0), 0
    if score.dim() == 2:
        num_heads, head_stride = score.shape[1], score.stride(1)
    int_pitches = pitches(int_lengths(num_rows, batch_size), INT_MULTIPLE)
    ints = score.new_empty(sum(int_pitches), dtype=torch.int32)
    flags = score.new_empty(sum(pitches(flag_lengths(num_rows), FLAG_MULTIPLE)), dtype=torch.bool)
    merge_into = score.new_empty(num_rows, dtype=torch.int64)
    merge_weight = score.new_empty(num_rows, dtype=torch.float32)
    each_stride = 0 if each is None else each.stride(0)
    start = _bound_select(kind, num_heads, row_stride, each_stride, 1 << (rows - 1).bit_length())
    # Triton would round a float to fp32; the bits of a double reach the kernel as they are.
    (setting,) = _LONG.unpack(_DOUBLE.pack(value))
    start(
        batch_size, score, ints, flags, merge_into, merge_weight, cu_seqlens,
        None if eligible is None else eligible.contiguous(), None if order is None else order.contiguous(), each,
        num_rows, batch_size, rows, prefix, setting, least, most, head_stride,
    )  # fmt: skip
    if batch_size > 1 and not (kind == "count" and cu_seqlens is None and each is None and eligible is None):
        _bound_bounds()(2, ints, sum(int_pitches[:2]), batch_size)
    return ints, flags, merge_into, merge_weight


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
def _bound_select(kind: str, num_heads: int, row_stride: int, each_stride: int, block: int) -> Bound:
    # Measured on an H200: one warp needs no barriers, but four have so much less to do each that they win.
    warps = 1 if block <= 32 else 4 if block <= 1024 else 8
    return Bound(
        select_kernel, ROW=row_stride, H=num_heads, EACH=each_stride, KIND=kind, BLOCK=block, num_warps=warps
    )


@functools.cache
def _bound_bounds() -> Bound:
    return Bound(bounds_kernel, BLOCK=512, num_warps=4)


@functools.cache
def _bound_rank(row_stride: int) -> Bound:
    return Bound(rank_kernel, ROW=row_stride, BLOCK=RANK_BLOCK, BLOCK_OTHER=128, num_warps=4)


@triton.jit
def key_of(score, can_be_selected):
    """Map fp32 to uint32 of the same order: NaN as -inf, -0 as 0; what cannot be selected gets 0, lowest of all."""
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    key = tl.where(score < 0.0, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return tl.where(can_be_selected, key, 0)


@triton.jit
def _holding(score, key, is_patch, share):
    """Count the fewest of the best patches that hold a share of the sum of all.

    Bisection, between scores that are there, for the smallest one with less than the share above it.
    """
    mass = tl.where(is_patch & (score > 0.0), score, 0.0).to(tl.float64)
    total = tl.sum(mass, 0)
    low = tl.min(tl.where(is_patch, key, 0xFFFFFFFF), 0)
    high = tl.max(key, 0)
    while low < high:
        middle = low + ((high - low) >> 1)
        above = tl.sum(tl.where(key > middle, mass, 0.0), 0)
        if (above / total).to(tl.float32) < share:
            high = tl.max(tl.where(key <= middle, key, 0), 0)
        else:
            low = tl.min(tl.where(key > middle, key, 0xFFFFFFFF), 0)
    is_above = key > low
    is_tied = is_patch & (key == low)
    place = tl.cumsum(is_tied.to(tl.int32), 0) - 1
    before = tl.sum(tl.where(is_above, mass, 0.0), 0) + tl.where(place > 0, place.to(tl.float64) * mass, 0.0)
    is_needed = is_above | (is_tied & ((before / total).to(tl.float32) < share))
    return tl.sum(is_needed.to(tl.int32), 0)


@triton.jit
def _left_by_prefix(score, is_live, column, prefix, target):
    """Count the patches among the best `target` rows, prefix rows competing."""
    key = key_of(score, is_live)
    left = target
    for number in range(0, prefix):
        own = tl.max(tl.where(column == number, key, 0), 0)
        is_ahead = (key > own) | (is_live & (key == own) & (column < number))
        wins = tl.sum(is_ahead.to(tl.int32), 0) < target
        left -= wins.to(tl.int32)
    return left


@triton.jit
def _count(score, key, is_patch, is_live, column, present, length, prefix, setting, KIND: tl.constexpr):
    """Count the patches that a rule asks for by their number or mass; see `select.Rule`."""
    if KIND == "count":
        count = setting.to(tl.int32)
    elif KIND == "ceil":
        count = tl.ceil(setting * present.to(tl.float64)).to(tl.int32)
    elif KIND == "floor":
        count = tl.floor(setting * present.to(tl.float64)).to(tl.int32)
    elif KIND == "mass":
        count = _holding(score, key, is_patch, setting.to(tl.float32))
    else:
        target = tl.floor(setting * length.to(tl.float64)).to(tl.int32)
        count = _left_by_prefix(score, is_live, column, tl.minimum(prefix, length), target)
    return count


@triton.jit
def _limit(score, is_patch, present, setting, KIND: tl.constexpr):
    """Return what the patches that a rule asks for must reach; see `select.Rule`."""
    limit = setting
    if KIND == "deviation":
        number = present.to(tl.float64)
        wide = tl.where(is_patch, score, 0.0).to(tl.float64)
        mean = tl.sum(wide, 0) / number
        away = tl.where(is_patch, wide - mean, 0.0)
        limit = mean + setting * tl.sqrt(tl.sum(away * away, 0) / number)
    elif KIND == "maximum":
        there = is_patch & (score == score)
        limit = setting * tl.max(tl.where(there, score, float("-inf")), 0).to(tl.float64)
    return limit.to(tl.float32)


@triton.jit
def _place(keep, goes_behind):
    """Count the rows that stay and come before each row that stays, where some go behind all others."""
    ahead, behind = (keep & (goes_behind == 0)).to(tl.int32), (keep & goes_behind).to(tl.int32)
    return tl.where(goes_behind, tl.sum(ahead, 0) + tl.cumsum(behind, 0), tl.cumsum(ahead, 0)) - 1


@triton.jit
def _store_rows(
    ints, flags, merge_into, merge_weight, int_pitch, flag_pitch, row, mask, slot, slot_fused, into, weight, keep,
    keep_fused,
):  # fmt: skip
    tl.store(ints + row, slot, mask=mask)
    tl.store(ints + int_pitch + row, slot_fused, mask=mask)
    tl.store(flags + row, keep, mask=mask)
    tl.store(flags + flag_pitch + row, keep_fused, mask=mask)
    tl.store(merge_into + row, into, mask=mask)
    tl.store(merge_weight + row, weight, mask=mask)


@triton.jit
def store_bounds(bounds, extent, image, batch_size, kept, IS_STATIC: tl.constexpr):
    """Store where an image begins and ends, or, for `bounds_kernel` to add up, how many rows it keeps."""
    if IS_STATIC:
        bound = image + tl.arange(0, 2)  # the neighbour writes the same value
        tl.store(bounds + bound, bound * kept)
    else:
        tl.store(bounds + image + 1, kept)
        if image == 0:
            tl.store(bounds, 0)
    if image == 0:
        tl.store(extent, batch_size * kept)
        tl.store(extent + 1 + tl.arange(0, 2), tl.zeros([2], tl.int32) + kept)


@triton.jit(
    do_not_specialize=["num_rows", "batch_size", "rows", "prefix", "value", "least", "most", "head_stride"]
)
def select_kernel(
    score, ints, flags, merge_into, merge_weight, cu_seqlens, eligible, order, each, num_rows, batch_size, rows, prefix,
    value, least, most, head_stride, ROW: tl.constexpr, H: tl.constexpr, EACH: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write the planes of a `Selection`; a program holds the scores of one image.

    The heir is the patch that `count` others are ahead of. Its key is the largest one that more than `count`
    keys reach, and everything else follows from it. It is found by bisection, which ends early at a number that just
    `count + 1` keys reach. Where a limit says how many stay, it is the largest key below the limit.
    """
    wait_for_previous(OVERLAP)
    image = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    if cu_seqlens is None:
        start, length, total = image.to(tl.int64) * rows, rows, batch_size * rows
    else:
        start = tl.load(cu_seqlens + image).to(tl.int64)
        length = (tl.load(cu_seqlens + image + 1) - start).to(tl.int32)
        total = tl.load(cu_seqlens + batch_size)
    row = start + column
    is_live = column < length
    mean = tl.zeros([BLOCK], tl.float32)
    for head in tl.static_range(H):
        head_score = score + head * head_stride.to(tl.int64) + row * ROW
        mean += tl.load(head_score, mask=is_live, other=0.0).to(tl.float32)
    mean *= 1.0 / H

    is_patch = is_live & (column >= prefix)
    if eligible is not None:
        is_patch = is_patch & (tl.load(eligible + row, mask=is_live, other=0) != 0)
    key = key_of(mean, is_patch)
    present = tl.sum(is_patch.to(tl.int32), 0)
    if each is None:
        setting = value.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        setting = tl.load(each + image * EACH).to(tl.float64)
    low = tl.min(tl.where(is_patch, key, 0xFFFFFFFF), 0)
    high = tl.max(key, 0)
    if KIND == "score" or KIND == "deviation" or KIND == "maximum":
        reaches = is_patch & (mean >= _limit(mean, is_patch, present, setting, KIND))
        asked = tl.sum(reaches.to(tl.int32), 0)
        below = tl.max(tl.where(reaches, 0, key), 0)
        count = tl.minimum(tl.minimum(tl.maximum(asked, least), most), present)
        low = tl.where(count == asked, below, low)
        high = tl.where(count == asked, below, high)
    else:
        asked = _count(mean, key, is_patch, is_live, column, present, length, prefix, setting, KIND)
        count = tl.minimum(tl.minimum(tl.maximum(asked, least), most), present)
    reached = 0
    while (low < high) & (reached != count + 1) & (count < present):  # where all stay there is no heir
        middle = high - ((high - low) >> 1)
        reached = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(reached > count, middle, low)
        high = tl.where(reached > count, high, middle - 1)
    heir_key = tl.min(tl.where(key >= low, key, 0xFFFFFFFF), 0)

    is_ahead = key > heir_key
    is_tied = is_patch & (key == heir_key)
    tied_rank = tl.sum(is_ahead.to(tl.int32), 0) + tl.cumsum(is_tied.to(tl.int32), 0) - 1
    is_prefix = is_live & (column < prefix)
    keep = is_prefix | is_ahead | (is_tied & (tied_rank < count))
    is_heir = is_tied & (tied_rank == count)
    has_heir = (count < present).to(tl.int32)
    heir = tl.sum(tl.where(is_heir, column, 0), 0)
    loses = is_patch & (keep == 0)
    keep_fused = keep | is_heir

    if order is None:
        slot = tl.cumsum(keep.to(tl.int32), 0) - 1
        slot_fused = slot + tl.where(column >= heir, has_heir, 0)
    else:
        goes_behind = (tl.load(order + row, mask=is_live, other=0) != 0) & (is_prefix == 0)
        slot = _place(keep, goes_behind)
        heir_goes_behind = tl.max((is_heir & goes_behind).to(tl.int32), 0)
        follows = (column >= heir) & (goes_behind.to(tl.int32) == heir_goes_behind)
        slot_fused = slot + tl.where(follows | (goes_behind.to(tl.int32) > heir_goes_behind), has_heir, 0)
    int_pitch, flag_pitch = (num_rows + 3) // 4 * 4, (num_rows + 15) // 16 * 16
    _store_rows(
        ints, flags, merge_into, merge_weight, int_pitch, flag_pitch, row, is_live, tl.where(keep, slot, -1),
        tl.where(keep_fused, slot_fused, -1),
        tl.where(loses, start + heir, tl.where(is_prefix | is_patch, row, -1)),
        tl.where(loses, mean, 1.0), keep, keep_fused,
    )  # fmt: skip
    kept = tl.minimum(prefix, length) + count
    bounds, bound_pitch = ints + 2 * int_pitch.to(tl.int64), (batch_size + 4) // 4 * 4
    extent = bounds + 2 * bound_pitch
    is_static: tl.constexpr = KIND == "count" and cu_seqlens is None and eligible is None and each is None
    store_bounds(bounds, extent, image, batch_size, kept, is_static)
    store_bounds(bounds + bound_pitch, extent + 3, image, batch_size, kept + has_heir, is_static)

    for first in range(total + image * BLOCK, num_rows, batch_size * BLOCK):
        dead = first + column.to(tl.int64)
        none = tl.full([BLOCK], -1, tl.int32)
        nowhere = dead < 0
        _store_rows(
            ints, flags, merge_into, merge_weight, int_pitch, flag_pitch, dead, dead < num_rows, none, none,
            none.to(tl.int64), tl.full([BLOCK], 1.0, tl.float32), nowhere, nowhere,
        )  # fmt: skip


@triton.jit(do_not_specialize=["skip", "batch_size"])
def bounds_kernel(ints, skip, batch_size, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Add up the rows that each image keeps, a program for each plan of the images.

    Behind the first `skip` numbers lie the boundaries of each plan, and behind them all the extents.
    """
    wait_for_previous(OVERLAP)
    bound_pitch = (batch_size + 4) // 4 * 4
    bounds = ints + skip.to(tl.int64)
    extent = bounds + bound_pitch * tl.num_programs(0) + 3 * tl.program_id(0)
    ends = bounds + bound_pitch * tl.program_id(0) + 1
    total, longest, shortest = 0, 0, 0x7FFFFFFF
    for first in range(0, batch_size, BLOCK):
        image = first + tl.arange(0, BLOCK)
        is_image = image < batch_size
        kept = tl.load(ends + image, mask=is_image, other=0)
        tl.store(ends + image, total + tl.cumsum(kept, 0), mask=is_image)
        total += tl.sum(kept, 0)
        longest = tl.maximum(longest, tl.max(kept, 0))
        shortest = tl.minimum(shortest, tl.min(tl.where(is_image, kept, 0x7FFFFFFF), 0))
    tl.store(extent, total)
    tl.store(extent + 1, longest)
    tl.store(extent + 2, shortest)


@triton.jit
def _load_keys(score, eligible, start, column, length, ROW: tl.constexpr):
    row = start.to(tl.int64) + column
    is_live = column < length
    can_be_selected = tl.load(eligible + row, mask=is_live, other=0) != 0
    return key_of(tl.load(score + row * ROW, mask=is_live, other=0.0).to(tl.float32), can_be_selected)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def rank_kernel(
    score, eligible, cu_seqlens, position, num_rows, batch_size, num_tiles,
    ROW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `position` [T]: how many rows of its image are ahead of a row. A program holds a tile of one image.

    Rows that cannot be selected all have the lowest key, so they come last, in row order.
    """
    wait_for_previous(OVERLAP)
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
