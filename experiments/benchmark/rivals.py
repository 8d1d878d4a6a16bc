"""What a pruned model is measured against: ways to drop the same tokens without a ragged batch, or for nothing.

All take images and give logits, share the timm model's weights, and synchronise nowhere, so that each of them runs in
every execution mode.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import Attention
from torch import Tensor, nn

from prunevit import RaggedTokens, RaggedViT, Trace, prune
from prunevit.embedding import embed_patches
from prunevit.policies import EViT, NoPruning, ThresholdL2, TopK
from prunevit.policy import PruningPolicy


def cuts_of(trace: Trace) -> dict[int, int]:
    """Rows of an image (of the largest one) behind each stage of a trace, by the half-block that follows.

    Args:
        trace: What a pruned model did.

    Cost:
        One read-back a stage.
    """
    return {
        2 * stage.layer + (stage.site == "after_attention"): int(stage.counts.max()) for stage in trace.stages
    }


def counts_of(trace: Trace) -> dict[int, int | Tensor]:
    """Rows behind each stage of a trace, by the half-block that follows: of each image, `[B]`, where these differ.

    Args:
        trace: What a pruned model did.

    Cost:
        One read-back a stage.
    """
    found: dict[int, int | Tensor] = {}
    for (half, longest), stage in zip(cuts_of(trace).items(), trace.stages):
        found[half] = longest if bool((stage.counts == longest).all()) else stage.counts
    return found


class FreePruning(nn.Module):
    """The walk with the counts of a pruned model and no cost of pruning: no score, no selection, a slice.

    The ceiling of every policy of these counts: the first rows of each image stay. Where images differ in rows, what
    stays is gathered by row numbers that are known ahead.
    """

    def __init__(self, model: nn.Module, cuts: Mapping[int, int | Tensor], batch_size: int) -> None:
        """Prepare the layouts.

        Args:
            model: A timm model.
            cuts: From `cuts_of` or `counts_of`.
            batch_size: Images of every batch.
        """
        super().__init__()
        self.walk = prune(model, NoPruning())
        self.batch_size, self.cuts = batch_size, sorted(cuts)
        info, device = self.walk.info, next(model.parameters()).device
        before = _layout(self.walk, batch_size, info.num_prefix_tokens + info.grid[0] * info.grid[1], device)
        for half in self.cuts:
            after = _layout(self.walk, batch_size, cuts[half], device)
            rows = (before.cu_seqlens[after.image_id] + after.position).long()
            setattr(self, f"layout{half}", after)
            setattr(self, f"rows{half}", None if before.uniform and after.uniform else rows)
            before = after

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K]`."""
        tokens, first = self.walk.embed(images), 0
        for half in self.cuts:
            tokens = self.walk.walk(tokens, first=first, last=half)
            layout: RaggedTokens = getattr(self, f"layout{half}")
            rows: Tensor | None = getattr(self, f"rows{half}")
            if rows is None:
                x = tokens.x.unflatten(0, (self.batch_size, -1))[:, : layout.max_seqlen].flatten(0, 1)
            else:
                x = tokens.x[rows]
            tokens, first = replace(layout, x=x), half
        return self.walk.forward_head(self.walk.walk(tokens, first=first))


def _layout(walk: RaggedViT, batch_size: int, rows: int | Tensor, device: torch.device) -> RaggedTokens:
    """The first rows of each image, without features: the same number of them, or one an image."""
    prefix, grid = walk.info.num_prefix_tokens, walk.info.grid
    if isinstance(rows, int):
        source = (torch.arange(rows, dtype=torch.int32, device=device) - prefix).clamp(min=-1)
        empty = torch.empty(batch_size, rows, 0, device=device)
        return RaggedTokens.from_padded(empty, prefix, grid, source=source.expand(batch_size, rows))
    images = torch.arange(batch_size, device=device)
    ends = torch.cat([rows.new_zeros(1), rows.cumsum(0)]).int()
    image_id = images.int().repeat_interleave(rows)
    position = torch.arange(len(image_id), dtype=torch.int32, device=device) - ends[image_id]
    return RaggedTokens(
        x=torch.empty(len(image_id), 0, device=device),
        cu_seqlens=ends,
        image_id=image_id,
        max_seqlen=int(rows.max()),
        uniform=False,
        num_prefix_tokens=prefix,
        grid=grid,
        image_index=images,
        source=(position - prefix).clamp(min=-1),
    )


