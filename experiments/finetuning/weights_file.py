"""The file that fine-tuning is for: weights with all that `prunevit evaluate weights=FILE` needs to rebuild the model.

safetensors with the names of `RaggedViT.state_dict()` (`model.*`, `policies.*`), and in its metadata under "prunevit"
JSON: `schema`, the groups `model` and `policy` of the configuration, `architecture` (what the model is, resolved),
`recipe` (all numbers of the training), `trained`, `seed`, `val` and `environment`.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from prunevit.experiments.config import RunConfig
from prunevit.experiments.finetuning.atomic import atomically
from prunevit.experiments.report import environment
from prunevit.experiments.weights import METADATA, SCHEMA
from prunevit.vit import RaggedViT


def describe(config: RunConfig, pruned: RaggedViT, recipe: dict[str, Any]) -> dict[str, Any]:
    """Say what a weights file will hold.

    Args:
        config: Of the run.
        pruned: The model.
        recipe: All numbers of the training.
    """
    return {
        "schema": SCHEMA,
        "model": asdict(config.model),
        "policy": config.policy,
        "architecture": {
            "name": pruned.pretrained_cfg.get("architecture"),
            "img_size": list(pruned.model.patch_embed.img_size),
            "num_classes": pruned.num_classes,
        },
        "recipe": recipe,
        "trained": "fine-tuned",
        "seed": config.seed,
        "environment": environment(),
    }


def write_weights(path: Path, pruned: RaggedViT, said: dict[str, Any]) -> None:
    """Write the file, whole or not at all.

    Args:
        path: Target, `*.safetensors`.
        pruned: The model.
        said: From `describe`, and what came out.

    Raises:
        InputError: If the disk does not take it; a file that was there stays.

    Cost:
        A copy of the weights on the CPU.
    """
    state = {name: value.detach().cpu().contiguous() for name, value in pruned.state_dict().items()}
    with atomically(path) as temporary:
        save_file(state, temporary, {"format": "pt", METADATA: json.dumps(said)})
