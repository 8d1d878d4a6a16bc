"""Pictures of what a policy did with a photo: one panel for each prune stage.

A dropped patch is darkened; patches that share one token are tinted in the colour of that token and outlined; a patch
that has a token of its own looks as in the photo. All of it is read off the `Trace`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray
from timm.data import ImageNetInfo, infer_imagenet_subset, resolve_model_data_config
from torch import Tensor

from prunevit import RaggedViT, Trace
from prunevit.experiments.comparison.figures import any_script
from prunevit.experiments.comparison.series import PALETTE
from prunevit.experiments.data import Batch
from prunevit.experiments.labels import class_names
from prunevit.experiments.report import replace_files

Pixels = NDArray[np.float64]

DARK = 0.2  # what is left of a dropped patch's brightness
TINT = 0.55  # share of the token's colour in a patch that shares it
PANELS = 7  # in one line of a picture
PANEL_INCHES = 1.6


@dataclass(frozen=True)
class Stages:
    """What one pruned model did with one photo.

    Attributes:
        title: The model's name and its prediction.
        photo: The photo as the model saw it, `[H, W, 3]` in 0 to 1.
        grid: Patches in a column and in a row.
        panels: For each stage its title and the heir of each patch, int64 `[P]`; -1 where it was dropped.
    """

    title: str
    photo: Pixels
    grid: tuple[int, int]
    panels: Sequence[tuple[str, NDArray[np.int64]]]


def look(name: str, pruned: RaggedViT, photos: Batch) -> list[Stages]:
    """Run a pruned model on some photos and take down what happened to each.

    Args:
        name: Label of the model.
        pruned: The model.
        photos: A batch as `EvaluationData.loader` gives it; moved to the model's device.
    """
    device = next(pruned.parameters()).device
    with torch.inference_mode():
        trace = pruned.trace(photos.images.to(device), photos.positions.to(device)).to("cpu")
    titles, pixels = class_titles(pruned.model), unnormalise(photos.images, pruned.model)
    return [
        Stages(f"{name}: {prediction(logits, titles)}", photo, trace.tokens.grid, _panels(trace, number))
        for number, (logits, photo) in enumerate(zip(trace.logits, pixels))
    ]


def draw(title: str, rows: Sequence[Stages]) -> Figure:
    """Draw one photo under one or several models, a line each.

    Args:
        title: Stands above all.
        rows: What each model did with the photo.
    """
    columns = min(PANELS, 1 + max(len(row.panels) for row in rows))
    lines = [math.ceil((1 + len(row.panels)) / columns) for row in rows]
    high = PANEL_INCHES * max(row.photo.shape[0] / row.photo.shape[1] for row in rows) + 0.15
    size = (PANEL_INCHES * columns + 0.1, high * sum(lines) + 0.18 * len(rows) + 0.35)
    tight = ConstrainedLayoutEngine(w_pad=0.02, h_pad=0.02, hspace=0, wspace=0)
    figure = Figure(figsize=size, layout=tight)
    left = {"x": 0.01, "ha": "left", "parse_math": False}  # a name may hold dollar signs
    figure.suptitle(title, fontsize=9, fontweight="bold", **left)
    figure.supxlabel(
        "dark: dropped; one colour and outline: one token", fontsize=7, color="#555555", x=0.01, ha="left"
    )
    for part, row, count in zip(
        figure.subfigures(len(rows), squeeze=False, height_ratios=lines)[:, 0], rows, lines
    ):
        part.suptitle(row.title, fontsize=8, **left)
        panels = part.subplots(count, columns, squeeze=False).ravel()
        everything = [("photo", np.arange(math.prod(row.grid))), *row.panels]
        for panel in panels:
            panel.set_axis_off()
        for panel, (said, heirs) in zip(panels, everything):
            _show(panel, said, row, heirs)
    return figure


def shade(photo: Pixels, heirs: NDArray[np.int64], grid: tuple[int, int]) -> Pixels:
    """Darken the patches that were dropped and tint those that share a token.

    Args:
        photo: `[H, W, 3]` in 0 to 1.
        heirs: Heir of each patch, int64 `[P]`; -1 where it was dropped.
        grid: Patches in a column and in a row.

    Returns:
        `[H, W, 3]`. The colour of a token depends on its patch alone, so it stays the same from stage to stage.
    """
    colours = np.array([[int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)] for code in PALETTE])
    here = _per_pixel(heirs, grid, photo)
    tinted = (1 - TINT) * photo + TINT * colours[here % len(PALETTE)]
    shared = _per_pixel(_shared(heirs), grid, photo)
    shaded = np.where(shared[..., None], tinted, photo)
    return np.where(here[..., None] < 0, DARK * photo, shaded)


def unnormalise(images: Tensor, model: Any) -> Pixels:
    """Undo the normalisation of a model's transform.

    Args:
        images: `[B, 3, H, W]`, as the model takes them.
        model: A timm model.

    Returns:
        `[B, H, W, 3]` in 0 to 1.
    """
    settings = resolve_model_data_config(model)
    mean, std = (torch.tensor(settings[name], dtype=torch.float64)[:, None, None] for name in ("mean", "std"))
    return (images.cpu().double() * std + mean).clamp(0, 1).permute(0, 2, 3, 1).numpy()


def class_titles(model: Any) -> list[str]:
    """What each class of the head is called, in words where ImageNet has them, else by its number.

    Args:
        model: A timm model.
    """
    names = class_names(model, None)
    subset = infer_imagenet_subset({"num_classes": model.num_classes})
    if subset and names == ImageNetInfo(subset).label_names():
        info = ImageNetInfo(subset)
        return [info.index_to_description(number).split(",")[0] for number in range(model.num_classes)]
    return names or [f"class {number}" for number in range(model.num_classes)]


def prediction(logits: Tensor, titles: Sequence[str]) -> str:
    """Name the class of highest logit and its probability.

    Args:
        logits: `[K]`.
        titles: Name of each class.
    """
    share, best = logits.double().softmax(0).max(0)
    return f"{titles[int(best)]} {100 * float(share):.0f} %"


def write_pictures(
    folder: Path, models: Mapping[str, RaggedViT], photos: Batch, names: Sequence[str]
) -> list[Path]:
    """Draw a grid over the models for each photo, with its label and the unpruned prediction above.

    Args:
        folder: Where the PNG files go; made if it is not there.
        models: Pruned models by label, at least one; the first one's unpruned model is the one quoted.
        photos: A few photos, as a loader gives them.
        names: What each photo is called.

    Returns:
        The files. Their "Description" holds the title.

    Cost:
        One forward pass of each model, and a drawing of each panel: about 0.05 s.
    """
    first = next(iter(models.values())).model
    titles = class_titles(first)
    with torch.inference_mode():
        dense = first(photos.images.to(next(first.parameters()).device)).cpu()
    looks = [look(name, pruned, photos) for name, pruned in models.items()]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for number, (name, target) in enumerate(zip(names, photos.targets.tolist())):
        title = f"{name}: label {titles[target]}, unpruned {prediction(dense[number], titles)}"
        path = folder / f"{int(photos.positions[number]):06d}.png"
        save(draw(title, [rows[number] for rows in looks]), path, title)
        written.append(path)
    return written


def save(figure: Figure, path: Path, title: str, dpi: int = 130) -> None:
    """Write a picture as PNG, whole or not at all.

    Args:
        figure: The picture.
        path: Target file.
        title: Kept in the file as its "Description".
        dpi: Pixels an inch.
    """
    content = BytesIO()
    with any_script():
        figure.savefig(content, format="png", dpi=dpi, metadata={"Description": title})
    replace_files({path: content.getvalue()})


def _panels(trace: Trace, image: int) -> list[tuple[str, NDArray[np.int64]]]:
    panels = []
    for number, stage in enumerate(trace.stages):
        heirs = trace.heirs(number)[image].numpy()
        tokens = len(np.unique(heirs[heirs >= 0]))
        panels.append((f"block {stage.layer}: {tokens} of {len(heirs)} tokens", heirs))
    return panels


def _show(panel: Axes, said: str, row: Stages, heirs: NDArray[np.int64]) -> None:
    panel.imshow(shade(row.photo, heirs, row.grid), interpolation="nearest")
    panel.add_collection(LineCollection(_outlines(heirs, row), colors="white", linewidths=0.4), autolim=False)
    panel.set_title(said, fontsize=7, pad=2)


def _outlines(heirs: NDArray[np.int64], row: Stages) -> list[list[tuple[float, float]]]:
    """Line segments between neighbours of different tokens, one of which is shared, and round what was dropped."""
    (down, across), (height, width) = row.grid, row.photo.shape[:2]
    owner, marked = heirs.reshape(row.grid), (_shared(heirs) | (heirs < 0)).reshape(row.grid)
    high, wide = height / down, width / across
    left = np.argwhere((owner[:, 1:] != owner[:, :-1]) & (marked[:, 1:] | marked[:, :-1]))
    above = np.argwhere((owner[1:] != owner[:-1]) & (marked[1:] | marked[:-1]))
    corners = [((row, column + 1), (row + 1, column + 1)) for row, column in left]
    corners += [((row + 1, column), (row + 1, column + 1)) for row, column in above]
    # A pixel's centre stands at its whole number, so the picture begins at -0.5.
    return [[(column * wide - 0.5, row * high - 0.5) for row, column in pair] for pair in corners]


def _shared(heirs: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which patches share a token with another one."""
    members = np.bincount(heirs[heirs >= 0], minlength=len(heirs))
    return (heirs >= 0) & (members[heirs.clip(0)] > 1)


def _per_pixel(values: NDArray[Any], grid: tuple[int, int], photo: Pixels) -> NDArray[Any]:
    """Spread one value a patch over the pixels, `[H, W]`."""
    height, width = photo.shape[:2]
    rows, columns = np.arange(height) * grid[0] // height, np.arange(width) * grid[1] // width
    return values.reshape(grid)[rows[:, None], columns]
