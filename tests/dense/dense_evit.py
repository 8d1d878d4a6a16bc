"""EViT (Liang et al., ICLR 2022), written out densely.

As attention-score top-k, and the patches that lose become one more token, appended last: the sum of
attention times residual stream over the losers, with the raw attention weights (not renormalised). It
passes through the MLP of the same block and is an ordinary token from then on: counted, scored, kept, or
lost and fused again.

Differs from the authors' code where the model has more prefix tokens than CLS: there the distillation token
competes as a patch; here every prefix token is protected.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from dense_walk import Attended, Record, Tokens, kept_count, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def evit(
    model: VisionTransformer,
    images: Tensor,
    keep_rate: float,
    layers: Sequence[int] = (3, 6, 9),
    rounding: str = "ceil",
    of: str = "current",
    compound: bool = False,
) -> tuple[Tensor, Record]:
    """Keep `rounding(keep_rate * base)` patches at each stage, and the fused token besides.

    In the record the fused token carries the patch index of the loser with the highest score.
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        count = kept_count(tokens, keep_rate, stage, rounding, of, compound)
        if count == tokens.count:
            return tokens
        score = attended.cls_score(tokens)
        order = score.argsort(descending=True)
        winners, losers = order[:count], order[count:]
        fused = (score[losers, None] * tokens.patches[losers]).sum(0)
        heir = tokens.source[tokens.num_prefix + losers[0]]
        kept = tokens.keep(winners)
        return replace(
            kept,
            x=torch.cat([kept.x, fused[None]]),
            source=torch.cat([kept.source, heir[None]]),
            weight=torch.cat([kept.weight, kept.weight.new_ones(1)]),
        )

    return walk(model, images, layers, rule)
