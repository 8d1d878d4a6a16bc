"""The keep-mask that a policy emits, and the verbs that select by score: `top_k`, `top_p`, `threshold`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
from torch import Tensor

from prunevit.kernels.select import Rule, select
from prunevit.kernels.select import rank as rank_rows
from prunevit.kernels.select_reference import mean_over_heads
from prunevit.selection import Selected
from prunevit.tokens import RaggedTokens


@dataclass(frozen=True, eq=False)
class KeepMask:
    """What a policy decides about the `T` rows of a ragged batch; `pack` carries it out.

    Attributes:
        keep: Rows that stay, bool `[T]`. `pack` adds the prefix rows.
        rows_per_image: Rows of each image after packing, prefix and fused rows included, where the host knows it;
            then nothing downstream synchronises. Only for uniform tokens.
        merge_into: Row that each row is folded into, int64 `[T]`: itself for a row that stays, -1 for one that is
            dropped. None: nothing is folded.
        merge_weight: Factor of each row in its heir's sum, `[T]`; None means 1.
        size: What each row adds to its heir's `size`, `[T]`; None: its own size.
        key_weight: What each row adds to its heir's `key_weight`, `[T]`; None: the heir keeps its own.
        order: Sort key of the rows of an image after packing, `[T]`, bool (False first) or a number; None: the present
            order.
        soft: Training only: the whole new soft mask, `[T]`. With it no row leaves: rows may still be reordered, and
            heirs still take up what is folded into them.
        aux: Tensors for the policy's own losses.
        selection: What selecting the rows found out, so that `fuse` and `pack` need not find out again. It says nothing
            once `keep` is another tensor than the selection's or was written to in place, `rows_per_image` is another
            number, or the rows are those of another batch.
    """

    keep: Tensor
    rows_per_image: int | None = None
    merge_into: Tensor | None = None
    merge_weight: Tensor | None = None
    size: Tensor | None = None
    key_weight: Tensor | None = None
    order: Tensor | None = None
    soft: Tensor | None = None
    aux: Mapping[str, Tensor] = field(default_factory=dict)
    selection: Selected | None = None


def check_score(tokens: RaggedTokens, score: Tensor) -> None:
    """Refuse a score that is not one floating number a row, or one a row and head; costs nothing on the device.

    Args:
        tokens: The batch.
        score: `[T]` or `[T, H]`.

    Raises:
        ValueError: If it is anything else.
    """
    rows = tokens.x.shape[0]
    fits = isinstance(score, Tensor) and score.is_floating_point() and score.ndim in (1, 2)
    if not fits or score.shape[0] != rows or 0 in score.shape[1:]:
        got = f"{score.dtype} {list(score.shape)}" if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"score: must be floating [{rows}] or [{rows}, H], one entry a row, got {got}")
    if score.device != tokens.x.device:
        raise ValueError(f"score: must be on {tokens.x.device}, as the rows are, got {score.device}")


_RELATIVE = {None: "score", "deviation": "deviation", "maximum": "maximum"}


def keep_everything(tokens: RaggedTokens) -> KeepMask:
    """Keep every live row."""
    return KeepMask(tokens.live, rows_per_image=tokens.max_seqlen if tokens.uniform else None)


def keep_count(patches: int | Tensor, rate: float, rounding: str = "ceil") -> int | Tensor:
    """Number of patches to keep: `rate * patches`, rounded up or down in double precision, at least 1.

    The double product is rounded as the papers' code does it, with its traps: `ceil(0.28 * 25)` is 8.

    Args:
        patches: A number, or one for each image, `[B]`.
        rate: Fraction to keep.
        rounding: "ceil" or "floor".

    Raises:
        ValueError: If `rounding` is another word, or the rate lies outside (0, 1].
    """
    if not isinstance(rate, Real) or not 0 < rate <= 1:
        raise ValueError(f"keep_count: rate must be in (0, 1], got {rate!r}")
    if rounding not in ("ceil", "floor"):
        raise ValueError(f'keep_count: rounding must be "ceil" or "floor", got "{rounding}"')
    if isinstance(patches, Tensor):
        product = rate * patches.double()
        return (product.ceil() if rounding == "ceil" else product.floor()).clamp(min=1).to(patches.dtype)
    return max(1, math.ceil(rate * patches) if rounding == "ceil" else math.floor(rate * patches))


def rank(tokens: RaggedTokens, score: Tensor, within: KeepMask | None = None) -> Tensor:
    """Rank of each patch in its image by falling score, int64 `[T]`; ties go to the earlier row, NaN comes last.

    Args:
        tokens: The batch.
        score: `[T]`, or `[T, H]` to go by the mean over heads; its values on other rows than patches are not
            looked at.
        within: Rank only the patches that this mask keeps. All other rows rank behind them.

    Cost:
        One launch on a GPU, two stable sorts elsewhere; no synchronisation.
    """
    check_score(tokens, score)
    return rank_rows(
        mean_over_heads(score.detach()),
        _eligible(tokens, within),
        image_id=tokens.image_id,
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
    )


def top_k(
    tokens: RaggedTokens,
    score: Tensor,
    rate: float | None = None,
    *,
    count: int | Tensor | None = None,
    rounding: str = "ceil",
    of: str = "current",
    within: KeepMask | None = None,
) -> KeepMask:
    """Keep the patches of the highest score in each image.

    Args:
        tokens: The batch.
        score: `[T]`, or `[T, H]` to go by the mean over heads.
        rate: Fraction of the patches to keep; or give `count`.
        count: Patches to keep in each image: a number, or int `[B]`.
        rounding: "ceil" or "floor" of `rate` times the patches.
        of: "current" (the patches present now, a fused one included) or "initial" (those of the grid). Or "rows": of
            the best rows, prefix rows competing and `rate` times all rows of the image rounded down in number, those
            that are patches stay.
        within: Select among the patches that this mask keeps, and hand on its folds.

    Returns:
        At least one patch an image; `rows_per_image` is known if the tokens are uniform and the count is a number that
        the image does not change.

    Raises:
        ValueError: If not exactly one of `rate` and `count` is given, one is no such number, or `of` is another word.
    """
    if (rate is None) == (count is None):
        raise ValueError("top_k: exactly one of rate and count must be given")
    if of not in ("current", "initial", "rows"):
        raise ValueError(f'top_k: of must be "current", "initial" or "rows", got "{of}"')
    if isinstance(count, Tensor):
        return _select(tokens, score, Rule("count", each=counts_of_images(tokens, count)), within)
    if count is not None:
        check_host_count("top_k: count", count)
    present = _present(tokens, within)
    if rate is not None:
        base = tokens.grid[0] * tokens.grid[1] if of == "initial" else present
        count = keep_count(base or 1, rate, rounding)
        if of == "rows" or base is None:
            return _select(tokens, score, Rule("rows" if of == "rows" else rounding, rate), within)
    assert not isinstance(count, Tensor)
    assert count is not None
    if present is None:
        return _select(tokens, score, Rule("count", count), within)
    count = min(max(1, count), present)
    return _select(tokens, score, Rule("count", count), within, tokens.num_prefix_tokens + count)


def threshold(
    tokens: RaggedTokens,
    score: Tensor,
    value: float | Tensor,
    *,
    relative_to: str | None = None,
    min_keep: int = 1,
    max_keep: int | None = None,
    within: KeepMask | None = None,
) -> KeepMask:
    """Keep the patches whose score is at least `value`, and the best `min_keep` of each image in any case.

    Args:
        tokens: The batch.
        score: `[T]`, or `[T, H]` to go by the mean over heads.
        value: One threshold, or one for each image, `[B]`.
        relative_to: What `value` counts in: None, the score itself; "deviation", standard deviations above the mean
            score of the patches of the image; "maximum", a fraction of the largest of them.
        min_keep: Patches that every image keeps, at least 1.
        max_keep: Patches that no image exceeds.
        within: Select among the patches that this mask keeps, and hand on its folds.

    Raises:
        ValueError: If `relative_to` is another word, `value` is no number and not one for each image, or the bounds
            are no counts or cross.

    Cost:
        Two launches on a GPU, one for a batch of one image; no synchronisation.
    """
    if relative_to not in _RELATIVE:
        raise ValueError(
            f"threshold: relative_to must be one of {', '.join(map(str, _RELATIVE))}, got {relative_to!r}"
        )
    rule = _within_limits(_RELATIVE[relative_to], 0.0, min_keep, max_keep)
    if isinstance(value, Tensor):
        each = _one_an_image(tokens, value if value.ndim else value.expand(tokens.batch_size))
        return _select(tokens, score, rule._replace(each=each), within)
    if not isinstance(value, Real) or math.isnan(value):
        raise ValueError(f"threshold: value must be a number or one for each image, got {value!r}")
    return _select(tokens, score, rule._replace(value=value), within)


def top_p(
    tokens: RaggedTokens,
    score: Tensor,
    p: float,
    *,
    min_keep: int = 1,
    max_keep: int | None = None,
    within: KeepMask | None = None,
) -> KeepMask:
    """Keep the smallest set of patches that holds the share `p` of the image's score, the crossing patch included.

    Args:
        tokens: The batch.
        score: `[T]`, or `[T, H]` to go by the mean over heads; the share is of the sum over the patches that can be
            selected, where a score below 0 counts as 0.
        p: Share in (0, 1]; 1 keeps everything.
        min_keep: Patches that every image keeps, at least 1.
        max_keep: Patches that no image exceeds.
        within: Select among the patches that this mask keeps, and hand on its folds.

    Raises:
        ValueError: If `p` lies outside (0, 1], or the bounds are no counts or cross.

    Cost:
        Two launches on a GPU, one for a batch of one image; no synchronisation.
    """
    if not isinstance(p, Real) or not 0 < p <= 1:
        raise ValueError(f"top_p: p must be in (0, 1], got {p!r}")
    rule = _within_limits("mass" if p < 1 else "ceil", p, min_keep, max_keep)
    return _select(tokens, score, rule, within)


def check_within(tokens: RaggedTokens, within: KeepMask, owner: str = "within", what: str = "") -> None:
    """Refuse what is no mask of these rows; the caller is its owner, and may have another word for it."""
    if not isinstance(within, KeepMask):
        raise ValueError(f"{owner}: {what}must be a KeepMask, got {type(within).__name__}; use the verbs")
    keep, device = within.keep, tokens.image_id.device
    if keep.shape != tokens.image_id.shape or keep.dtype != torch.bool:
        raise ValueError(
            f"{owner}: keep must be bool {list(tokens.image_id.shape)}, one entry a row, got {keep.dtype} "
            f"{list(keep.shape)}"
        )
    if keep.device != device:
        raise ValueError(f"{owner}: keep must be on {device}, as the rows are, got {keep.device}")


def _eligible(tokens: RaggedTokens, within: KeepMask | None) -> Tensor:
    if within is not None:
        check_within(tokens, within)
    return tokens.is_patch if within is None else tokens.is_patch & within.keep


def _present(tokens: RaggedTokens, within: KeepMask | None) -> int | None:
    """Patches of each image that can be selected, if the host knows their number."""
    if within is not None:
        check_within(tokens, within)
    rows = tokens.max_seqlen if within is None else within.rows_per_image
    return rows - tokens.num_prefix_tokens if tokens.uniform and rows is not None else None


def _within_limits(kind: str, value: float, min_keep: int, max_keep: int | None) -> Rule:
    for name, number in (("min_keep", min_keep), ("max_keep", max_keep)):
        if number is not None:
            check_host_count(name, number)
    if max_keep is not None and max_keep < min_keep:
        raise ValueError(f"max_keep: must be at least min_keep={min_keep}, got {max_keep}")
    return Rule(kind, value, least=max(1, min_keep), most=None if max_keep is None else max(1, max_keep))


def check_host_count(name: str, number: object) -> None:
    """Refuse what is no whole number; the compiler's stand-in for one is one."""
    if isinstance(number, bool) or not isinstance(number, int | torch.SymInt):
        raise ValueError(f"{name} must be a whole number, got {number!r}")


