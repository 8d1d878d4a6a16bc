"""Rows that are alike enough join their partners: meaning, torch reference, choice of what computes it."""

import torch
from torch import Tensor

from prunevit.kernels.select import takes_triton
from prunevit.kernels.select_reference import mean_over_heads


def join(
    similarity: Tensor, partner: Tensor, limit: Tensor, score: Tensor, *, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Let each row whose similarity exceeds a limit join its partner; find the best score of each group.

    Args:
        similarity: of each row to its partner, [T]; -inf for dead rows, as `nearest` gives it.
        partner: row of the same image, int64 [T]; not looked at where the similarity does not exceed the limit.
        limit: one number, [].
        score: [T, H], of which the mean over H heads counts. Fp16, bf16 and fp32 run on Triton where the tensor is on
            a GPU; the reference computes all else, and what a gradient flows through.
        cu_seqlens: boundaries of the images, int32 [B + 1].

    Returns:
        Which rows stay, bool [T], and the largest score among a row and those that join it, at least fp32 [T];
        gradients flow through it. Of dead rows, their own score.

    Cost: on a GPU one launch. No host synchronisation.
    """
    if torch.is_grad_enabled() and score.requires_grad:
        return join_reference(similarity.detach(), partner, limit.detach(), score, cu_seqlens)
    compute = _join_op if torch.compiler.is_compiling() else choose_join
    keep, best = compute(similarity.detach(), partner, limit.detach(), score, cu_seqlens)
    return keep, best


def join_reference(
    similarity: Tensor, partner: Tensor, limit: Tensor, score: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Say what `join` means."""
    joins, mean = similarity > limit, mean_over_heads(score)
    rows = torch.arange(len(mean), device=mean.device)
    return ~joins, mean.scatter_reduce(0, torch.where(joins, partner, rows), mean, "amax")


def choose_join(
    similarity: Tensor, partner: Tensor, limit: Tensor, score: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `join` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(score) and len(score) and len(cu_seqlens) > 1):
        return join_reference(similarity, partner, limit, score, cu_seqlens)
    from prunevit.kernels.triton_join import triton_join

    return triton_join(similarity, partner, limit, score, cu_seqlens)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_join_op = torch.library.custom_op("prunevit::join", choose_join, mutates_args=())


@_join_op.register_fake
def _(
    similarity: Tensor, partner: Tensor, limit: Tensor, score: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    num_rows, wide = score.shape[0], torch.promote_types(score.dtype, torch.float32)
    return score.new_empty(num_rows, dtype=torch.bool), score.new_empty(num_rows, dtype=wide)
