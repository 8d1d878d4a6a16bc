"""Attention-score top-k, written out densely.

After the attention of a block the patches that CLS attends to most stay, in the order of their score; the
score is the softmax row of CLS in that block's own attention, mean over heads. Prefix tokens are never
pruned.
"""

from collections.abc import Sequence

from dense_walk import Attended, Record, Tokens, kept_count, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def topk(
    model: VisionTransformer,
    images: Tensor,
    keep_rate: float,
    layers: Sequence[int] = (3, 6, 9),
    rounding: str = "ceil",
    of: str = "current",
    compound: bool = False,
) -> tuple[Tensor, Record]:
    """Keep `rounding(keep_rate * base)` patches at each stage (`dense_walk.kept_count`)."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        count = kept_count(tokens, keep_rate, stage, rounding, of, compound)
        return tokens.keep(attended.cls_score(tokens).argsort(descending=True)[:count])

    return walk(model, images, layers, rule)
