"""Norm threshold and top-p, written out densely: policies whose count differs from image to image.

Norms are L2 norms of the residual stream (no LayerNorm). One patch stays at least, the best; survivors keep
their order. `min_keep` and `max_keep` bound the patches of an image.
"""

from collections.abc import Sequence

from dense_walk import Attended, Record, Tokens, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def keep_best(
    tokens: Tokens, score: Tensor, count: int, min_keep: int = 1, max_keep: int | None = None
) -> Tokens:
    """Keep the `count` best patches by score [n], within the bounds, in their present order."""
    count = min(max(count, min_keep), max_keep or tokens.count)
    return tokens.keep(score.argsort(descending=True)[:count].sort().values)


def cutoff(norm: Tensor, threshold: float, relative: str) -> Tensor | float:
    """Smallest norm that stays; statistics over the patches of the image [n], population deviation."""
    if relative == "absolute":
        return threshold
    if relative == "mean_std":
        return norm.mean() + threshold * norm.std(correction=0)
    return {"max": norm.max()}[relative] * threshold


def norm_threshold(
    model: VisionTransformer,
    images: Tensor,
    threshold: float,
    layers: Sequence[int] = (4,),
    relative: str = "absolute",
    site: str = "before_block",
    min_keep: int = 1,
    max_keep: int | None = None,
) -> tuple[Tensor, Record]:
    """Keep patches whose norm is at least the cut-off.

    That is the threshold itself ("absolute"), so many standard deviations above the image's mean
    ("mean_std"), or that fraction of the image's maximum ("max").
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        norm = tokens.patches.norm(dim=-1)
        count = int((norm >= cutoff(norm, threshold, relative)).sum())
        return keep_best(tokens, norm, count, min_keep, max_keep)

    return walk(model, images, layers, rule, site)


def norm_fixed_ratio(
    model: VisionTransformer,
    images: Tensor,
    ratio: float,
    layers: Sequence[int] = (4,),
    site: str = "before_block",
) -> tuple[Tensor, Record]:
    """Keep the int(S * (1 - ratio)) rows of largest norm out of S, prefix rows competing and then forced on.

    This is the published rule. An image whose CLS is among the winners keeps one patch less than another.
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        norm = tokens.x.norm(dim=-1)
        winners = norm.argsort(descending=True)[: int(len(norm) * (1 - ratio))]
        count = int((winners >= tokens.num_prefix).sum())
        return keep_best(tokens, norm[tokens.num_prefix :], count)

    return walk(model, images, layers, rule, site)


def top_p(
    model: VisionTransformer,
    images: Tensor,
    p: float,
    layers: Sequence[int] = (3, 6, 9),
    min_keep: int = 1,
    max_keep: int | None = None,
) -> tuple[Tensor, Record]:
    """Keep the smallest set of patches that has the share p of CLS's attention to patches (1 keeps all)."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        score = attended.cls_score(tokens)
        mass = (score / score.sum()).sort(descending=True).values.cumsum(0)
        count = tokens.count if p >= 1 else int((mass < p).sum()) + 1
        return keep_best(tokens, score, count, min_keep, max_keep)

    return walk(model, images, layers, rule)
