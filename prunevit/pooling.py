"""timm's poolings over the rows that each image has left."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prunevit.tokens import RaggedTokens


def pool(model: Any, tokens: RaggedTokens) -> Tensor:
    """Pool the rows of each image as a timm `VisionTransformer` does, `[B, C]`.

    The average is over the rows that are left: a fused or merged row counts once.

    Args:
        model: The timm model: its `global_pool`, `attn_pool` and `pool_include_prefix` are used.
        tokens: Rows after the final norm.

    Cost:
        One padded copy, except for the pooling "token".
    """
    if model.attn_pool is None and model.global_pool == "token":
        return tokens.prefix()[:, 0]
    skip = 0 if model.pool_include_prefix else tokens.num_prefix_tokens
    x = tokens.to_padded()[:, skip:]
    if tokens.uniform:
        return (
            model.attn_pool(x)
            if model.attn_pool is not None
            else _reduce(model.global_pool, x, x, x.shape[1])
        )
    column = torch.arange(x.shape[1], device=x.device) + skip
    absent = column >= tokens.seqlens[:, None]
    if model.attn_pool is not None:
        bias = torch.zeros_like(absent, dtype=x.dtype).masked_fill_(absent, -torch.inf)
        return model.attn_pool(x, attn_mask=bias[:, None, None, :])
    count = (tokens.seqlens - skip).to(x.dtype)[:, None]
    return _reduce(model.global_pool, x, x.masked_fill(absent[..., None], -torch.inf), count)


def _reduce(kind: str, x: Tensor, bounded: Tensor, count: int | Tensor) -> Tensor:
    """Timm's "avg", "max" and "avgmax"; absent rows are 0 in `x` and -inf in `bounded`."""
    if kind == "max":
        return bounded.amax(1)
    mean = x.sum(1) / count
    return mean if kind == "avg" else 0.5 * (bounded.amax(1) + mean)
