"""Weights files: plain ones, those that `prunevit finetune` writes, and those that authors of policies published."""

import json
import logging
import os
import pickle
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prunevit.experiments.authors import Settings, our_names, settings_of
from prunevit.experiments.config import InputError, ModelConfig, first_line
from prunevit.experiments.finetuning.files import BEST, OURS, weights_in
from prunevit.experiments.ranks import is_first_process

if TYPE_CHECKING:  # timm takes seconds to import, and a file that cannot be read is refused without it
    from prunevit.vit import RaggedViT

SCHEMA = 1
METADATA = "prunevit"  # key of the metadata of a safetensors file
LISTED = 3  # names shown of those that are missing or unknown

# What the readers raise on files that are broken, would run code, or hold something else than weights.
UNREADABLE = (
    *(pickle.UnpicklingError, SafetensorError, RuntimeError, OSError, EOFError),
    *(AttributeError, KeyError, IndexError, TypeError, ValueError, SyntaxError),
)

log = logging.getLogger("prunevit")


@dataclass(frozen=True)
class Weights:
    """What a weights file holds.

    Attributes:
        path: The file.
        model: Parameters of the model, by the names in the file, without what wrappers put before them.
        policies: Parameters of the policies, by their names in `RaggedViT.policies`.
        settings: The groups `model` and `policy` of the run that made the file, where it says so.
        trained: "fine-tuned" and the like, where the file says so.
        choice: What was taken of several things in the file, or nothing.
    """

    path: str
    model: dict[str, Tensor]
    policies: dict[str, Tensor] = field(default_factory=dict)
    settings: Settings = field(default_factory=dict)
    trained: str | None = None
    choice: str = ""


def read_weights(path: str | None) -> Weights | None:
    """Read a file; what was chosen among several things in it is logged.

    Args:
        path: safetensors, or a torch pickle that holds tensors and plain values only; None: no file.

    Raises:
        InputError: If it cannot be read or would run code.
    """
    if path is None:
        return None
    weights = _read(path)
    if weights.choice and is_first_process():
        log.warning("weights: %s", weights.choice)
    return weights


def settings(path: str) -> Settings:
    """Say which model and policy a file was made with, as far as it says so; groups of a configuration.

    Args:
        path: The file.

    Raises:
        InputError: If it cannot be read.

    Cost:
        Reads the header of a safetensors file, the whole of a pickle.
    """
    return _read(path).settings


def load_model(model: Any, weights: Weights) -> None:
    """Give a model every weight that it has, from a file that has no other.

    A position embedding of another size is resampled, and the layouts of the DeiT, DINOv2 and CLIP authors are
    translated, as timm does it.

    Args:
        model: A timm `VisionTransformer`, at the input size it is to have.
        weights: The file.

    Raises:
        InputError: If they belong to another architecture.
    """
    from timm.models import deit, vision_transformer

    family = deit if isinstance(model, deit.VisionTransformerDistilled) else vision_transformer
    with _readable(weights.path):
        _check_tensors(weights.model)
    try:
        state = family.checkpoint_filter_fn(weights.model, model)
        misfit = _misfit(model.state_dict(), state)
    except UNREADABLE as error:  # the translation meets shapes that it does not know
        misfit = f"tensors of other shapes ({first_line(error)})"
    if misfit:
        name = model.pretrained_cfg.get("architecture", type(model).__name__)
        raise InputError(
            f"weights: {weights.path} must fit {name}, got {misfit}; set model or model.num_classes"
        )
    model.load_state_dict(state)


def load_policies(pruned: "RaggedViT", weights: Weights | None) -> None:
    """Give the policies the parameters that a file holds for them; a file without any changes nothing.

    Args:
        pruned: The pruned model.
        weights: The file, if there is one.

    Raises:
        InputError: If they belong to other policies, which would lose them.
    """
    if weights is None or not weights.policies:
        return
    with _readable(weights.path):
        _check_tensors(weights.policies)
    own = pruned.policies.state_dict()
    if misfit := _misfit(own, weights.policies):
        name = weights.settings.get("policy", {}).get("name", "the policy they belong to")
        there = ", ".join(type(policy).__name__ for policy in pruned.policies)
        raise InputError(
            f"weights: {weights.path} holds parameters of a policy, which {there} would lose, got {misfit}; "
            f"set policy={name}, with the layers it was trained with"
        )
    pruned.policies.load_state_dict(weights.policies)


def provenance(config: ModelConfig, weights: Weights | None, pruned: "RaggedViT") -> dict[str, str | None]:
    """Say where the parameters come from: the columns `weights`, `trained` and `predictors` of a row.

    Args:
        config: The model group.
        weights: The file, if there is one.
        pruned: The pruned model.

    Returns:
        `trained` is null where nobody says it; `predictors` is "random" where a policy has parameters and there is
        no file of them.
    """
    learned = any(each.numel() for each in pruned.policies.parameters())
    untrained = learned and not (weights and weights.policies)
    trained = weights.trained if weights else "off-the-shelf" if config.pretrained else None
    return {
        "weights": weights_name(config, weights.path if weights else None, pruned),
        "trained": None if untrained else trained,
        "predictors": "random" if untrained else None,
    }


def weights_name(config: ModelConfig, path: str | None, model: Any) -> str:
    """Say in a word where the parameters of a model come from.

    Args:
        config: The model group.
        path: The weights file, if there is one.
        model: The model, pruned or not.
    """
    if path is not None:
        return path
    if not config.pretrained:
        return "random"
    return "sample" if config.name == "sample" else model.pretrained_cfg.get("tag") or "pretrained"


