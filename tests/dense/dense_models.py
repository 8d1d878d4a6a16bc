"""Small timm ViTs in fp64 with random weights in every parameter, so that no term of the walk can hide."""

from typing import Any

import timm
import torch
from timm.layers.attention import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


class GatedAttention(Attention):
    """timm's attention with its output gate, which no registered architecture of small size switches on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"gated": True}))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("vit_tiny_patch16_224", {"img_size": 64}),
    "distilled": ("deit_tiny_distilled_patch16_224", {"img_size": 64}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 56}),
    "average": ("vit_tiny_patch16_224", {"img_size": 64, "global_pool": "avg"}),
    "rectangle": ("vit_tiny_patch16_224", {"img_size": (32, 96)}),
    "normed": (
        "vit_tiny_patch16_224",
        {"img_size": 64, "qk_norm": True, "scale_attn_norm": True, "scale_mlp_norm": True}
        | {"init_values": 0.1, "attn_layer": GatedAttention},
    ),
    "no_cls": ("vit_base_patch16_siglip_224", {"img_size": 64}),
}


def build(name: str, seed: int = 0, **overrides: Any) -> VisionTransformer:
    """Build a model of MODELS, or any registered timm ViT, four blocks deep and 48 channels wide."""
    architecture, own = MODELS.get(name, (name, {}))
    small = {"depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 7}
    model: Any = timm.create_model(architecture, **(small | own | overrides)).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            if parameter.dim() == 1:
                parameter.add_(0.2 * noise)
            else:
                fan_in = parameter[0].numel() if parameter.dim() in (2, 4) else 4
                parameter.copy_(1.5 * noise / fan_in**0.5)
    return model


def photos(model: VisionTransformer, batch: int = 2, seed: int = 1) -> Tensor:
    """Random images [batch, 3, H, W] of the model's input size, of different contrast."""
    generator = torch.Generator().manual_seed(seed)
    size = (batch, 3, *model.patch_embed.img_size)
    contrast = torch.linspace(0.5, 2, batch, dtype=torch.float64)
    return contrast[:, None, None, None] * torch.randn(size, generator=generator, dtype=torch.float64)
