"""Every registered timm Vision Transformer, shrunk to three blocks, equals timm or is refused with a reason."""

from typing import Any

import pytest
import timm
import torch
from tests_support import randomise
from timm.models import model_entrypoint
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer

import prunevit
from prunevit.policies import NoPruning

FAMILIES = ("vision_transformer", "vision_transformer_hybrid", "deit", "vitamin")
REFUSED = (
    "ResPostBlock",
    "ParallelScalingBlock",
    "ParallelThingsBlock",
    "DiffParallelScalingBlock",
    "DiffAttention",
)


def registered() -> list[str]:
    """Names of timm's architectures whose entry point builds a VisionTransformer."""
    return [
        name for name in timm.list_models() if model_entrypoint(name).__module__.split(".")[-1] in FAMILIES
    ]


def shrunk(name: str) -> Any:
    """The architecture with three narrow blocks on a small image; stems and their sizes stay what they are."""
    settings: dict[str, Any] = {"depth": 3, "num_classes": 7}
    patch = next(
        (int(part[5:]) for part in name.split("_") if part[:5] == "patch" and part[5:].isdigit()), None
    )
    if patch is None:
        settings["img_size"] = 128 if "_p8_" in name else 64
    else:
        settings |= {"img_size": 4 * patch, "embed_dim": 96, "num_heads": 2}
    torch.manual_seed(0)
    model = timm.create_model(name, **settings).double().eval()
    if (
        patch is not None
    ):  # the wide models with convolutional stems keep timm's draw: filling them takes long
        randomise(model)
    return model


@pytest.mark.parametrize("name", registered())
def test_architecture(name: str) -> None:
    model = shrunk(name)
    assert type(model) in (VisionTransformer, VisionTransformerDistilled)
    parts = {type(part).__name__ for part in model.blocks.modules()}
    if parts & set(REFUSED):
        with pytest.raises(TypeError, match=rf"must be timm's \w+, got ({'|'.join(REFUSED)}) in block 0"):
            prunevit.prune(model, NoPruning())
        return
    images = torch.randn(1, 3, *model.patch_embed.img_size, dtype=torch.float64)
    with torch.inference_mode():
        expected = model(images)
        assert expected.isfinite().all()
        torch.testing.assert_close(
            prunevit.prune(model, NoPruning())(images), expected, rtol=1e-10, atol=1e-10
        )


def test_nearly_all_run() -> None:
    """The refused ones are few and known; a timm version that adds families must not pass in silence."""
    names = registered()
    refused = [
        name
        for name in names
        if any(part in name for part in ("_18x2", "_rpn", "_xp_", "wee_", "_dlittle", "_dpwee"))
    ]
    assert len(names) >= 200
    assert len(names) - len(refused) >= 193
