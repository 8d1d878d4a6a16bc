"""Pruning by the L2 norm of a token: arXiv 2604.15408, and a real threshold, which that system lacks.

The published "Threshold-L2" is no threshold but a fixed share: the `int(rows * share)` rows of the largest norm with
CLS among them, CLS then forced in. That is `rule="published"`. Beware: in timm, AugReg and DINOv2 ViTs the tokens of
very large norm are artefacts (Darcet et al., "Vision Transformers Need Registers", ICLR 2024), and a norm threshold
keeps exactly those.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask, threshold, top_k
from prunevit.policy import ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens

RULES = ("absolute", "deviation", "maximum", "share", "published")


class ThresholdL2(PruningPolicy):
    """Keep the patches of large norm; the number differs from image to image, except for the rule "share"."""

    knob = "threshold"
    site = "before_block"

    def __init__(
        self,
        threshold: float | Sequence[float] = 0.0,
        layers: Sequence[int] | str = (4,),
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
            ValueError: If the rule is not known, or a share lies outside (0, 1].
        """
        super().__init__(threshold, layers)
        if rule not in RULES:
            raise ValueError(f"ThresholdL2: rule must be one of {', '.join(RULES)}, got {rule!r}")
        shares = self.knob_value if isinstance(self.knob_value, tuple) else (threshold,)
        if rule in ("share", "published") and not all(0 < share <= 1 for share in shares):  # type: ignore[operator]
            raise ValueError(f'ThresholdL2: threshold must be in (0, 1] for rule="{rule}", got {threshold}')
        self.rule, self.min_keep, self.max_keep = rule, min_keep, max_keep

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Norm of a row."""
        return tokens.x.to(torch.promote_types(tokens.x.dtype, torch.float32)).norm(dim=-1)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep what is large."""
        norm = self.score(tokens, attention, layer)
        rate = self.rate(layer)
        if self.rule == "share":
            return top_k(tokens, norm, rate, rounding="floor")
        if self.rule == "published":
            return self._published(tokens, norm, rate)
        bound: float | Tensor = rate
        if self.rule == "deviation":
            mean = self._patch_mean(tokens, norm)
            variance = self._patch_mean(tokens, norm**2) - mean**2
            bound = mean + rate * variance.clamp(min=0).sqrt()
        elif self.rule == "maximum":
            bound = rate * tokens.max(norm.masked_fill(~tokens.is_patch, 0.0))
        return threshold(tokens, norm, bound, min_keep=self.min_keep, max_keep=self.max_keep)

    def macs(self, counts: Tensor) -> Tensor:
        """One product for each channel of each row."""
        return counts.double() * self.width

    def setup(self, info: ModelInfo) -> None:
        """Learn the width, for the cost."""
        super().setup(info)
        self.width = info.width

    def _patch_mean(self, tokens: RaggedTokens, values: Tensor) -> Tensor:
        return tokens.sum(values.masked_fill(~tokens.is_patch, 0.0)) / tokens.num_patches

    def _published(self, tokens: RaggedTokens, norm: Tensor, share: float) -> KeepMask:
        """The rows of the largest norm, prefix rows competing; those that win take a patch's place."""
        rows = (share * tokens.seqlens.double()).floor()
        # Dead and prefix rows rank behind all patches in `rank`, so the prefix rows' own ranks are counted by hand.
        padded = tokens.to_padded(norm)
        prefix = padded[:, : tokens.num_prefix_tokens]
        patches = tokens.to_padded(norm.masked_fill(~tokens.is_patch, -torch.inf), fill=-torch.inf)
        larger = (patches[:, None, :] > prefix[:, :, None]).sum(-1) + _rank_among(prefix)
        winners = (larger < rows[:, None]).sum(-1)
        return top_k(tokens, norm, count=(rows - winners).int())


def _rank_among(values: Tensor) -> Tensor:
    """Rank of each entry of a row by falling value, ties in order, `[B, P]`."""
    order = values.argsort(dim=1, descending=True, stable=True)
    return order.argsort(dim=1)
