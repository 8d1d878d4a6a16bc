"""K-medoids: keep the patches at the centres of clusters (Haurum et al., "Which Tokens to Use?", ICCVW 2023).

Their weighted variant: a patch weighs what attention it received, and as in their code the medoid of a cluster is the
member of least own weight times sum of distances to *all* patches (a textbook medoid sums over the cluster, weighted
by the others). Differs from their code: a medoid never leaves its own cluster, where features are equal; distillation
and register tokens take no part.
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from prunevit.checks import check_counting, check_whole
from prunevit.keepmask import KeepMask, top_k
from prunevit.kernels.clusters import medoids
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
        keep = medoids(
            tokens.x,
            weight,
            start.keep,
            tokens.source,
            cu_seqlens=tokens.cu_seqlens,
            max_seqlen=tokens.max_seqlen,
            turns=self.iterations,
        )
        return replace(start, keep=keep)

    def macs(self, counts: Tensor) -> Tensor:
        """The distances."""
        return counts.double() ** 2 * self.width
