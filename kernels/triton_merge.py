"""Weights of rows that are folded into a mean, as one launch: no atomics, so the same bits each time."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

BLOCK = 128


def triton_merge(
    keep: Tensor,
    into: Tensor,
    weight: Tensor,
    source: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `merge`."""
    num_rows, batch_size, tiles = len(weight), len(cu_seqlens) - 1, triton.cdiv(max_seqlen, BLOCK)
    stays = torch.empty(num_rows, dtype=torch.bool, device=weight.device)
    target = torch.empty(num_rows, dtype=torch.int64, device=weight.device)
    share = torch.empty(num_rows, dtype=weight.dtype, device=weight.device)
    _bound_merge(weight.stride(0), normalise, eps)(
        batch_size * tiles, keep.contiguous(), into.contiguous(), weight, source.contiguous(), cu_seqlens, stays,
        target, share, num_rows, batch_size, tiles,
    )  # fmt: skip
    return stays, target, share


@functools.cache
def _bound_merge(stride: int, normalise: bool, eps: float) -> Bound:
    return Bound(
        merge_kernel, STRIDE=stride, NORMALISE=normalise, EPS=eps, BLOCK=BLOCK, BLOCK_OTHER=128, CHUNK=256,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _targets(keep, into, source, start, column, length):
    """Find the row of its image that a row is folded into, -1 if none, and whether it takes part in a mean.

    The pointers point to the first row of the image, `into` counts from `start`.
    """
    is_live = column < length
    is_patch = tl.load(source + column, mask=is_live, other=-1) >= 0
    stays = is_live & ((tl.load(keep + column, mask=is_live, other=0) != 0) | (is_patch == 0))
    heir = tl.load(into + column, mask=is_live, other=-1).to(tl.int64) - start
    asks = is_patch & (stays == 0) & (heir >= 0) & (heir < length)
    heir = heir.to(tl.int32)
    joins = asks & (tl.load(keep + heir, mask=asks, other=0) != 0)
    joins = joins & (tl.load(source + heir, mask=asks, other=-1) >= 0)
    target = tl.where(joins, heir, tl.where(stays, column, -1))
    return target, stays, joins | (stays & is_patch)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def merge_kernel(
    keep, into, weight, source, cu_seqlens, stays, target, share, num_rows, batch_size, num_tiles,
    STRIDE: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr, CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write what stays, the targets and the weights, [T] each. A program holds a tile of one image.

    A row adds up the weights of all rows of its own target, so none waits for what another finds. Where no patch of
    the image leaves there is nothing to add up.
    """
    wait_for_previous(OVERLAP)
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    offset = start.to(tl.int64)
    keep += offset
    into += offset
    source += offset
    weight += offset * STRIDE
    column = first + tl.arange(0, BLOCK)
    is_live = column < length
    heir, is_kept, is_folded = _targets(keep, into, source, offset, column, length)
    own = tl.load(weight + column.to(tl.int64) * STRIDE, mask=is_live, other=1.0).to(tl.float32)
    if NORMALISE:
        reach = tl.where(first < length, length, 0)
        leaves = tl.zeros([CHUNK], tl.int32)
        for first_other in range(0, reach, CHUNK):
            other = first_other + tl.arange(0, CHUNK)
            is_patch = tl.load(source + other, mask=other < length, other=-1) >= 0
            leaves |= (is_patch & (tl.load(keep + other, mask=other < length, other=1) == 0)).to(tl.int32)
        total = own
        if tl.max(leaves, 0) > 0:
            total = tl.zeros([BLOCK], tl.float32)
            for first_other in range(0, reach, BLOCK_OTHER):
                other = first_other + tl.arange(0, BLOCK_OTHER)
                other_heir, _, counts = _targets(keep, into, source, offset, other, length)
                theirs = tl.load(weight + other.to(tl.int64) * STRIDE, mask=counts, other=0.0).to(tl.float32)
                # Heir and weight in one number cross the threads at once; rows that do not count weigh nothing.
                bits = theirs.to(tl.uint32, bitcast=True).to(tl.int64)
                pair = ((other_heir.to(tl.int64) << 32) | bits)[:, None] ^ (heir.to(tl.int64) << 32)[None, :]
                theirs = pair.to(tl.uint32).to(tl.float32, bitcast=True)
                total += tl.sum(tl.where((pair >> 32).to(tl.int32) == 0, theirs, 0.0), 0)
        own = own / tl.where(is_folded, total + EPS, 1.0)
    tl.store(stays + offset + column, is_kept, mask=is_live)
    tl.store(target + offset + column, tl.where(heir >= 0, offset + heir, -1), mask=is_live)
    tl.store(share + offset + column, tl.where(is_folded, own, 1.0), mask=is_live)

    total_rows = tl.load(cu_seqlens + batch_size)
    for dead in range(total_rows + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(stays + row, row < 0, mask=row < num_rows)
        tl.store(target + row, tl.full([BLOCK], -1, tl.int64), mask=row < num_rows)
        tl.store(share + row, tl.full([BLOCK], 1.0, tl.float32), mask=row < num_rows)
