"""ATS (Fayyaz et al., ECCV 2022), the official variant, written out densely.

After the attention of a block each patch scores (CLS attention summed over heads) times the norm of its
value vector, heads concatenated. Inverse-transform sampling on the scores sorted ascending picks patches on
a fixed grid of the cumulative score; a patch picked several times stays once, so counts differ from image
to image.

The result is the one of each image alone. Differs from the authors' code: budgets below the present count,
which crash there, shorten the grid; an image always keeps a patch (a last index of 1 counts as a duplicate
there); with more prefix tokens than CLS the grid has one point for each initial patch.
"""

from collections.abc import Sequence

import torch
from dense_dynamicvit import masked_softmax
from dense_walk import Attended, Record, Tokens, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def sample(score: Tensor, points: int) -> Tensor:
    """Pick patches [<= points] by score [n]; the result is in ascending order of score, without repeats."""
    value, order = (score / score.sum()).detach().sort()
    if len(order) == 1:
        return order
    cdf = value.cumsum(0)
    cdf = (cdf - cdf[0]) / (cdf[-1] - cdf[0])
    grid = torch.linspace(float(cdf[cdf > 0].min()), 1.0, points, dtype=cdf.dtype)
    nearest = (grid[:, None] - cdf).abs().argmin(1)
    return order[nearest.unique()]


def points(tokens: Tokens, budget: float | None) -> int:
    """Grid points: one for each initial patch, or less with a budget of rows (CLS included, 8 at least)."""
    if budget is None:
        return tokens.num_patches
    rows = budget * (tokens.count + 1) if budget <= 1 else budget
    return min(max(round(rows), 8) - 1, tokens.num_patches)


def ats(
    model: VisionTransformer,
    images: Tensor,
    budget: float | None = None,
    layers: Sequence[int] = tuple(range(3, 12)),
    eps: float = 0.0,
) -> tuple[Tensor, Record]:
    """Sample at each of `layers`; eps is that of the authors' softmax (1e-6), which the whole walk uses."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        attention = attended.probability[:, 0].sum(0)
        score = (attention * attended.v.transpose(0, 1).flatten(1).norm(dim=-1))[tokens.num_prefix :]
        return tokens.keep(sample(score, points(tokens, budget)))

    return walk(model, images, layers, rule, probability=lambda s, t: masked_softmax(s, t, eps))
