"""Structured pruning: the same patches of every image, chosen by where they stand.

"center" is the centre-distance rule of Haurum et al., "Which Tokens to Use?" (ICCVW 2023), here on any grid and
with an exact count. "grid" orders the patches as an ordered-dither matrix does (Bayer, 1973): at a rate of 1/2 a
checkerboard stays, at 1/4 every second row and column, and the patches of a later stage are always among those of an
earlier one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.checks import check_counting, check_word
from prunevit.keepmask import KeepMask, top_k
from prunevit.policy import Layers, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class FixedRate(PruningPolicy):
    """Keep a pattern of the grid that no image changes."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        pattern: str = "grid",
        rounding: str = "floor",
        of: str = "initial",
        compound: bool = True,
    ) -> None:
        """Choose the pattern.

        Args:
            keep_rate: Fraction of the patches kept at each layer: one, or one a layer.
            layers: Blocks after whose attention it prunes.
            pattern: "grid" (evenly strewn) or "center" (nearest to the middle).
            rounding: "ceil" or "floor".
            of: Fraction of the "current" or of the "initial" patches.
            compound: Whether the rates of the stages multiply; goes with `of="initial"`.

        Raises:
            ValueError: If the pattern or a count convention is another word, or those contradict each other.
        """
        super().__init__(keep_rate, layers, compound)
        check_counting("FixedRate", rounding, of, compound)
        check_word("FixedRate", "pattern", pattern, ("grid", "center"))
        self.pattern, self.rounding, self.of = pattern, rounding, of

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """How early the pattern takes a patch."""
        height, width = tokens.grid
        source = tokens.source.clamp(min=0)
        row, column = source // width, source % width
        if self.pattern == "grid":
            return -_dither(row, column)
        return -((row - (height - 1) / 2) ** 2 + (column - (width - 1) / 2) ** 2).float()

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the pattern."""
        score = self.score(tokens, attention, layer)
        return top_k(tokens, score, self.rate(layer), rounding=self.rounding, of=self.of)


def _dither(row: Tensor, column: Tensor, bits: int = 8) -> Tensor:
    """Place of a cell in the dither matrix of side 2^bits: its bits interleaved, in reverse."""
    place = torch.zeros_like(row)
    for bit in range(bits):
        low, mixed = (row >> bit) & 1, ((row ^ column) >> bit) & 1
        place = (place << 2) | (mixed << 1) | low
    return place.float()
