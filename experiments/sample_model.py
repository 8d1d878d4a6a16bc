"""The bundled sample: a ViT-S/14 fine-tuned on ten garment classes, and photos to run it on.

The weights are stored in 8 bits; `quantise` and `dequantise` are the whole format.
`sample/README.md` says where the model and the photos come from and under which licences.
"""

import json
from pathlib import Path
from typing import cast

import timm
import torch
from safetensors import safe_open
from timm.models import VisionTransformer
from torch import Tensor

SAMPLE = Path(__file__).parent / "sample"
WEIGHTS = SAMPLE / "model.safetensors"
PHOTOS = SAMPLE / "photos"  # train/<class>/*.jpg and val/<class>/*.jpg
CLASSES = ("dress", "hat", "longsleeve", "outwear", "pants", "shirt", "shoes", "shorts", "skirt", "t-shirt")
SCALE = ".scale"
SMALLEST_SCALE = 2.0**-24  # the least positive fp16 number: a row of zeros must not be divided by zero


def load_sample_model(path: str | Path = WEIGHTS) -> VisionTransformer:
    """Build the timm model that a file of `make_sample` holds, the bundled one by default.

    Args:
        path: A safetensors file with `architecture` and `pretrained_cfg` in its metadata.

    Returns:
        The model in fp32 and eval mode. The bundled one takes images [B,3,196,196] (197 tokens) and gives
        logits [B,10] in the order of `CLASSES`; `timm.data.resolve_model_data_config` gives its transforms.
    """
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    config = json.loads(metadata["pretrained_cfg"])
    config = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    model = timm.create_model(
        metadata["architecture"],
        img_size=config["input_size"][-1],
        num_classes=config["num_classes"],
        pretrained_cfg_overlay=config,
    )
    model.load_state_dict(dequantise(stored))
    return cast(VisionTransformer, model.eval())


def quantise(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store weights in 8 bits: `weight[i] = scale[i] * integer[i]`, one fp16 scale for each output row.

    Args:
        state: A state dict. Its linear and convolution weights [rows, ...] become int8 of the same shape with
            `<name>.scale` [rows] in fp16 beside them; biases, norms and embeddings become fp16.
    """
    stored = {}
    for name, value in state.items():
        if not name.endswith(".weight") or value.ndim < 2:
            stored[name] = value.half()
            continue
        rows = value.float().flatten(1)
        # Rounded to fp16 before the division: the integers belong to the scale that is stored.
        scale = (rows.abs().amax(1) / 127).half().clamp(min=SMALLEST_SCALE)
        integers = (rows / scale.float()[:, None]).round().clamp(-127, 127)
        stored[name] = integers.to(torch.int8).view(value.shape)
        stored[name + SCALE] = scale
    return stored


def dequantise(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the fp32 state dict back: int8 weights times the scale of their row, everything else cast."""
    state = {name: value.float() for name, value in stored.items() if not name.endswith(SCALE)}
    for name in state:
        if name + SCALE in stored:
            rows = state[name].flatten(1) * stored[name + SCALE].float()[:, None]
            state[name] = rows.view(state[name].shape)
    return state
