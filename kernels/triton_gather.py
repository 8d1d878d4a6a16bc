"""Packing rows, with folding, as one launch: no atomics, so that the same input gives the same bits."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound

BLOCK_CHANNELS = 128
MANY_ROWS = 16384  # from here on tall tiles fill the GPU; below, short ones that share the channels


def triton_gather(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    kept: Tensor,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None,
    merge_weight: Tensor | None,
    folds_key_weight: bool,
) -> list[Tensor]:
    """Compute `gather`; returns `x`, the ids [2, capacity], and what else there is of size, key weight and soft."""
    num_rows, num_channels = x.shape
    is_many = num_rows >= MANY_ROWS
    block_rows = 32 if is_many else 16
    groups = 1 if is_many else triton.cdiv(num_channels, BLOCK_CHANNELS)

    def empty(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.empty(capacity, dtype=values.dtype, device=x.device)

    features = torch.empty((capacity, num_channels), dtype=x.dtype, device=x.device)
    ids = torch.empty((2, capacity), dtype=torch.int32, device=x.device)
    new_size, new_key_weight, new_soft = empty(size), empty(key_weight), empty(soft)
    if size is None and merge_into is not None:
        new_size = torch.empty(capacity, dtype=torch.float32, device=x.device)
    inputs = (
        x, image_id, source, size, key_weight, soft, kept, destination, cu_old, cu_new, merge_into,
        merge_weight if merge_into is not None else None,
    )  # fmt: skip
    _bound(num_channels, block_rows, folds_key_weight)(
        triton.cdiv(num_rows, block_rows) * groups,
        *(None if values is None else values.contiguous() for values in inputs),
        features, ids, new_size, new_key_weight, new_soft, num_rows, len(cu_new) - 1, capacity, groups,
    )  # fmt: skip
    return [features, ids, *(new for new in (new_size, new_key_weight, new_soft) if new is not None)]


@functools.cache
def _bound(num_channels: int, block_rows: int, folds_key_weight: bool) -> Bound:
    return Bound(
        gather_kernel, C=num_channels, ROWS=block_rows, FOLDS_KEY_WEIGHT=folds_key_weight,
        CHANNELS=BLOCK_CHANNELS, OTHERS=256, MEMBERS=64, num_warps=8,
    )  # fmt: skip


@triton.jit
def _next_heir(merge_into, first, stop, begin, end, OTHERS: tl.constexpr):
    """Return the first row from `first` to `stop` that others are folded into, else `stop`; these are in [begin, end)."""
    nearest = tl.full([OTHERS], 0, tl.int32) + stop
    for first_other in range(begin, end, OTHERS):
        other = first_other + tl.arange(0, OTHERS)
        into = tl.load(merge_into + other, mask=other < end, other=-1).to(tl.int32)
        nearest = tl.where((into >= first) & (into != other), tl.minimum(nearest, into), nearest)
    return tl.min(nearest, 0)


@triton.jit
def _sum_members(values, merge_into, heir, begin, end, OTHERS: tl.constexpr):
    """Sum `values`, or ones, over the rows that are folded into `heir`."""
    total = tl.zeros([OTHERS], tl.float32)
    for first_other in range(begin, end, OTHERS):
        other = first_other + tl.arange(0, OTHERS)
        is_member = tl.load(merge_into + other, mask=other < end, other=-1) == heir
        if values is not None:
            total += tl.load(values + other, mask=is_member, other=0.0).to(tl.float32)
        else:
            total += is_member.to(tl.float32)
    return tl.sum(total, 0)


@triton.jit
def _fold_members(
    x, merge_into, merge_weight, heir, begin, end, channel, C: tl.constexpr, MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """Sum the weighted features of the rows that are folded into `heir`; only these are read."""
    total = tl.zeros([CHANNELS], tl.float32)
    for first_other in range(begin, end, MEMBERS):
        other = first_other + tl.arange(0, MEMBERS)
        is_member = tl.load(merge_into + other, mask=other < end, other=-1) == heir
        tile = x + other.to(tl.int64)[:, None] * C + channel[None, :]
        features = tl.load(tile, mask=is_member[:, None] & (channel < C)[None, :], other=0.0).to(tl.float32)
        if merge_weight is not None:
            weight = tl.load(merge_weight + other, mask=is_member, other=0.0).to(tl.float32)
            features *= weight[:, None]
        total += tl.sum(features, 0)
    return total


@triton.jit
def _move(values, moved, row, new, stays):
    tl.store(moved + new, tl.load(values + row, mask=stays, other=0), mask=stays)


@triton.jit
def _fill_dead(
    features, ids, new_size, new_key_weight, new_soft, capacity, batch_size, total, tile, num_tiles, group,
    num_groups, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Fill this program's share of the rows from `total` on."""
    for first in range(total + tile * ROWS, capacity, num_tiles * ROWS):
        row = first + tl.arange(0, ROWS)
        is_dead = row < capacity
        for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
            channel = first_channel + tl.arange(0, CHANNELS)
            zero = tl.zeros([ROWS, CHANNELS], features.dtype.element_ty)
            rows = features + row.to(tl.int64)[:, None] * C + channel[None, :]
            tl.store(rows, zero, mask=is_dead[:, None] & (channel < C)[None, :])
        if group == 0:
            none = tl.zeros([ROWS], tl.float32)
            tl.store(ids + row, tl.zeros([ROWS], tl.int32) + batch_size, mask=is_dead)
            tl.store(ids + tl.cast(capacity, tl.int64) + row, tl.full([ROWS], -1, tl.int32), mask=is_dead)
            if new_size is not None:
                tl.store(new_size + row, none, mask=is_dead)
            if new_key_weight is not None:
                tl.store(new_key_weight + row, none, mask=is_dead)
            if new_soft is not None:
                tl.store(new_soft + row, none, mask=is_dead)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "capacity", "num_groups"])
