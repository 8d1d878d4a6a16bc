"""Which models the walk computes exactly, part by part; all others are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Attention, Block, VisionTransformer
from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_architecture(model: Any) -> None:
    """Raise unless the walk computes exactly what this model computes.

    Raises:
        TypeError: Names the class that is not supported, and the reason.
    """
    name = type(model).__name__
    if type(model) not in (VisionTransformer, VisionTransformerDistilled):
        raise TypeError(
            f"RaggedViT: the model must be a timm VisionTransformer or VisionTransformerDistilled, got {name}; "
            "other families order or mix their tokens in other ways"
        )
    if not len(model.blocks):
        raise TypeError("RaggedViT: the model must have at least one block, got none")
    for number, block in enumerate(model.blocks):
        for part, expected in ((block, Block), (getattr(block, "attn", None), Attention)):
            if type(part) is not expected:
                raise TypeError(
                    f"RaggedViT: blocks must be timm's {expected.__name__}, got {type(part).__name__} in block "
                    f"{number}; the walk cannot prune between its attention and its MLP"
                )
    if model.global_pool in ("", "prr"):
        raise TypeError(
            f'RaggedViT: global_pool must pool rows into one vector ("token", "avg", "map", ...), got '
            f'"{model.global_pool}"; create the model with another global_pool'
        )
    _check_hooks(model)


def _check_hooks(model: Any) -> None:
    """Refuse what somebody hung onto a part that the walk takes apart instead of calling it: it would never run."""
    for place, part in _not_called(model):
        hooked = any(getattr(part, hooks) for hooks in HOOKS)
        if hooked or "forward" in vars(part):
            what = "hooks" if hooked else "a forward of its own"
            raise TypeError(
                f"RaggedViT: {place} must be as timm made it, got {what} on it; the walk never calls this module, so "
                "hang it onto its parts (norm1, attn.qkv, attn.proj, mlp, ...), or take it off"
            )


def _not_called(model: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "blocks", model.blocks
    for number, block in enumerate(model.blocks):
        yield f"blocks.{number}", block
        yield f"blocks.{number}.attn", block.attn
        yield f"blocks.{number}.attn.attn_drop", block.attn.attn_drop
