"""The patch embedding as one matrix product, where that is faster than the convolution it equals."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import PatchEmbed
from timm.layers.format import Format
from torch import Tensor, nn
from torch.nn import functional as F

HALVES = (torch.float16, torch.bfloat16)


def embed_patches(module: Any, images: Tensor) -> Tensor:
    """What timm's patch embedding gives, `[B, N, C]` or, with dynamic sizes, `[B, h, w, C]`.

    A convolution whose stride is its kernel is a product of cut-up images `[B * N, 3 * p * p]` and weights. cuDNN takes
    up to several times as long for it in half precision on a GPU; elsewhere timm's own module runs.

    Args:
        module: A timm patch embedding.
        images: `[B, 3, height, width]`.

    Cost:
        A copy of the images.
    """
    if not (_in_half_precision(module, images) and _is_plain(module, images)):
        return module(images)
    return cut_and_project(module, images)


def cut_and_project(module: PatchEmbed, images: Tensor) -> Tensor:
    """Compute `module(images)` by a matrix product; arguments as `embed_patches`."""
    proj, (batch, channels) = module.proj, images.shape[:2]
    (p, q), (h, w) = module.patch_size, module.grid_size
    cut = images.reshape(batch, channels, h, p, w, q).permute(0, 2, 4, 1, 3, 5)
    x = F.linear(cut.reshape(batch, h * w, channels * p * q), proj.weight.flatten(1), proj.bias)
    return module.norm(x if module.flatten else x.view(batch, h, w, -1))


def _in_half_precision(module: Any, images: Tensor) -> bool:
    if not images.is_cuda:
        return False
    if torch.is_autocast_enabled("cuda"):
        return torch.get_autocast_dtype("cuda") in HALVES
    return images.dtype in HALVES


def _is_plain(module: Any, images: Tensor) -> bool:
    """Whether the module does nothing but cut, project and normalise images of its own size."""
    return (
        type(module) is PatchEmbed
        and type(module.proj) is nn.Conv2d
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module.proj._forward_hooks or module.proj._forward_pre_hooks)
        and (module.flatten or module.output_fmt == Format.NHWC)
        and module.img_size == tuple(images.shape[-2:])
        and all(
            size == count * side
            for size, count, side in zip(module.img_size, module.grid_size, module.patch_size)
        )
    )
