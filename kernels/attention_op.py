"""`ragged_attention` as one opaque operator, for graphs: `torch.compile`, `torch.export`.

Inside it tiles may depend on the batch without a new compilation. An eager call goes past it: an operator takes
the host several times as long as the launch.
"""

# mypy: disable-error-code="no-untyped-def"

import torch
from torch import Tensor

from prunevit.kernels.backends import AttentionOutput, probability_dtype, run_backend


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a chosen backend; what is not asked for is empty. No gradients.

    Returns:
        out [T, H, D], prefix_attention [T, P, H] and received_attention [T or 0, H], as in `AttentionOutput`.
    """
    result = run_backend(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
        return_received, image_id, uniform, backend,
    )  # fmt: skip
    promised = _outputs(q, prefix_rows, return_received)
    out, prefix, received = (
        promise if x is None else x if x.stride() == promise.stride() else promise.copy_(x)
        for x, promise in zip(result, promised)
    )
    return out, prefix, received


@attention_op.register_fake
def _(
    q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
    return_received, image_id, uniform, backend,
):  # fmt: skip
    return _outputs(q, prefix_rows, return_received)


def _outputs(q: Tensor, prefix_rows: int, return_received: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate what the operator returns, in the layout that the Triton kernel writes."""
    num_rows, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    received_rows = num_rows if return_received else 0
    dtype = probability_dtype(q)
    prefix_stride = (prefix_rows, 1, num_rows * prefix_rows)
    return (
        q.new_empty(num_rows, num_heads, head_dim),
        q.new_empty_strided((num_rows, prefix_rows, num_heads), prefix_stride, dtype=dtype),
        q.new_empty_strided((received_rows, num_heads), (1, received_rows), dtype=dtype),
    )


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
) -> AttentionOutput:
    """Call the operator as `run_backend` is called."""
    out, prefix, received = attention_op(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
        return_received, image_id, uniform, backend,
    )  # fmt: skip
    return AttentionOutput(out, prefix if prefix_rows else None, received if return_received else None)
