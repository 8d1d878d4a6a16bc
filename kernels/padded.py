"""Ragged attention by padding to `max_seqlen`: torch operations, differentiable, no host synchronisation."""

import math
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from prunevit.kernels.reference import check_bounds


def padded_attention(
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
    image_id: Tensor | None,
    uniform: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend within each image on a padded copy; meaning and shapes as in `ragged_attention`.

    `scaled_dot_product_attention` does the work wherever it can say what is meant. It cannot give the
    attention that a key received, `softmax_eps`, an exempt diagonal, or the gradient of a weight that is 0:
    those take the softmax written out.

    Raises:
        ValueError: On a CPU, `cu_seqlens` is not what the other arguments say. A GPU would have to be waited for.

    Cost: a copy of q, k, v and the output unless `uniform`; O(B H N^2) memory where the softmax is written
    out, O(B H P N) for the prefix rows.
    """
    if cu_seqlens.device.type == "cpu" and not (torch.compiler.is_compiling() or isinstance(q, FakeTensor)):
        bounds = check_bounds(cu_seqlens, max_seqlen, len(q))
        if uniform and bounds != [image * max_seqlen for image in range(len(bounds))]:
            raise ValueError(
                f"ragged_attention: uniform needs {max_seqlen} rows in every image, got cu_seqlens {bounds}"
            )
    layout = _Layout(cu_seqlens, max_seqlen, len(q), image_id, uniform)
    q, k, v = (layout.pad(rows).transpose(1, 2) for rows in (q, k, v))  # [B, H, N, D]

    def probabilities(queries: Tensor) -> Tensor:
        return _probabilities(queries, k, layout, softmax_scale, key_weight, soft, exempt_self, softmax_eps)

    weights = [weight for weight in (key_weight, soft) if weight is not None]
    differentiated = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
    # A half-precision bias would round log(weight): in bf16 a whole per cent of the probability.
    rounded = bool(weights) and q.dtype in (torch.float16, torch.bfloat16)
    received: Tensor | None = None
    first: Tensor | None = None
    if softmax_eps or return_received or (exempt_self and soft is not None) or differentiated or rounded:
        probability = probabilities(q)
        out = (probability @ v.to(probability.dtype)).to(v.dtype)
        if return_received:
            mean = probability.sum(2) / layout.lengths.clamp(min=1).view(-1, 1, 1)
            received = layout.unpad(mean.transpose(1, 2))
        first = probability[:, :, :prefix_rows]
    else:
        bias = None if uniform and not weights else _bias(layout, weights, q.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=softmax_scale)
        if prefix_rows:
            first = probabilities(q[:, :, :prefix_rows])

    prefix = None
    if prefix_rows and first is not None:
        missing = prefix_rows - first.shape[2]
        prefix = layout.unpad(F.pad(first, (0, 0, 0, missing)).permute(0, 3, 2, 1))
    return layout.unpad(out.transpose(1, 2)), prefix, received


class _Layout:
    """Where the packed rows [T, ...] stand in the padded layout [B, N, ...], and the way back."""

    def __init__(
        self, cu_seqlens: Tensor, max_seqlen: int, num_rows: int, image_id: Tensor | None, uniform: bool
    ) -> None:
        self.cu_seqlens, self.num_rows, self.uniform = cu_seqlens, num_rows, uniform
        self.shape = (len(cu_seqlens) - 1, max_seqlen)
        if not uniform:
            self._index(image_id)

    def _index(self, image_id: Tensor | None) -> None:
        batch_size, max_seqlen = self.shape
        row = torch.arange(self.num_rows, device=self.cu_seqlens.device)
        if image_id is None:
            image_id = torch.searchsorted(self.cu_seqlens[1:], row, right=True)
        cell = self.cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=row.device)
        self.row_of_cell = cell.masked_fill(~self.valid, 0)
        self.dead = image_id == batch_size
        position = row - self.cu_seqlens.index_select(0, image_id)
        self.cell_of_row = (image_id * max_seqlen + position).masked_fill(self.dead, 0)

    @cached_property
    def lengths(self) -> Tensor:
        """Rows of each image, [B]."""
        return self.cu_seqlens.diff()

    @cached_property
    def valid(self) -> Tensor:
        """Whether a cell holds a row, [B, N]."""
        return torch.arange(self.shape[1], device=self.cu_seqlens.device) < self.lengths[:, None]

    def pad(self, rows: Tensor) -> Tensor:
        """Return [B, N, ...] with zeros in the empty cells; dead rows are not read."""
        if self.uniform:
            return rows[: math.prod(self.shape)].unflatten(0, self.shape)
        return _zero_where(~self.valid, rows[self.row_of_cell])

    def unpad(self, padded: Tensor) -> Tensor:
        """Return [T, ...] with zeros in the dead rows."""
        rows = padded.flatten(0, 1)
        if not self.uniform:
            return _zero_where(self.dead, rows[self.cell_of_row])
        dead_rows = self.num_rows - len(rows)
        return torch.cat([rows, rows.new_zeros(dead_rows, *rows.shape[1:])]) if dead_rows else rows


def _probabilities(
    q: Tensor,
    k: Tensor,
    layout: _Layout,
    softmax_scale: float,
    key_weight: Tensor | None,
    soft: Tensor | None,
    exempt_self: bool,
    softmax_eps: float,
) -> Tensor:
    """Return the probabilities [B, H, M, N] of the first M queries, 0 in cells without a row."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    score = softmax_scale * (q.to(dtype) @ k.to(dtype).transpose(-1, -2))
    # All weights are [B, 1, 1, N]; an empty cell is a key of weight 0.
    valid = layout.valid[:, None, None, :]
    own = valid.to(dtype) if key_weight is None else layout.pad(key_weight.to(dtype))[:, None, None, :]
    row_max = _row_max(score, own)
    # Without eps the maximum cancels, and so does its gradient.
    row_max = row_max if softmax_eps else row_max.detach()
    # A key of weight 0 may lie far above the maximum: the limit keeps 0 * inf out.
    p = (score - row_max).clamp(max=math.log(torch.finfo(dtype).max) - 8).exp()

    weight = own
    if soft is not None:
        weight = own * layout.pad(soft.to(dtype))[:, None, None, :]
        if exempt_self:
            diagonal = torch.eye(*score.shape[-2:], dtype=torch.bool, device=q.device)
            weight = torch.where(diagonal, own, weight)
    p = p * weight
    total = p.sum(-1, keepdim=True)
    if softmax_eps:
        lengths = layout.lengths.clamp(min=1).to(dtype).view(-1, 1, 1, 1)
        probability = (p + softmax_eps / lengths) / (total + softmax_eps)
    else:
        probability = p / total.masked_fill(total == 0, 1)
    if layout.uniform:
        return probability
    return probability.masked_fill(~(valid & valid.transpose(-1, -2)[:, :, : q.shape[2]]), 0)


def _row_max(score: Tensor, key_weight: Tensor) -> Tensor:
    """Return the maximum of score + log key_weight over the keys, soft-masked ones included, [B, H, M, 1]."""
    positive = key_weight > 0
    log_weight = torch.where(positive, key_weight, 1).log().masked_fill(~positive, float("-inf"))
    row_max = (score + log_weight).max(-1, keepdim=True).values
    return row_max.masked_fill(row_max == float("-inf"), 0)  # no key with a positive weight


def _bias(layout: _Layout, weights: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Return log(weight) [B, 1, 1, N] as SDPA adds it.

    Its lowest value is finite: rows of -inf alone, such as those of an empty image, would become NaN.
    """
    weight = layout.valid.to(dtype)
    for factor in weights:
        weight = weight * layout.pad(factor.to(dtype))
    return weight.log().masked_fill(weight <= 0, torch.finfo(dtype).min / 2)[:, None, None, :]


def _zero_where(mask: Tensor, rows: Tensor) -> Tensor:
    """Zero whole rows by selection: a NaN times 0 would stay NaN."""
    return rows.masked_fill(mask.view(*mask.shape, *[1] * (rows.dim() - mask.dim())), 0)
