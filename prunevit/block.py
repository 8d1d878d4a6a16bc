"""The two halves of a timm block on packed rows: attention, and MLP. A policy may act between them.

They call the parts of a block, never the block or its attention: hooks on the parts run. `prune` refuses a model with
hooks on the two; it does not see those that are hung there later, and they never run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from prunevit.kernels.ragged_attention import ragged_attention
from prunevit.tokens import AttentionState, RaggedTokens


def attend(
    block: Any,
    tokens: RaggedTokens,
    *,
    backend: str,
    needs: frozenset[str] = frozenset(),
    exempt_self: bool = False,
    softmax_eps: float = 0.0,
) -> tuple[Tensor, AttentionState]:
    """`x + drop_path1(ls1(attn(norm1(x))))` on packed rows.

    Args:
        block: A timm `Block`.
        tokens: The batch.
        backend: Of `ragged_attention`.
        needs: Parts of the attention to emit on the way.
        exempt_self: As in `ragged_attention`.
        softmax_eps: As in `ragged_attention`.

    Returns:
        The new features `[T, C]` and the attention's state.

    Raises:
        ValueError: If the block drops attention probabilities and is in training mode.
    """
    attn = block.attn
    if attn.training and attn.attn_drop.p > 0:
        raise ValueError(
            f"RaggedViT: attention dropout in training must be 0, got {attn.attn_drop.p:g}; "
            "create the model with attn_drop_rate=0"
        )
    x = block.norm1(tokens.x)
    qkv = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1))
    q, k, v = qkv.unbind(1)
    plain = isinstance(attn.q_norm, nn.Identity) and isinstance(attn.k_norm, nn.Identity)
    if not plain:
        q, k = attn.q_norm(q), attn.k_norm(k)
    output = ragged_attention(
        *((qkv,) if plain else (q, k, v)),
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
        softmax_scale=attn.scale,
        key_weight=tokens.key_weight,
        soft=tokens.soft,
        exempt_self=exempt_self,
        softmax_eps=softmax_eps,
        prefix_rows=tokens.num_prefix_tokens if "prefix_attention" in needs else 0,
        return_received="received_attention" in needs,
        image_id=tokens.image_id,
        uniform=tokens.uniform,
        backend=backend,
    )
    y = attn.norm(output.out.flatten(1))
    gate = getattr(attn, "gate", None)
    if gate is not None:
        y = y * gate(x).sigmoid()
    y = block.ls1(attn.proj_drop(attn.proj(y)))
    state = AttentionState(q, k, v, output.prefix_attention, output.received_attention)
    return tokens.x + drop_path(block.drop_path1, y, tokens), state


def feed_forward(block: Any, tokens: RaggedTokens) -> Tensor:
    """`x + drop_path2(ls2(mlp(norm2(x))))` on packed rows, `[T, C]`.

    Args:
        block: A timm `Block`.
        tokens: The batch.
    """
    return tokens.x + drop_path(block.drop_path2, block.ls2(block.mlp(block.norm2(tokens.x))), tokens)


def drop_path(module: Any, x: Tensor, tokens: RaggedTokens) -> Tensor:
    """Stochastic depth that draws once for each image, not for each row.

    Args:
        module: timm's `DropPath`, or an identity.
        x: Residual branch, `[T, C]`.
        tokens: The batch that the rows belong to.
    """
    if isinstance(module, nn.Identity) or not module.training or module.drop_prob == 0:
        return x
    return x * module(x.new_ones(tokens.batch_size + 1, 1))[tokens.image_id]
