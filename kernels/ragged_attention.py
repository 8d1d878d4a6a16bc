"""The public door of ragged attention: what it means, what it accepts, and which backend computes it."""

import contextlib
import functools
import importlib.util
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.padded import padded_attention
from prunevit.kernels.reference import reference_attention

BACKENDS = ("auto", "reference", "padded", "triton")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRITON_HEAD_DIM = 256

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


def ragged_attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None = None,
    key_weight: Tensor | None = None,
    soft: Tensor | None = None,
    exempt_self: bool = False,
    softmax_eps: float = 0.0,
    prefix_rows: int = 0,
    return_received: bool = False,
    image_id: Tensor | None = None,
    uniform: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Let each row attend to the rows of its own image, for packed images of different lengths.

    For a query i and the keys j of its image of N rows::

        s_ij = softmax_scale * (q_i . k_j)
        m_i  = max_j (s_ij + log key_weight_j)                     over all keys, soft-masked ones included
        p_ij = key_weight_j * soft_j * exp(s_ij - m_i)             exempt_self: p_ii without soft_i
        probability_ij = (p_ij + softmax_eps / N) / (sum_j p_ij + softmax_eps)
        out_i = sum_j probability_ij * v_j

    Rows beyond `cu_seqlens[-1]` are dead: they are never read, and their outputs are 0. Images of 0 rows are
    allowed. A weight may be 0 as long as another key of the image has a positive one (a query for which no
    key has one gets finite, otherwise unspecified values).

    Args:
        q: queries [T, H, D], or queries, keys and values packed as [T, 3, H, D] (read in place); fp16, bf16,
            fp32 or fp64, last dimension contiguous. Under autocast they are cast as those of SDPA are.
        k: keys [T, H, D]; None if packed.
        v: values [T, H, D]; None if packed.
        cu_seqlens: int32 [B + 1]; image b owns the rows cu_seqlens[b] to cu_seqlens[b + 1]; starts at 0.
        max_seqlen: upper bound of the rows of an image, known on the host. A bound that is too low gives
            wrong results (finding that out would take a host synchronisation; "reference" raises).
        softmax_scale: default D ** -0.5.
        key_weight: floating [T], multiplies `exp(score)` of that key.
        soft: floating [T], the differentiable keep-mask, a key weight too.
        exempt_self: leave `soft` out where a row attends to itself.
        softmax_eps: smoothing, as above.
        prefix_rows: P, how many leading rows of each image report whom they attend to.
        return_received: report the mean attention that each row receives.
        image_id: int32 [T], the image of each row, B for dead rows; saves `padded` from finding it.
        uniform: every image has exactly `max_seqlen` rows; lets `padded` reshape instead of copying.
        backend: "reference" (loop over images), "padded" (torch operations), "triton" (CUDA, no backward), or
            "auto", which takes "triton" where it can and says once in the log what it took and why. An
            explicit choice never falls back.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value; the backend cannot compute this.

    Cost: no host synchronisation, except in "reference". "padded" takes O(B H N^2) memory for
        `return_received`, `softmax_eps` and most weights.

    Reference: Rao et al., DynamicViT, NeurIPS 2021 (`soft`, `exempt_self`, `softmax_eps`); Bolya et al.,
        Token Merging, ICLR 2023 (`key_weight`).
    """
    q, k, v = _unpack(q, k, v)
    autocast = torch.is_autocast_enabled(q.device.type)
    if autocast:
        q, k, v = _cast(q), _cast(k), _cast(v)
    _check(q, k, v, cu_seqlens, key_weight, soft, image_id)
    _check_numbers(len(q), len(cu_seqlens) - 1, max_seqlen, softmax_eps, prefix_rows, uniform)
    chosen = _choose_backend(backend, q, _needs_grad(q, k, v, key_weight, soft))
    arguments: dict[str, Any] = {
        "cu_seqlens": cu_seqlens,
        "max_seqlen": max_seqlen,
        "softmax_scale": q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale),
        "key_weight": key_weight,
        "soft": soft,
        "exempt_self": exempt_self,
        "softmax_eps": float(softmax_eps),
        "prefix_rows": prefix_rows,
        "return_received": return_received,
    }
    if chosen == "padded":
        arguments |= {"image_id": image_id, "uniform": uniform}
    # What a backend computes in fp32 stays in fp32.
    with torch.autocast(q.device.type, enabled=False) if autocast else contextlib.nullcontext():
        return _run(chosen, q, k, v, arguments)


def _run(backend: str, q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any]) -> AttentionOutput:
    if len(q) == 0 or len(arguments["cu_seqlens"]) == 1 or arguments["max_seqlen"] == 0:
        return _no_live_row(q, arguments["prefix_rows"], arguments["return_received"])
    if backend == "reference":
        return AttentionOutput(*reference_attention(q, k, v, **arguments))
    if backend == "padded":
        return AttentionOutput(*padded_attention(q, k, v, **arguments))
    from prunevit.kernels.triton_forward import triton_attention

    return AttentionOutput(*triton_attention(q, k, v, **arguments))


def _no_live_row(q: Tensor, prefix_rows: int, return_received: bool) -> AttentionOutput:
    num_rows, num_heads, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    zeros = torch.zeros(num_rows, num_heads, dtype=dtype, device=q.device)
    prefix = zeros[:, None].expand(-1, prefix_rows, -1)
    return AttentionOutput(
        torch.zeros_like(q), prefix if prefix_rows else None, zeros if return_received else None
    )


def _cast(x: Tensor) -> Tensor:
    """Cast as autocast casts the input of `scaled_dot_product_attention`: fp64 stays."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _needs_grad(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _choose_backend(backend: str, q: Tensor, needs_grad: bool) -> str:
    if backend not in BACKENDS:
        raise _error(f"backend must be one of {', '.join(BACKENDS)}", repr(backend))
    if backend in ("reference", "padded"):
        return backend
    obstacle = _triton_obstacle(q, needs_grad, interpret=backend == "triton")
    if backend == "triton" and obstacle:
        raise ValueError(f'ragged_attention: backend="triton" {obstacle}; use "padded" or "auto"')
    chosen = "padded" if obstacle else "triton"
    _log_once(
        f'ragged_attention: backend="auto" takes "{chosen}"' + (f': "triton" {obstacle}' if obstacle else "")
    )
    return chosen