def counts_of_images(tokens: RaggedTokens, counts: Tensor) -> Tensor:
    """Check that there is one whole number for each image, and put them where the tokens are."""
    if counts.is_floating_point() or counts.dtype == torch.bool:
        raise ValueError(f"KeepMask: counts of the images must be integers, got {counts.dtype}")
    return _one_an_image(tokens, counts)


def _one_an_image(tokens: RaggedTokens, values: Tensor) -> Tensor:
    """Check that there is one value for each image, and put them where the tokens are."""
    if values.shape != (tokens.batch_size,):
        raise ValueError(
            f"KeepMask: one value for each of the {tokens.batch_size} images is needed, got {list(values.shape)}"
        )
    return values.to(tokens.cu_seqlens.device)


def _is_bool(values: object) -> bool:
    return isinstance(values, Tensor) and values.dtype == torch.bool


def _select(
    tokens: RaggedTokens, score: Tensor, rule: Rule, within: KeepMask | None, rows: int | None = None
) -> KeepMask:
    """Select by a rule; `rows` an image are left if the host knows that."""
    check_score(tokens, score)
    if within is not None:
        check_within(tokens, within)
    # Selecting knows of two groups, one behind the other; packing finds out about any other order.
    order = None if within is None or not _is_bool(within.order) else within.order
    chosen = select(
        score,
        rule,
        batch_size=tokens.batch_size,
        rows=tokens.max_seqlen,
        prefix=tokens.num_prefix_tokens,
        cu_seqlens=None if tokens.uniform else tokens.cu_seqlens,
        eligible=None if within is None else within.keep,
        order=order,
    )
    selection = Selected.of(tokens, score, chosen, rows, order, among_all=within is None)
    mask = KeepMask(chosen.keep) if within is None else within
    return replace(mask, keep=chosen.keep, rows_per_image=rows, selection=selection)
