"""DPC-KNN (TokenReduction, Haurum et al., ICCVW 2023), written out densely.

Before a block: patches with a high density that are far from denser ones become int(P * rate^stage)
centres; every patch joins its nearest centre and a cluster becomes the weighted mean of its members.
Distances are divided by sqrt(C); the density's neighbours include the patch itself; the mean divides by the
sum of weights + 1e-6.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from dense_walk import Attended, Record, Tokens, kept_count, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


def cluster(x: Tensor, count: int, neighbours: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Centres [count] among the rows of x [n, C], best first, and each row's cluster [n]."""
    distance = (x[:, None] - x).norm(dim=-1) / x.shape[1] ** 0.5
    nearest = distance.topk(min(neighbours, len(x)), largest=False).values
    density = (-nearest.square().mean(-1)).exp() + 1e-6 * noise
    denser = density[None] > density[:, None]
    gap = torch.where(denser, distance, distance.max()).min(1).values
    centres = (gap * density).argsort(descending=True)[:count]
    member = distance[centres].argmin(0)
    member[centres] = torch.arange(count)
    return centres, member


def dpcknn(
    model: VisionTransformer,
    images: Tensor,
    keep_rate: float,
    noise: Sequence[Tensor],
    layers: Sequence[int] = (3, 6, 9),
    neighbours: int = 5,
    scorers: Sequence[nn.Module] | None = None,
) -> tuple[Tensor, Record]:
    """Cluster with the given noise, uniform in [0, 1): for each stage [B, patches there].

    Weights are exp(scorer(x)) with one scorer [n, C] -> [n, 1] a stage, or all equal (off the shelf).
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        count = kept_count(tokens, keep_rate, stage, "floor", "initial", compound=True)
        x = tokens.patches
        centres, member = cluster(x.detach(), count, neighbours, noise[stage][tokens.image])
        weight = x.new_ones(len(x), 1) if scorers is None else scorers[stage](x).exp()
        total = x.new_zeros(count, 1).index_add(0, member, weight) + 1e-6
        mean = x.new_zeros(count, x.shape[1]).index_add(0, member, x * (weight / total[member]))
        kept = tokens.keep(centres)
        return replace(kept, x=torch.cat([tokens.x[: tokens.num_prefix], mean]))

    return walk(model, images, layers, rule, "before_block")
