"""`ragged_attention` as an opaque operator: for graphs (`torch.compile`, `torch.export`) and for gradients of "triton".

Inside it tiles may depend on the batch without a new compilation. An eager call without gradients goes past it: an
operator takes the host several times as long as the launch.
"""

# mypy: disable-error-code="no-untyped-def"

from typing import Any, NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.backends import AttentionOutput, has_live_row, probability_dtype, run_backend


@torch.library.custom_op("prunevit::ragged_attention", mutates_args=())
def attention_op(
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
    prefix_rows: int,
    return_received: bool,
    image_id: Tensor | None,
    uniform: bool,
    backend: str,
    saves: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run a chosen backend; what is not asked for is empty. Differentiable if it `saves`, which "triton" alone does.

    Returns:
        out [T, H, D], prefix_attention [T, P, H] and received_attention [T or 0, H], as in `AttentionOutput`, and
        what the backward takes besides, [0 to 2, H, T].
    """
    saved = None
    if saves and has_live_row(q, cu_seqlens, max_seqlen):
        from prunevit.kernels.triton_forward import triton_attention

        *result, saved = triton_attention(
            q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
            return_received, saves=True,
        )  # fmt: skip
    else:
        result = list(
            run_backend(
                q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps,
                prefix_rows, return_received, image_id, uniform, backend,
            )
        )  # fmt: skip
    promised = _outputs(q, prefix_rows, return_received, softmax_eps, saves)
    out, prefix, received, saved = (
        _as_promised(q, x, promise) for x, promise in zip([*result, saved], promised)
    )
    return out, prefix, received, saved


@attention_op.register_fake
def _(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
    return_received, image_id, uniform, backend, saves,
):  # fmt: skip
    promised = _outputs(q, prefix_rows, return_received, softmax_eps, saves)
    return tuple(_allocate(q, promise) for promise in promised)


class _Promise(NamedTuple):
    """Layout of a tensor that is returned."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def _allocate(q: Tensor, promise: _Promise) -> Tensor:
    return q.new_empty_strided(promise.shape, promise.stride, dtype=promise.dtype)


def _as_promised(q: Tensor, x: Tensor | None, promise: _Promise) -> Tensor:
    if x is not None and x.stride() == promise.stride:
        return x
    return _allocate(q, promise).zero_() if x is None else _allocate(q, promise).copy_(x)


def _outputs(
    q: Tensor, prefix_rows: int, return_received: bool, softmax_eps: float, saves: bool
) -> tuple[_Promise, _Promise, _Promise, _Promise]:
    """Say how what the operator returns lies in memory: as the Triton kernel writes it."""
    num_rows, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    received_rows = num_rows if return_received else 0
    planes = 0 if not saves else 2 if softmax_eps else 1
    dtype = probability_dtype(q)
    plane = (num_heads * num_rows, num_rows, 1)
    return (
        _Promise((num_rows, num_heads, head_dim), (num_heads * head_dim, head_dim, 1), q.dtype),
        _Promise((num_rows, prefix_rows, num_heads), (prefix_rows, 1, num_rows * prefix_rows), dtype),
        _Promise((received_rows, num_heads), (1, received_rows), dtype),
        _Promise((planes, num_heads, num_rows), plane, dtype),
    )


@torch.library.custom_op("prunevit::ragged_attention_backward", mutates_args=())
def backward_op(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, key_weight and soft; what is not there or not wanted is empty."""
    if not has_live_row(q, cu_seqlens, max_seqlen):
        nothing = _gradients(q, k, v, key_weight, soft, wants_key_weight, wants_soft)
        dq, dk, dv, d_key_weight, d_soft = (gradient.zero_() for gradient in nothing)
        return dq, dk, dv, d_key_weight, d_soft
    from prunevit.kernels.triton_backward import triton_backward

    found = triton_backward(
        d_out, d_prefix, d_received, q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self,
        softmax_eps, out, saved, wants_key_weight, wants_soft,
    )  # fmt: skip
    dq, dk, dv, d_key_weight, d_soft = (q.new_empty([0]) if x is None else x for x in found)
    return dq, dk, dv, d_key_weight, d_soft


@backward_op.register_fake
def _(
    d_out, d_prefix, d_received, q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self,
    softmax_eps, out, saved, wants_key_weight, wants_soft,
):  # fmt: skip
    return _gradients(q, k, v, key_weight, soft, wants_key_weight, wants_soft)


def _gradients(q, k, v, key_weight, soft, wants_key_weight, wants_soft) -> tuple[Tensor, ...]:
    nothing = [0]
    return (
        q.new_empty(q.shape),
        q.new_empty(nothing if k is None else k.shape),
        q.new_empty(nothing if v is None else v.shape),
        key_weight.new_empty(key_weight.shape) if wants_key_weight else q.new_empty(nothing),
        soft.new_empty(soft.shape) if wants_soft else q.new_empty(nothing),
    )


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps = inputs[:10]
    out, _, _, saved = output
    ctx.save_for_backward(q, k, v, cu_seqlens, key_weight, soft, out, saved)
    ctx.numbers = max_seqlen, softmax_scale, exempt_self, softmax_eps
    ctx.reports = inputs[10] > 0, inputs[11]
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, d_out: Tensor | None, d_prefix: Tensor | None, d_received: Tensor | None, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, key_weight, soft, out, saved = ctx.saved_tensors
    max_seqlen, softmax_scale, exempt_self, softmax_eps = ctx.numbers
    has_prefix, has_received = ctx.reports
    wants_key_weight, wants_soft = ctx.needs_input_grad[6], ctx.needs_input_grad[7]
    dq, dk, dv, d_key_weight, d_soft = backward_op(
        torch.zeros_like(out) if d_out is None else d_out,
        d_prefix if has_prefix else None,
        d_received if has_received else None,
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, out, saved,
        wants_key_weight, wants_soft,
    )  # fmt: skip
    found = {
        0: dq,
        1: None if k is None else dk,
        2: None if v is None else dv,
        6: d_key_weight if wants_key_weight else None,
        7: d_soft if wants_soft else None,
    }
    return tuple(found.get(index) for index in range(16))


attention_op.register_autograd(_backward, setup_context=_keep_for_backward)


def run_operator(
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
    prefix_rows: int,
    return_received: bool,
    image_id: Tensor | None,
    uniform: bool,
    backend: str,
    saves: bool,
) -> AttentionOutput:
    """Call the operator as `run_backend` is called; if it `saves`, its results are differentiable."""
    out, prefix, received, _ = attention_op(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
        return_received, image_id, uniform, backend, saves,
    )  # fmt: skip
    return AttentionOutput(out, prefix if prefix_rows else None, received if return_received else None)
