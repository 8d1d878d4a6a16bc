"""Weights of rows that are folded into a mean, as one launch: no atomics, so the same bits each time."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound

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
        merge_kernel, STRIDE=stride, NORMALISE=normalise, EPS=eps, BLOCK=BLOCK, BLOCK_OTHER=16, num_warps=8
    )


@triton.jit
def _targets(keep, into, source, start, column, length):
    """Find the row of its image that a row is folded into, -1 if none, and whether it takes part in a mean."""
    row = start.to(tl.int64) + column
    is_live = column < length
    is_patch = tl.load(source + row, mask=is_live, other=-1) >= 0
    stays = is_live & ((tl.load(keep + row, mask=is_live, other=0) != 0) | (is_patch == 0))
    heir = tl.load(into + row, mask=is_live, other=-1).to(tl.int64) - start
    asks = is_patch & (stays == 0) & (heir >= 0) & (heir < length)
    heir_row = start.to(tl.int64) + heir
    joins = asks & (tl.load(keep + heir_row, mask=asks, other=0) != 0)
    joins = joins & (tl.load(source + heir_row, mask=asks, other=-1) >= 0)
    target = tl.where(joins, heir.to(tl.int32), tl.where(stays, column, -1))
    return target, stays, joins | (stays & is_patch)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def merge_kernel(
    keep, into, weight, source, cu_seqlens, stays, target, share, num_rows, batch_size, num_tiles,
    STRIDE: tl.constexpr, NORMALISE: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_OTHER: tl.constexpr,
):  # fmt: skip
    """Write what stays, the targets and the weights, [T] each. A program holds a tile of one image.

    A row adds up the weights of all rows of its own target, so none waits for what another finds.
    """
    program = tl.program_id(0)
    image = program // num_tiles
    first = program % num_tiles * BLOCK
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    column = first + tl.arange(0, BLOCK)
    is_live = column < length
    row = start.to(tl.int64) + column
    heir, is_kept, is_folded = _targets(keep, into, source, start, column, length)
    own = tl.load(weight + row * STRIDE, mask=is_live, other=1.0).to(tl.float32)
    if NORMALISE:
        total = tl.zeros([BLOCK], tl.float32)
        for first_other in range(0, tl.where(first < length, length, 0), BLOCK_OTHER):
            other = first_other + tl.arange(0, BLOCK_OTHER)
            other_heir, _, counts = _targets(keep, into, source, start, other, length)
            other_row = start.to(tl.int64) + other
            theirs = tl.load(weight + other_row * STRIDE, mask=counts, other=0.0).to(tl.float32)
            is_one_group = counts[:, None] & (other_heir[:, None] == heir[None, :])
            total += tl.sum(tl.where(is_one_group, theirs[:, None], 0.0), 0)
        own = own / tl.where(is_folded, total + EPS, 1.0)
    tl.store(stays + row, is_kept, mask=is_live)
    tl.store(target + row, tl.where(heir >= 0, start.to(tl.int64) + heir, -1), mask=is_live)
    tl.store(share + row, tl.where(is_folded, own, 1.0), mask=is_live)

    total_rows = tl.load(cu_seqlens + batch_size)
    for dead in range(total_rows + program * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        row = dead + tl.arange(0, BLOCK).to(tl.int64)
        tl.store(stays + row, row < 0, mask=row < num_rows)
        tl.store(target + row, tl.full([BLOCK], -1, tl.int64), mask=row < num_rows)
        tl.store(share + row, tl.full([BLOCK], 1.0, tl.float32), mask=row < num_rows)
