"""Which backend computes a call of `ragged_attention`, and the call itself."""

import functools
import importlib.util
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.autocast import without_casts
from prunevit.kernels.padded import padded_attention
from prunevit.kernels.reference import attend_to_nothing, reference_attention
from prunevit.kernels.tiles import dense_is_faster

BACKENDS = ("auto", "reference", "padded", "triton")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRITON_HEAD_DIM = 256
_HAS_TRITON = importlib.util.find_spec("triton") is not None

log = logging.getLogger("prunevit")


class AttentionOutput(NamedTuple):
    """What attention gives.

    Attributes:
        out: mixed values [T, H, D] in the dtype of the input; 0 in dead rows.
        prefix_attention: probabilities [T, P, H] with which each of the first P rows of an image attends to
            the row, fp32 (fp64 for fp64 input); 0 for a prefix row that the image lacks. Or None.
        received_attention: mean over the image's queries of the probability on the row, [T, H], dtype as
            `prefix_attention`. Or None.
    """

    out: Tensor
    prefix_attention: Tensor | None
    received_attention: Tensor | None


def choose_backend(backend: str, q: Tensor, dense_rows: int | None) -> str:
    """Return "reference", "padded" or "triton"; `auto` says once in the log what it takes, and why.

    Args:
        backend: One of BACKENDS.
        q: As in `ragged_attention`.
        dense_rows: How many rows each image has, if all have the same and plain attention is all that is wanted.

    Raises:
        ValueError: If there is no such backend, or if it cannot compute this.
    """
    if backend == "reference" or backend == "padded":
        return backend
    if backend not in BACKENDS:
        raise ValueError(f"ragged_attention: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    obstacle = _triton_obstacle(q, interpret=backend == "triton")
    if backend == "triton":
        if obstacle:
            raise ValueError(f'ragged_attention: backend="triton" {obstacle}; use "padded" or "auto"')
        return "triton"
    if dense_rows is not None and obstacle is None and dense_is_faster(dense_rows, q.shape[-1], q.dtype):
        obstacle = "is slower than dense attention, and all images are equally long"
    if not torch.compiler.is_compiling():  # a log line cannot be part of a graph
        _say_choice(obstacle)
    return "padded" if obstacle else "triton"


def _triton_obstacle(q: Tensor, interpret: bool) -> str | None:
    """Return what keeps the Triton kernel from this input, None if nothing does.

    Where `TRITON_INTERPRET=1` made the kernel an interpreted one it also runs on a CPU, if asked for by name.
    """
    if not _HAS_TRITON:
        return "needs the package triton, which is not installed"
    if not q.is_cuda:
        if not (interpret and _is_interpreted()):
            return f"needs CUDA tensors, got {q.device.type}"
        if q.dtype == torch.bfloat16:
            return "is wrong for bf16 under TRITON_INTERPRET"
    if q.dtype not in _TRITON_DTYPES:
        return f"computes fp16, bf16 and fp32, got {q.dtype}"
    if not 1 <= q.shape[-1] <= _TRITON_HEAD_DIM:
        return f"needs a head_dim of 1 to {_TRITON_HEAD_DIM}, got {q.shape[-1]}"
    return None


def _is_interpreted() -> bool:
    from prunevit.kernels.triton_forward import INTERPRETED

    return INTERPRETED


@functools.cache
def _say_choice(obstacle: str | None) -> None:
    if obstacle is None:
        log.info('ragged_attention: backend="auto" takes "triton"')
    else:
        log.info(f'ragged_attention: backend="auto" takes "padded": "triton" {obstacle}')


def run_backend(
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
    """Compute `ragged_attention` from arguments that have been checked, by a backend that has been chosen."""
    if not has_live_row(q, cu_seqlens, max_seqlen):
        return AttentionOutput(*attend_to_nothing(q, k, v, key_weight, soft, prefix_rows, return_received))
    if backend == "triton":
        out, prefix, received, _ = _triton_attention()(
            q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
            return_received,
        )  # fmt: skip
        return AttentionOutput(out, prefix, received)
    if k is None or v is None:
        q, k, v = q.unbind(1)
    arguments: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "softmax_scale": softmax_scale,
        "key_weight": key_weight,
        "soft": soft,
        "exempt_self": exempt_self,
        "softmax_eps": softmax_eps,
        "prefix_rows": prefix_rows,
        "return_received": return_received,
    }
    with without_casts(q.device.type):
        if backend == "reference":
            return AttentionOutput(*reference_attention(q, k, v, **arguments))
        return AttentionOutput(*padded_attention(q, k, v, **arguments, image_id=image_id, uniform=uniform))


@functools.cache
def _triton_attention() -> Any:
    """Import the kernel once it is wanted: triton need not be installed."""
    from prunevit.kernels.triton_forward import triton_attention

    return triton_attention


def has_live_row(q: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> bool:
    """Whether there is anything to compute, as far as the host knows."""
    return not (q.shape[0] == 0 or cu_seqlens.shape[0] == 1 or max_seqlen == 0)


def probability_dtype(q: Tensor) -> torch.dtype:
    """Return the dtype of the emitted probabilities."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32
