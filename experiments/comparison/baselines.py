"""Rows without pruning: the model on smaller images, and smaller models of its family.

What pruning has to beat is not only the model itself, but the model made smaller in a simpler way.
"""

import copy
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import timm

from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.config import InputError, ModelConfig
from prunevit.experiments.contender import RowSpec

SHARES = (6 / 7, 5 / 7, 4 / 7)  # of the side of the patch grid: about 0.73, 0.5 and 0.32 of the cost
SIZES = ("giant", "huge", "large", "base", "medium", "small", "tiny")  # as timm's names say it
NONE = {"name": "none"}


def baseline_rows(config: CompareConfig, model: Any) -> list[RowSpec]:
    """Say which unpruned rows there are.

    Args:
        config: `baselines`, `model`, `weights`.
        model: The unpruned model.

    Raises:
        InputError: If there is no smaller model with trained weights.
    """
    rows = []
    if "resize" in config.baselines:
        for size in smaller_inputs(model):
            said = size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"
            smaller = replace(config.model, img_size=list(size))
            rows.append(
                RowSpec(f"unpruned at {said} px", NONE, smaller, config.weights, config.seed, "resize")
            )
    if "model" in config.baselines:
        for name in smaller_models(config.model):
            smaller = ModelConfig(name, config.model.pretrained, None, config.model.num_classes)
            rows.append(RowSpec(name, NONE, smaller, None, config.seed, "model"))
    return rows


def smaller_inputs(model: Any) -> Iterator[tuple[int, int]]:
    """Input sizes with fewer patches, px.

    Args:
        model: A timm model.
    """
    patch, grid = model.patch_embed.patch_size, model.patch_embed.grid_size
    seen = {tuple(grid)}
    for share in SHARES:
        sides = tuple(max(round(side * share), 1) for side in grid)
        if sides not in seen:
            seen.add(sides)
            yield sides[0] * patch[0], sides[1] * patch[1]


def smaller_models(config: ModelConfig) -> list[str]:
    """Names of the same family with the next smaller words for size, largest first.

    Args:
        config: The model group.

    Raises:
        InputError: If there is none.
    """
    parts = re.split(r"([_.])", config.name)
    size = next((part for part in parts if part in SIZES), None)
    smaller = SIZES[SIZES.index(size) + 1 :] if size else ()
    names = ["".join(word if part == size else part for part in parts) for word in smaller]
    found = [name for name in names if _exists(name, config.pretrained)]
    if not found:
        raise InputError(
            f"baselines: no smaller model of the family of {config.name} is known; use baselines=[resize]"
        )
    return found


def resized(model: Any, size: list[int]) -> Any:
    """The same model for another input size: its position embedding is resampled, all other weights are shared.

    Args:
        model: A timm model.
        size: Height and width, px.
    """
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    smaller = copy.deepcopy(model, shared)
    smaller.set_input_size(img_size=tuple(size))
    return smaller


def _exists(name: str, pretrained: bool) -> bool:
    if not timm.is_model(name):
        return False
    return not pretrained or (
        name in timm.list_pretrained() if "." in name else timm.models.is_model_pretrained(name)
    )
