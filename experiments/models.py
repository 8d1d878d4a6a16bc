"""The timm model that a configuration names: the bundled one, timm's pretrained ones, or a weights file."""

import os
import pickle
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from timm.models import deit, vision_transformer
from timm.models._helpers import load_state_dict

from prunevit.experiments.compose import nearest
from prunevit.experiments.config import InputError, ModelConfig, first_line
from prunevit.experiments.sample_model import load_sample_model
from prunevit.policy import PruningPolicy
from prunevit.vit import RaggedViT, prune

HUBS = ("hf-hub:", "hf_hub:", "local-dir:")  # how timm's names of models elsewhere begin

# What the readers raise on files that are broken, would run code, or hold something else than weights.
UNREADABLE = (
    *(pickle.UnpicklingError, SafetensorError, RuntimeError, OSError, EOFError),
    *(AttributeError, KeyError, IndexError, TypeError, ValueError),
)


def build_model(config: ModelConfig, weights: str | None = None) -> Any:
    """Build the model with its weights, on the CPU, in fp32 and evaluation mode.

    Args:
        config: The model group.
        weights: A file to load in place of the pretrained weights.

    Raises:
        InputError: If the weights cannot be had or do not fit.
    """
    model: Any = load_sample_model() if config.name == "sample" else _build_timm(config, weights)
    trained = model.pretrained_cfg.get("num_classes")
    if weights is not None:
        if config.num_classes not in (None, model.num_classes):
            model.reset_classifier(config.num_classes)
        load_weights(model, weights)
    elif config.pretrained and config.num_classes not in (None, trained):
        raise InputError(
            f"model.num_classes: the trained head of {config.name} has {trained}, got {config.num_classes}; "
            "give weights=FILE, or model.pretrained=false for random weights"
        )
    if model.num_classes == 0:
        raise InputError(
            f"model: {config.name} has no head to classify with; set model.num_classes and weights=FILE"
        )
    if config.img_size is not None:
        _resize(model, config.img_size)
    return model.eval()


def check_fit(config: ModelConfig, policy: PruningPolicy) -> None:
    """Refuse an unsupported architecture or a policy that does not fit it, before any weights are fetched.

    Args:
        config: The model group.
        policy: A throw-away copy of the policy, which this sets up.

    Raises:
        InputError: Says what does not fit.
    """
    if config.name == "sample":
        if not config.pretrained:
            raise InputError(
                "model.pretrained: the bundled model is a trained one; name a timm architecture instead"
            )
        model: Any = load_sample_model()
    elif config.name.startswith(HUBS):
        return  # what a hub holds is known once it is there
    elif not timm.is_model(config.name):
        raise InputError(
            f"model.name: unknown architecture, got {config.name}; {nearest(config.name, timm.list_models())}"
        )
    else:
        try:
            with torch.device("meta"):
                model = timm.create_model(config.name)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"model.name: {first_line(error)}, got {config.name}") from error
    prune_model(model, policy)


def prune_model(model: Any, policy: PruningPolicy, backend: str = "auto") -> RaggedViT:
    """Plug a policy into a model, in evaluation mode.

    Args:
        model: A timm model.
        policy: The policy.
        backend: Attention backend.

    Raises:
        InputError: If the architecture is not supported or the policy does not fit it.
    """
    try:
        return prune(model, policy, backend=backend).eval()
    except (TypeError, ValueError) as error:
        raise InputError(str(error)) from error


def weights_name(config: ModelConfig, weights: str | None, model: Any) -> str:
    """Name the weights in reports: a file, timm's tag, "sample" or "random".

    Args:
        config: The model group.
        weights: The file, if one was given.
        model: The model built.
    """
    if weights is not None:
        return weights
    if not config.pretrained:
        return "random"
    return "sample" if config.name == "sample" else model.pretrained_cfg.get("tag") or "pretrained"


def load_weights(model: Any, path: str) -> None:
    """Load a file into a model: every weight, no other.

    A position embedding of another size is resampled, and the layouts of the DeiT, DINOv2 and CLIP authors
    are translated, as timm does it.

    Args:
        model: A timm `VisionTransformer`.
        path: safetensors, or a torch pickle that holds tensors only.

    Raises:
        InputError: If it cannot be read, would run code, or belongs to another architecture.
    """
    if not os.path.isfile(path):
        raise InputError(f"weights: must be a file, got {path}")
    try:
        state = load_state_dict(path, weights_only=True)
        family = deit if isinstance(model, deit.VisionTransformerDistilled) else vision_transformer
        state = family.checkpoint_filter_fn(state, model)
        strange = next((name for name, value in state.items() if not isinstance(value, torch.Tensor)), None)
        if strange is not None:
            raise TypeError(f"{strange} is no tensor")
    except UNREADABLE as error:
        raise InputError(
            f"weights: must be safetensors or a pickle of tensors only, got {path} ({first_line(error)})"
        ) from error
    if misfit := _misfit(model.state_dict(), state):
        raise InputError(
            f"weights: {path} must fit {model.pretrained_cfg.get('architecture', type(model).__name__)}, got "
            f"{misfit}; set model or model.num_classes"
        )
    model.load_state_dict(state)


def _build_timm(config: ModelConfig, weights: str | None) -> Any:
    """Without `weights` the head keeps the trained number of classes; `build_model` compares."""
    fetch = config.pretrained and weights is None
    classes: dict[str, Any] = {"num_classes": config.num_classes} if config.num_classes and not fetch else {}
    try:
        return timm.create_model(config.name, pretrained=fetch, **classes)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"model: no weights for {config.name} ({first_line(error)}); give weights=FILE, or "
            "model.pretrained=false for random weights"
        ) from error


def _misfit(own: dict[str, Any], given: dict[str, Any]) -> str:
    missing = [name for name in own if name not in given]
    extra = [name for name in given if name not in own]
    shapes = [
        f"{name} is {list(given[name].shape)}, not {list(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    parts = [f"{len(missing)} missing ({missing[0]})"] if missing else []
    parts += [f"{len(extra)} unknown ({extra[0]})"] if extra else []
    return ", ".join(parts + shapes[-1:])


def _resize(model: Any, size: int | list[int]) -> None:
    sides = (size, size) if isinstance(size, int) else tuple(size)
    patch = model.patch_embed.patch_size
    if any(side % step for side, step in zip(sides, patch)):
        raise InputError(f"model.img_size: must be a multiple of the patch size {patch[0]}, got {size}")
    model.set_input_size(img_size=sides)
