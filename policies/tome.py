"""ToMe: merge the most alike tokens in every block (Bolya et al., "Token Merging: Your ViT But Faster", ICLR 2023).

Differs from the authors' code: distillation *and* register tokens are protected; images of a batch may differ in
length; `r` and `inflection` are two settings.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from prunevit.checks import check_number, check_whole
from prunevit.folding import merge, nearest
from prunevit.keepmask import KeepMask, rank
from prunevit.kernels.turns import split_by_turns
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class ToMe(PruningPolicy):
    """Merge `r` tokens of every image in each block, into partners whose keys are most alike.

    The rows of an image are split by turns into A and B; each row of A finds its nearest in B by the cosine of the
    head-mean keys, and the `r` most alike merge by a mean weighted by size. What stays is laid out A before B, which is
    what the next block splits.
    """

    knob = "r"
    needs = frozenset({"qkv"})

    def __init__(
        self,
        r: int | Sequence[int] = 13,
        layers: Layers = ":",
        inflection: float = 0.0,
        prop_attn: bool = True,
    ) -> None:
        """Set the schedule.

        Args:
            r: Tokens merged in each block, or one number a layer; never more than half of what is there.
            layers: Blocks after whose attention it merges.
            inflection: Slope of the schedule: from `r * (1 - inflection)` in the first to `r * (1 + inflection)` in
                the last layer.
            prop_attn: Weigh each key by how many patches it stands for (proportional attention).

        Raises:
            ValueError: If `r` is negative or no whole number, or the inflection lies outside [-1, 1].
        """
        super().__init__(r, layers)
        for each in self.knob_values:
            check_whole("ToMe", "r", each, 0)
        check_number("ToMe", "inflection", inflection, -1, 1)
        self.inflection, self.prop_attn = inflection, prop_attn

    def rate(self, layer: int) -> int:
        """Tokens to merge at a layer."""
        r = super().rate(layer)
        low = int(r * (1.0 - self.inflection))
        step = (2 * r - 2 * low) / max(1, len(self.layers) - 1)
        return int(low + step * self.layers.index(layer))

    def setup(self, info: ModelInfo) -> None:
        """Learn the head size, for the cost."""
        super().setup(info)
        self.head_dim = info.width // info.num_heads

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Merge the most alike."""
        assert attention is not None
        a, b = split_by_turns(tokens.source, tokens.image_id, tokens.cu_seqlens)
        partner, similarity = nearest(tokens, attention.k, queries=a, keys=b, cosine=True)
        number, rows = self._number(tokens, layer)
        # Only rows of A are like any other, and no image merges more than it has.
        keep, sizes = rank(tokens, similarity) >= number, tokens.sizes
        mask = merge(tokens, KeepMask(keep, rows_per_image=rows), partner, sizes)
        # Where nothing merges the authors leave the order alone.
        order = None if self.rate(layer) == 0 else b
        return replace(mask, order=order, key_weight=sizes if self.prop_attn else None)

    def macs(self, counts: Tensor) -> Tensor:
        """The products of A with B."""
        return (counts.double() / 2) ** 2 * self.head_dim

    def _number(self, tokens: RaggedTokens, layer: int) -> tuple[int | Tensor, int | None]:
        """Rows to merge, for all images or for each row's image, and the rows then left if the host knows them."""
        r = min(self.rate(layer), tokens.max_seqlen)
        if tokens.uniform:
            number = max(0, min(r, (tokens.max_seqlen - tokens.num_prefix_tokens) // 2))
            return number, tokens.max_seqlen - number
        halves = torch.cat([tokens.num_patches // 2, tokens.seqlens.new_zeros(1)])
        return halves.clamp(max=r)[tokens.image_id], None
