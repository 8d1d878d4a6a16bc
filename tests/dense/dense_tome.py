"""ToMe (Bolya et al., ICLR 2023), written out densely.

After the attention of every block: rows at even positions (A) look for their most similar row at odd
positions (B) by the cosine of the head-mean key; the r best pairs merge by size-weighted mean. Survivors
are the unmerged rows of A in their order, then all of B, so that the next block splits another way. A block
that merges nothing leaves the order alone.

Prefix rows take their place in A or B by position, but neither merge nor are merged into, and lead the
survivors: for CLS, and for CLS with a distillation token, this is what the authors do.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from dense_walk import Attended, Record, Tokens, softmax, walk, weighted_softmax
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

Schedule = int | tuple[int, float] | Sequence[int]


def per_block(r: Schedule, depth: int) -> list[int]:
    """Spell out r: one number for all blocks, (r, inflection), or a list a block (0 from its end on).

    Inflection 1 rises linearly from 0 to 2r, -1 falls from 2r to 0; the float expression is the authors'.
    """
    if isinstance(r, list):
        return list(r) + [0] * (depth - len(r))
    mean, inflection = (r, 0.0) if isinstance(r, int) else (int(r[0]), r[1])
    low = int(mean * (1.0 - inflection))
    step = (2 * mean - low - low) / (depth - 1)
    return [int(low + step * block) for block in range(depth)]


def match(metric: Tensor, num_prefix: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pair rows [N, D]: rows of A, rows of B, and for each of A its best cosine and that partner's row."""
    metric = (metric / metric.norm(dim=-1, keepdim=True)).detach()
    rows = torch.arange(len(metric))
    a, b = rows[::2], rows[1::2]
    if len(b) == 0:
        return a, b, metric.new_full((len(a),), -torch.inf), a
    cosine = metric[a] @ metric[b].T
    cosine[a < num_prefix] = -torch.inf
    cosine[:, b < num_prefix] = -torch.inf
    best, partner = cosine.max(-1)
    return a, b, best, b[partner]


def merge_pairs(tokens: Tokens, sources: Tensor, heirs: Tensor) -> Tokens:
    """Fold row sources[i] into row heirs[i] by size-weighted mean; the source rows stay where they are."""
    size = tokens.weight
    total = (size[:, None] * tokens.x).index_add(0, heirs, size[sources, None] * tokens.x[sources])
    new_size = size.index_add(0, heirs, size[sources])
    return replace(tokens, x=total / new_size[:, None], weight=new_size)


def survivors(a: Tensor, b: Tensor, num_prefix: int) -> Tensor:
    """Rows in ToMe's order: prefix, unmerged patches of A, patches of B."""
    return torch.cat([torch.arange(num_prefix), a[a >= num_prefix], b[b >= num_prefix]])


def tome(
    model: VisionTransformer, images: Tensor, r: Schedule, prop_attn: bool = True
) -> tuple[Tensor, Record]:
    """Merge r rows in each block, at most half of its patches."""
    wanted = per_block(r, len(model.blocks))

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        number = min(wanted[stage], tokens.count // 2)
        if number <= 0:
            return tokens
        a, b, best, partner = match(attended.k.mean(0), tokens.num_prefix)
        order = best.argsort(descending=True)
        merged, unmerged = order[:number], order[number:].sort().values
        tokens = merge_pairs(tokens, a[merged], partner[merged])
        return tokens.take(survivors(a[unmerged], b, tokens.num_prefix))

    probability = weighted_softmax if prop_attn else softmax
    return walk(model, images, range(len(model.blocks)), rule, probability=probability)
