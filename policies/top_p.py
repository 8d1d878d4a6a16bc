"""Cumulative-mass pruning: the smallest set of patches that holds the share `p` of CLS's attention to all patches.

The patch that crosses the share is kept, unlike in the public code of arXiv 2604.15408.
"""

from collections.abc import Sequence

from torch import Tensor

from prunevit.checks import check_limits
from prunevit.keepmask import KeepMask, top_p
from prunevit.policy import Layers, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens, score_needs


class TopP(PruningPolicy):
    """Keep as many patches as it takes to hold a share of the attention; the number differs from image to image."""

    knob = "p"
    knob_range = (0.0, 1.0)

    def __init__(
        self,
        p: float | Sequence[float] = 0.9,
        layers: Layers = (3, 6, 9),
        score_source: str = "cls",
        min_keep: int = 1,
        max_keep: int | None = None,
    ) -> None:
        """Choose the share.

        Args:
            p: Share of the attention that stays: one, or one a layer.
            layers: Blocks after whose attention it prunes.
            score_source: "cls", "prefix" (mean over all prefix tokens) or "received" (mean over all queries).
            min_keep: Patches that every image keeps.
            max_keep: Patches that no image exceeds.

        Raises:
            ValueError: If the bounds are no counts, or cross.
        """
        super().__init__(p, layers)
        check_limits(type(self).__name__, min_keep, max_keep)
        self.needs = score_needs(type(self).__name__, score_source)
        self.score_source, self.min_keep, self.max_keep = score_source, min_keep, max_keep

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Attention that a row gets, by head."""
        assert attention is not None
        return attention.by_head(self.score_source)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the share."""
        score = self.score(tokens, attention, layer)
        return top_p(tokens, score, self.rate(layer), min_keep=self.min_keep, max_keep=self.max_keep)
