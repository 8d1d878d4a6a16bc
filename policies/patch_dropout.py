"""Patch dropout: train on a random part of the patches of each image (Liu et al., "PatchDropout", WACV 2023).

The count is timm's, `max(1, int(patches * (1 - prob)))`. timm's own module (`patch_drop_rate`) does the same before the
first block; as a policy it can act before any block, and together with others.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask, keep_everything, top_k
from prunevit.policy import Layers, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class PatchDropout(PruningPolicy):
    """Keep random patches of each image in training, drawn anew in each forward pass; all in evaluation."""

    knob = "prob"
    site = "before_block"
    stochastic = True

    def __init__(self, prob: float | Sequence[float] = 0.5, layers: Layers = (0,)) -> None:
        """Choose the share.

        Args:
            prob: Fraction of the patches dropped at each layer: one, or one a layer.
            layers: Blocks before which it acts.

        Raises:
            ValueError: If it lies outside [0, 1).
        """
        super().__init__(prob, layers)
        if not all(0 <= value < 1 for value in self.knob_values):
            raise ValueError(f"PatchDropout: prob must be in [0, 1), got {prob}")

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Draw."""
        return torch.rand(tokens.source.shape, device=tokens.source.device)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the luckiest in training, everything in evaluation."""
        if not self.training:
            return keep_everything(tokens)
        score = self.score(tokens, attention, layer)
        return top_k(tokens, score, 1.0 - self.rate(layer), rounding="floor")
