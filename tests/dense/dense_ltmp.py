"""LTMP (Bonnaerens and Dambre, TMLR 2023), evaluation, written out densely.

After the attention of every block: first merge (ToMe's pairs, wherever the best cosine exceeds a
threshold), then prune (patches whose received attention, mean over heads and queries, does not exceed
another). A row that others merged into has the largest received attention of its group. Rows are reordered
as in ToMe, even if none merged.
"""

from collections.abc import Sequence

import torch
from dense_tome import match, merge_pairs, survivors
from dense_walk import Attended, Record, Tokens, walk, weighted_softmax
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


def ltmp(
    model: VisionTransformer,
    images: Tensor,
    merge_thresholds: Sequence[float],
    prune_thresholds: Sequence[float],
) -> tuple[Tensor, Record]:
    """Use one merge and one prune threshold for each block; the best patch stays at least."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        a, b, best, partner = match(attended.k.mean(0), tokens.num_prefix)
        merges = best > merge_thresholds[stage]
        sources, heirs = a[merges], partner[merges]
        tokens = merge_pairs(tokens, sources, heirs)
        received = attended.probability.mean((0, 1)).detach()
        received = received.scatter_reduce(0, heirs, received[sources], "amax")
        received[: tokens.num_prefix] = torch.inf
        rows = survivors(a[~merges], b, tokens.num_prefix)
        alive = received[rows] > prune_thresholds[stage]
        alive[tokens.num_prefix + received[rows][tokens.num_prefix :].argmax()] = True
        return tokens.take(rows[alive])

    return walk(model, images, range(len(model.blocks)), rule, probability=weighted_softmax)
