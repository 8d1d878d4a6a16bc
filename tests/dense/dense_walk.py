"""The walk of one image through a plain timm ViT, written out: what all re-statements of papers share.

Images go through one after the other, so that nothing here knows of padding, masks or packing. Everything
is differentiable and runs in any floating dtype. Dropout and stochastic depth are left out (evaluation).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """The rows of one image: prefix rows (CLS, distillation, registers) lead, patches follow."""

    x: Tensor  # [N, C] residual stream
    source: Tensor  # [N] patch index in the grid, -1 for a prefix row; a fused or merged row has its heir's
    weight: Tensor  # [N] what the method carries for each row: size, key weight or decision; 1 at first
    num_prefix: int
    num_patches: int  # patches before anything was pruned
    image: int  # position in the batch

    @property
    def count(self) -> int:
        """Patch rows left, fused and merged ones included."""
        return len(self.x) - self.num_prefix

    @property
    def patches(self) -> Tensor:
        """Residual stream of the patch rows [count, C]."""
        return self.x[self.num_prefix :]

    def take(self, rows: Tensor) -> "Tokens":
        return replace(self, x=self.x[rows], source=self.source[rows], weight=self.weight[rows])

    def keep(self, patch_rows: Tensor) -> "Tokens":
        """All prefix rows, then the given patch rows (0 is the first patch) in the given order."""
        return self.take(torch.cat([torch.arange(self.num_prefix), self.num_prefix + patch_rows]))


class Attended(NamedTuple):
    """What the attention of one block did with one image."""

    out: Tensor  # [N, C] after the projection, before LayerScale
    probability: Tensor  # [H, N, N] query, key
    k: Tensor  # [H, N, D] after any key norm
    v: Tensor  # [H, N, D]

    def cls_score(self, tokens: Tokens) -> Tensor:
        """Probability with which CLS attends to each patch row, mean over heads [count]."""
        return self.probability[:, 0, tokens.num_prefix :].mean(0)


@dataclass(frozen=True)
class Stage:
    """What one prune stage left of each image."""

    layer: int
    after: list[Tokens] = field(default_factory=list)  # one for each image, directly after the stage

    @property
    def kept(self) -> list[Tensor]:
        """For each image the patch index in the original grid of each patch row, in row order."""
        return [t.source[t.num_prefix :] for t in self.after]

    @property
    def counts(self) -> list[int]:
        """For each image the patch rows left, fused and merged ones included."""
        return [t.count for t in self.after]


@dataclass(frozen=True)
class Record:
    """What one forward decided, besides its logits."""

    stages: list[Stage]
    attention_rows: Tensor  # [depth, B] rows in the attention of each block, prefix included
    mlp_rows: Tensor  # [depth, B] rows in the MLP of each block, prefix included
    final: list[Tokens] = field(default_factory=list)  # after the final norm


Probability = Callable[[Tensor, Tokens], Tensor]
StageRule = Callable[[int, Tokens, Attended | None], Tokens]


def softmax(scores: Tensor, tokens: Tokens) -> Tensor:
    """Plain attention."""
    return scores.softmax(-1)


def weighted_softmax(scores: Tensor, tokens: Tokens) -> Tensor:
    """Proportional attention: each key counts `weight` times."""
    return (scores + tokens.weight.log()).softmax(-1)


def embed(model: VisionTransformer, image: Tensor, position: int) -> Tokens:
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))[0]
    prefix = model.num_prefix_tokens
    source = torch.cat([torch.full((prefix,), -1), torch.arange(len(x) - prefix)])
    return Tokens(x, source, x.new_ones(len(x)), prefix, len(x) - prefix, position)


def attend(block: Any, tokens: Tokens, probability: Probability) -> Attended:
    attn, x = block.attn, block.norm1(tokens.x)
    q, k, v = attn.qkv(x).reshape(len(x), 3, attn.num_heads, -1).permute(1, 2, 0, 3)
    q, k = attn.q_norm(q), attn.k_norm(k)
    p = probability(attn.scale * q @ k.transpose(1, 2), tokens)
    out = attn.norm((p @ v).transpose(0, 1).flatten(1))
    if attn.gate is not None:
        out = out * attn.gate(x).sigmoid()
    return Attended(attn.proj(out), p, k, v)


def walk(
    model: VisionTransformer,
    images: Tensor,
    layers: Sequence[int],
    rule: StageRule,
    site: str = "after_attention",
    probability: Probability = softmax,
) -> tuple[Tensor, Record]:
    """Run `rule(stage, tokens, attended)` at each of `layers` and return logits [B, K] and the record.

    At "after_attention" the rule sees the attention of its own block, between the residual sum and the MLP;
    at "before_block" that of the block before (None before the first), whose rows are still the same.
    """
    depth = len(model.blocks)
    rows = torch.zeros(2, depth, len(images), dtype=torch.long)
    record = Record([Stage(layer) for layer in layers], rows[0], rows[1])
    logits = []
    for position, image in enumerate(images):
        tokens, attended = embed(model, image, position), None
        block: Any
        for layer, block in enumerate(model.blocks):
            here = layers.index(layer) if layer in layers else None
            if here is not None and site == "before_block":
                tokens = rule(here, tokens, attended)
                record.stages[here].after.append(tokens)
            record.attention_rows[layer, position] = len(tokens.x)
            attended = attend(block, tokens, probability)
            tokens = replace(tokens, x=tokens.x + block.ls1(attended.out))
            if here is not None and site == "after_attention":
                tokens = rule(here, tokens, attended)
                record.stages[here].after.append(tokens)
            record.mlp_rows[layer, position] = len(tokens.x)
            tokens = replace(tokens, x=tokens.x + block.ls2(block.mlp(block.norm2(tokens.x))))
        tokens = replace(tokens, x=model.norm(tokens.x))
        record.final.append(tokens)
        logits.append(model.forward_head(tokens.x[None])[0])
    return torch.stack(logits), record


def kept_count(
    tokens: Tokens, keep_rate: float, stage: int, rounding: str, of: str, compound: bool = False
) -> int:
    """Patches kept at a stage: `rounding(rate * base)` in floats, as the authors write it, within 1 and all.

    `compound` raises the rate to the power stage + 1; the base is the "current" or the "initial" patch count.
    """
    rate = keep_rate ** (stage + 1) if compound else keep_rate
    base = {"current": tokens.count, "initial": tokens.num_patches}[of]
    count = {"ceil": math.ceil, "floor": math.floor}[rounding](rate * base)
    return min(max(count, 1), tokens.count)
