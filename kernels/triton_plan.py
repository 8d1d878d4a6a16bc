"""The place of each row after packing, counted: no sort, no atomics, no host synchronisation."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound
from prunevit.kernels.plan import plan_sizes
from prunevit.kernels.triton_select import bounds_kernel, store_bounds

BLOCK = 128


def triton_plan(
    source: Tensor, keep: Tensor | None, order: Tensor | None, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `plan`; returns its parts one behind the other, see `plan.plan_sizes`."""
    num_rows, batch_size = len(source), len(cu_seqlens) - 1
    sizes = plan_sizes(num_rows, batch_size)
    ints = torch.empty(sum(sizes), dtype=torch.int32, device=source.device)
    tiles = triton.cdiv(max_seqlen, BLOCK)
    _bound_plan()(
        batch_size * tiles, ints, source.contiguous(), None if keep is None else keep.contiguous(),
        None if order is None else order.contiguous(), cu_seqlens, num_rows, batch_size, tiles,
    )  # fmt: skip
    if batch_size > 1:
        _bound_bounds()(1, ints, sum(sizes[:2]), batch_size)
    return ints


@functools.cache
def _bound_plan() -> Bound:
    return Bound(plan_kernel, BLOCK=BLOCK, BLOCK_OTHER=32, num_warps=4)


@functools.cache
def _bound_bounds() -> Bound:
    return Bound(bounds_kernel, BLOCK=512, num_warps=4)


@triton.jit
def _load_rows(source, keep, start, column, length):
    """Load which rows of an image are patches, and which stay."""
    row = start.to(tl.int64) + column
    is_live = column < length
    is_patch = tl.load(source + row, mask=is_live, other=-1) >= 0
    stays = is_live
    if keep is not None:
        stays = is_live & ((tl.load(keep + row, mask=is_live, other=0) != 0) | (is_patch == 0))
    return is_patch, stays


@triton.jit
def _load_order(order, start, column, length):
    value = tl.load(order + (start.to(tl.int64) + column), mask=column < length, other=0)
    if value.dtype.primitive_bitwidth == 16:  # fp32 holds each number of 16 bits
        value = value.to(tl.float32)
    return value


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def plan_kernel(
    ints, source, keep, order, cu_seqlens, num_rows, batch_size, num_tiles, BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
):  # fmt: skip
    """Count the rows that stay and come before each row of a tile of one image; write where the image begins and ends.

    For `bounds_kernel` to add up the latter are the rows that each image keeps, unless there is only one.
    """
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    column = first + tl.arange(0, BLOCK)
    is_patch, stays = _load_rows(source, keep, start, column, length)
    if order is not None:
        value = _load_order(order, start, column, length)
    ahead = tl.zeros([BLOCK], tl.int32)
    kept = 0
    for first_other in range(0, tl.where(first < length, length, 0), BLOCK_OTHER):
        other = first_other + tl.arange(0, BLOCK_OTHER)
        other_is_patch, other_stays = _load_rows(source, keep, start, other, length)
        kept += tl.sum(other_stays.to(tl.int32), 0)
        is_ahead = other[:, None] < column[None, :]
        if order is not None:
            other_value = _load_order(order, start, other, length)
            is_nan, other_is_nan = value != value, other_value != other_value
            is_less = (other_value[:, None] < value[None, :]) | (
                is_nan[None, :] & (other_is_nan == 0)[:, None]
            )
            ties = (other_value[:, None] == value[None, :]) | (is_nan[None, :] & other_is_nan[:, None])
            both = is_patch[None, :] & other_is_patch[:, None]
            is_ahead = (is_ahead & (ties | (both == 0))) | (both & is_less)
        ahead += tl.sum((is_ahead & other_stays[:, None]).to(tl.int32), 0)
    tl.store(ints + start.to(tl.int64) + column, tl.where(stays, ahead, -1), mask=column < length)
    if first == 0:
        bounds = ints + (num_rows + 3).to(tl.int64) // 4 * 4
        store_bounds(bounds, bounds + (batch_size + 4) // 4 * 4, image, batch_size, kept, False)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK)
        tl.store(ints + row, -1, mask=row < num_rows)