def gather_kernel(
    x, image_id, source, size, key_weight, soft, kept, destination, cu_old, cu_new, merge_into, merge_weight,
    features, ids, new_size, new_key_weight, new_soft, num_rows, batch_size, capacity, num_groups,
    C: tl.constexpr, ROWS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr, CHANNELS: tl.constexpr,
    OTHERS: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """Write `features` [capacity, C], `ids` [2, capacity] and, unless they are None, the other new values.

    A program holds a tile of old rows and every `num_groups`-th block of channels. It moves its rows together, as
    if nothing were folded into them, and then writes those again that are heirs, one by one. One group of
    channels moves what a row has besides its features.
    """
    program = tl.program_id(0)
    tile = program // num_groups
    group = program % num_groups
    first = tile * ROWS
    row = first + tl.arange(0, ROWS)
    total = tl.load(cu_new + batch_size)
    stays = tl.load(kept + row, mask=row < num_rows, other=0) != 0
    new = tl.load(destination + row, mask=stays, other=0)
    stays = stays & (new < capacity)
    if merge_into is not None:
        holds_itself = tl.load(merge_into + row, mask=stays, other=-1) == row
        weight = tl.full([ROWS], 1.0, tl.float32)
        if merge_weight is not None:
            weight = tl.load(merge_weight + row, mask=stays, other=0.0).to(tl.float32)

    for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
        channel = first_channel + tl.arange(0, CHANNELS)
        mask = stays[:, None] & (channel < C)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0)
        if merge_into is not None:
            values = tl.where(holds_itself[:, None], values.to(tl.float32) * weight[:, None], 0.0)
        tl.store(features + new[:, None] * C + channel[None, :], values, mask=mask)

    if group == 0:
        _move(image_id, ids, row, new, stays)
        _move(source, ids + tl.cast(capacity, tl.int64), row, new, stays)
        if soft is not None:
            _move(soft, new_soft, row, new, stays)
        if key_weight is not None:
            own = tl.load(key_weight + row, mask=stays, other=0.0)
            if FOLDS_KEY_WEIGHT:
                own = tl.where(holds_itself, own, 0.0)
            tl.store(new_key_weight + new, own, mask=stays)
        if new_size is not None:
            own = tl.full([ROWS], 1.0, tl.float32)
            if size is not None:
                own = tl.load(size + row, mask=stays, other=0.0)
            if merge_into is not None:
                own = tl.where(holds_itself, own, 0.0)
            tl.store(new_size + new, own, mask=stays)

    if merge_into is not None:
        stop = tl.minimum(first + ROWS, num_rows)
        begin = tl.load(cu_old + tl.minimum(tl.load(image_id + first), batch_size))
        end = tl.load(cu_old + tl.minimum(tl.load(image_id + stop - 1) + 1, batch_size))
        heir = _next_heir(merge_into, first, stop, begin, end, OTHERS)
        if heir < stop:
            tl.debug_barrier()  # other threads wrote the heirs' rows above
        while heir < stop:
            new_heir = tl.load(destination + heir)
            if tl.load(kept + heir) & (new_heir < capacity):
                for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
                    channel = first_channel + tl.arange(0, CHANNELS)
                    folded = _fold_members(
                        x, merge_into, merge_weight, heir, begin, end, channel, C, MEMBERS, CHANNELS
                    )
                    tl.store(features + new_heir * C + channel, folded, mask=channel < C)
                if group == 0:
                    tl.store(new_size + new_heir, _sum_members(size, merge_into, heir, begin, end, OTHERS))
                    if FOLDS_KEY_WEIGHT:
                        folded_weight = _sum_members(key_weight, merge_into, heir, begin, end, OTHERS)
                        tl.store(new_key_weight + new_heir, folded_weight)
            heir = _next_heir(merge_into, heir + 1, stop, begin, end, OTHERS)

    _fill_dead(
        features, ids, new_size, new_key_weight, new_soft, capacity, batch_size, total, tile,
        tl.num_programs(0) // num_groups, group, num_groups, C, ROWS, CHANNELS,
    )  # fmt: skip
