"""K-medoids: keep the patches at the centres of clusters (Haurum et al., "Which Tokens to Use?", ICCVW 2023).

Their weighted variant: a patch weighs what attention it received, and as in their code the medoid of a cluster is the
member of least own weight times sum of distances to *all* patches (a textbook medoid sums over the cluster, weighted
by the others). Differs from their code: a medoid never leaves its own cluster, where features are equal; distillation
and register tokens take no part.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prunevit.checks import check_counting, check_whole
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class KMedoids(PruningPolicy):
    """Keep the medoids of the patches as they are; nothing is averaged.

    The start is the patches that received most attention in the block before; each turn assigns every patch to its
    nearest medoid and lets each cluster choose its medoid anew.
    """

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    site = "before_block"
    needs = frozenset({"received_attention"})

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        iterations: int = 3,
        rounding: str = "floor",
        of: str = "initial",
        compound: bool = True,
    ) -> None:
        """Choose the count.

        Args:
            keep_rate: Fraction of the patches kept at each layer: one, or one a layer.
            layers: Blocks before which it acts; not block 0, before which there is no attention.
            iterations: Turns.
            rounding: "ceil" or "floor".
            of: Fraction of the "current" or of the "initial" patches.
            compound: Whether the rates of the stages multiply; goes with `of="initial"`.

        Raises:
            ValueError: If a setting is not one of those, or contradicts another.
        """
        super().__init__(keep_rate, layers, compound)
        check_counting("KMedoids", rounding, of, compound)
        check_whole("KMedoids", "iterations", iterations, 0)
        self.iterations, self.rounding, self.of = iterations, rounding, of

    def setup(self, info: ModelInfo) -> None:
        """Learn the width, for the cost."""
        super().setup(info)
        self.width = info.width

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the medoids."""
        assert attention is not None
        weight = attention.score("received").detach()
        start = top_k(tokens, weight, self.rate(layer), rounding=self.rounding, of=self.of)
        distance = patch_distances(tokens)
        cost = tokens.to_padded(weight) * distance.masked_fill(distance.isinf(), 0).sum(2)
        cost = cost.masked_fill(~tokens.to_padded(tokens.is_patch, fill=False) | cost.isnan(), torch.inf)
        column = torch.arange(tokens.max_seqlen, device=weight.device)
        medoid = tokens.to_padded(start.keep & tokens.is_patch, fill=False)
        for _ in range(self.iterations):
            cluster = distance.masked_fill(~medoid[:, None, :], torch.inf).argmin(2)
            medoid = _cheapest(cost, torch.where(medoid, column, cluster), column)
        keep = (tokens.to_rows(medoid) & tokens.is_patch) | (tokens.live & ~tokens.is_patch)
        return replace(start, keep=keep)

    def macs(self, counts: Tensor) -> Tensor:
        """The distances."""
        return counts.double() ** 2 * self.width


def patch_distances(tokens: RaggedTokens) -> Tensor:
    """Euclidean distances between the patches of each image, at least fp32 `[B, max_seqlen, max_seqlen]`.

    Infinite where a row or a column is no patch of the image. Without a gradient.

    Cost:
        A padded copy and one batched product: O(T * max_seqlen).
    """
    x = tokens.to_padded(tokens.x.detach())
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    patch = tokens.to_padded(tokens.is_patch, fill=False)
    return torch.cdist(x, x).masked_fill(~(patch[:, :, None] & patch[:, None, :]), torch.inf)


def _cheapest(cost: Tensor, cluster: Tensor, column: Tensor) -> Tensor:
    """Mark the member of least cost of each cluster, the earliest of equals, bool `[B, N]`.

    Args:
        cost: `[B, N]`, infinite for what belongs to no cluster.
        cluster: Column that names each member's cluster, int64 `[B, N]`.
        column: 0 to N - 1.
    """
    least = torch.full_like(cost, torch.inf).scatter_reduce(1, cluster, cost, "amin")
    best = cost == least.gather(1, cluster)
    place = torch.where(best, column, len(column))
    first = torch.full_like(cluster, len(column)).scatter_reduce(1, cluster, place, "amin")
    return column == first.gather(1, cluster)
