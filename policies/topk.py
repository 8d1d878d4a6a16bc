"""Attention-score top-k: the baseline of Haurum et al., "Which Tokens to Use?" (ICCVW 2023).

The count is by default that of EViT without its fused token, `ceil(keep_rate * present patches)`;
`rounding="floor", of="initial", compound=True` is the count of Haurum et al. Differs from their code: a stage where
nothing is to be dropped is a normal case.
"""

from collections.abc import Sequence

from torch import Tensor

from prunevit.checks import check_counting
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens, score_needs


class TopK(PruningPolicy):
    """Keep the patches that get the most attention."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        score_source: str = "cls",
        rounding: str = "ceil",
        of: str = "current",
        compound: bool = False,
    ) -> None:
        """Choose the count and the score.

        Args:
            keep_rate: Fraction of the patches kept at each layer: one, or one a layer.
            layers: Blocks after whose attention it prunes.
            score_source: "cls", "prefix" (mean over all prefix tokens) or "received" (mean over all queries).
            rounding: "ceil" or "floor".
            of: Fraction of the "current" or of the "initial" patches.
            compound: Whether the rates of the stages multiply; goes with `of="initial"`.

        Raises:
            ValueError: If a setting is not one of those, or contradicts another.
        """
        super().__init__(keep_rate, layers, compound)
        check_counting(type(self).__name__, rounding, of, compound)
        self.needs = score_needs(type(self).__name__, score_source)
        self.score_source, self.rounding, self.of = score_source, rounding, of

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Attention that a row gets."""
        assert attention is not None
        return attention.by_head(self.score_source)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the best."""
        score = self.score(tokens, attention, layer)
        return top_k(tokens, score, self.rate(layer), rounding=self.rounding, of=self.of)
