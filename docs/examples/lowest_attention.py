"""The control experiment: keep the patches that CLS attends to least. A score that means something must beat it by far.

Run it from this folder:
    uv run prunevit evaluate policy=lowest_attention:LowestAttention policy.keep_rate=0.5
"""

from prunevit import AttentionState, KeepMask, RaggedTokens, top_k
from prunevit.policies import TopK


class LowestAttention(TopK):
    """Keep the patches that get the least attention."""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the worst."""
        assert attention is not None
        score = -attention.by_head(self.score_source)
        return top_k(tokens, score, self.rate(layer), rounding=self.rounding, of=self.of)
