"""Rows that join their partners and the best score of each group, in one launch.

The atomics take maxima, which are the same in any order: the same input gives the same bits.
"""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

BLOCK = 256


def triton_join(
    similarity: Tensor, partner: Tensor, limit: Tensor, score: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `join`."""
    num_rows, batch_size = len(score), len(cu_seqlens) - 1
    keep = torch.empty(num_rows, dtype=torch.bool, device=score.device)
    best = torch.empty(num_rows, dtype=torch.float32, device=score.device)
    _bound_join(score.shape[1], score.stride(0))(
        batch_size, similarity.contiguous(), partner.contiguous(), limit, score, cu_seqlens, keep, best, num_rows,
        batch_size, score.stride(1),
    )  # fmt: skip
    return keep, best


@functools.cache
def _bound_join(num_heads: int, row_stride: int) -> Bound:
    return Bound(join_kernel, H=num_heads, ROW=row_stride, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _load_means(score, row, mask, head_stride, H: tl.constexpr, ROW: tl.constexpr):
    """Load the means over the heads, summed in order as `mean_over_heads` does."""
    mean = tl.zeros(row.shape, tl.float32)
    for head in tl.static_range(H):
        values = score + head * head_stride.to(tl.int64) + row * ROW
        mean += tl.load(values, mask=mask, other=0.0).to(tl.float32)
    return mean * (1.0 / H)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "head_stride"])
def join_kernel(
    similarity, partner, limit, score, cu_seqlens, keep, best, num_rows, batch_size, head_stride, H: tl.constexpr,
    ROW: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `keep` and `best` [T]. A program holds an image: all of its groups lie there."""
    wait_for_previous(OVERLAP)
    image = tl.program_id(0)
    start = tl.load(cu_seqlens + image).to(tl.int64)
    stop = tl.load(cu_seqlens + image + 1).to(tl.int64)
    above = tl.load(limit).to(tl.float32)
    column = tl.arange(0, BLOCK)
    for first in range(start, stop, BLOCK):
        row = first + column
        joins = tl.load(similarity + row, mask=row < stop, other=float("-inf")) > above
        tl.store(keep + row, joins == 0, mask=row < stop)
        tl.store(best + row, _load_means(score, row, row < stop, head_stride, H, ROW), mask=row < stop)
    tl.debug_barrier()
    for first in range(start, stop, BLOCK):
        row = first + column
        joins = tl.load(similarity + row, mask=row < stop, other=float("-inf")) > above
        heir = tl.load(partner + row, mask=joins, other=0)
        mean = _load_means(score, row, joins, head_stride, H, ROW)
        tl.atomic_max(best + heir, mean, mask=joins, sem="relaxed", scope="cta")

    total = tl.load(cu_seqlens + batch_size).to(tl.int64)
    for first in range(total + image * BLOCK, num_rows, batch_size * BLOCK):
        row = first + column
        tl.store(keep + row, row >= 0, mask=row < num_rows)
        tl.store(
            best + row, _load_means(score, row, row < num_rows, head_stride, H, ROW), mask=row < num_rows
        )
