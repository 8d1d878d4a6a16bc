"""A merging policy: what is not kept joins the kept patch that it is most alike.

uv run prunevit check docs/examples/merge_rest.py:MergeRest
"""

from dataclasses import replace

from torch.nn.functional import normalize

import prunevit


class MergeRest(prunevit.PruningPolicy):
    """Keep the patches that get the most attention; merge each of the others into the kept one of the nearest key."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    needs = frozenset({"qkv", "received_attention"})

    def __init__(self, keep_rate: float = 0.5, layers: tuple[int, ...] = (3, 6, 9)) -> None:
        super().__init__(keep_rate, layers)

    def setup(self, info):
        super().setup(info)
        self.head_dim = info.width // info.num_heads

    def forward(self, tokens, attention, layer):
        best = prunevit.top_k(tokens, attention.received_attention, self.rate(layer))
        keys = normalize(attention.k.float().mean(1), dim=-1)
        rest = tokens.is_patch & ~best.keep
        partner, _ = prunevit.nearest(tokens, keys, queries=rest, keys=tokens.is_patch & best.keep)
        mask = prunevit.merge(tokens, best, partner, weight=tokens.sizes)  # a mean over the patches merged
        return replace(mask, key_weight=tokens.sizes)  # a row for four patches counts four times as a key

    def macs(self, counts):
        return counts.double() ** 2 * self.head_dim
