"""The timm model that a configuration names: the bundled one, timm's pretrained ones, or a weights file."""

from typing import Any

import timm
import torch

from prunevit.architecture import check_architecture
from prunevit.experiments.compose import nearest
from prunevit.experiments.config import InputError, ModelConfig, first_line
from prunevit.experiments.sample_model import load_sample_model
from prunevit.experiments.weights import Weights, load_model
from prunevit.policy import PruningPolicy
from prunevit.vit import RaggedViT, prune

HUBS = ("hf-hub:", "hf_hub:", "local-dir:")  # how timm's names of models elsewhere begin


def build_model(config: ModelConfig, weights: Weights | None = None) -> Any:
    """Build the model with its weights, on the CPU, in fp32 and evaluation mode.

    Args:
        config: The model group.
        weights: What to load in place of the pretrained weights.

    Raises:
        InputError: If the weights cannot be had or do not fit.
    """
    model: Any = load_sample_model() if config.name == "sample" else _build_timm(config, weights)
    trained = model.pretrained_cfg.get("num_classes")
    if weights is not None:
        if config.num_classes not in (None, model.num_classes):
            model.reset_classifier(config.num_classes)
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
    if weights is not None:
        load_model(model, weights)
    return model.eval()


def check_fit(config: ModelConfig, policy: PruningPolicy) -> None:
    """Refuse an unsupported architecture or a policy that does not fit it, before any weights are fetched.

    Args:
        config: The model group.
        policy: A throw-away copy of the policy, which this sets up.

    Raises:
        InputError: Says what does not fit.
    """
    if not config.name.startswith(HUBS):  # what a hub holds is known once it is there
        prune_model(architecture(config), policy)


def architecture(config: ModelConfig) -> Any:
    """Build the model without its weights, on the meta device; the bundled one comes with them.

    Args:
        config: The model group.

    Raises:
        InputError: If there is no such model, or it cannot have that input size.
    """
    if config.name == "sample":
        if not config.pretrained:
            raise InputError(
                "model.pretrained: the bundled model is a trained one; name a timm architecture instead"
            )
        model: Any = load_sample_model()
    elif not config.name.startswith(HUBS) and not timm.is_model(config.name):
        raise InputError(
            f"model.name: unknown architecture, got {config.name}; {nearest(config.name, timm.list_models())}"
        )
    else:
        classes: dict[str, Any] = {"num_classes": config.num_classes} if config.num_classes else {}
        try:
            with torch.device("meta"):
                model = timm.create_model(config.name, **classes)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"model.name: {first_line(error)}, got {config.name}") from error
    if config.img_size is not None:
        _resize(model, config.img_size)
    return model


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


def _build_timm(config: ModelConfig, weights: Weights | None) -> Any:
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


def _resize(model: Any, size: int | list[int]) -> None:
    try:
        check_architecture(model)
    except TypeError as error:
        raise InputError(str(error)) from error
    sides = (size, size) if isinstance(size, int) else tuple(size)
    patch = model.patch_embed.patch_size
    if any(side % step for side, step in zip(sides, patch)):
        raise InputError(f"model.img_size: must be a multiple of the patch size {patch[0]}, got {size}")
    model.set_input_size(img_size=sides)
