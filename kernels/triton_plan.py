"""The place of each row after packing, counted: no sort, no atomics, no host synchronisation."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous
from prunevit.kernels.parts import pitches
from prunevit.kernels.plan import MULTIPLE, plan_lengths
from prunevit.kernels.triton_select import bounds_kernel, store_bounds

BLOCK = 128


def triton_plan(
    source: Tensor, keep: Tensor | None, order: Tensor | None, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `plan`; returns its parts one behind the other, see `plan.plan_lengths`."""
    num_rows, batch_size = len(source), len(cu_seqlens) - 1
    pitch = pitches(plan_lengths(num_rows, batch_size), MULTIPLE)
    ints = torch.empty(sum(pitch), dtype=torch.int32, device=source.device)
    tiles = triton.cdiv(max_seqlen, BLOCK)
    _bound_plan(order is not None and order.element_size() == 8)(
        batch_size * tiles, ints, source.contiguous(), None if keep is None else keep.contiguous(),
        None if order is None else order.contiguous(), cu_seqlens, num_rows, batch_size, tiles,
    )  # fmt: skip
    if batch_size > 1:
        _bound_bounds()(1, ints, pitch[0], batch_size)
    return ints


@functools.cache
def _bound_plan(is_wide: bool) -> Bound:
    # Of keys of 32 bits with a place behind them, each thread holds those of a whole tile; wider ones leave no room.
    return Bound(plan_kernel, BLOCK=BLOCK, BLOCK_OTHER=32 if is_wide else 128, CHUNK=256, num_warps=4)


@functools.cache
def _bound_bounds() -> Bound:
    return Bound(bounds_kernel, BLOCK=512, num_warps=4)


@triton.jit
def _load_rows(source, keep, column, length):
    """Load which rows of an image are patches, and which stay; the pointers point to its first row."""
    is_live = column < length
    is_patch = tl.load(source + column, mask=is_live, other=-1) >= 0
    stays = is_live
    if keep is not None:
        stays = is_live & ((tl.load(keep + column, mask=is_live, other=0) != 0) | (is_patch == 0))
    return is_patch, stays


@triton.jit
def _as_integers(value):
    """Map an order to integers of the same order: NaN is the largest, -0 is 0."""
    if value.dtype.is_floating():
        if value.dtype.primitive_bitwidth == 16:  # fp32 holds each number of 16 bits
            value = value.to(tl.float32)
        bits = tl.where(value == 0.0, 0.0, value).to(
            tl.int64 if value.dtype.primitive_bitwidth == 64 else tl.int32, bitcast=True
        )
        largest: tl.constexpr = (1 << (value.dtype.primitive_bitwidth - 1)) - 1
        value = tl.where(value == value, tl.where(bits < 0, bits ^ largest, bits), largest)
    elif value.dtype.primitive_bitwidth < 32:
        value = value.to(tl.int32)
    return value


@triton.jit
def _load_keys(order, is_patch, column, length):
    """Load what orders the rows of an image, place included unless it is too wide, so that no two are alike.

    Those that are no patches lead the image, and rank lowest.
    """
    value = tl.load(order + column, mask=column < length, other=0)
    key = _as_integers(value)
    if value.dtype.primitive_bitwidth == 8:  # 24 bits are left, for more rows than an image can have
        key = tl.where(is_patch, key, -128) * (1 << 24) + column
    else:
        key = tl.where(is_patch, key, -(1 << (key.dtype.primitive_bitwidth - 1)))
        if key.dtype.primitive_bitwidth == 32:
            key = (key.to(tl.int64) << 32) + column
    return key


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def plan_kernel(
    ints, source, keep, order, cu_seqlens, num_rows, batch_size, num_tiles, BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Count the rows that stay and come before each row of a tile of one image; write where the image begins and ends.

    For `bounds_kernel` to add up the latter are the rows that each image keeps, unless there is only one.
    """
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    offset = start.to(tl.int64)
    source += offset
    if keep is not None:
        keep += offset
    if order is not None:
        order += offset
    column = first + tl.arange(0, BLOCK)
    is_patch, stays = _load_rows(source, keep, column, length)
    if order is None:
        # Rows before the tile, and of the image, that stay: counted in each lane, added up once.
        before, whole = tl.zeros([CHUNK], tl.int32), tl.zeros([CHUNK], tl.int32)
        for first_other in range(0, tl.where(first < length, length, 0), CHUNK):
            other = first_other + tl.arange(0, CHUNK)
            _, other_stays = _load_rows(source, keep, other, length)
            before += (other_stays & (other < first)).to(tl.int32)
            whole += other_stays.to(tl.int32)
        kept = tl.sum(whole, 0)
        place = tl.sum(before, 0) + tl.cumsum(stays.to(tl.int32), 0) - 1
    else:
        key = _load_keys(order, is_patch, column, length)
        place = tl.zeros([BLOCK], tl.int32)
        whole = tl.zeros([BLOCK_OTHER], tl.int32)
        for first_other in range(0, tl.where(first < length, length, 0), BLOCK_OTHER):
            other = first_other + tl.arange(0, BLOCK_OTHER)
            other_is_patch, other_stays = _load_rows(source, keep, other, length)
            other_key = _load_keys(order, other_is_patch, other, length)
            whole += other_stays.to(tl.int32)
            # What leaves is ahead of nothing.
            other_key = tl.where(other_stays, other_key, (1 << (other_key.dtype.primitive_bitwidth - 1)) - 1)
            is_ahead = other_key[:, None] < key[None, :]
            if order.dtype.element_ty.primitive_bitwidth == 64:
                other = tl.where(other_stays, other, 0x7FFFFFFF)
                is_ahead |= (other_key[:, None] == key[None, :]) & (other[:, None] < column[None, :])
            place += tl.sum(is_ahead.to(tl.int32), 0)
        kept = tl.sum(whole, 0)
    tl.store(ints + offset + column, tl.where(stays, place, -1), mask=column < length)
    if first == 0:
        bounds = ints + (num_rows + 3).to(tl.int64) // 4 * 4
        store_bounds(bounds, bounds + (batch_size + 4) // 4 * 4, image, batch_size, kept, False)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK)
        tl.store(ints + row, -1, mask=row < num_rows)
