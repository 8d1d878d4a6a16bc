"""Which rows stay and where they go: what it means, a torch reference, and the choice of what computes it."""

import functools
import importlib.util
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Selection(NamedTuple):
    """The best patches of each image, and beside them the same selection with one row that takes up the rest.

    The best patch that is not selected is the heir of its image. Dead rows are kept nowhere.

    Attributes:
        keep: rows that stay, bool [T].
        destination: new row of each row that stays, int64 [T]; -1 for others.
        cu_seqlens: boundaries of the images after packing, int32 [B + 1].
        keep_fused: `keep` and the heirs.
        destination_fused: as `destination`, for `keep_fused`.
        cu_fused: as `cu_seqlens`, for `keep_fused`.
        merge_into: row that a row is folded into, int64 [T]: the heir for it and all patches behind it, the row
            itself for the others, -1 for dead rows.
        merge_weight: the score of rows that are folded into an heir, 1 for others, [T], at least fp32.
        score: mean over the heads, [T], at least fp32; 0 for dead rows.
    """

    keep: Tensor
    destination: Tensor
    cu_seqlens: Tensor
    keep_fused: Tensor
    destination_fused: Tensor
    cu_fused: Tensor
    merge_into: Tensor
    merge_weight: Tensor
    score: Tensor


Planes = tuple[Tensor, Tensor, Tensor, Tensor]
"""The fields of a `Selection` by dtype, so that a kernel's outputs are few: int64 [3, T] (destination,
destination_fused, merge_into), float [2, T] (merge_weight, score), bool [2, T] (keep, keep_fused), int32 [2, B + 1]
(cu_seqlens, cu_fused)."""


def select(score: Tensor, *, batch_size: int, rows: int, prefix: int, count: int) -> Selection:
    """Select the `count` patches of the highest score in each image of a uniform batch.

    Image b owns the rows b * rows to (b + 1) * rows; rows behind the last image are dead. Ties go to the earlier
    row; NaN counts as -inf. With `count >= rows - prefix` all patches stay and there are no heirs.

    Args:
        score: [T], or [T, H] to go by the mean over H heads, summed in order in fp32; any strides. Fp16, bf16 and
            fp32 run on Triton where the tensor is on a GPU and no gradient is needed; the reference computes all
            else. Gradients flow through `merge_weight` and `score`.
        batch_size: B, number of images.
        rows: rows of each image.
        prefix: leading rows of each image, which always stay and are no patches.
        count: patches to keep, at least 1.

    Raises:
        ValueError: a shape or number cannot be.

    Cost: one launch on a GPU; no host synchronisation.

    Reference: Liang et al., EViT, ICLR 2022 (the fused row).
    """
    if score.dim() not in (1, 2) or not score.is_floating_point() or score.shape[0] < batch_size * rows:
        raise ValueError(
            f"select: score must be floating [T] or [T, H] with at least {batch_size} x {rows} rows, "
            f"got {score.dtype} {list(score.shape)}"
        )
    if not 0 <= prefix <= rows or count < 1:
        raise ValueError(
            f"select: prefix must be in [0, {rows}] and count at least 1, got {prefix} and {count}"
        )
    compute = _select_op if torch.compiler.is_compiling() else choose_select
    if torch.is_grad_enabled() and score.requires_grad:
        compute = select_reference
    (destination, destination_fused, merge_into), (weight, mean), (keep, keep_fused), (cu, cu_fused) = (
        plane.unbind() for plane in compute(score, batch_size, rows, prefix, count)
    )
    return Selection(keep, destination, cu, keep_fused, destination_fused, cu_fused, merge_into, weight, mean)


