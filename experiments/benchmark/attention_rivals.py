"""Other ways to compute ragged attention on a GPU: one function each, from the packed `qkv` to the mixed rows.

Those of `TRAINED` go on to the gradients of q, k and v.

Those that need a package which is not installed are left out of `available`.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from prunevit.kernels.ragged_attention import ragged_attention


@dataclass(frozen=True)
class Shape:
    """A batch of images of certain lengths.

    Attributes:
        lengths: Rows of each image.
        heads: Attention heads.
        head_dim: Channels of a head.
        dtype: Number format.
    """

    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    dtype: torch.dtype

    @cached_property  # host times count what a call computes
    def longest(self) -> int:
        """Rows of the longest image."""
        return max(self.lengths)

    @cached_property
    def uniform(self) -> bool:
        """Whether all images have as many rows."""
        return len(set(self.lengths)) == 1


@dataclass(frozen=True)
class Inputs:
    """Tensors of one `Shape` on a device: `qkv [T, 3, H, D]`, boundaries, and the same for the padded rivals."""

    shape: Shape
    qkv: Tensor
    cu_seqlens: Tensor
    padded: Tensor  # [3, B, H, N, D]
    mask: Tensor  # [B, 1, 1, N]
    d_out: Tensor  # [T, H, D], the gradient of the mixed rows

    @classmethod
    def make(cls, shape: Shape, device: torch.device, seed: int = 0) -> "Inputs":
        """Draw them.

        Args:
            shape: The lengths and sizes.
            device: Where.
            seed: Of the draw.
        """
        generator = torch.Generator(device).manual_seed(seed)
        lengths = torch.tensor(shape.lengths, device=device)
        cu = F.pad(lengths.cumsum(0), (1, 0)).int()
        rows = (int(lengths.sum()), 3, shape.heads, shape.head_dim)
        qkv = torch.randn(rows, device=device, generator=generator).to(shape.dtype)
        valid = torch.arange(shape.longest, device=device) < lengths[:, None]
        padded = qkv.new_zeros(len(shape.lengths), shape.longest, *rows[1:])
        padded[valid] = qkv
        d_out = torch.randn(rows[0], *rows[2:], device=device, generator=generator).to(shape.dtype)
        return cls(shape, qkv, cu, padded.permute(2, 0, 3, 1, 4).contiguous(), valid[:, None, None], d_out)


Attention = Callable[[Inputs], Tensor]
Trained = Callable[[Inputs], tuple[Tensor, Tensor, Tensor]]


def triton(inputs: Inputs) -> Tensor:
    """The Triton kernel of this project."""
    return _ours(inputs, "triton")


def auto(inputs: Inputs) -> Tensor:
    """What `backend="auto"` takes."""
    return _ours(inputs, "auto")


def triton_cls(inputs: Inputs) -> Tensor:
    """The Triton kernel, which also reports whom the CLS row attends to."""
    return _ours(inputs, "triton", prefix_rows=1)


def _ours(inputs: Inputs, backend: str, **settings: Any) -> Tensor:
    shape = inputs.shape
    return ragged_attention(
        inputs.qkv,
        cu_seqlens=inputs.cu_seqlens,
        max_seqlen=shape.longest,
        uniform=shape.uniform,
        backend=backend,
        **settings,
    ).out


@torch.enable_grad()
def our_gradients(inputs: Inputs, backend: str = "triton") -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of this project, through the packed rows, as autograd runs them.

    Args:
        inputs: The batch.
        backend: As in `ragged_attention`.
    """
    qkv = inputs.qkv.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_ours(replace(inputs, qkv=qkv), backend), qkv, inputs.d_out)
    dq, dk, dv = gradient.unbind(1)
    return dq, dk, dv


