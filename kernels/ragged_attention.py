"""The public door of ragged attention: what it means, and what it accepts.

Checks and choices depend on little that changes from call to call: a call like one before goes straight to the launch.
"""

import math
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from prunevit.kernels.attention_op import run_operator
from prunevit.kernels.autocast import casts
from prunevit.kernels.backends import BACKENDS, AttentionOutput, choose_backend, has_live_row, run_backend

__all__ = ["BACKENDS", "AttentionOutput", "ragged_attention"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
        key_weight: floating [T], multiplies `exp(score)` of that key; with fp16 rows below 2**15 in "triton".
        soft: floating [T], the differentiable keep-mask, a key weight too.
        exempt_self: leave `soft` out where a row attends to itself.
        softmax_eps: smoothing, as above.
        prefix_rows: P, how many leading rows of each image report whom they attend to.
        return_received: report the mean attention that each row receives.
        image_id: int32 [T], the image of each row, B for dead rows; saves `padded` from finding it.
        uniform: every image has exactly `max_seqlen` rows; lets `padded` reshape instead of copying.
        backend: "reference" (loop over images), "padded" (torch operations), "triton" (CUDA), or
            "auto", which takes "triton" where it can, unless all images are equally long and dense attention
            is known to be faster, and says once in the log what it took and why. An explicit choice never
            falls back. All are differentiable in q, k, v, `key_weight` and `soft`.

    Raises:
        ValueError: an argument has the wrong shape, dtype, device or value; the backend cannot compute this.

    Cost: no host synchronisation, except in "reference". "padded" takes O(B H N^2) memory for
        `return_received`, `softmax_eps` and most weights.

    Reference: Rao et al., DynamicViT, NeurIPS 2021 (`soft`, `exempt_self`, `softmax_eps`); Bolya et al.,
        Token Merging, ICLR 2023 (`key_weight`).
    """
    if torch.is_autocast_enabled() if q.is_cuda else casts(q.device.type):
        q = _cast(q)
        k, v = (x if x is None else _cast(x) for x in (k, v))
    key = prepared = None
    shape = q.shape
    if q.__class__ is Tensor and len(shape) > 2 and not torch.compiler.is_dynamo_compiling():
        # All that a check or a choice depends on; of the number of rows only whether it passes.
        num_rows, bounds, is_graded = shape[0], cu_seqlens.shape, torch.is_grad_enabled()
        key = (
            q.dtype, q.device, shape[1], shape[-2], shape[-1], len(shape), is_graded and q.requires_grad,
            q.is_contiguous() or q.stride(), num_rows if num_rows < 2 else 2,  # the stride of a single row may be any
            cu_seqlens.dtype, cu_seqlens.device, bounds, cu_seqlens.is_contiguous(),
            None if k is None else (_kind(k, is_graded), k.stride(), k.shape == shape),
            None if v is None else (_kind(v, is_graded), v.stride(), v.shape == shape),
            None if key_weight is None else (_kind(key_weight, is_graded), key_weight.numel() == num_rows),
            None if soft is None else (_kind(soft, is_graded), soft.numel() == num_rows),
            None if image_id is None else (*_kind(image_id, False)[:3], image_id.numel() == num_rows),
            uniform and (bounds.numel() - 1) * max_seqlen <= num_rows,
            max_seqlen, softmax_scale, exempt_self, softmax_eps, prefix_rows, return_received, uniform, backend,
        )  # fmt: skip
        prepared = _prepared.get(key)
    if prepared is None:
        return _attend(
            key, q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps,
            prefix_rows, return_received, image_id, uniform, backend,
        )  # fmt: skip
    out, prefix, received, _ = prepared(num_rows, q, k, v, cu_seqlens, key_weight, soft)
    return AttentionOutput(out, prefix, received)


_prepared: dict[tuple[Any, ...], Callable[..., tuple[Any, ...]]] = {}
_MOST_PREPARED = 4096


def _kind(x: Tensor, is_graded: bool) -> tuple[Any, ...]:
    return x.dtype, x.device, x.dim(), x.is_contiguous(), is_graded and x.requires_grad


def _attend(
    key: tuple[Any, ...] | None,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float | None,
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
    """Check a call, choose what computes it, and compute it; "triton" without gradients is remembered under the key."""
    _check(q, k, v, cu_seqlens, key_weight, soft, image_id)
    _check_numbers(q.shape[0], cu_seqlens.shape[0] - 1, max_seqlen, softmax_eps, prefix_rows, uniform)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    needs_grad = torch.is_grad_enabled() and _requires_grad(q, k, v, key_weight, soft)
    plain = not (soft is not None or key_weight is not None or softmax_eps or prefix_rows or return_received)
    chosen = choose_backend(backend, q, max_seqlen if uniform and plain else None)
    saves = needs_grad and chosen == "triton"
    inside_graph = torch.compiler.is_compiling() and not needs_grad
    weights = (key_weight, soft)
    if chosen == "triton":  # which reads them without a stride
        key_weight, soft = (x if x is None else x.contiguous() for x in weights)
    call = (
        q, k, v, cu_seqlens, max_seqlen, scale, key_weight, soft, exempt_self, float(softmax_eps), prefix_rows,
        return_received,
    )  # fmt: skip
    if saves or inside_graph:
        return run_operator(*call, image_id, uniform, chosen, saves)
    numbers = (max_seqlen, softmax_scale, softmax_eps, prefix_rows)
    lasting = chosen == "triton" and has_live_row(q, cu_seqlens, max_seqlen) and _are_plain(numbers)
    if key is not None and lasting and key_weight is weights[0] and soft is weights[1]:
        _remember(key, call)
    return run_backend(*call, image_id, uniform, chosen)


def _are_plain(numbers: Iterable[object]) -> bool:
    """Whether equal ones stay equal: a tensor, which is hashed by its identity, can change its value."""
    return all(x is None or isinstance(x, int | float) for x in numbers)


def _remember(key: tuple[Any, ...], call: tuple[Any, ...]) -> None:
    from prunevit.kernels.triton_forward import prepare

    if len(_prepared) >= _MOST_PREPARED:
        _prepared.clear()
    _prepared[key] = prepare(*call).__call__  # a method is called sooner than an object


def _cast(x: Tensor) -> Tensor:
    """Cast as autocast casts the input of `scaled_dot_product_attention`: fp64 stays."""
    return x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype(x.device.type))


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def _check(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    key_weight: Tensor | None,
    soft: Tensor | None,
    image_id: Tensor | None,
) -> None:
    """Check shapes, dtypes and devices. Eager calls pay for each line: what is usual is asked first."""
    if k is not None and v is not None:
        _check_separate(q, k, v)
    elif k is not None or v is not None or q.dim() != 4 or q.shape[1] != 3:
        raise ValueError(
            "ragged_attention: q must be packed as [T, 3, H, D] when k or v is missing, "
            f"got q {list(q.shape)}; pass k and v, or neither"
        )
    if q.dtype not in _DTYPES:
        raise _error("q must be fp16, bf16, fp32 or fp64", q.dtype)
    if q.stride(-1) != 1 and q.shape[-1] > 1:
        raise _error("the last dimension of q, k, v must be contiguous", q.stride())
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not cu_seqlens.is_contiguous():
        raise _error(
            "cu_seqlens must be contiguous int32 [B + 1]", f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}"
        )
    if cu_seqlens.device != q.device:
        raise _error(f"cu_seqlens must be on the device of q, {q.device}", cu_seqlens.device)
    if key_weight is not None:
        _check_weight("key_weight", key_weight, q)
    if soft is not None:
        _check_weight("soft", soft, q)
    if image_id is not None and (image_id.dtype != torch.int32 or image_id.shape != q.shape[:1]):
        raise _error(f"image_id must be int32 [{len(q)}]", f"{image_id.dtype} {list(image_id.shape)}")
    if image_id is not None and image_id.device != q.device:
        raise _error(f"image_id must be on the device of q, {q.device}", image_id.device)


def _check_weight(name: str, weight: Tensor, q: Tensor) -> None:
    if weight.shape != q.shape[:1] or not weight.is_floating_point():
        raise _error(f"{name} must be floating [{len(q)}]", f"{weight.dtype} {list(weight.shape)}")
    if weight.device != q.device:
        raise _error(f"{name} must be on the device of q, {q.device}", weight.device)


def _check_separate(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dim() != 3 or q.shape != k.shape or q.shape != v.shape:
        raise _error("q, k, v must have one shape [T, H, D]", [list(x.shape) for x in (q, k, v)])
    if k.dtype != q.dtype or v.dtype != q.dtype:
        raise _error("q, k, v must have one dtype", [x.dtype for x in (q, k, v)])
    if k.shape[-1] > 1 and (k.stride(-1) != 1 or v.stride(-1) != 1):
        raise _error("the last dimension of q, k, v must be contiguous", [x.stride() for x in (q, k, v)])
    if k.device != q.device or v.device != q.device:
        raise _error("q, k, v must be on one device", [x.device for x in (q, k, v)])


def _check_numbers(
    num_rows: int, batch_size: int, max_seqlen: int, softmax_eps: float, prefix_rows: int, uniform: bool
) -> None:
    if batch_size < 0:
        raise _error("cu_seqlens must have at least the one element 0", "none")
    if not (_is_whole(max_seqlen) and _is_whole(prefix_rows)):
        raise _error("max_seqlen and prefix_rows must be whole numbers", (max_seqlen, prefix_rows))
    if max_seqlen < 0 or prefix_rows < 0:
        raise _error("max_seqlen and prefix_rows must not be negative", (max_seqlen, prefix_rows))
    if not 0 <= softmax_eps < math.inf:
        raise _error("softmax_eps must be finite and not be negative", softmax_eps)
    if uniform and batch_size * max_seqlen > num_rows:
        raise _error(f"uniform needs {batch_size} x {max_seqlen} rows", num_rows)


def _is_whole(number: object) -> bool:
    """Whether it is one; the compiler's stand-in for one is, a truth value is not."""
    return isinstance(number, int | Integral | torch.SymInt) and not isinstance(number, bool)


def _error(must_hold: str, got: object) -> ValueError:
    return ValueError(f"ragged_attention: {must_hold}, got {got}")
