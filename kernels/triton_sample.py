"""Inverse-transform sampling as one launch: ranks and running sums are counted, nothing is sorted or searched."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous
from prunevit.kernels.triton_select import key_of


def triton_sample(
    score: Tensor,
    source: Tensor,
    within: Tensor | None,
    each: Tensor | None,
    points: int,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Compute `sample`."""
    keep = torch.empty(len(source), dtype=torch.bool, device=source.device)
    batch_size = len(cu_seqlens) - 1
    start = _bound_sample(score.stride(0), max(16, 1 << (max_seqlen - 1).bit_length()))
    start(
        batch_size, keep, score, source.contiguous(), None if within is None else within.contiguous(),
        None if each is None else each.contiguous(), cu_seqlens, len(source), batch_size, points,
    )  # fmt: skip
    return keep


@functools.cache
def _bound_sample(row_stride: int, block: int) -> Bound:
    return Bound(
        sample_kernel,
        ROW=row_stride,
        BLOCK=block,
        BLOCK_OTHER=min(64, 4096 // block),
        BLOCK_POINTS=min(16, 8192 // block),
        num_warps=8 if block > 128 else 4,
    )


@triton.jit
def _load_rows(score, source, within, start, column, length, ROW: tl.constexpr):
    """Load which rows are patches, which can be hit, what they add to the sum, and a key that falls as they rise."""
    row = start.to(tl.int64) + column
    is_live = column < length
    is_patch = tl.load(source + row, mask=is_live, other=-1) >= 0
    eligible = is_patch
    if within is not None:
        eligible = is_patch & (tl.load(within + row, mask=is_live, other=0) != 0)
    value = tl.load(score + row * ROW, mask=is_live, other=0.0).to(tl.float32)
    mass = tl.where(eligible & (value == value), value, 0.0).to(tl.float64)
    return is_patch, eligible, mass, key_of(-value, eligible)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "points"])
def sample_kernel(
    keep, score, source, within, each, cu_seqlens, num_rows, batch_size, points, ROW: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_OTHER: tl.constexpr, BLOCK_POINTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `keep` [T]; a program holds one image.

    The patch that a point is nearest to is known by how many patches lie below the point, which is its rank.
    """
    wait_for_previous(OVERLAP)
    image = tl.program_id(0)
    start = tl.load(cu_seqlens + image)
    length = tl.load(cu_seqlens + image + 1) - start
    column = tl.arange(0, BLOCK)
    is_patch, eligible, _mass, key = _load_rows(score, source, within, start, column, length, ROW)
    place = tl.zeros([BLOCK], tl.int32)
    running = tl.zeros([BLOCK], tl.float64)
    for first_other in range(0, length, BLOCK_OTHER):
        other = first_other + tl.arange(0, BLOCK_OTHER)
        _, _, other_mass, other_key = _load_rows(score, source, within, start, other, length, ROW)
        ties = (other_key[:, None] == key[None, :]) & (other < length)[:, None]
        is_below = (other_key[:, None] > key[None, :]) | (ties & (other[:, None] < column[None, :]))
        # With its own mass inside, the sum of a patch is never more than that of the next one, however it is rounded.
        counts = is_below | (ties & (other[:, None] == column[None, :]))
        place += tl.sum(is_below.to(tl.int32), 0)
        running += tl.sum(tl.where(counts, other_mass[:, None], 0.0), 0)

    present = tl.sum(eligible.to(tl.int32), 0)
    low = tl.min(tl.where(eligible, running, float("inf")), 0)
    high = tl.max(tl.where(eligible, running, float("-inf")), 0)
    span = tl.where(high > low, high - low, 1.0)
    share = tl.where(eligible, tl.minimum((running - low) / span, 1.0), float("inf"))
    lowest = tl.min(tl.where(eligible & (share > 0.0), share, 1.0), 0)
    last = points - 1
    if each is not None:
        last = tl.load(each + image).to(tl.int32) - 1
    hits = tl.zeros([BLOCK], tl.int32)
    for first_point in range(0, last + 1, BLOCK_POINTS):
        point = tl.minimum(first_point + tl.arange(0, BLOCK_POINTS), last)
        step = point.to(tl.float64) / tl.maximum(last, 1).to(tl.float64)
        level = tl.minimum(lowest + (1.0 - lowest) * step, 1.0)
        is_lower = share[:, None] < level[None, :]
        above = tl.sum(is_lower.to(tl.int32), 0)
        share_below = tl.max(tl.where(is_lower, share[:, None], float("-inf")), 0)
        share_above = tl.min(tl.where(is_lower, float("inf"), share[:, None]), 0)
        nearest = tl.where(level - share_below <= share_above - level, above - 1, above)
        nearest = tl.minimum(nearest, present - 1)
        hits += tl.sum((place[:, None] == nearest[None, :]).to(tl.int32), 1)
    stays = (is_patch == 0) | (eligible & (hits > 0))
    tl.store(keep + start.to(tl.int64) + column, stays, mask=column < length)

    total = tl.load(cu_seqlens + batch_size)
    for dead in range(total + image * BLOCK, num_rows, batch_size * BLOCK):
        row = dead + column
        tl.store(keep + row, column < 0, mask=row < num_rows)
