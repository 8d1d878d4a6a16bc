"""Random pruning: the ablation baseline of DynamicViT (Rao et al., NeurIPS 2021).

Draws are keyed by (seed, image, layer, patch), so batch order, batch size and number of processes change nothing. In
training each forward pass draws anew.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.checks import check_counting, check_seed
from prunevit.draws import keyed_uniform
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class RandomPruning(PruningPolicy):
    """Keep a random share of the patches of each image."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    stochastic = True

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        seed: int = 0,
        shared: bool = False,
        rounding: str = "ceil",
        of: str = "current",
        compound: bool = False,
    ) -> None:
        """Choose the count and the draw.

        Args:
            keep_rate: Fraction of the patches kept at each layer: one, or one a layer.
            layers: Blocks after whose attention it prunes.
            seed: Of the draws in evaluation.
            shared: Draw one mask for all images: what a static mask of this count gives.
            rounding: "ceil" or "floor".
            of: Fraction of the "current" or of the "initial" patches.
            compound: Whether the rates of the stages multiply; goes with `of="initial"`.

        Raises:
            ValueError: If a setting is not one of those, or contradicts another.
        """
        super().__init__(keep_rate, layers, compound)
        check_counting("RandomPruning", rounding, of, compound)
        check_seed("RandomPruning", seed)
        self.seed, self.shared, self.rounding, self.of = seed, shared, rounding, of

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Draw."""
        images = torch.cat([tokens.image_index, tokens.image_index.new_zeros(1)])
        image = torch.zeros_like(images) if self.shared else images
        keys = [image[tokens.image_id], tokens.source]
        if self.training:
            keys.append(torch.randint(2**31, (1,), device=image.device))
        return keyed_uniform(self.seed * 1009 + layer, *keys)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the luckiest."""
        score = self.score(tokens, attention, layer)
        return top_k(tokens, score, self.rate(layer), rounding=self.rounding, of=self.of)
