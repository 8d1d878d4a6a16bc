"""Packing rows, with folding, as one launch: no atomics, so that the same input gives the same bits."""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, overlap
from prunevit.kernels.triton_parts import begin as begin_after

ROWS = 32


class Tile(NamedTuple):
    """How the work is cut.

    Attributes:
        channels: channels that a program moves at a time.
        fold_rows: rows that a program folds, or looks through for heirs, at a time.
        fold_channels: channels that a program folds at a time.
        parts: programs that share the rows of an image.
        groups: programs that share the channels of a row.
        fold_parts: programs that share the heirs of an image.
        fold_groups: programs that share the channels of an heir.
    """

    channels: int
    fold_rows: int
    fold_channels: int
    parts: int
    groups: int
    fold_parts: int
    fold_groups: int


@functools.cache
def choose_tile(
    batch_size: int, num_rows: int, num_channels: int, folds: bool, one_heir: bool = False
) -> Tile:
    """Return the tile for a batch: as much work for a program as leaves several programs for each part of a GPU."""
    parts = max(-(-num_rows // (batch_size * ROWS)), 1)
    narrow = -(-num_channels // 64)
    channels, groups = (128, 1) if batch_size * parts >= 512 else (64, narrow)
    if one_heir:
        # Few images: an image in one turn. More: so few and small programs that all of them run at once.
        if batch_size <= 8:
            return Tile(channels, 256, 16, parts, groups, 1, -(-num_channels // 16))
        return Tile(128, 128, 32, parts, min(groups, -(-num_channels // 128)), 1, -(-num_channels // 32))
    if not folds:
        return Tile(channels, 128, 64, parts, groups, 0, 0)
    fold_groups = min(max(512 // batch_size, 1), narrow)
    fold_parts = min(max(512 // (batch_size * fold_groups), 1), 4)
    return Tile(channels, 128, 64, parts, groups, fold_parts, fold_groups)


def triton_gather(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None,
    merge_weight: Tensor | None,
    plain: Tensor | None,
    folds_key_weight: bool,
) -> list[Tensor]:
    """Compute `gather`; returns `x`, the ids [2, capacity], and what else there is of size, key weight and soft."""
    batch_size, (num_rows, num_channels) = len(cu_new) - 1, x.shape
    folds = merge_into is not None
    tile = choose_tile(batch_size, num_rows, num_channels, folds, plain is not None)

    def empty(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.empty(capacity, dtype=values.dtype, device=x.device)

    features = torch.empty((capacity, num_channels), dtype=x.dtype, device=x.device)
    ids = torch.empty((2, capacity), dtype=torch.int32, device=x.device)
    new_size, new_key_weight, new_soft = empty(size), empty(key_weight), empty(soft)
    if size is None and folds:
        new_size = torch.empty(capacity, dtype=torch.float32, device=x.device)
    inputs = (
        x, source, size, key_weight, soft, destination, cu_old, cu_new, merge_into if plain is None else None,
        merge_weight if folds else None, plain,
    )  # fmt: skip
    _bound(num_channels, *tile[:3], folds_key_weight, x.get_device())(
        batch_size * (tile.parts * tile.groups + tile.fold_parts * tile.fold_groups),
        *(None if values is None else values.contiguous() for values in inputs),
        features, ids, new_size, new_key_weight, new_soft, batch_size, capacity, *tile[3:],
    )  # fmt: skip
    return [features, ids, *(new for new in (new_size, new_key_weight, new_soft) if new is not None)]


@functools.cache
def _bound(
    num_channels: int, channels: int, fold_rows: int, fold_channels: int, folds_key_weight: bool, device: int
) -> Bound:
    return Bound(
        gather_kernel, C=num_channels, ROWS=ROWS, CHANNELS=channels, MEMBERS=fold_rows,
        FOLD_CHANNELS=fold_channels, FOLDS_KEY_WEIGHT=folds_key_weight, **overlap(device), num_warps=8,
    )  # fmt: skip


@triton.jit
def _are_heirs(merge_into, row, begin, end, ROWS: tl.constexpr, MEMBERS: tl.constexpr):
    """Return which rows of a tile others, of [begin, end), are folded into."""
    is_heir = tl.zeros([ROWS], tl.int32)
    for first in range(begin, end, MEMBERS):
        member = first + tl.arange(0, MEMBERS)
        into = tl.load(merge_into + member, mask=member < end, other=-1).to(tl.int32)
        into = tl.where(into == member, -1, into)
        is_heir = tl.maximum(is_heir, tl.max((into[:, None] == row[None, :]).to(tl.int32), 0))
    return is_heir != 0


@triton.jit
def _next_heir(merge_into, first, stop, begin, end, MEMBERS: tl.constexpr):
    """Return the first row from `first` to `stop` that other rows of [begin, end) are folded into; else `stop`."""
    nearest = tl.full([MEMBERS], 0, tl.int32) + stop
    for first_other in range(begin, end, MEMBERS):
        other = first_other + tl.arange(0, MEMBERS)
        into = tl.load(merge_into + other, mask=other < end, other=-1).to(tl.int32)
        nearest = tl.where((into >= first) & (into != other), tl.minimum(nearest, into), nearest)
    return tl.min(nearest, 0)


@triton.jit
def _sum_members(values, merge_into, heir, begin, end, MEMBERS: tl.constexpr):
    """Sum `values`, or ones, over the rows that are folded into `heir`."""
    total = tl.zeros([MEMBERS], tl.float32)
    for first_other in range(begin, end, MEMBERS):
        other = first_other + tl.arange(0, MEMBERS)
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
def _fold_heirs(
    x, size, key_weight, destination, merge_into, merge_weight, features, new_size, new_key_weight,
    capacity, begin, end, new_begin, part, num_parts, group, num_groups, C: tl.constexpr, MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write a program's share of the heirs of one image, one after the other."""
    share = tl.cdiv(end - begin, num_parts)
    after = begin + part * share
    stop = tl.minimum(after + share, end)
    while after < stop:
        heir = _next_heir(merge_into, after, stop, begin, end, MEMBERS)
        if heir < stop:
            place = tl.load(destination + heir)
            new = new_begin + place
            stays = (place >= 0) & (new < capacity)
            for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
                channel = first_channel + tl.arange(0, CHANNELS)
                folded = _fold_members(
                    x, merge_into, merge_weight, heir, begin, end, channel, C, MEMBERS, CHANNELS
                )
                tl.store(features + new * C + channel, folded, mask=stays & (channel < C))
            if group == 0:
                tl.store(
                    new_size + new, _sum_members(size, merge_into, heir, begin, end, MEMBERS), mask=stays
                )
                if FOLDS_KEY_WEIGHT:
                    folded_weight = _sum_members(key_weight, merge_into, heir, begin, end, MEMBERS)
                    tl.store(new_key_weight + new, folded_weight, mask=stays)
        after = heir + 1


@triton.jit
def _fold_rest(
    x, size, key_weight, destination, merge_weight, plain, features, new_size, new_key_weight, capacity, begin, end,
    new_begin, group, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write a block of channels of the one heir of an image, which takes up all rows that are not plain.

    All that a row has is asked for at once: nobody has to be looked for, and most images are one turn of the loop.
    """
    channel = group * CHANNELS + tl.arange(0, CHANNELS)
    rows = x + begin.to(tl.int64) * C
    place = tl.full([ROWS], -1, tl.int32)
    count = tl.zeros([ROWS], tl.float32)
    folded_weight = tl.zeros([ROWS], tl.float32)
    folded = tl.zeros([ROWS, CHANNELS], tl.float32)
    for first in range(begin, end, ROWS):
        row = first + tl.arange(0, ROWS)
        is_own = row < end
        joins = is_own & (tl.load(plain + row, mask=is_own, other=0) == 0)
        place = tl.maximum(place, tl.where(joins, tl.load(destination + row, mask=is_own, other=-1), -1))
        weight = joins.to(tl.float32)
        if merge_weight is not None:
            weight = tl.where(joins, tl.load(merge_weight + row, mask=is_own, other=0.0).to(tl.float32), 0.0)
        tile = rows + (row - begin)[:, None] * C + channel[None, :]
        values = tl.load(tile, mask=joins[:, None] & (channel < C)[None, :], other=0.0)
        folded += values.to(tl.float32) * weight[:, None]
        if size is None:
            count += joins.to(tl.float32)
        else:
            own = tl.load(size + row, mask=is_own & (group == 0), other=0.0).to(tl.float32)
            count += tl.where(joins, own, 0.0)
        if FOLDS_KEY_WEIGHT:
            own = tl.load(key_weight + row, mask=is_own & (group == 0), other=0.0).to(tl.float32)
            folded_weight += tl.where(joins, own, 0.0)
    heir = tl.max(place, 0)  # of the rows that join it, only the heir has a place
    new = new_begin + heir
    stays = (heir >= 0) & (new < capacity)
    tl.store(features + new * C + channel, tl.sum(folded, 0), mask=stays & (channel < C))
    if group == 0:
        tl.store(new_size + new, tl.sum(count, 0), mask=stays)
        if FOLDS_KEY_WEIGHT:
            tl.store(new_key_weight + new, tl.sum(folded_weight, 0), mask=stays)


@triton.jit
def _move(values, moved, row, new, stays):
    tl.store(moved + new, tl.load(values + row, mask=stays, other=0), mask=stays)


@triton.jit
def _move_rows(
    x, source, size, key_weight, soft, destination, merge_into, merge_weight, plain, features, ids, new_size,
    new_key_weight, new_soft, capacity, image, begin, end, new_begin, first, group, num_groups, C: tl.constexpr,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, MEMBERS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Move a tile of rows of one image, all but the features and the sums of heirs."""
    row = first + tl.arange(0, ROWS)
    is_own = row < end
    place = tl.load(destination + row, mask=is_own, other=-1)
    new = new_begin + place
    stays = (place >= 0) & (new < capacity)
    is_plain = stays
    if plain is not None:
        is_plain = stays & (tl.load(plain + row, mask=is_own, other=0) != 0)
    if merge_into is not None:
        holds_itself = tl.load(merge_into + row, mask=is_own, other=-1) == row
        weight = tl.full([ROWS], 1.0, tl.float32)
        if merge_weight is not None:
            weight = tl.load(merge_weight + row, mask=is_own, other=0.0).to(tl.float32)
        is_plain = stays & (_are_heirs(merge_into, row, begin, end, ROWS, MEMBERS) == 0)

    for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
        channel = first_channel + tl.arange(0, CHANNELS)
        mask = is_plain[:, None] & (channel < C)[None, :]
        values = tl.load(x + row.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0)
        if merge_into is not None:
            values = tl.where(holds_itself[:, None], values.to(tl.float32) * weight[:, None], 0.0)
        tl.store(features + new[:, None] * C + channel[None, :], values, mask=mask)

    if group == 0:
        tl.store(ids + new, tl.zeros([ROWS], tl.int32) + image, mask=stays)
        _move(source, ids + tl.cast(capacity, tl.int64), row, new, stays)
        if soft is not None:
            _move(soft, new_soft, row, new, stays)
        if key_weight is not None:
            own = tl.load(key_weight + row, mask=stays, other=0.0)
            if FOLDS_KEY_WEIGHT:
                if merge_into is not None:
                    own = tl.where(holds_itself, own, 0.0)
                tl.store(new_key_weight + new, own, mask=is_plain)
            else:
                tl.store(new_key_weight + new, own, mask=stays)
        if new_size is not None:
            count = tl.full([ROWS], 1.0, tl.float32)
            if size is not None:
                count = tl.load(size + row, mask=stays, other=0.0)
            if merge_into is not None:
                count = tl.where(holds_itself, count, 0.0)
            tl.store(new_size + new, count, mask=is_plain)


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


@triton.jit(
    do_not_specialize=["batch_size", "capacity", "num_parts", "num_groups", "fold_parts", "fold_groups"]
)
def gather_kernel(
    x, source, size, key_weight, soft, destination, cu_old, cu_new, merge_into, merge_weight, plain,
    features, ids, new_size, new_key_weight, new_soft, batch_size, capacity, num_parts, num_groups, fold_parts,
    fold_groups, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, MEMBERS: tl.constexpr,
    FOLD_CHANNELS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `features` [capacity, C], `ids` [2, capacity] and, unless they are None, the other new values.

    The first programs fold: each takes some heirs of one image and some blocks of channels. With `plain` an image
    has one heir, which takes up all that is not plain, and `merge_into` is None. The other programs move all other
    rows, and fill what is dead. One group of channels does what a row has besides its features.
    """
    begin_after(OVERLAP)
    program = tl.program_id(0)
    num_folding = batch_size * fold_parts * fold_groups
    if program < num_folding:
        if plain is not None:
            image = program // fold_groups
            _fold_rest(
                x, size, key_weight, destination, merge_weight, plain, features, new_size, new_key_weight, capacity,
                tl.load(cu_old + image), tl.load(cu_old + image + 1), tl.load(cu_new + image).to(tl.int64),
                program % fold_groups, C, MEMBERS, FOLD_CHANNELS, FOLDS_KEY_WEIGHT,
            )  # fmt: skip
        if merge_into is not None:
            image = program // (fold_groups * fold_parts)
            _fold_heirs(
                x, size, key_weight, destination, merge_into, merge_weight, features, new_size, new_key_weight,
                capacity, tl.load(cu_old + image), tl.load(cu_old + image + 1),
                tl.load(cu_new + image).to(tl.int64),
                program // fold_groups % fold_parts, fold_parts, program % fold_groups, fold_groups, C, MEMBERS,
                FOLD_CHANNELS, FOLDS_KEY_WEIGHT,
            )  # fmt: skip
        return
    program -= num_folding
    group = program % num_groups
    part = program // num_groups % num_parts
    image = program // (num_groups * num_parts)
    begin = tl.load(cu_old + image)
    end = tl.load(cu_old + image + 1)
    new_begin = tl.load(cu_new + image).to(tl.int64)
    total = tl.load(cu_new + batch_size)
    for first in range(begin + part * ROWS, end, num_parts * ROWS):
        _move_rows(
            x, source, size, key_weight, soft, destination, merge_into, merge_weight, plain, features, ids, new_size,
            new_key_weight, new_soft, capacity, image, begin, end, new_begin, first, group, num_groups, C, ROWS,
            CHANNELS, MEMBERS, FOLDS_KEY_WEIGHT,
        )  # fmt: skip
    _fill_dead(
        features, ids, new_size, new_key_weight, new_soft, capacity, batch_size, total, program // num_groups,
        batch_size * num_parts, group, num_groups, C, ROWS, CHANNELS,
    )  # fmt: skip
