"""Multiply-accumulates of a forward pass, counted from the rows that each image really had."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from prunevit.trace import Trace
from prunevit.vit import RaggedViT


def model_macs(model: Any, attention_rows: Tensor, mlp_rows: Tensor, patches: int | None = None) -> Tensor:
    """MACs of the model for each image, float64 `[B]`: patch embedding, linear layers, attention products, head.

    Norms, activations, softmax and biases are left out, as usual; unpruned DeiT-T/S/B give 1.254, 4.599, 17.564 G.

    Args:
        model: The timm model.
        attention_rows: Rows in the attention of each block, `[depth, B]`.
        mlp_rows: Rows in the MLP of each block, `[depth, B]`.
        patches: Patches of the input before pruning; default those of the model's own input size.
    """
    fixed = _head_macs(model) + _embed_macs(model.patch_embed, patches or model.patch_embed.num_patches)
    total = torch.full_like(attention_rows[0], fixed, dtype=torch.float64)
    for block, rows, rows_mlp in zip(model.blocks, attention_rows.double(), mlp_rows.double()):
        linear, width = _linear_macs(block.attn), block.attn.proj.in_features
        total += rows * linear + 2 * width * rows**2 + rows_mlp * _linear_macs(block.mlp)
    if model.attn_pool is not None:
        pooled = mlp_rows[-1].double() - (0 if model.pool_include_prefix else model.num_prefix_tokens)
        total += pooled * (_linear_macs(model.attn_pool.kv) + 2 * model.embed_dim)
    return total


def dense_macs(model: Any) -> float:
    """MACs of the unpruned model at its own input size, for one image.

    Args:
        model: The timm model.
    """
    rows = torch.tensor([[model.patch_embed.num_patches + model.num_prefix_tokens]] * len(model.blocks))
    return model_macs(model, rows, rows).item()


def policy_macs(pruned: RaggedViT, trace: Trace) -> Tensor:
    """MACs that the policies themselves spent, float64 `[B]`.

    Args:
        pruned: The model that made the trace.
        trace: What it did.
    """
    total = torch.zeros(
        trace.attention_rows.shape[1], dtype=torch.float64, device=trace.attention_rows.device
    )
    for stage in trace.stages:
        total += pruned.policies[stage.policy].macs(stage.tokens.seqlens)  # type: ignore[operator]
    return total


def _head_macs(model: Any) -> float:
    """MACs of the head or heads, and of what an attention pool does once for each image."""
    total = sum(_linear_macs(getattr(model, head, nn.Identity())) for head in ("head", "head_dist"))
    if model.attn_pool is not None:
        total += model.attn_pool.latent_len * (
            _linear_macs(model.attn_pool) - _linear_macs(model.attn_pool.kv)
        )
    return float(total)


def _embed_macs(embed: Any, patches: int) -> float:
    """MACs of a patch embedding; those of a convolutional stem are measured once, by the sizes of its outputs."""
    linear = patches * _linear_macs(embed)
    convolutions = [module for module in embed.modules() if isinstance(module, nn.Conv2d)]
    if len(convolutions) == 1:
        return float(linear + patches * convolutions[0].weight.numel())
    return linear + _stem_macs(embed, convolutions) * patches / embed.num_patches


def _linear_macs(module: nn.Module) -> int:
    """MACs of the linear layers of a module for one row."""
    return sum(each.weight.numel() for each in module.modules() if isinstance(each, nn.Linear))


def _stem_macs(embed: Any, convolutions: list[nn.Conv2d]) -> float:
    macs: list[int] = []

    def count(module: nn.Module, inputs: Any, output: Tensor) -> None:
        macs.append(math.prod(output.shape[-2:]) * module.weight.numel())  # type: ignore[operator, union-attr]

    handles = [module.register_forward_hook(count) for module in convolutions]
    training, weight = embed.training, convolutions[0].weight
    try:
        with torch.no_grad():
            embed.eval()(
                torch.zeros(1, weight.shape[1], *embed.img_size, device=weight.device, dtype=weight.dtype)
            )
    finally:
        embed.train(training)
        for handle in handles:
            handle.remove()
    return float(sum(macs))
