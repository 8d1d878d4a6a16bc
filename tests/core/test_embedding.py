"""The patch embedding as a matrix product against timm's convolution."""

import copy
from typing import Any

import pytest
import timm
import torch
from timm.layers import PatchEmbed

from prunevit import embedding
from prunevit.embedding import cut_and_project, embed_patches


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"img_size": (64, 96), "dynamic_img_size": True},
        {"patch_size": 8, "pre_norm": True},
        {"in_chans": 1},
    ],
)
def test_equals_the_convolution(settings: dict[str, Any]) -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", **{"img_size": 64, **settings}, depth=1).double()
    images = torch.randn(
        2, model.patch_embed.proj.in_channels, *model.patch_embed.img_size, dtype=torch.float64
    )
    expected = model.patch_embed(images)
    assert embedding._is_plain(model.patch_embed, images)
    torch.testing.assert_close(cut_and_project(model.patch_embed, images), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(embed_patches(model.patch_embed, images), expected, rtol=0, atol=0)


def test_gradients_equal_the_convolutions() -> None:
    module = PatchEmbed(32, 8, 3, 5).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    weight = torch.randn(2, 16, 5, dtype=torch.float64)
    expected = torch.autograd.grad((module(images) * weight).sum(), list(module.parameters()))
    got = torch.autograd.grad((cut_and_project(module, images) * weight).sum(), list(module.parameters()))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


class Stem(PatchEmbed):
    """A patch embedding of somebody's own."""


def test_timm_runs_what_is_not_plain() -> None:
    images = torch.zeros(1, 3, 32, 32)
    hooked = PatchEmbed(32, 8)
    hooked.proj.register_forward_hook(lambda *_: None)
    odd = PatchEmbed(36, 8, strict_img_size=False)
    padded = PatchEmbed(32, 8, dynamic_img_pad=True, strict_img_size=False)
    assert embedding._is_plain(PatchEmbed(32, 8), images)
    for module, given in (
        (Stem(32, 8), images),
        (hooked, images),
        (odd, torch.zeros(1, 3, 36, 36)),
        (padded, torch.zeros(1, 3, 30, 30)),
    ):
        assert not embedding._is_plain(module, given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_on_a_gpu_is_as_exact_as_the_convolution(dtype: torch.dtype) -> None:
    module = PatchEmbed(224, 14, 3, 384).to("cuda", dtype)
    images = torch.randn(4, 3, 224, 224, device="cuda").to(dtype)
    with torch.no_grad():
        exact = copy.deepcopy(module).double()(images.double())
        got, eager = embed_patches(module, images), module(images)
    step = torch.finfo(dtype).eps * exact.abs().max()
    assert (got - exact).abs().max() <= 2 * (eager - exact).abs().max() + step
