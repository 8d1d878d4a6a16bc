"""Packing rows, with folding, as one launch, and one ahead of it where somebody has to find who joins whom.

No atomics, so that the same input gives the same bits.
"""

# mypy: disable-error-code="no-untyped-def"

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous
from prunevit.kernels.triton_members import fold_rows, list_members

TURNS = 8
"""How many members a row may have to take them up one by one, at the pace of its tile; more it sums many at a time."""


class Tile(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: rows that a program moves at a time, each with what is folded into it.
        channels: channels that a program moves at a time.
        fold_rows: rows that a program folds at a time, where one heir takes up all that is not plain.
        fold_channels: channels that such a program folds.
        parts: programs that share the rows of an image.
        groups: programs that share the channels of a row.
        fold_groups: programs that share the channels of the one heir that takes up all that is not plain; else 0.
        warps: warps of a program.
    """

    rows: int
    channels: int
    fold_rows: int
    fold_channels: int
    parts: int
    groups: int
    fold_groups: int
    warps: int = 8


@functools.cache
def choose_tile(
    batch_size: int, num_rows: int, num_channels: int, folds: bool, one_heir: bool = False
) -> Tile:
    """Return the tile for a batch: as much work for a program as leaves several programs for each part of a GPU."""
    if folds and not one_heir:
        return _choose_fold_tile(batch_size, num_rows, num_channels)
    parts = max(-(-num_rows // (batch_size * 32)), 1)
    channels, groups = (128, 1) if batch_size * parts >= 512 else (64, -(-num_channels // 64))
    if not folds:
        return Tile(32, channels, 32, channels, parts, groups, 0)
    # Few images: an image in one turn. More: so few and small programs that all of them run at once.
    if batch_size <= 8:
        return Tile(32, channels, 256, 16, parts, groups, -(-num_channels // 16))
    return Tile(32, 128, 128, 32, parts, min(groups, -(-num_channels // 128)), -(-num_channels // 32))


def _choose_fold_tile(batch_size: int, num_rows: int, num_channels: int) -> Tile:
    """Return the tile where every row may take up others, whose sums stand in registers.

    A thread has, in half precision, 16 channels of one row, and at first asks for those of the row and of its first
    member: up to four loads of 16 bytes, all on their way at once. More of them would take more than the 64 registers
    with which a multiprocessor of Hopper holds eight such programs, of which some load while others wait for their
    lists. With several rounds of programs (many images) one program has all channels of its rows and waits for their
    lists once; with fewer each block of channels is a program's.
    """
    parts, blocks = max(-(-num_rows // (batch_size * 16)), 1), -(-num_channels // 128)
    return Tile(16, 128, 16, 128, parts, 1 if batch_size * parts >= 2048 else blocks, 0, 4)


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

    lists, searched = None, merge_into if plain is None else None
    if searched is not None:
        lists, size, folded = list_members(searched, cu_old, size, key_weight if folds_key_weight else None)
        key_weight, folds_key_weight = key_weight if folded is None else folded, False

    def empty(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.empty(capacity, dtype=values.dtype, device=x.device)

    features = torch.empty((capacity, num_channels), dtype=x.dtype, device=x.device)
    ids = torch.empty((2, capacity), dtype=torch.int32, device=x.device)
    new_size, new_key_weight, new_soft = empty(size), empty(key_weight), empty(soft)
    if size is None and folds:
        new_size = torch.empty(capacity, dtype=torch.float32, device=x.device)
    inputs = (
        x, source, size, key_weight, soft, destination, cu_old, cu_new, searched, merge_weight if folds else None,
        plain, lists,
    )  # fmt: skip
    _bound(num_channels, *tile[:4], tile.warps, folds_key_weight)(
        batch_size * (tile.parts * tile.groups + tile.fold_groups),
        *(None if values is None else values.contiguous() for values in inputs),
        features, ids, new_size, new_key_weight, new_soft, num_rows, batch_size, capacity,
        tile.parts, tile.groups, tile.fold_groups,
    )  # fmt: skip
    return [features, ids, *(new for new in (new_size, new_key_weight, new_soft) if new is not None)]


@functools.cache
def _bound(
    num_channels: int, rows: int, channels: int, fold_rows: int, fold_channels: int, warps: int,
    folds_key_weight: bool,
) -> Bound:  # fmt: skip
    return Bound(
        gather_kernel, C=num_channels, ROWS=rows, CHANNELS=channels, TURNS=TURNS, FOLD_ROWS=fold_rows,
        FOLD_CHANNELS=fold_channels, FOLDS_KEY_WEIGHT=folds_key_weight, num_warps=warps,
    )  # fmt: skip


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
    x, source, size, key_weight, soft, destination, merge_into, merge_weight, plain, lists, features, ids, new_size,
    new_key_weight, new_soft, num_rows, capacity, image, begin, end, new_begin, first, group, num_groups,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Move a tile of rows of one image, with what joins them; with `plain` the heir's sums are left out."""
    row = first + tl.arange(0, ROWS)
    is_own = row < end
    place = tl.load(destination + row, mask=is_own, other=-1)
    new = new_begin + place
    stays = (place >= 0) & (new < capacity)
    is_plain = stays
    if plain is not None:
        is_plain = stays & (tl.load(plain + row, mask=is_own, other=0) != 0)

    if merge_into is not None:
        fold_rows(
            x, merge_into, merge_weight, lists, features, num_rows, row, new, stays, begin, group, num_groups, C,
            ROWS, CHANNELS, TURNS,
        )  # fmt: skip
    else:
        for first_channel in range(group * CHANNELS, C, num_groups * CHANNELS):
            channel = first_channel + tl.arange(0, CHANNELS)
            mask = is_plain[:, None] & (channel < C)[None, :]
            values = tl.load(x + row.to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0.0)
            tl.store(features + new[:, None] * C + channel[None, :], values, mask=mask)

    if group == 0:
        tl.store(ids + new, tl.zeros([ROWS], tl.int32) + image, mask=stays)
        _move(source, ids + tl.cast(capacity, tl.int64), row, new, stays)
        if soft is not None:
            _move(soft, new_soft, row, new, stays)
        if key_weight is not None:
            _move(key_weight, new_key_weight, row, new, is_plain if FOLDS_KEY_WEIGHT else stays)
        if size is not None:
            _move(size, new_size, row, new, is_plain)
        elif new_size is not None:
            tl.store(new_size + new, tl.full([ROWS], 1.0, tl.float32), mask=is_plain)


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
    do_not_specialize=["num_rows", "batch_size", "capacity", "num_parts", "num_groups", "fold_groups"]
)
def gather_kernel(
    x, source, size, key_weight, soft, destination, cu_old, cu_new, merge_into, merge_weight, plain, lists,
    features, ids, new_size, new_key_weight, new_soft, num_rows, batch_size, capacity, num_parts, num_groups,
    fold_groups, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, TURNS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, FOLD_CHANNELS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `features` [capacity, C], `ids` [2, capacity] and, unless they are None, the other new values.

    Each program moves rows of one image, sums what joins them, and fills what is dead. With `plain` an image has one
    heir, which takes up all that is not plain; `merge_into` is None then, and the first programs write these heirs.
    One group of channels does what a row has besides its features.
    """
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    num_folding = batch_size * fold_groups
    if program < num_folding:
        if plain is not None:
            image = program // fold_groups
            _fold_rest(
                x, size, key_weight, destination, merge_weight, plain, features, new_size, new_key_weight, capacity,
                tl.load(cu_old + image), tl.load(cu_old + image + 1), tl.load(cu_new + image).to(tl.int64),
                program % fold_groups, C, FOLD_ROWS, FOLD_CHANNELS, FOLDS_KEY_WEIGHT,
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
            x, source, size, key_weight, soft, destination, merge_into, merge_weight, plain, lists, features, ids,
            new_size, new_key_weight, new_soft, num_rows, capacity, image, begin, end, new_begin, first, group,
            num_groups, C, ROWS, CHANNELS, TURNS, FOLDS_KEY_WEIGHT,
        )  # fmt: skip
    _fill_dead(
        features, ids, new_size, new_key_weight, new_soft, capacity, batch_size, total, program // num_groups,
        batch_size * num_parts, group, num_groups, C, ROWS, CHANNELS,
    )  # fmt: skip
