"""DiffRate: prune the least attended patches, then merge, by learned counts (Chen et al., ICCV 2023).

Evaluation with given counts: those of a schedule that the authors published, or one's own. Differs from the authors'
code: distillation and register tokens are never pruned or merged; a similarity below 0 counts as 0 (there, it is
subtracted from a key weight, whose logarithm is taken); images of a batch may differ in length.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prunevit.checks import check_whole
from prunevit.folding import merge, nearest
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens, score_needs

DEIT_SMALL_PRUNE = (197, 196, 190, 168, 150, 139, 129, 117, 99, 78, 58, 3)
DEIT_SMALL_MERGE = (197, 194, 176, 156, 141, 133, 121, 107, 88, 64, 56, 3)
"""The published schedule of DeiT-S at 2.9 GFLOPs."""


class DiffRate(PruningPolicy):
    """Drop the tail of the patches sorted by attention, fold the tail of the rest into patches of the head.

    What is folded joins the patch of most similar features, by a plain mean. It adds its key weight, times that
    similarity, to its heir's: attention weighs the keys so, in every block.
    """

    def __init__(
        self,
        prune_counts: Sequence[int] = DEIT_SMALL_PRUNE,
        merge_counts: Sequence[int] = DEIT_SMALL_MERGE,
        layers: Layers = ":",
        score_source: str = "cls",
    ) -> None:
        """Set the schedule.

        Args:
            prune_counts: Rows left by pruning at each layer, CLS included and other prefix tokens not; a count above
                what is there prunes nothing.
            merge_counts: Rows then left by merging, counted alike; likewise.
            layers: Blocks after whose attention it acts.
            score_source: "cls", "prefix" (mean over all prefix tokens) or "received" (mean over all queries).

        Raises:
            ValueError: If a count is not a whole number from 1 on.
        """
        super().__init__(None, layers)
        self.needs = score_needs("DiffRate", score_source)
        self.prune_counts, self.merge_counts = tuple(prune_counts), tuple(merge_counts)
        for name, counts in (("prune_counts", self.prune_counts), ("merge_counts", self.merge_counts)):
            for count in counts:
                check_whole("DiffRate", name, count, 1)
        self.score_source = score_source

    def setup(self, info: ModelInfo) -> None:
        """Check that there are counts for each layer.

        Raises:
            ValueError: If there are not.
        """
        super().setup(info)
        self.width = info.width
        for name, counts in (("prune_counts", self.prune_counts), ("merge_counts", self.merge_counts)):
            if len(counts) != len(self.layers):
                raise ValueError(
                    f"DiffRate: {name} must hold one count for each of the {len(self.layers)} layers, "
                    f"got {len(counts)}; give a schedule of this model"
                )

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Attention that a row gets."""
        assert attention is not None
        return attention.by_head(self.score_source)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Prune, then merge."""
        stage = self.layers.index(layer)
        score = self.score(tokens, attention, layer)
        left = top_k(tokens, score, count=self.prune_counts[stage] - 1)
        head = top_k(tokens, score, count=self.merge_counts[stage] - 1, within=left)
        if head.rows_per_image is not None and head.rows_per_image == left.rows_per_image:
            return left
        tail, heirs = left.keep ^ head.keep, head.keep & tokens.is_patch
        partner, similarity = nearest(tokens, tokens.x.detach(), queries=tail, keys=heirs, cosine=True)
        one = torch.ones_like(similarity)
        weight = torch.where(tail, similarity.clamp(min=0), one)
        weight = weight if tokens.key_weight is None else weight * tokens.key_weight
        return replace(merge(tokens, head, partner, one), key_weight=weight)

    def macs(self, counts: Tensor) -> Tensor:
        """The products of the tail with the head: at most those of two halves."""
        return (counts.double() / 2) ** 2 * self.width
