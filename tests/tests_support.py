"""What several test files build on."""

from typing import Any

import timm
import torch
from torch import nn

from prunevit import RaggedTokens


def dense_tokens(batch: int, patches: int, prefix: int, channels: int = 4) -> RaggedTokens:
    """A uniform batch of random rows."""
    x = torch.randn(batch, prefix + patches, channels, dtype=torch.float64)
    return RaggedTokens.from_padded(x, prefix, (1, patches))


def rows_of(tokens: RaggedTokens, image: int) -> list[int]:
    """Row numbers of an image."""
    return list(range(int(tokens.cu_seqlens[image]), int(tokens.cu_seqlens[image + 1])))


def small_vit(name: str = "vit_tiny_patch16_224", **settings: Any) -> Any:
    """A timm ViT of four narrow blocks on a 6 x 6 grid, in double precision, no parameter left at 0 or 1."""
    defaults = {"img_size": 96, "depth": 4, "embed_dim": 48, "num_heads": 3, "num_classes": 10}
    torch.manual_seed(0)
    model = timm.create_model(name, pretrained=False, **{**defaults, **settings}).double().eval()
    randomise(model)
    return model


def randomise(model: nn.Module) -> None:
    """Give every parameter values under which each part of the model matters."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                # Sharp enough attention for scores to differ.
                parameter.normal_(
                    std=0.5 if "pos_embed" in name or "token" in name else parameter[0].numel() ** -0.5
                )
            else:
                parameter.uniform_(0.5, 1.5)
