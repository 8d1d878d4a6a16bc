"""Weights of rows that are folded into a mean: meaning, torch reference, choice of what computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.select import takes_triton


class Merged(NamedTuple):
    """Which rows fold into which.

    Attributes:
        keep: rows that stay, the prefix rows among them, bool [T].
        into: row that each row is folded into, int64 [T]: itself for a row that stays, -1 for one that is dropped.
        weight: factor of each row in its heir's sum, [T]; 1 for prefix rows and rows that are dropped.
    """

    keep: Tensor
    into: Tensor
    weight: Tensor


def merge(
    keep: Tensor,
    into: Tensor,
    weight: Tensor,
    *,
    source: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    normalise: bool = True,
    eps: float = 0.0,
) -> Merged:
    """Fold patches that leave into patches that stay, by a mean with given weights.

    Args:
        keep: patches that stay, bool [T].
        into: row that each patch that leaves joins, int64 [T]; -1, or a row that is not a patch of its image that
            stays, drops it.
        weight: weight of each row, [T]. Fp16, bf16 and fp32 run on Triton where the tensor is on a GPU; the reference
            computes all else, and what a gradient flows through.
        source: patch of each row, int32 [T]; negative for prefix and dead rows.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.
        normalise: divide by the sum of the weights of all that fold into one row; else they stay as they are.
        eps: added to that sum.

    Cost: on a GPU one launch, and O(T * max_seqlen) comparisons; elsewhere one scatter-add. No host synchronisation.
    """
    layout = (source, image_id, cu_seqlens, max_seqlen)
    if torch.is_grad_enabled() and weight.requires_grad:
        return Merged(*merge_reference(keep, into, weight, *layout, normalise, eps))
    compute = _merge_op if torch.compiler.is_compiling() else choose_merge
    return Merged(*compute(keep, into, weight.detach(), *layout, normalise, float(eps)))


def merge_reference(
    keep: Tensor,
    into: Tensor,
    weight: Tensor,
    source: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Say what `merge` means."""
    rows, is_patch = torch.arange(weight.shape[0], device=weight.device), source >= 0
    keep = (image_id < len(cu_seqlens) - 1) & (keep | ~is_patch)
    heirs = keep & is_patch
    heir = into.long().clamp(0, into.shape[0] - 1)
    joins = ~keep & is_patch & (into >= 0) & heirs[heir] & (image_id[heir] == image_id)
    target = torch.where(joins, heir, torch.where(keep, rows, -1))
    folded = joins | heirs
    if normalise:
        share = torch.where(folded, weight, torch.zeros_like(weight))
        total = torch.zeros_like(weight).index_add(0, target.clamp(min=0), share) + eps
        weight = weight / torch.where(folded, total[target.clamp(min=0)], torch.ones_like(weight))
    return keep, target, torch.where(folded, weight, torch.ones_like(weight))


def choose_merge(
    keep: Tensor,
    into: Tensor,
    weight: Tensor,
    source: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    normalise: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `merge` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(weight) and len(weight) and len(cu_seqlens) > 1 and max_seqlen):
        return merge_reference(keep, into, weight, source, image_id, cu_seqlens, max_seqlen, normalise, eps)
    from prunevit.kernels.triton_merge import triton_merge

    return triton_merge(keep, into, weight, source, cu_seqlens, max_seqlen, normalise, eps)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_merge_op = torch.library.custom_op("prunevit::merge", choose_merge, mutates_args=())


@_merge_op.register_fake
def _(keep: Tensor, into: Tensor, weight: Tensor, *layout: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(keep), torch.empty_like(into, dtype=torch.int64), torch.empty_like(weight)
