"""DiffRate (Chen et al., ICCV 2023), evaluation with given counts, written out densely.

After the attention of a block patches are sorted by CLS attention (head mean). The tail is pruned; the
least important of the rest are each folded into the most similar important patch (cosine of the residual
stream) by a plain mean. A folded row adds its key weight times that cosine to its heir's, and every
attention weighs keys so.
"""

from collections.abc import Sequence
from dataclasses import replace

from dense_walk import Attended, Record, Tokens, walk, weighted_softmax
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def diffrate(
    model: VisionTransformer, images: Tensor, prune_counts: Sequence[int], merge_counts: Sequence[int]
) -> tuple[Tensor, Record]:
    """Leave prune_counts[block] rows after pruning and merge_counts[block] after merging.

    Counts are the published ones, CLS included (other prefix tokens are not counted); a count above what is
    there does nothing, and one patch stays at least.
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        order = attended.cls_score(tokens).argsort(descending=True)
        tokens = tokens.keep(order[: max(prune_counts[stage] - 1, 1)])
        important = tokens.num_prefix + max(merge_counts[stage] - 1, 1)
        if len(tokens.x) <= important:
            return tokens
        return fold_tail(tokens, important)

    return walk(model, images, range(len(model.blocks)), rule, probability=weighted_softmax)


def fold_tail(tokens: Tokens, important: int) -> Tokens:
    """Fold the rows from `important` on into their nearest patch among the rows before."""
    metric = (tokens.x / tokens.x.norm(dim=-1, keepdim=True)).detach()
    best, heir = (metric[important:] @ metric[tokens.num_prefix : important].T).max(-1)
    heir = heir + tokens.num_prefix
    folded = tokens.x[:important].index_add(0, heir, tokens.x[important:])
    group = tokens.x.new_ones(important).index_add(0, heir, tokens.x.new_ones(len(heir)))
    weight = tokens.weight[:important].index_add(0, heir, tokens.weight[important:] * best)
    return replace(tokens, x=folded / group[:, None], source=tokens.source[:important], weight=weight)
