"""k-medoids (TokenReduction, Haurum et al., ICCVW 2023, weighted variant), written out densely.

Before a block: int(P * rate^stage) medoids of the patches, which stay as they are; nothing is averaged. A
patch's weight is the attention it received in the block before, summed over heads and queries. The start is
the heaviest patches; then, three times, each cluster's medoid becomes the member with the smallest own
weight times sum of distances to *all* patches (the authors' rule; a textbook medoid sums over the cluster,
weighted by the others).
"""

from collections.abc import Sequence

import torch
from dense_walk import Attended, Record, Tokens, kept_count, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def medoids(x: Tensor, weight: Tensor, count: int, iterations: int) -> Tensor:
    """Rows of x [n, C] that are medoids [count]."""
    distance = (x[:, None] - x).norm(dim=-1)
    cost = weight * distance.sum(1)
    centres = weight.argsort(descending=True)[:count].clone()
    for _ in range(iterations):
        cluster = distance[:, centres].argmin(1)
        for k in range(count):
            centres[k] = cost.masked_fill(cluster != k, torch.inf).argmin()
    return centres


def kmedoids(
    model: VisionTransformer,
    images: Tensor,
    keep_rate: float,
    layers: Sequence[int] = (3, 6, 9),
    iterations: int = 3,
) -> tuple[Tensor, Record]:
    """Keep the medoids; the first layer must not be block 0, which has no attention before it."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        count = kept_count(tokens, keep_rate, stage, "floor", "initial", compound=True)
        weight = attended.probability.sum((0, 1))[tokens.num_prefix :].detach()
        return tokens.keep(medoids(tokens.patches.detach(), weight, count, iterations))

    return walk(model, images, layers, rule, "before_block")