class DenseGather(nn.Module):
    """Static pruning on a dense batch, as the papers' code does it: score, `topk` and `gather` as torch operations.

    Knows top-k and EViT by the attention of the CLS token, and the L2 rule "share", which keep equal numbers.
    """

    def __init__(self, model: Any, policy: PruningPolicy, cuts: dict[int, int]) -> None:
        """Take the model and the counts.

        Args:
            model: A timm model with a CLS token.
            policy: Says by what patches are scored, and whether the rest is fused.
            cuts: Rows after each stage, from `cuts_of`.

        Raises:
            ValueError: If the policy is another one.
        """
        super().__init__()
        by_norm = isinstance(policy, ThresholdL2) and policy.rule == "share"
        if not by_norm and type(policy) not in (TopK, EViT):
            raise ValueError(f"DenseGather: policy must be TopK, EViT or the L2 share, got {policy}")
        self.model, self.cuts = model, cuts
        self.by_norm, self.fuses = by_norm, isinstance(policy, EViT)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K]`."""
        model = self.model
        x = model.norm_pre(model._pos_embed(embed_patches(model.patch_embed, images)))
        for number, block in enumerate(model.blocks):
            if 2 * number in self.cuts:
                x = self._pruned(x, _norm(x), self.cuts[2 * number])
            y = block.norm1(x)
            x = x + block.ls1(block.attn(y))
            if 2 * number + 1 in self.cuts:
                x = self._pruned(x, _class_attention(block.attn, y), self.cuts[2 * number + 1])
            x = x + block.ls2(block.mlp(block.norm2(x)))
        return model.forward_head(model.norm(x))

    def _pruned(self, x: Tensor, score: Tensor, rows: int) -> Tensor:
        """Keep the prefix and the best patches, so that `rows` remain with the fused one."""
        prefix, channels = self.model.num_prefix_tokens, x.shape[-1]
        patches, score = x[:, prefix:], score[:, prefix:]
        fuses = self.fuses and rows < x.shape[1]
        best = score.topk(rows - prefix - fuses, dim=1).indices
        kept = patches.gather(1, best[..., None].expand(-1, -1, channels))
        if not fuses:
            return torch.cat([x[:, :prefix], kept], 1)
        rest = score.scatter(1, best, 0.0).to(x.dtype)
        return torch.cat([x[:, :prefix], kept, rest[:, None] @ patches], 1)


def _norm(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=-1)


def _class_attention(attn: Attention, x: Tensor) -> Tensor:
    """Attention of the CLS token to each row, mean over heads, `[B, N]`."""
    q, k, _ = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).unbind(2)
    q, k = attn.q_norm(q[:, 0]), attn.k_norm(k)
    score = torch.einsum("bhd,bnhd->bhn", q * attn.scale, k)
    return score.to(torch.promote_types(score.dtype, torch.float32)).softmax(-1).mean(1)


class Padded(nn.Module):
    """The pruned rows as a padded batch: `scaled_dot_product_attention` under a key mask.

    One L2 policy before one block. `longest=None` pads to the full length: nothing moves, dropped tokens are computed
    on and masked as keys, as most published code does it. With a length, what stays is moved to the front and the rest
    is cut off; the longest image is then known in advance, where a real run would have to wait for it.
    """

    def __init__(self, model: Any, policy: ThresholdL2, longest: int | None = None) -> None:
        """Take the policy.

        Args:
            model: A timm model.
            policy: Prunes before one block.
            longest: Rows of the longest image after pruning, prefix included.

        Raises:
            ValueError: If the policy acts at several blocks.
        """
        super().__init__()
        (walk := prune(model, policy)).eval()
        if len(policy.layers) != 1:
            raise ValueError(f"Padded: policy must act before one block, got {list(policy.layers)}")
        self.walk, self.policy, self.layer, self.longest = walk, policy, policy.layers[0], longest

    def forward(self, images: Tensor) -> Tensor:
        """Logits `[B, K]`."""
        walk, model = self.walk, self.walk.model
        tokens = walk.embed(images)
        x, mask = tokens.to_padded(), None
        for number, block in enumerate(model.blocks):
            if number == self.layer:
                x, mask = self._pruned(x, tokens)
            x = x + block.ls1(_attention(block.attn, block.norm1(x), mask))
            x = x + block.ls2(block.mlp(block.norm2(x)))
        x = model.norm(x)
        return model.head(model.head_drop(model.fc_norm(_pooled(walk, x, mask))))

    def _pruned(self, x: Tensor, tokens: RaggedTokens) -> tuple[Tensor, Tensor]:
        """Rows, and which of them count, `[B, N]`."""
        decided = self.policy(replace(tokens, x=x.flatten(0, 1)), None, self.layer)
        keep = (decided.keep | ~tokens.is_patch).view(x.shape[:2])
        if self.longest is None:
            return x, keep
        first = keep.int().argsort(dim=1, descending=True, stable=True)[:, : self.longest]
        return x.gather(1, first[..., None].expand(-1, -1, x.shape[-1])), keep.gather(1, first)


def _attention(attn: Attention, x: Tensor, mask: Tensor | None) -> Tensor:
    """A timm attention whose keys are masked."""
    if mask is None:
        return attn(x)
    q, k, v = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(
        attn.q_norm(q), attn.k_norm(k), v, mask[:, None, None], scale=attn.scale
    )
    return attn.proj_drop(attn.proj(attn.norm(y.transpose(1, 2).flatten(2))))


def _pooled(walk: RaggedViT, x: Tensor, mask: Tensor | None) -> Tensor:
    """CLS, or the mean of the patches that count."""
    model, prefix = walk.model, walk.info.num_prefix_tokens
    if model.global_pool == "token":
        return x[:, 0]
    if model.global_pool != "avg" or mask is None:
        raise ValueError(f'Padded: global_pool must be "token" or "avg", got "{model.global_pool}"')
    weight = mask[:, prefix:, None].to(x.dtype)
    return (x[:, prefix:] * weight).sum(1) / weight.sum(1)
