"""The verbs that fold pruned rows into rows that stay: `fuse` and `merge`, and `nearest`, which finds partners."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask, check_score, rank
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
        ValueError: If `mask` already folds rows, or `score` is not one number a row.

    Cost:
        None if `mask` comes from a verb that selected by the same score; else one `rank`.
    """
    if mask.merge_into is not None:
        raise ValueError(
            "fuse: mask must not fold rows already, got one with merge_into; fuse before merging"
        )
    check_score(tokens, score)
    if mask.rows_per_image is not None and mask.rows_per_image == tokens.max_seqlen:
        return mask
    rows_per_image = None if mask.rows_per_image is None else mask.rows_per_image + 1
    if mask.selection is not None:
        by, chosen, _ = mask.selection
        if by is score and mask.keep is chosen.keep:
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
    keep = mask.keep | heirs
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
        ValueError: If `into` or `weight` is not one entry a row.

    Cost:
        One scatter-add of `T` weights.
    """
    _check_rows(tokens, "merge", into=into, weight=weight)
    rows = torch.arange(weight.shape[0], device=weight.device)
    keep = mask.keep | (tokens.live & ~tokens.is_patch)
    kept_patch = keep & tokens.is_patch
    heir = into.long().clamp(0, into.shape[0] - 1)
    joins = (
        ~keep & tokens.is_patch & (into >= 0) & kept_patch[heir] & (tokens.image_id[heir] == tokens.image_id)
    )
    target = torch.where(joins, heir, torch.where(keep, rows, -1))
    folded = joins | kept_patch
    if normalise:
        share = torch.where(folded, weight, torch.zeros_like(weight))
        total = torch.zeros_like(weight).index_add(0, target.clamp(min=0), share) + eps
        weight = weight / torch.where(folded, total[target.clamp(min=0)], torch.ones_like(weight))
    return replace(
        mask, keep=keep, merge_into=target, merge_weight=torch.where(folded, weight, torch.ones_like(weight))
    )


def nearest(tokens: RaggedTokens, features: Tensor, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Find for each query row the key row of the same image with the largest dot product; no selection by itself.

    Args:
        tokens: The batch.
        features: `[T, D]`; normalise them for the cosine. Compared in at least fp32, under autocast too.
        queries: Rows that look for a partner, bool `[T]`.
        keys: Rows that may be one, bool `[T]`; a row is never its own partner.

    Returns:
        The partner's row, int64 `[T]`, and the product, `[T]`; -1 and -inf for other rows and where the image has no
        key. Ties go to the earlier row.

    Raises:
        ValueError: If the features are not `[T, D]`, or `queries` and `keys` not bool `[T]`.

    Cost:
        One batched product `[B, max_seqlen, max_seqlen]`: O(T * max_seqlen), never O(T^2).
    """
    _check_rows(tokens, "nearest", queries=queries, keys=keys)
    if features.ndim != 2 or queries.dtype != torch.bool or keys.dtype != torch.bool:
        raise ValueError(
            f"nearest: features must be [T, D] and queries and keys bool, got {list(features.shape)}, "
            f"{queries.dtype} and {keys.dtype}"
        )
    # Half precision ties what is nearly alike, and autocast would bring it back.
    with torch.autocast(features.device.type, enabled=False):
        padded = tokens.to_padded(features.to(torch.promote_types(features.dtype, torch.float32)))
        product = padded @ padded.transpose(1, 2)
    allowed = tokens.to_padded(keys & tokens.live, fill=False)[:, None, :]
    itself = torch.eye(product.shape[1], dtype=torch.bool, device=product.device)
    value, column = product.masked_fill(~allowed | itself, -torch.inf).max(-1)
    image, position = tokens.image_id.long().clamp(max=tokens.batch_size - 1), tokens.position.long()
    position = position.clamp(max=product.shape[1] - 1)
    value = value[image, position].masked_fill(~(queries & tokens.live), -torch.inf)
    row = tokens.start + column[image, position]
    return torch.where(value > -torch.inf, row, -1), value


def _check_rows(tokens: RaggedTokens, verb: str, **given: Tensor) -> None:
    """Refuse what is not one entry a row."""
    for name, values in given.items():
        if values.shape != tokens.image_id.shape:
            raise ValueError(
                f"{verb}: {name} must have shape {list(tokens.image_id.shape)}, one entry a row, "
                f"got {list(values.shape)}"
            )
