"""The verbs that fold pruned rows into rows that stay: `fuse` and `merge`, and `nearest`, which finds partners."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prunevit.checks import SIGNED_INTEGERS
from prunevit.keepmask import KeepMask, check_score, check_within, rank
from prunevit.kernels.merge import merge as merge_rows
from prunevit.kernels.nearest import nearest as nearest_rows
from prunevit.kernels.select_reference import mean_over_heads
from prunevit.tokens import RaggedTokens


def fuse(tokens: RaggedTokens, mask: KeepMask, score: Tensor) -> KeepMask:
    """Fold all patches that a mask drops in an image into one row, `sum of score_i * x_i` (Liang et al., ICLR 2022).

    The best of the losers is the heir: it stays, as an ordinary row, and the score, its own included, is the weight
    of each, not renormalised. An image that loses nothing gets no such row.

    Args:
        tokens: The batch.
        mask: What to keep; it must not fold rows itself.
        score: Weight of each row, `[T]`, or `[T, H]` to weigh by the mean over heads; gradients flow through it.

    Raises:
        ValueError: If `mask` is no mask of these rows or already folds some, or `score` is not one number a row.

    Cost:
        None if `mask` comes from a verb that selected by the same score; else one `rank`.
    """
    check_within(tokens, mask, "fuse", "mask ")
    if mask.merge_into is not None:
        raise ValueError(
            "fuse: mask must not fold rows already, got one with merge_into; fuse before merging"
        )
    check_score(tokens, score)
    if mask.rows_per_image is not None and mask.rows_per_image == tokens.max_seqlen:
        return mask
    rows_per_image = None if mask.rows_per_image is None else mask.rows_per_image + 1
    selected = mask.selection
    if selected is not None and selected.score is score and mask.keep is selected.chosen.keep:
        chosen = selected.chosen
        # Selected without a gradient, the weights have none, though the score may. What could not be selected is
        # folded too, of which the selection knows nothing.
        learns = torch.is_grad_enabled() and score.requires_grad
        knows_all = selected.among_all and chosen.merge_weight.requires_grad >= learns
        if knows_all and selected.holds_for(tokens):
            return replace(
                mask,
                keep=chosen.keep_fused,
                rows_per_image=rows_per_image,
                merge_into=chosen.merge_into,
                merge_weight=chosen.merge_weight,
            )
    score = mean_over_heads(score)
    losers = tokens.is_patch & ~mask.keep
    heirs = losers & (rank(tokens, score, within=KeepMask(losers)) == 0)
    rows = torch.arange(losers.shape[0], device=losers.device)
    heir_of_image = rows.new_full((tokens.batch_size + 1,), -1)
    heir_of_image.scatter_reduce_(0, tokens.image_id.long(), torch.where(heirs, rows, -1), "amax")
    prefix = tokens.live & ~tokens.is_patch  # stays whether the mask says so or not, as it is
    keep = mask.keep | heirs | prefix
    return replace(
        mask,
        keep=keep,
        rows_per_image=rows_per_image,
        merge_into=torch.where(losers, heir_of_image[tokens.image_id], torch.where(keep, rows, -1)),
        merge_weight=torch.where(losers, score, torch.ones_like(score)),
    )


def merge(
    tokens: RaggedTokens,
    mask: KeepMask,
    into: Tensor,
    weight: Tensor,
    *,
    normalise: bool = True,
    eps: float = 0.0,
) -> KeepMask:
    """Fold rows that a mask drops into patches that it keeps, `x_d = sum of w_i x_i / (sum of w_i + eps)`.

    Args:
        tokens: The batch.
        mask: What to keep.
        into: Row that each dropped row joins, int64 `[T]`; -1, or a row that is not a kept patch of
            its image, drops it. Its entries for kept rows are not looked at.
        weight: Weight of each row in the mean, `[T]`, of the heir too; gradients flow through it. Prefix rows stay
            as they are.
        normalise: Divide by the sum of the weights; without it `x_d` is the plain weighted sum.
        eps: Added to that sum.

    Raises:
        ValueError: If `mask` is no mask of these rows, or `into` or `weight` is not one whole or floating number a row.

    Cost:
        One launch on a GPU, and O(T * max_seqlen) comparisons; elsewhere, and where a gradient flows through the
        weights, one scatter-add of them.
    """
    check_within(tokens, mask, "merge", "mask ")
    _check_rows(tokens, "merge", into=into, weight=weight)
    if into.dtype not in SIGNED_INTEGERS or not weight.is_floating_point():
        raise ValueError(
            f"merge: into must be of signed integers and weight floating, got {into.dtype} and {weight.dtype}"
        )
    keep, target, share = merge_rows(
        mask.keep,
        into,
        weight,
        source=tokens.source,
        image_id=tokens.image_id,
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
        normalise=normalise,
        eps=eps,
    )
    return replace(mask, keep=keep, merge_into=target, merge_weight=share)


def nearest(
    tokens: RaggedTokens, features: Tensor, queries: Tensor, keys: Tensor, *, cosine: bool = False
) -> tuple[Tensor, Tensor]:
    """Find for each query row the key row of the same image with the largest dot product; no selection by itself.

    Args:
        tokens: The batch.
        features: `[T, D]`, or `[T, H, D]` to go by the mean over heads. Compared in at least fp32, under autocast too.
        queries: Rows that look for a partner, bool `[T]`.
        keys: Rows that may be one, bool `[T]`; a row is never its own partner.
        cosine: Compare by the cosine instead of the product.

    Returns:
        The partner's row, int64 `[T]`, and the product, `[T]`; -1 and -inf for other rows and where the image has no
        key. Ties go to the earlier row. Gradients flow through the product.

    Raises:
        ValueError: If the features are not one vector a row, or one a row and head, or `queries` and `keys` not bool
            `[T]`.

    Cost:
        On a GPU one launch, two with heads, and O(T * max_seqlen) products. Elsewhere, and where a gradient flows
        through the features, one batched product `[B, max_seqlen, max_seqlen]`. Never O(T^2).
    """
    _check_rows(tokens, "nearest", queries=queries, keys=keys)
    fits = features.ndim in (2, 3) and features.shape[0] == queries.shape[0] and 0 not in features.shape[1:]
    fits = fits and features.is_floating_point()
    if not fits or queries.dtype != torch.bool or keys.dtype != torch.bool:
        raise ValueError(
            f"nearest: features must be floating [T, D] or [T, H, D] and queries and keys bool, got {features.dtype} "
            f"{list(features.shape)}, {queries.dtype} and {keys.dtype}"
        )
    return nearest_rows(
        features,
        queries,
        keys,
        image_id=tokens.image_id,
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
        cosine=cosine,
    )


def _check_rows(tokens: RaggedTokens, verb: str, **given: Tensor) -> None:
    """Refuse what is not one entry a row."""
    for name, values in given.items():
        if values.shape != tokens.image_id.shape:
            raise ValueError(
                f"{verb}: {name} must have shape {list(tokens.image_id.shape)}, one entry a row, "
                f"got {list(values.shape)}"
            )
