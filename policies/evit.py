"""EViT: the rest is fused into one token (Liang et al., "Not All Patches are What You Need", ICLR 2022).

Differs from the authors' code: the fused row stands where the best loser stood, not at the end (attention does not see
the order); distillation and register tokens are never pruned or fused (theirs can be); any grid, not only square ones.
"""

from prunevit.folding import fuse
from prunevit.keepmask import KeepMask, top_k
from prunevit.policies.topk import TopK
from prunevit.tokens import AttentionState, RaggedTokens


class EViT(TopK):
    """Keep the patches that CLS attends to most; fuse the rest into one token, weighted by that attention.

    The fused token is an ordinary one from then on: it is scored, counted, kept or fused again at the next stage.
    """

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the best and fuse the rest."""
        score = self.score(tokens, attention, layer)
        best = top_k(tokens, score, self.rate(layer), rounding=self.rounding, of=self.of)
        return fuse(tokens, best, score)
