"""`prunevit show`: one photo, and what a policy keeps of it at each stage."""

from pathlib import Path
from typing import Any

import torch

from prunevit.experiments.comparison.config import ShowConfig
from prunevit.experiments.comparison.pictures import class_titles, draw, look, prediction, save
from prunevit.experiments.config import InputError
from prunevit.experiments.data import Batch, evaluation_transform
from prunevit.experiments.images import ImageError, read_image
from prunevit.experiments.labels import class_names
from prunevit.experiments.models import build_model, check_fit, prune_model
from prunevit.experiments.policy_spec import build_policy, policy_errors
from prunevit.experiments.weights import load_policies, read_weights


def run(config: ShowConfig) -> Path:
    """Draw the photo with the patches that a policy drops darkened and those that it joins coloured.

    Args:
        config: The composed configuration.

    Returns:
        The PNG file.

    Raises:
        InputError: If the input is wrong; nothing is written then.
    """
    name = config.policy["name"]
    with policy_errors(name):
        check_fit(config.model, build_policy(config.policy, config.seed))
    weights = read_weights(config.weights)
    model = build_model(config.model, weights)
    try:
        photo = read_image(config.image, config.image)
    except ImageError as error:
        raise InputError(f"image: {error}") from error
    batch = Batch(
        evaluation_transform(model)(photo)[None],
        torch.tensor([-1]),
        torch.tensor([0]),
        (),
    )
    with policy_errors(name), torch.inference_mode():
        pruned = prune_model(model, build_policy(config.policy, config.seed))
        load_policies(pruned, weights)
        policy: Any = pruned.policies[0]
        knob = f" {policy.knob}={policy.knob_value}" if policy.knob else ""
        stages = look(name + knob, pruned, batch)
        logits = model(batch.images)[0]
        if where := pruned.find_nan(batch.images, batch.positions):
            raise InputError(f"logits: must be finite, got others for {config.image}; {where}")
        unpruned = prediction(logits, class_titles(model))
    title = f"{Path(config.image).name}: {_label(config.image, model)}unpruned {unpruned}"
    try:
        save(draw(title, stages), Path(config.output), title, dpi=200)
    except OSError as error:
        raise InputError(
            f"output: must be a file that can be written, got {config.output} ({error.strerror})"
        ) from error
    print(f"picture in {config.output}")
    return Path(config.output)


def _label(image: str, model: Any) -> str:
    """The class whose folder the photo stands in, for the title; nothing if it is none."""
    folder, names = Path(image).absolute().parent.name, class_names(model, None) or []
    return f"label {class_titles(model)[names.index(folder)]}, " if folder in names else ""