def rank(score: Tensor, eligible: Tensor, *, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Rank the eligible rows of each image by falling score, int64 [T]; ties go to the earlier row, NaN comes last.

    All other rows of an image rank behind them, in their own order; a dead row gets its distance from the first one.

    Args:
        score: [T]. Fp16, bf16 and fp32 run on Triton where the tensor is on a GPU; the reference computes all else.
        eligible: bool [T]; False for dead rows.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.

    Cost: on a GPU one launch, O(T * max_seqlen) comparisons; else two stable sorts. No host synchronisation.
    """
    compute = _rank_op if torch.compiler.is_compiling() else choose_rank
    return compute(score.detach(), eligible, image_id, cu_seqlens, max_seqlen)


def select_reference(score: Tensor, batch_size: int, rows: int, prefix: int, count: int) -> Planes:
    """Say what `select` means in torch operations."""
    live = batch_size * rows
    mean = mean_over_heads(score[:live]).view(batch_size, rows)
    patches = mean.detach()[:, prefix:]
    order = patches.masked_fill(patches.isnan(), -torch.inf).argsort(dim=1, descending=True, stable=True)
    column = torch.arange(rows, device=score.device)
    ranks = torch.empty_like(order).scatter_(1, order, column[: rows - prefix].expand_as(order))
    position = F.pad(ranks, (prefix, 0), value=-1)  # the prefix ranks ahead of all patches

    row = torch.arange(live, device=score.device).view(batch_size, rows)
    heir = torch.where(position == count, row, 0).sum(1, keepdim=True)
    loses = position >= count
    kept_rows = min(prefix + count, rows)
    ints, flags, bounds = [], [], []
    for keep, kept in ((~loses, kept_rows), (position <= count, min(kept_rows + 1, rows))):
        first = torch.arange(0, (batch_size + 1) * kept, kept, device=score.device)
        slot = first[:-1, None] + keep.cumsum(1) - 1
        ints.append(torch.where(keep, slot, -1))
        flags.append(keep)
        bounds.append(first.int())
    ints.append(torch.where(loses, heir, row))
    weight = torch.where(loses, mean, torch.ones_like(mean))

    def with_dead_rows(values: Tensor, fill: int) -> Tensor:
        return F.pad(values.flatten(), (0, score.shape[0] - live), value=fill)

    return (
        torch.stack([with_dead_rows(values, -1) for values in ints]),
        torch.stack([with_dead_rows(weight, 1), with_dead_rows(mean, 0)]),
        torch.stack([with_dead_rows(values, 0) for values in flags]),
        torch.stack(bounds),
    )


def mean_over_heads(score: Tensor) -> Tensor:
    """Mean of [T, H] over its heads in at least fp32, summed in order: the same bits as the kernel's; or [T] itself."""
    wide = score.to(torch.promote_types(score.dtype, torch.float32))
    return (
        wide if score.dim() == 1 else sum(wide.unbind(1), torch.zeros_like(wide[:, 0])) * (1 / score.shape[1])
    )


def rank_reference(
    score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Say what `rank` means in torch operations."""
    score = score.masked_fill(~eligible | score.isnan(), -torch.inf)
    by_score = torch.argsort(score, descending=True, stable=True)
    group = image_id * 2 + (~eligible).int()
    order = by_score[torch.argsort(group[by_score], stable=True)]
    position = torch.arange(score.shape[0], device=score.device) - cu_seqlens[image_id]
    return torch.empty_like(order).scatter_(0, order, position)


def takes_triton(values: Tensor) -> bool:
    """Whether a Triton kernel computes with these values: on a GPU, at most fp32, triton installed."""
    return values.is_cuda and values.dtype in (torch.float32, torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def choose_select(score: Tensor, batch_size: int, rows: int, prefix: int, count: int) -> Planes:
    """Compute `select` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(score) and batch_size * rows):
        return select_reference(score, batch_size, rows, prefix, count)
    from prunevit.kernels.triton_select import triton_select

    return triton_select(score, batch_size, rows, prefix, count)


def choose_rank(
    score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `rank` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(score) and len(score) and len(cu_seqlens) > 1 and max_seqlen):
        return rank_reference(score, eligible, image_id, cu_seqlens, max_seqlen)
    from prunevit.kernels.triton_select import triton_rank

    return triton_rank(score, eligible, cu_seqlens, max_seqlen)


# Opaque operations for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_select_op = torch.library.custom_op("prunevit::select", choose_select, mutates_args=())
_rank_op = torch.library.custom_op("prunevit::rank", choose_rank, mutates_args=())


@_select_op.register_fake
def _(score: Tensor, batch_size: int, rows: int, prefix: int, count: int) -> Planes:
    num_rows = score.shape[0]
    wide = torch.promote_types(score.dtype, torch.float32)
    return (
        score.new_empty((3, num_rows), dtype=torch.int64),
        score.new_empty((2, num_rows), dtype=wide),
        score.new_empty((2, num_rows), dtype=torch.bool),
        score.new_empty((2, batch_size + 1), dtype=torch.int32),
    )


@_rank_op.register_fake
def _(score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    return torch.empty_like(score, dtype=torch.int64)
