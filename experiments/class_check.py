"""Whether class folders fit the head of an architecture, known from its timm configuration: no weights are fetched."""

import os
from pathlib import Path
from types import SimpleNamespace

from timm.models import get_pretrained_cfg, is_model
from timm.utils import natural_key

from prunevit.experiments.config import DataConfig, InputError, ModelConfig
from prunevit.experiments.folders import check_root, split_folder
from prunevit.experiments.images import readable_endings
from prunevit.experiments.labels import class_names, head_indices


def check_classes(data: DataConfig, model: ModelConfig) -> None:
    """Refuse a place for images that is none, and class folders that do not fit the model's head, before it is built.

    Args:
        data: The data group; what is no folder of class folders is passed over.
        model: The model group; the bundled model and what a hub holds are passed over.

    Raises:
        InputError: As `load_data`, which looks again.
    """
    if not data.dataset and data.name != "sample":
        check_root(data.root)
    config = get_pretrained_cfg(model.name) if is_model(model.name) else None
    if (
        config is None
        or data.root is None
        or data.dataset
        or data.ground_truth
        or not os.path.isdir(data.root)
    ):
        return
    place = split_folder(Path(data.root), data.split)
    labels = _class_folders(place)
    classes = model.num_classes or config.num_classes
    if labels and classes:
        head = SimpleNamespace(num_classes=classes, pretrained_cfg=config.to_dict())
        head_indices(labels, class_names(head, data.class_map), classes, place)


def _class_folders(root: Path) -> list[str]:
    """Folders that hold an image, in natural order; none for a flat folder."""
    endings = readable_endings()
    try:
        folders = [each for each in root.iterdir() if each.is_dir()]
        with_images = [each.name for each in folders if _holds_image(each, endings)]
    except OSError as error:
        raise InputError(f"data.root: {error.filename} must be readable ({error.strerror})") from error
    return sorted(with_images, key=natural_key)


def _holds_image(folder: Path, endings: tuple[str, ...]) -> bool:
    return any(os.path.splitext(each)[1].lower() in endings for each in os.listdir(folder))
