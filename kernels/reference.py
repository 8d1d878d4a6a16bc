"""Ragged attention as a loop over images: the oracle that every other backend is measured against."""

from itertools import pairwise

import torch
from torch import Tensor


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    key_weight: Tensor | None,
    soft: Tensor | None,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend within each image, one image after the other; meaning and shapes as in `ragged_attention`.

    fp16 and bf16 are computed in fp32 and rounded once, at the end. Differentiable in every input.

    Raises:
        ValueError: `cu_seqlens` does not rise from 0 to at most the number of rows, or an image has more than
            `max_seqlen` rows, or it is a meta tensor.

    Cost: one host synchronisation (reads `cu_seqlens`), launches that grow with B, O(N^2) memory.
    """
    num_rows, num_heads, _ = q.shape
    bounds = check_bounds(cu_seqlens, max_seqlen, num_rows)
    if bounds[-1] == 0:
        return attend_to_nothing(q, k, v, key_weight, soft, prefix_rows, return_received)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    wide_q, wide_k, wide_v = q.to(dtype), k.to(dtype), v.to(dtype)
    ones = torch.ones(num_rows, dtype=dtype, device=q.device)
    key_weight = ones if key_weight is None else key_weight.to(dtype)
    soft = ones if soft is None else soft.to(dtype)

    out, prefix, received = [], [], []
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        image = slice(start, stop)
        probability = image_probabilities(
            wide_q[image],
            wide_k[image],
            key_weight[image],
            soft[image],
            softmax_scale=softmax_scale,
            exempt_self=exempt_self,
            softmax_eps=softmax_eps,
        )
        out.append(torch.einsum("hij,jhd->ihd", probability, wide_v[image]))
        prefix.append(_first_queries(probability, prefix_rows))
        received.append(probability.mean(1).T)

    dead_rows = num_rows - bounds[-1]
    out.append(wide_q.new_zeros(dead_rows, num_heads, v.shape[-1]))
    prefix.append(wide_q.new_zeros(dead_rows, prefix_rows, num_heads))
    received.append(wide_q.new_zeros(dead_rows, num_heads))
    return (
        torch.cat(out).to(q.dtype),
        torch.cat(prefix) if prefix_rows else None,
        torch.cat(received) if return_received else None,
    )


def attend_to_nothing(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    prefix_rows: int,
    return_received: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the zeros of a batch without a live row, whose gradients are zeros too, not missing."""
    num_rows, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    # A sum of nothing depends on what it is not taken of, and no NaN of a dead row gets into it.
    nothing = sum(x[:0].sum(dtype=dtype) for x in (q, k, v, key_weight, soft) if x is not None)
    zeros = q.new_zeros(num_rows, num_heads, dtype=dtype) + nothing
    return (
        zeros[..., None].expand(-1, -1, head_dim).to(q.dtype).contiguous(),
        zeros[:, None].expand(-1, prefix_rows, -1) if prefix_rows else None,
        zeros if return_received else None,
    )


def image_probabilities(
    q: Tensor,
    k: Tensor,
    key_weight: Tensor,
    soft: Tensor,
    *,
    softmax_scale: float,
    exempt_self: bool,
    softmax_eps: float,
) -> Tensor:
    """Return the attention probabilities [H, N, N] (query, key) of one image of N >= 1 rows.

    The weights multiply `exp(score)`: as an additive logarithm their gradient would be NaN at weight 0.
    """
    num_rows = len(q)
    score = softmax_scale * torch.einsum("ihd,jhd->hij", q, k)
    positive = key_weight > 0
    log_weight = torch.where(positive, key_weight, 1).log().masked_fill(~positive, float("-inf"))
    row_max = (score + log_weight).max(-1, keepdim=True).values
    row_max = row_max.masked_fill(row_max == float("-inf"), 0)  # no key with a positive weight

    weight = (key_weight * soft).expand(num_rows, num_rows)
    if exempt_self:
        weight = torch.where(torch.eye(num_rows, dtype=torch.bool, device=q.device), key_weight, weight)
    # Only a key of weight 0 can lie far above the maximum: without the limit it would give 0 * inf.
    p = weight * (score - row_max).clamp(max=exponent_limit(score.dtype)).exp()
    total = p.sum(-1, keepdim=True)
    if softmax_eps == 0:
        return p / total.masked_fill(total == 0, 1)
    return (p + softmax_eps / num_rows) / (total + softmax_eps)


def exponent_limit(dtype: torch.dtype) -> float:
    """Return the largest exponent used, a factor of 3000 below the overflow of `exp` in `dtype`."""
    return float(torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).log()) - 8


def _first_queries(probability: Tensor, prefix_rows: int) -> Tensor:
    """Return what the first queries attend to, [N, P, H]; a query that the image lacks attends to nothing."""
    first = probability[:, :prefix_rows]
    missing = prefix_rows - first.shape[1]
    return torch.nn.functional.pad(first, (0, 0, 0, missing)).permute(2, 1, 0)


def check_bounds(cu_seqlens: Tensor, max_seqlen: int, num_rows: int) -> list[int]:
    """Return the boundaries of the images, read back from the device, or refuse what cannot be some."""
    if cu_seqlens.is_meta:
        raise ValueError(
            'ragged_attention: backend="reference" needs tensors with data, got meta tensors; use "padded"'
        )
    bounds = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] > num_rows or min(lengths, default=0) < 0:
        raise ValueError(
            f"ragged_attention: cu_seqlens must rise from 0 to at most the {num_rows} rows, got {bounds}"
        )
    if max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"ragged_attention: max_seqlen must be at least the longest, {max(lengths)}, got {max_seqlen}"
        )
    return bounds
