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

WORDS = 8
"""A program keeps whom it folds into a row as so many words of 32 bits: a span of 256 rows."""
TURNS = 8
"""How many members of a span an heir takes up one by one, at the pace of its tile; the rest it sums many at a time."""


class Tile(NamedTuple):
    """How the work is cut.

    Attributes:
        rows: rows that a program moves at a time, each with what is folded into it.
        channels: channels that a program moves at a time.
        fold_rows: rows that a program folds at a time, where one heir takes up all that is not plain.
        fold_channels: channels that such a program folds.
        parts: programs that share the rows of an image.
        groups: programs that share the channels of a row; where rows are folded, each has one block of channels.
        fold_groups: such programs that share the channels of the heir; else 0.
    """

    rows: int
    channels: int
    fold_rows: int
    fold_channels: int
    parts: int
    groups: int
    fold_groups: int


@functools.cache
def choose_tile(
    batch_size: int, num_rows: int, num_channels: int, folds: bool, one_heir: bool = False
) -> Tile:
    """Return the tile for a batch: as much work for a program as leaves several programs for each part of a GPU."""
    if folds and not one_heir:  # small tiles: their sums stand in registers
        parts = max(-(-num_rows // (batch_size * 16)), 1)
        return Tile(16, 128, 16, 128, parts, -(-num_channels // 128), 0)
    parts = max(-(-num_rows // (batch_size * 32)), 1)
    channels, groups = (128, 1) if batch_size * parts >= 512 else (64, -(-num_channels // 64))
    if not folds:
        return Tile(32, channels, 32, channels, parts, groups, 0)
    # Few images: an image in one turn. More: so few and small programs that all of them run at once.
    if batch_size <= 8:
        return Tile(32, channels, 256, 16, parts, groups, -(-num_channels // 16))
    return Tile(32, 128, 128, 32, parts, min(groups, -(-num_channels // 128)), -(-num_channels // 32))


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
    _bound(num_channels, *tile[:4], folds_key_weight, x.get_device())(
        batch_size * (tile.parts * tile.groups + tile.fold_groups),
        *(None if values is None else values.contiguous() for values in inputs),
        features, ids, new_size, new_key_weight, new_soft, batch_size, capacity, *tile[4:],
    )  # fmt: skip
    return [features, ids, *(new for new in (new_size, new_key_weight, new_soft) if new is not None)]


@functools.cache
def _bound(
    num_channels: int, rows: int, channels: int, fold_rows: int, fold_channels: int, folds_key_weight: bool,
    device: int,
) -> Bound:  # fmt: skip
    return Bound(
        gather_kernel, C=num_channels, ROWS=rows, CHANNELS=channels, WORDS=WORDS, TURNS=TURNS,
        FOLD_ROWS=fold_rows, FOLD_CHANNELS=fold_channels, FOLDS_KEY_WEIGHT=folds_key_weight, **overlap(device),
        num_warps=8,
    )  # fmt: skip


@triton.jit
def _find_members(merge_into, heir, span, end, WORDS: tl.constexpr):
    """Return bits [heirs, WORDS]: number b of word w says whether row `span` + b * WORDS + w, another one, joins.

    Each thread reads what its word needs: nothing is exchanged between threads.
    """
    words = tl.zeros([heir.shape[0], WORDS], tl.uint32)
    every = heir[:, None] * 0
    for first in range(0, tl.minimum(end - span, 32 * WORDS), 8 * WORDS):
        for bit in tl.static_range(8):
            row = span + first + bit * WORDS + tl.arange(0, WORDS)[None, :] + every
            into = tl.load(merge_into + row, mask=row < end, other=-1).to(tl.int32)
            joins = (into == heir[:, None]) & (row != heir[:, None])
            words |= joins.to(tl.uint32) << (first // WORDS + bit)
    return words


@triton.jit
def _next_members(words, span, NONE: tl.constexpr, WORDS: tl.constexpr):
    """Return the first row that joins each heir, NONE where there is none, and the bits without it."""
    others = words & (words - 1)
    power = (words ^ others).to(tl.float32)  # of two: its exponent is the number of the lowest bit
    bit = (power.to(tl.int32, bitcast=True) >> 23) - 127
    row = tl.where(words != 0, span + bit * WORDS + tl.arange(0, WORDS)[None, :], NONE)
    member = tl.min(row, 1)
    return member, tl.where(row == member[:, None], others, words)


@triton.jit
def _load_or_one(values, row, mask):
    """Load values in fp32, or 1 where there are none; 0 outside of the mask."""
    loaded = mask.to(tl.float32)
    if values is not None:
        loaded = tl.load(values + row, mask=mask, other=0.0).to(tl.float32)
    return loaded


@triton.jit
def _add_members(
    folded, count, key_sum, tile, size, key_weight, merge_into, merge_weight, row, heir, first, stop, begin,
    is_channel, counts, C: tl.constexpr, ROWS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Add to the sums of one heir, a row of a tile, all other rows of [first, stop) that join it, a tile at a time."""
    is_heir = row == heir
    for start in range(first, stop, ROWS):
        member = start + tl.arange(0, ROWS)
        joins = (member < stop) & (member != heir)
        joins &= tl.load(merge_into + member, mask=joins, other=-1) == heir
        values = tl.load(tile + (member - begin)[:, None] * C, mask=joins[:, None] & is_channel, other=0.0)
        weighted = values.to(tl.float32) * _load_or_one(merge_weight, member, joins)[:, None]
        folded += tl.where(is_heir[:, None], tl.sum(weighted, 0)[None, :], 0.0)
        count += tl.where(is_heir, tl.sum(_load_or_one(size, member, joins & counts), 0), 0.0)
        if FOLDS_KEY_WEIGHT:
            key_sum += tl.where(is_heir, tl.sum(_load_or_one(key_weight, member, joins & counts), 0), 0.0)
    return folded, count, key_sum


@triton.jit
def _fold_tile(
    x, size, key_weight, merge_into, merge_weight, features, new_size, new_key_weight, row, new, stays, begin, end,
    group, C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr,
    TURNS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """Write a block of channels of a tile of rows, each the sum of itself, then of its members in their order.

    Each turn adds the next member of all rows of the tile at once. The few heirs that have more then take up theirs,
    one heir after the other.
    """
    NONE: tl.constexpr = 2147483647
    channel = group * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channel < C)[None, :]
    tile = x + begin.to(tl.int64) * C + channel[None, :]
    counts = group == 0
    heir = tl.where(stays, row, -2)  # nobody is folded into -2

    joins = stays & (tl.load(merge_into + row, mask=stays, other=-1) == row)
    values = tl.load(tile + (row - begin)[:, None] * C, mask=joins[:, None] & is_channel, other=0.0)
    folded = values.to(tl.float32) * _load_or_one(merge_weight, row, joins)[:, None]
    count = _load_or_one(size, row, joins & counts)
    key_sum = tl.zeros([ROWS], tl.float32)
    if FOLDS_KEY_WEIGHT:
        key_sum = _load_or_one(key_weight, row, joins & counts)

    for span in range(begin, end, 32 * WORDS):
        words = _find_members(merge_into, heir, span, end, WORDS)
        member, words = _next_members(words, span, NONE, WORDS)
        turn = 0
        while (turn < TURNS) & (tl.min(member, 0) < NONE):
            joins = member < NONE
            place = tl.where(joins, member - begin, 0)
            values = tl.load(tile + place[:, None] * C, mask=joins[:, None] & is_channel, other=0.0)
            folded += values.to(tl.float32) * _load_or_one(merge_weight, begin + place, joins)[:, None]
            count += _load_or_one(size, begin + place, joins & counts)
            if FOLDS_KEY_WEIGHT:
                key_sum += _load_or_one(key_weight, begin + place, joins & counts)
            member, words = _next_members(words, span, NONE, WORDS)
            turn += 1
        left = tl.min(tl.where(member < NONE, row, NONE), 0)
        while left < NONE:
            folded, count, key_sum = _add_members(
                folded, count, key_sum, tile, size, key_weight, merge_into, merge_weight, row, left,
                tl.min(tl.where(row == left, member, NONE), 0), tl.minimum(end, span + 32 * WORDS), begin,
                is_channel, counts, C, ROWS, FOLDS_KEY_WEIGHT,
            )  # fmt: skip
            member = tl.where(row == left, NONE, member)
            left = tl.min(tl.where(member < NONE, row, NONE), 0)

    tl.store(features + new[:, None] * C + channel[None, :], folded, mask=stays[:, None] & is_channel)
    if counts:
        tl.store(new_size + new, count, mask=stays)
        if FOLDS_KEY_WEIGHT:
            tl.store(new_key_weight + new, key_sum, mask=stays)


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
    ROWS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, TURNS: tl.constexpr,
    FOLDS_KEY_WEIGHT: tl.constexpr,
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
        _fold_tile(
            x, size, key_weight, merge_into, merge_weight, features, new_size, new_key_weight, row, new, stays,
            begin, end, group, C, ROWS, CHANNELS, WORDS, TURNS, FOLDS_KEY_WEIGHT,
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
            if not FOLDS_KEY_WEIGHT:
                _move(key_weight, new_key_weight, row, new, stays)
            elif merge_into is None:
                _move(key_weight, new_key_weight, row, new, is_plain)
        if merge_into is None:
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


@triton.jit(do_not_specialize=["batch_size", "capacity", "num_parts", "num_groups", "fold_groups"])
def gather_kernel(
    x, source, size, key_weight, soft, destination, cu_old, cu_new, merge_into, merge_weight, plain,
    features, ids, new_size, new_key_weight, new_soft, batch_size, capacity, num_parts, num_groups, fold_groups,
    C: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr, WORDS: tl.constexpr, TURNS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, FOLD_CHANNELS: tl.constexpr, FOLDS_KEY_WEIGHT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `features` [capacity, C], `ids` [2, capacity] and, unless they are None, the other new values.

    Each program moves rows of one image, sums what joins them, and fills what is dead. With `plain` an image has one
    heir, which takes up all that is not plain; `merge_into` is None then, and the first programs write these heirs.
    One group of channels does what a row has besides its features.
    """
    begin_after(OVERLAP)
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
            x, source, size, key_weight, soft, destination, merge_into, merge_weight, plain, features, ids, new_size,
            new_key_weight, new_soft, capacity, image, begin, end, new_begin, first, group, num_groups, C, ROWS,
            CHANNELS, WORDS, TURNS, FOLDS_KEY_WEIGHT,
        )  # fmt: skip
    _fill_dead(
        features, ids, new_size, new_key_weight, new_soft, capacity, batch_size, total, program // num_groups,
        batch_size * num_parts, group, num_groups, C, ROWS, CHANNELS,
    )  # fmt: skip