def fa2_gradients(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Forward and backward of FlashAttention 2 inside torch, by its `aten` operations; nothing is packed again."""
    q, k, v = inputs.qkv.unbind(1)
    cu, longest = inputs.cu_seqlens, inputs.shape.longest
    bounds = (cu, cu, longest, longest, 0.0, False)
    out, log_sum, seed, offset, _ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, False)
    backward = torch.ops.aten._flash_attention_backward
    return backward(inputs.d_out, q, k, v, out, log_sum, *bounds, seed, offset)  # type: ignore[no-any-return]


def fa2(inputs: Inputs) -> Tensor:
    """FlashAttention 2 inside torch, by its `aten` operation."""
    q, k, v = inputs.qkv.unbind(1)
    cu, longest = inputs.cu_seqlens, inputs.shape.longest
    return torch.ops.aten._flash_attention_forward(q, k, v, cu, cu, longest, longest, 0.0, False, False)[0]


def varlen_attn(inputs: Inputs) -> Tensor:
    """Torch's public `varlen_attn`."""
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = inputs.qkv.unbind(1)
    cu, longest = inputs.cu_seqlens, inputs.shape.longest
    return varlen_attn(q, k, v, cu, cu, longest, longest)  # type: ignore[return-value]


def padded_sdpa(inputs: Inputs) -> Tensor:
    """SDPA on the batch padded to its longest image, under a key mask; the padding itself is for free."""
    q, k, v = inputs.padded
    return F.scaled_dot_product_attention(q, k, v, inputs.mask)


def nested_sdpa(inputs: Inputs) -> Tensor:
    """SDPA on jagged NestedTensors."""
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(part, inputs.cu_seqlens.long()).transpose(1, 2)
        for part in inputs.qkv.unbind(1)
    )
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).values()


def dense_sdpa(backend: SDPBackend) -> Attention:
    """Make SDPA of one backend on uniform images.

    Args:
        backend: The only one allowed.
    """

    def attend(inputs: Inputs) -> Tensor:
        q, k, v = inputs.padded
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v)

    return attend


def flash_attn(inputs: Inputs) -> Tensor:
    """The flash-attn package (version 2)."""
    from flash_attn import flash_attn_varlen_func

    q, k, v = inputs.qkv.unbind(1)
    cu, longest = inputs.cu_seqlens, inputs.shape.longest
    return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)


def fa3(inputs: Inputs) -> Tensor:
    """FlashAttention 3."""
    from flash_attn_interface import flash_attn_varlen_func

    q, k, v = inputs.qkv.unbind(1)
    cu, longest = inputs.cu_seqlens, inputs.shape.longest
    out = flash_attn_varlen_func(q, k, v, cu, cu, longest, longest)
    return out[0] if isinstance(out, tuple) else out


def xformers(inputs: Inputs) -> Tensor:
    """XFormers under a block-diagonal mask."""
    from xformers.ops import fmha

    q, k, v = (part[None] for part in inputs.qkv.unbind(1))
    mask = fmha.attn_bias.BlockDiagonalMask.from_seqlens(list(inputs.shape.lengths))
    return fmha.memory_efficient_attention(q, k, v, attn_bias=mask)[0]


PACKED: dict[str, Attention] = {
    "triton": triton,
    "triton with CLS row": triton_cls,
    "auto": auto,
    "FA2 aten": fa2,
    "varlen_attn": varlen_attn,
    "FA3": fa3,
    "flash-attn": flash_attn,
    "xFormers": xformers,
    "NestedTensor SDPA": nested_sdpa,
}
"""Results `[T, H, D]`."""

PADDED: dict[str, Attention] = {
    "padded SDPA": padded_sdpa,
    "dense SDPA flash": dense_sdpa(SDPBackend.FLASH_ATTENTION),
    "dense SDPA cuDNN": dense_sdpa(SDPBackend.CUDNN_ATTENTION),
    "dense SDPA efficient": dense_sdpa(SDPBackend.EFFICIENT_ATTENTION),
}
"""Results `[B, H, N, D]`; those named dense for uniform images only."""

TRAINED: dict[str, Trained] = {"triton": our_gradients, "FA2 aten": fa2_gradients}
"""Results: the gradients of q, k and v, each `[T, H, D]`."""

NEEDS = {"FA3": "flash_attn_interface", "flash-attn": "flash_attn", "xFormers": "xformers"}


def available(uniform: bool) -> dict[str, Attention]:
    """Contestants that can run here on such a batch.

    Args:
        uniform: Whether all images have as many rows.
    """
    every = {**PACKED, **PADDED}
    return {
        name: call
        for name, call in every.items()
        if (uniform or not name.startswith("dense")) and (name not in NEEDS or _importable(NEEDS[name]))
    }


def _importable(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def packed_rows(name: str, inputs: Inputs, out: Tensor) -> Tensor:
    """Bring a contestant's result to `[T, H, D]`.

    Args:
        name: The contestant.
        inputs: What it was given.
        out: What it returned.
    """
    return out if name in PACKED else out.transpose(1, 2)[inputs.mask[:, 0, 0]]