def _read(path: str) -> Weights:
    if not os.path.isfile(path):
        raise InputError(f"weights: must be a file, got {path}")
    try:
        with open(path, "rb") as file:
            empty = not file.read(1)
    except OSError as error:  # safetensors would say that there is no such file
        raise InputError(f"weights: must be readable, got {path} ({error.strerror})") from error
    if empty:
        raise InputError(f"weights: must hold tensors, got {path}, which is empty")
    with _readable(path):
        return _of_safetensors(path) if path.endswith(".safetensors") else _of_pickle(path)


@contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn what a reader raises into a line that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # what torch warns of is said by the line, or no concern of the user's
            yield
    except InputError:
        raise
    except UNREADABLE as error:
        raise InputError(
            f"weights: must be safetensors or a pickle of tensors only, got {path} ({_reason(error)})"
        ) from error


def _reason(error: BaseException) -> str:
    """Why a file cannot be read; torch's own words on pickles advise to run what is in them."""
    if not isinstance(error, pickle.UnpicklingError | KeyError):  # a key is a place in the pickle's memory
        return first_line(error).split(". ")[0]
    named = re.search(r"GLOBAL (\S+)", str(error))
    return f"it would call {named[1]}, which was not run" if named else "it is no pickle of torch's"


def _check_tensors(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"{name!r} is no name of a tensor")
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} is no tensor")


def _of_safetensors(path: str) -> Weights:
    with safe_open(path, framework="pt") as file:
        metadata = (file.metadata() or {}).get(METADATA)
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if metadata is None:
        return _sorted_out(path, state)
    try:
        said = json.loads(metadata)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"weights: {path} must have JSON under {METADATA} in its metadata, got other text ({first_line(error)}); "
            "use the file as it was written"
        ) from error
    if not isinstance(said, dict) or said.get("schema") != SCHEMA:
        got = said.get("schema") if isinstance(said, dict) else said
        raise InputError(
            f"weights: {path} must be of schema {SCHEMA}, got {got}; use the version that wrote it"
        )
    groups = {name: said[name] for name in ("model", "policy") if isinstance(said.get(name), dict)}
    if "model" in groups:
        known = {each.name for each in fields(ModelConfig)}
        groups["model"] = {name: value for name, value in groups["model"].items() if name in known}
        if groups["model"].get("num_classes") is None and isinstance(said.get("architecture"), dict):
            groups["model"]["num_classes"] = said["architecture"].get("num_classes")
    return _sorted_out(path, state, groups, said.get("trained"))


def _of_pickle(path: str) -> Weights:
    """Read a state dict, or a checkpoint of timm, DeiT, Lightning or the authors of a policy around one."""
    # A namespace of arguments, as training scripts keep it, is plain values; nothing else is let in.
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict):
        raise TypeError(f"a {type(content).__name__} is no state dict")
    if OURS in content:
        weights = weights_in(Path(path).parent)
        raise InputError(
            f"weights: must be a file of weights, got {path}, which is what prunevit finetune goes on from; "
            + (
                f"use weights={weights}"
                if weights
                else f"let it go on with ckpt_path={path}, it leaves {BEST}"
            )
        )
    arguments = vars(content["args"]) if isinstance(content.get("args"), Namespace) else {}
    groups = settings_of(arguments)
    state, choice = _unwrapped(path, content)
    _check_tensors(state)
    return replace(_sorted_out(path, state, groups, "fine-tuned" if groups else None), choice=choice)


def _unwrapped(path: str, content: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Take the state dict of a checkpoint that counts, and say which it was if there were several.

    Of timm's that is the averaged one. The scripts of DeiT, and those built on them, evaluate `model`; TokenReduction's
    note whether its average was better.
    """
    found = [
        name
        for name in ("state_dict_ema", "state_dict", "model", "model_ema")
        if isinstance(content.get(name), dict)
    ]
    if not found:
        return content, ""
    taken = "model_ema" if content.get("ema_best") and "model_ema" in found else found[0]
    others = "".join(f", not {name}" for name in found if name != taken)
    says = len(found) > 1 or taken.endswith("ema")
    return content[taken], f"took {taken} of {path}{others}" if says else ""


def _sorted_out(
    path: str, state: dict[str, Any], groups: Settings | None = None, trained: str | None = None
) -> Weights:
    """Tell the model's parameters from the policies', by our names."""
    from timm.models import clean_state_dict

    state, policy = our_names(clean_state_dict(state))
    policies = {
        name.removeprefix("policies."): value for name, value in state.items() if name.startswith("policies.")
    }
    model = {name: value for name, value in state.items() if not name.startswith("policies.")}
    if model and all(name.startswith("model.") for name in model):
        model = {name.removeprefix("model."): value for name, value in model.items()}
    groups = groups or {}
    if policy is not None:
        groups = {"policy": {"name": policy}, **groups}
        trained = trained or "fine-tuned"  # predictors are trained together with the model, or after it
    return Weights(path, model, policies, groups, trained)


def _misfit(own: dict[str, Any], given: dict[str, Any]) -> str:
    """Missing and unknown names, a shape and a kind of number that differ, in one line; empty if all fit."""
    missing = [name for name in own if name not in given]
    extra = [name for name in given if name not in own]
    shapes = [
        f"{name} is {list(given[name].shape)}, not {list(own[name].shape)}"
        for name in own
        if name in given and given[name].shape != own[name].shape
    ]
    kinds = [
        f"{name} holds {given[name].dtype}, not {own[name].dtype}"
        for name in own
        if name in given and own[name].is_floating_point() != given[name].is_floating_point()
    ]
    counted = [
        f"{len(names)} {what} ({', '.join(names[:LISTED])}{', ...' if len(names) > LISTED else ''})"
        for what, names in (("missing", missing), ("unknown", extra))
        if names
    ]
    return ", ".join(counted + shapes[-1:] + kinds[:1])