def _triton_obstacle(q: Tensor, needs_grad: bool, interpret: bool) -> str | None:
    """Return what keeps the Triton kernel from this input, None if nothing does.

    Where `TRITON_INTERPRET=1` made the kernel an interpreted one it also runs on a CPU, if asked for by name.
    """
    if not _has_triton():
        return "needs the package triton, which is not installed"
    interpreted = interpret and not q.is_cuda and _is_interpreted()
    if not (q.is_cuda or interpreted):
        return f"needs CUDA tensors, got {q.device.type}"
    if interpreted and q.dtype == torch.bfloat16:
        return "is wrong for bf16 under TRITON_INTERPRET"
    if q.dtype not in _TRITON_DTYPES:
        return f"computes fp16, bf16 and fp32, got {q.dtype}"
    if not 1 <= q.shape[-1] <= _TRITON_HEAD_DIM:
        return f"needs a head_dim of 1 to {_TRITON_HEAD_DIM}, got {q.shape[-1]}"
    if needs_grad:
        return "has no backward yet, and gradients are required"
    return None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _is_interpreted() -> bool:
    from prunevit.kernels.triton_forward import INTERPRETED

    return INTERPRETED


@functools.cache
def _log_once(message: str) -> None:
    log.info(message)


def _unpack(q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if k is not None and v is not None:
        return q, k, v
    if k is not None or v is not None or q.dim() != 4 or q.shape[1] != 3:
        raise ValueError(
            "ragged_attention: q must be packed as [T, 3, H, D] when k or v is missing, "
            f"got q {list(q.shape)}; pass k and v, or neither"
        )
    return q[:, 0], q[:, 1], q[:, 2]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    key_weight: Tensor | None,
    soft: Tensor | None,
    image_id: Tensor | None,
) -> None:
    """Check shapes, dtypes and devices."""
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise _error("q, k, v must have one shape [T, H, D]", [list(x.shape) for x in (q, k, v)])
    if q.dtype not in (*_TRITON_DTYPES, torch.float64):
        raise _error("q must be fp16, bf16, fp32 or fp64", q.dtype)
    if any(x.dtype != q.dtype for x in (k, v)):
        raise _error("q, k, v must have one dtype", [x.dtype for x in (q, k, v)])
    if any(x.shape[-1] > 1 and x.stride(-1) != 1 for x in (q, k, v)):
        raise _error("the last dimension of q, k, v must be contiguous", [x.stride() for x in (q, k, v)])
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not cu_seqlens.is_contiguous():
        raise _error(
            "cu_seqlens must be contiguous int32 [B + 1]", f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    for name, values in {"key_weight": key_weight, "soft": soft}.items():
        if values is not None and (values.shape != q.shape[:1] or not values.is_floating_point()):
            raise _error(f"{name} must be floating [{len(q)}]", f"{values.dtype} {list(values.shape)}")
    if image_id is not None and (image_id.shape != q.shape[:1] or image_id.dtype != torch.int32):
        raise _error(f"image_id must be int32 [{len(q)}]", f"{image_id.dtype} {list(image_id.shape)}")
    for name, tensor in {
        "k": k,
        "v": v,
        "cu_seqlens": cu_seqlens,
        "key_weight": key_weight,
        "soft": soft,
    }.items():
        if tensor is not None and tensor.device != q.device:
            raise _error(f"{name} must be on the device of q, {q.device}", tensor.device)


def _check_numbers(
    num_rows: int, batch_size: int, max_seqlen: int, softmax_eps: float, prefix_rows: int, uniform: bool
) -> None:
    if batch_size < 0:
        raise _error("cu_seqlens must have at least the one element 0", "none")
    if max_seqlen < 0 or prefix_rows < 0 or softmax_eps < 0:
        raise _error(
            "max_seqlen, prefix_rows and softmax_eps must not be negative",
            (max_seqlen, prefix_rows, softmax_eps),
        )
    if uniform and batch_size * max_seqlen > num_rows:
        raise _error(f"uniform needs {batch_size} x {max_seqlen} rows", num_rows)


def _error(must_hold: str, got: object) -> ValueError:
    return ValueError(f"ragged_attention: {must_hold}, got {got}")
