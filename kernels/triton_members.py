"""Who joins whom: the rows folded into each row of an image as lists, what these add up to, and how they are read."""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

ROWS = 128
"""Rows of a program, as many as it has threads: each thread counts for one row and exchanges nothing."""


class Members(NamedTuple):
    """The members of each row: the other rows of its image that are folded into it.

    Attributes:
        lists: int32 [2, T]. The first row says where in the second the list of each row ends; it starts where that of
            the row before ends, and that of the first row of an image where the image does. The second row holds the
            lists, each in the order of rows.
        size: sizes of each row, if it is folded into itself, and of its members, added up, [T].
        key_weight: key weights likewise, or None.
    """

    lists: Tensor
    size: Tensor
    key_weight: Tensor | None


def list_members(
    merge_into: Tensor, cu_old: Tensor, size: Tensor | None, key_weight: Tensor | None
) -> Members:
    """List the members of each row, and add up what they have besides features.

    Args:
        merge_into: row that a row is folded into, [T]. Into one of another image, or -1: into none.
        cu_old: boundaries of the images, int32 [B + 1]. Nothing is written for rows behind the last one.
        size: [T]; None: 1.
        key_weight: [T]; None: there are none to add up.

    Cost: one launch; compares each row with those rows of its image that join another one. Deterministic, no
        atomics, no host synchronisation.
    """
    num_rows, batch_size, device = len(merge_into), len(cu_old) - 1, merge_into.device
    lists = torch.empty((2, num_rows), dtype=torch.int32, device=device)
    keys = torch.empty(num_rows, dtype=torch.int64, device=device)
    folded_size = torch.empty(num_rows, dtype=torch.float32 if size is None else size.dtype, device=device)
    folded_key_weight = None if key_weight is None else torch.empty_like(key_weight)
    parts = max(-(-num_rows // (batch_size * ROWS)), 1)
    inputs = (merge_into, size, key_weight, cu_old)
    _bound(256 if num_rows <= 256 * batch_size else 1024)(
        batch_size * parts, lists, keys, *(None if values is None else values.contiguous() for values in inputs),
        folded_size, folded_key_weight, num_rows, parts,
    )  # fmt: skip
    return Members(lists, folded_size, folded_key_weight)


@functools.cache
def _bound(chunk: int) -> Bound:
    return Bound(members_kernel, ROWS=ROWS, CHUNK=chunk, OTHERS=16, num_warps=ROWS // 32)


@triton.jit
def _load_heirs(merge_into, row, begin, end):
    """Load whom rows are folded into, and whether that is another row of the image."""
    heir = tl.load(merge_into + row, mask=row < end, other=-1).to(tl.int32)
    return heir, (heir >= begin) & (heir < end) & (heir != row)


@triton.jit
def _list_joining(keys, merge_into, begin, end, CHUNK: tl.constexpr):
    """Write a key, the heir and behind it the row, for each row that joins another one; return how many they are.

    All programs of an image write the same, and each reads only what it has written.
    """
    count = 0
    for first in range(begin, end, CHUNK):
        row = first + tl.arange(0, CHUNK)
        heir, joins = _load_heirs(merge_into, row, begin, end)
        place = begin + count + tl.cumsum(joins.to(tl.int32), 0) - 1
        tl.store(keys + place, (heir.to(tl.int64) << 32) + row, mask=joins)
        count += tl.sum(joins.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def _load_own(values, row, heir, end):
    """Load in fp32 what rows that are folded into themselves start their sums with."""
    return _load_or_one(values, row, (row < end) & (heir == row))


@triton.jit
def _sum_of_members(values, other, is_other, is_member):
    """Return what some other rows add to each of a tile of rows, of which they are members or not."""
    return tl.sum(tl.where(is_member, _load_or_one(values, other, is_other)[:, None], 0.0), 0)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def members_kernel(
    lists, keys, merge_into, size, key_weight, cu_old, folded_size, folded_key_weight, num_rows, num_parts,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, OTHERS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write for the rows of some tiles of an image where their lists end and what these add up to; place what joins.

    A row's place is the number of keys below its own. Few rows join others as a rule, so these are found first, and
    only they are compared with.
    """
    NONE: tl.constexpr = 0x7FFFFFFFFFFFFFFF
    wait_for_previous(OVERLAP)
    image, part = tl.program_id(0) // num_parts, tl.program_id(0) % num_parts
    begin, end = tl.load(cu_old + image), tl.load(cu_old + image + 1)
    stop = begin + _list_joining(keys, merge_into, begin, end, CHUNK)
    for first in range(begin + part * ROWS, end, num_parts * ROWS):
        row = first + tl.arange(0, ROWS)
        is_own = row < end
        heir, joins = _load_heirs(merge_into, row, begin, end)
        key = (heir.to(tl.int64) << 32) + row
        list_stop = tl.zeros([ROWS], tl.int32) + begin
        place = tl.zeros([ROWS], tl.int32) + begin
        total = _load_own(size, row, heir, end)
        total_weight = tl.zeros([ROWS], tl.float32)
        if key_weight is not None:
            total_weight = _load_own(key_weight, row, heir, end)
        for first_other in range(begin, stop, OTHERS):
            index = first_other + tl.arange(0, OTHERS)
            other_key = tl.load(keys + index, mask=index < stop, other=NONE)
            other, other_heir = other_key.to(tl.int32), (other_key >> 32).to(tl.int32)[:, None]
            place += tl.sum((other_key[:, None] < key[None, :]).to(tl.int32), 0)
            list_stop += tl.sum((other_heir <= row[None, :]).to(tl.int32), 0)
            is_member = other_heir == row[None, :]
            total += _sum_of_members(size, other, index < stop, is_member)
            if key_weight is not None:
                total_weight += _sum_of_members(key_weight, other, index < stop, is_member)
        tl.store(lists + row, list_stop, mask=is_own)
        tl.store(lists + tl.cast(num_rows, tl.int64) + place, row, mask=joins)
        tl.store(folded_size + row, total, mask=is_own)
        if key_weight is not None:
            tl.store(folded_key_weight + row, total_weight, mask=is_own)


@triton.jit
def _load_or_one(values, row, mask):
    """Load values in fp32, or 1 where there are none; 0 outside of the mask."""
    loaded = mask.to(tl.float32)
    if values is not None:
        loaded = tl.load(values + row, mask=mask, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def _load_rows(values, row, mask, channel, C: tl.constexpr):
    """Load some channels of rows, 0 outside of the mask and beyond C."""
    rows = values + row[:, None] * C + channel[None, :]
    return tl.load(rows, mask=mask[:, None] & (channel < C)[None, :], other=0.0)


@triton.jit
def _store_rows(features, folded, new, mask, channel, C: tl.constexpr):
    """Store some channels of rows."""
    tl.store(
        features + new[:, None] * C + channel[None, :], folded, mask=mask[:, None] & (channel < C)[None, :]
    )


@triton.jit
def fold_rows(
    x, merge_into, merge_weight, lists, features, num_rows, row, new, stays, begin, group, num_groups,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Write a share of the channels of a tile of rows of an image, each the sum of itself and its members, in order.

    Each row and its first member are asked for at once; each turn adds the next member of all rows of the tile. The
    few rows with more than TURNS members follow one by one.
    """
    NONE: tl.constexpr = 2147483647
    members = lists + tl.cast(num_rows, tl.int64)
    joins = stays & (tl.load(merge_into + row, mask=stays, other=-1) == row)
    stop = tl.load(lists + row, mask=stays, other=0)
    start = tl.load(lists + row - 1, mask=stays & (row > begin), other=0)
    start = tl.where(row > begin, start, begin)
    count = tl.where(stays, stop - start, 0)
    is_short = stays & (count <= TURNS)
    stop = tl.where(is_short, stop, start)
    turns = tl.max(stop - start, 0)
    rows = x + begin.to(tl.int64) * C
    share = _load_or_one(merge_weight, row, joins)
    first = tl.load(members + start, mask=start < stop, other=0)
    first_share = _load_or_one(merge_weight, first, start < stop)
    for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
        left = first_channel + tl.arange(0, CHANNELS // 2)
        right = left + CHANNELS // 2
        own_left = _load_rows(rows, row - begin, joins, left, C)
        own_right = _load_rows(rows, row - begin, joins, right, C)
        first_left = _load_rows(rows, first - begin, start < stop, left, C)
        first_right = _load_rows(rows, first - begin, start < stop, right, C)
        folded_left = (
            own_left.to(tl.float32) * share[:, None] + first_left.to(tl.float32) * first_share[:, None]
        )
        folded_right = (
            own_right.to(tl.float32) * share[:, None] + first_right.to(tl.float32) * first_share[:, None]
        )
        for turn in range(1, turns):
            joins_now = start + turn < stop
            member = tl.load(members + start + turn, mask=joins_now, other=0)
            member_share = _load_or_one(merge_weight, member, joins_now)
            member_left = _load_rows(rows, member - begin, joins_now, left, C)
            member_right = _load_rows(rows, member - begin, joins_now, right, C)
            folded_left += member_left.to(tl.float32) * member_share[:, None]
            folded_right += member_right.to(tl.float32) * member_share[:, None]
        _store_rows(features, folded_left, new, is_short, left, C)
        _store_rows(features, folded_right, new, is_short, right, C)

    is_long = stays & (is_short == 0)
    heir = tl.min(tl.where(is_long, row, NONE), 0)
    while heir < NONE:
        _fold_row(
            rows, merge_into, merge_weight, lists, members, features, heir, tl.max(tl.where(row == heir, new, 0), 0),
            begin, group, num_groups, C, ROWS, CHANNELS,
        )  # fmt: skip
        heir = tl.min(tl.where(is_long & (row > heir), row, NONE), 0)


@triton.jit
def _fold_row(
    rows, merge_into, merge_weight, lists, members, features, heir, new, begin, group, num_groups,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write a share of the channels of one row with many members: the sum of itself and them, a tile at a time."""
    start = tl.where(heir > begin, tl.load(lists + heir - 1, mask=heir > begin, other=0), begin)
    stop = tl.load(lists + heir)
    joins_itself = tl.load(merge_into + heir) == heir
    for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
        channel = first_channel + tl.arange(0, CHANNELS)
        folded = tl.zeros([ROWS, CHANNELS], tl.float32)
        # The row itself comes ahead of its list. Two tiles are on their way at once.
        for place in tl.range(start - 1, stop, ROWS, loop_unroll_factor=2):
            index = place + tl.arange(0, ROWS)
            is_member = (index >= start) & (index < stop)
            joins = is_member | ((index < start) & joins_itself)
            row = tl.where(is_member, tl.load(members + index, mask=is_member, other=0), heir)
            block = _load_rows(rows, row - begin, joins, channel, C)
            folded += block.to(tl.float32) * _load_or_one(merge_weight, row, joins)[:, None]
        tl.store(features + new * C + channel, tl.sum(folded, 0), mask=channel < C)
