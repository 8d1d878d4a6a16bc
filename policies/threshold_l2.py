"""Pruning by the L2 norm of a token: arXiv 2604.15408, and a real threshold, which that system lacks.

The published "Threshold-L2" is no threshold but a fixed share: the `int(rows * share)` rows of the largest norm with
CLS among them, CLS then forced in. That is `rule="published"`. Beware: in timm, AugReg and DINOv2 ViTs the tokens of
very large norm are artefacts (Darcet et al., "Vision Transformers Need Registers", ICLR 2024), and a norm threshold
keeps exactly those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.checks import check_limits, check_word
from prunevit.keepmask import KeepMask, threshold, top_k
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens

RULES = ("absolute", "deviation", "maximum", "share", "published")


class ThresholdL2(PruningPolicy):
    """Keep the patches of large norm; the number differs from image to image, except for the rule "share"."""

    knob = "threshold"
    site = "before_block"

    def __init__(
        self,
        threshold: float | Sequence[float] = 0.0,
        layers: Layers = (4,),
        rule: str = "deviation",
        min_keep: int = 1,
        max_keep: int | None = None,
    ) -> None:
        """Choose what the threshold means.

        Args:
            threshold: For the rule "absolute" the norm itself; "deviation" how many standard deviations above the
                image's mean norm; "maximum" a fraction of its largest norm; "share" the fraction of the patches to
                keep; "published" the fraction of the rows, CLS included.
            layers: Blocks before which it prunes: 4 is the output of the first four.
            rule: One of `RULES`.
            min_keep: Patches that every image keeps.
            max_keep: Patches that no image exceeds.

        Raises:
            ValueError: If the rule is not known, a share lies outside (0, 1], or the bounds are no counts, cross, or go
                with a rule that counts.
        """
        super().__init__(threshold, layers)
        check_word("ThresholdL2", "rule", rule, RULES)
        check_limits("ThresholdL2", min_keep, max_keep)
        if rule in ("share", "published"):
            if not all(0 < share <= 1 for share in self.knob_values):
                raise ValueError(
                    f'ThresholdL2: threshold must be in (0, 1] for rule="{rule}", got {threshold}'
                )
            if (min_keep, max_keep) != (1, None):
                raise ValueError(f'ThresholdL2: min_keep and max_keep must be left out with rule="{rule}"')
        self.rule, self.min_keep, self.max_keep = rule, min_keep, max_keep

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Norm of a row."""
        wide = torch.promote_types(tokens.x.dtype, torch.float32)
        return torch.linalg.vector_norm(tokens.x, dim=-1, dtype=wide)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep what is large."""
        norm, value = self.score(tokens, attention, layer), self.rate(layer)
        if self.rule == "share":
            return top_k(tokens, norm, value, rounding="floor")
        if self.rule == "published":
            return top_k(tokens, norm, value, of="rows")
        relative_to = None if self.rule == "absolute" else self.rule
        return threshold(
            tokens, norm, value, relative_to=relative_to, min_keep=self.min_keep, max_keep=self.max_keep
        )

    def macs(self, counts: Tensor) -> Tensor:
        """One product for each channel of each row."""
        return counts.double() * self.width

    def setup(self, info: ModelInfo) -> None:
        """Learn the width, for the cost."""
        super().setup(info)
        self.width = info.width
