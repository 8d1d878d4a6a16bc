"""A policy for speed measurements alone: how many patches of an image stay is drawn, with a given spread.

Random weights give images of nearly equal counts where trained ones do not; here the spread is set.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.draws import keyed_uniform
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class Drawn(PruningPolicy):
    """Keep the patches of the largest norm; their number is normal around a share, with a coefficient of variation."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    site = "before_block"

    def __init__(
        self, keep_rate: float = 0.5, layers: Sequence[int] = (4,), variation: float = 0.25, seed: int = 0
    ) -> None:
        """Choose mean and spread.

        Args:
            keep_rate: Mean share of the patches of the grid.
            layers: Blocks before which it prunes.
            variation: Standard deviation over mean.
            seed: Of the draws, which are keyed by the image.
        """
        super().__init__(keep_rate, layers)
        self.variation, self.seed = variation, seed

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Norm of a row."""
        return tokens.x.float().norm(dim=-1)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep as many as were drawn; what is not there any more is not kept."""
        uniform = keyed_uniform(self.seed, tokens.image_index, torch.full_like(tokens.image_index, layer))
        deviation = torch.special.ndtri(uniform.clamp(1e-6, 1 - 1e-6))
        patches = tokens.grid[0] * tokens.grid[1]
        count = self.rate(layer) * patches * (1 + self.variation * deviation)
        count = count.round().int().clamp(1, patches)
        return top_k(tokens, self.score(tokens, attention, layer), count=count)
