"""The gradients of the Triton ragged attention: one launch where a tile holds an image's keys, else two.

Without atomics: the same input gives the same bits. Scores are computed again from q, k and the log-sum-exp.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from prunevit.kernels.launch import Bound
from prunevit.kernels.tiles import BackwardTiles, LongTile, choose_backward_tiles
from prunevit.kernels.triton_forward import bind, layout
from prunevit.kernels.triton_gradients import keys_kernel, queries_kernel


class AttentionGradients(NamedTuple):
    """What `triton_backward` gives.

    Attributes:
        q: Gradient of q, as q is: [T, H, D], or [T, 3, H, D] of packed rows; contiguous, 0 in dead rows.
        k: Gradient of k [T, H, D]; None for packed rows.
        v: Gradient of v [T, H, D]; None for packed rows.
        key_weight: Gradient of `key_weight`, [T]; None if it is not wanted.
        soft: Gradient of `soft`, [T]; None if it is not wanted.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    key_weight: Tensor | None
    soft: Tensor | None


def triton_backward(
    d_out: Tensor,
    d_prefix: Tensor | None,
    d_received: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    key_weight: Tensor | None,
    soft: Tensor | None,
    exempt_self: bool,
    softmax_eps: float,
    out: Tensor,
    saved: Tensor,
    wants_key_weight: bool,
    wants_soft: bool,
    tiles: BackwardTiles | None = None,
) -> AttentionGradients:
    """Return the gradients of `triton_attention`.

    Args:
        d_out: Gradient of the mixed values [T, H, D]; dead rows are not read.
        d_prefix: Gradient of the prefix rows' probabilities [T, P, H], or None.
        d_received: Gradient of the received attention [T, H], or None.
        q: As in the forward, and so are k, v and all up to `softmax_eps`.
        k: Keys.
        v: Values.
        cu_seqlens: Bounds of the images.
        max_seqlen: Bound of an image's rows.
        softmax_scale: Scale of the scores.
        key_weight: Weights of the keys.
        soft: The differentiable keep-mask.
        exempt_self: Whether `soft` is left out on the diagonal.
        softmax_eps: Smoothing.
        out: What the forward gave.
        saved: What the forward saved.
        wants_key_weight: Whether `key_weight` needs a gradient.
        wants_soft: Whether `soft` needs one.
        tiles: Those to take instead of the table's, for the tuner.

    Cost: one launch or two; a copy of each incoming gradient that is not contiguous; a sum over heads for each weight.
    """
    num_rows, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    num_images = cu_seqlens.shape[0] - 1
    d_out = d_out.contiguous()
    if d_prefix is not None:
        d_prefix = d_prefix.permute(2, 0, 1).contiguous()
    if d_received is not None:
        d_received = d_received.T.contiguous()
    plan = _plan(
        max_seqlen, q.dtype, q.stride(), None if k is None else k.stride(), None if v is None else v.stride(),
        num_heads, head_dim, softmax_scale, exempt_self and soft is not None, softmax_eps,
        0 if d_prefix is None else d_prefix.shape[-1],
        softmax_eps == 0 and key_weight is None and soft is None and d_prefix is None and d_received is None,
        q.get_device(), tiles,
    )  # fmt: skip
    dq, dk, dv = (
        None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)
    )
    assert dq is not None
    d_key_weight, d_soft = (
        torch.empty(num_heads, num_rows, device=q.device) if wanted else None
        for wanted in (wants_key_weight, wants_soft)
    )
    segments = num_heads * (num_images + 1)  # of rows: the images and the dead rows
    row_grads = None
    if plan.queries is not None:
        row_grads = torch.empty(3 if softmax_eps else 1, num_heads, num_rows, device=q.device)
        plan.queries(
            segments * plan.query_tiles, q, cu_seqlens, d_out, saved, dq, num_rows, num_images, plan.query_tiles, k, v,
            out, key_weight, soft, d_prefix, d_received, row_grads,
        )  # fmt: skip
    plan.keys(
        segments * plan.key_tiles, q, cu_seqlens, d_out, saved, dq, num_rows, num_images, plan.key_tiles, k, v, dk, dv,
        key_weight, soft, d_prefix, d_received, d_key_weight, d_soft, row_grads,
    )  # fmt: skip
    return AttentionGradients(dq, dk, dv, _over_heads(d_key_weight, key_weight), _over_heads(d_soft, soft))


def _over_heads(gradient: Tensor | None, weight: Tensor | None) -> Tensor | None:
    """Sum [H, T] over the heads, in the dtype of the weight."""
    return None if gradient is None or weight is None else gradient.sum(0).to(weight.dtype)


class _Plan(NamedTuple):
    """The kernels of a backward, and how many tiles they take for each head of each image."""

    keys: Bound
    key_tiles: int
    queries: Bound | None
    query_tiles: int


@functools.lru_cache(maxsize=4096)
def _plan(
    max_seqlen: int,
    dtype: torch.dtype,
    q_stride: tuple[int, ...],
    k_stride: tuple[int, ...] | None,
    v_stride: tuple[int, ...] | None,
    num_heads: int,
    head_dim: int,
    softmax_scale: float,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    plain: bool,
    device: int,
    tiles: BackwardTiles | None,
) -> _Plan:
    tiles = tiles or choose_backward_tiles(max_seqlen, head_dim, dtype, plain)
    constants: dict[str, Any] = {
        **layout(q_stride, k_stride, v_stride),
        "H": num_heads,
        "D": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "SCALE": softmax_scale,
        "SCALE_LOG2": softmax_scale / math.log(2),
        "EXEMPT_SELF": exempt_self,
        "EPS": softmax_eps,
        "PREFIX_ROWS": prefix_rows,
        "WHOLE": tiles.queries is None,
    }
    keys = bind(keys_kernel, **constants, **_shape(tiles.keys))
    key_tiles = triton.cdiv(max_seqlen, tiles.keys.block_n)
    if tiles.queries is None:
        return _Plan(keys, key_tiles, None, 0)
    queries = bind(queries_kernel, **constants, **_shape(tiles.queries))
    return _Plan(keys, key_tiles, queries, triton.cdiv(max_seqlen, tiles.queries.block_m))


def _shape(tile: LongTile) -> dict[str, int]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
