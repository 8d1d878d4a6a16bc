"""ATS: sample tokens from the distribution of their significance (Fayyaz et al., ECCV 2022).

Differs from the authors' code: each image gets what it would get alone (there, padded rows of its neighbours change
it); a budget below what is present thins the samples out (there, it crashes); an image always keeps a patch;
attention is the plain softmax (theirs adds 1e-6); distillation and register tokens stay.

`variant="token_reduction"` is the ATS of Haurum et al., "Which Tokens to Use?" (ICCVW 2023): the significance is
summed after it is weighted head by head, the distribution function runs in the order of the tokens, and the points
are the midpoints of `int(P * budget^stage) + 1` intervals without the last. It wants `layers=(3, 6, 9)`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.checks import check_whole, check_word
from prunevit.keepmask import KeepMask
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.sampling import sample
from prunevit.tokens import AttentionState, RaggedTokens, score_needs


class ATS(PruningPolicy):
    """Keep the patches that evenly spaced points of the significance's distribution function fall on.

    The significance is CLS's attention to a patch times the norm of its value vector. Several points may fall on one
    patch: it stays once, so the number kept differs from image to image, even without a budget.
    """

    knob = "budget"
    knob_range = (0.0, math.inf)

    def __init__(
        self,
        budget: float | Sequence[float] | None = None,
        layers: Layers = "3:",
        variant: str = "official",
        score_source: str = "cls",
        min_rows: int = 8,
    ) -> None:
        """Choose how many points there are.

        Args:
            budget: Bound on the rows of an image, CLS included: a number of rows, or up to 1 a fraction of those
                present; one, or one a layer. None: a point for each patch of the grid. For "token_reduction" the
                fraction of the initial patches that each stage keeps at most, compounding.
            layers: Blocks after whose attention it samples.
            variant: "official" or "token_reduction".
            score_source: "cls", "prefix" (mean over all prefix tokens) or "received" (mean over all queries).
            min_rows: Rows that no budget goes below; of the variant "official".

        Raises:
            ValueError: If the variant is not known or does not go with the budget, or `min_rows` is not positive.
        """
        super().__init__(budget, layers, compound=variant == "token_reduction")
        check_word("ATS", "variant", variant, ("official", "token_reduction"))
        check_whole("ATS", "min_rows", min_rows, 1)
        if variant == "token_reduction" and (not self.knob_values or max(self.knob_values) > 1):
            raise ValueError(f'ATS: budget must be in (0, 1] for variant="token_reduction", got {budget}')
        self.needs = score_needs("ATS", score_source)
        self.variant, self.score_source, self.min_rows = variant, score_source, min_rows

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Significance: the attention a row gets times the norm of its value."""
        assert attention is not None
        norm, wide = torch.linalg.vector_norm, torch.promote_types(attention.v.dtype, torch.float32)
        if self.variant == "token_reduction":
            return (attention.by_head(self.score_source) * norm(attention.v, dim=-1, dtype=wide)).sum(-1)
        return attention.score(self.score_source) * norm(attention.v.flatten(1), dim=-1, dtype=wide)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep what the points fall on."""
        score = self.score(tokens, attention, layer)
        if self.variant == "token_reduction":
            return _sample_in_place(tokens, score, int(self.rate(layer) * tokens.grid[0] * tokens.grid[1]))
        return sample(tokens, score, self._points(tokens, layer))

    def setup(self, info: ModelInfo) -> None:
        """Learn the width, for the cost."""
        super().setup(info)
        self.width = info.width

    def macs(self, counts: Tensor) -> Tensor:
        """The norms of the values."""
        return counts.double() * self.width

    def _points(self, tokens: RaggedTokens, layer: int) -> int | Tensor:
        """Points for all images, or for each one, int `[B]`, where the budget is a fraction of rows that differ."""
        patches = tokens.grid[0] * tokens.grid[1]
        if self.knob_value is None:
            return patches
        budget = self.rate(layer)
        if budget <= 1 and not tokens.uniform:
            rows = (budget * (tokens.num_patches.double() + 1)).round()
            return (rows.clamp(min=self.min_rows) - 1).clamp(min=1, max=patches).int()
        if budget <= 1:
            budget = budget * (tokens.max_seqlen - tokens.num_prefix_tokens + 1)
        return min(max(max(round(budget), self.min_rows) - 1, 1), patches)


def _sample_in_place(tokens: RaggedTokens, score: Tensor, points: int) -> KeepMask:
    """Keep the patches whose running share of the score, in the present order, is nearest to a midpoint."""
    running = tokens.to_padded(score.detach().masked_fill(~tokens.is_patch, 0)).cumsum(1)
    running = running / (running[:, -1:] + 1e-6)
    points = max(points, 1)
    middle = (2 * torch.arange(points, device=score.device, dtype=score.dtype) + 1) / (2 * (points + 1))
    distance = (middle[:, None] - running[:, None, :]).abs()
    absent = ~tokens.to_padded(tokens.is_patch, fill=False)
    nearest = distance.masked_fill(absent[:, None, :], torch.inf).argmin(2)
    hit = torch.zeros_like(absent).scatter_(1, nearest, True)
    return KeepMask(tokens.to_rows(hit) | (tokens.live & ~tokens.is_patch))
