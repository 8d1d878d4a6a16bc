"""From folder names and label files to class indices of the model's head: by name, never by position."""

import json
import pkgutil
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

from prunevit.experiments.compose import nearest
from prunevit.experiments.config import InputError

NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")
WORDNET_ID = re.compile(r"n\d{8}")


def class_names(model: Any, class_map: str | None) -> list[str] | None:
    """Return the folder name of each class of the head, or None if nobody knows them.

    Args:
        model: A timm model. Its `pretrained_cfg["label_names"]` counts first, then the WordNet ids of the
            ImageNet subset that has as many classes as the head.
        class_map: Text file with a name a line, which wins over both.

    Raises:
        InputError: If the file cannot be read or has another number of lines than the head has classes.
    """
    if class_map is not None:
        lines = read_text("data.class_map", class_map).splitlines()
        names = [line.strip() for line in lines if line.strip()]
        if len(names) != model.num_classes:
            raise InputError(
                f"data.class_map: must name the {model.num_classes} classes of the head, got {len(names)}"
            )
        return names
    known = (model.pretrained_cfg or {}).get("label_names")
    if known and len(known) == model.num_classes:
        return list(known)
    subset = infer_imagenet_subset({"num_classes": model.num_classes})
    return ImageNetInfo(subset).label_names() if subset else None


def head_indices(
    folders: Sequence[str], names: Sequence[str] | None, num_classes: int, place: Path | None = None
) -> list[int]:
    """Map class folders to class indices of the head.

    By name where the names of the head are known, a subset being fine. Folders that are all integers are
    indices into an ImageNet head. Where no names are known, the folders in natural order are all the classes.

    Args:
        folders: Folder names, in natural order.
        names: What `class_names` returned.
        num_classes: Classes of the head.
        place: Where the folders stand, which the message names.

    Raises:
        InputError: If a folder is unknown to the model or the number of classes does not fit the head.
    """
    if names is None:
        if len(folders) != num_classes:
            raise InputError(
                f"data.root: must have a class folder with images for each of the {num_classes} classes of the head, "
                f"got {len(folders)}{f' in {place}' if place else ''}; name the head's classes with data.class_map"
            )
        return list(range(num_classes))
    position = {name: index for index, name in enumerate(names)}
    if WORDNET_ID.fullmatch(names[0]) and all(folder.isdecimal() for folder in folders):
        position = {str(int(folder)): int(folder) for folder in folders if int(folder) < num_classes}
        folders = [str(int(folder)) for folder in folders]
    unknown = [folder for folder in folders if folder not in position]
    if unknown:
        raise InputError(
            f'data.root: class folders must be classes of the model, got "{unknown[0]}" '
            f"(unknown: {len(unknown)} of {len(folders)}); {nearest(unknown[0], list(names))}"
        )
    return [position[folder] for folder in folders]


def ground_truth(path: str, files: Sequence[str], names: Sequence[str] | None) -> list[int]:
    """Read the labels of a flat folder.

    Lines are `file label` (blanks or a comma between, file with or without its ending) or, for the 50,000
    images of ILSVRC2012 in the order of their numbers, a label alone. A label is a WordNet id or an index of
    the head from 0. The development kit's own file counts from 1 in an order of its own; its `map_clsloc.txt`
    must stand beside.

    Args:
        path: The file.
        files: Image files, as the reader orders them.
        names: Names of the classes of the head.

    Raises:
        InputError: If the file does not say the label of an image, or says one that the head does not have.
    """
    lines = [re.split(r"[,\s]+", line.strip()) for line in read_text("data.ground_truth", path).splitlines()]
    words = [line for line in lines if line[0] and line[:2] != ["ImageId", "PredictionString"]]
    position = {name: index for index, name in enumerate(names or [])}
    if words and all(len(line) == 1 for line in words):
        labels = [line[0] for line in words]
        if all(label.isdecimal() for label in labels) and "0" not in labels and "1000" in labels:
            kit = _kit_order(path)
            labels = [kit.get(label, label) for label in labels]
        words = [[f"ILSVRC2012_val_{number:08d}", label] for number, label in enumerate(labels, 1)]
    targets = []
    for file, found in zip(files, _labels_of(files, [line for line in words if len(line) > 1])):
        if found is None:
            raise InputError(
                f"data.ground_truth: must have a line for each image, got none for {file} in {path}"
            )
        if found not in position and not found.isdecimal():
            raise InputError(
                f'data.ground_truth: labels must be classes of the model, got "{found}" for {file}'
            )
        targets.append(position[found] if found in position else int(found))
    return targets


def _labels_of(files: Sequence[str], lines: Sequence[list[str]]) -> list[str | None]:
    """The label of each file: by its path, with or without its ending, else by its name where only one has it."""
    by_path: dict[PurePath, str] = {}
    by_stem: dict[str, str] = {}
    for name, label, *_ in lines:
        if PurePath(name) in by_path:
            raise InputError(f"data.ground_truth: must name a file once, got {name} twice")
        by_path[PurePath(name)] = label
        by_stem[PurePath(name).stem] = label
    stems_of_lines = Counter(path.stem for path in by_path)
    stems_of_files = Counter(PurePath(file).stem for file in files)
    found: list[str | None] = []
    for file in map(PurePath, files):
        known = by_path.get(file, by_path.get(file.with_suffix("")))
        if known is None and file.stem in by_stem:
            if stems_of_lines[file.stem] > 1 or stems_of_files[file.stem] > 1:
                raise InputError(
                    f"data.ground_truth: lines must tell files of one name apart, got {file.stem} for {file}; "
                    "name them by their path below data.root"
                )
            known = by_stem[file.stem]
        found.append(known)
    return found


def real_labels(path: str, files: Sequence[str]) -> list[list[int]]:
    """Read ReaL labels (Beyer et al., 2020): for each image the classes that are right, possibly none.

    Args:
        path: JSON file, a list for each ILSVRC2012_val image in order of their numbers; "timm": its own.
        files: Image files, as the reader orders them.

    Raises:
        InputError: If the file is not such a list or a file's name bears no number that it covers.
    """
    data = pkgutil.get_data("timm.data", "_info/imagenet_real_labels.json") if path == "timm" else None
    text = data.decode() if data else read_text("data.real_labels", path)
    try:
        labels = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"data.real_labels: must be a JSON list of lists, got {path} ({error})") from error
    if not isinstance(labels, list):
        raise InputError(f"data.real_labels: must be a JSON list of lists, got {path}")
    wrong = next((number for number, each in enumerate(labels, 1) if not _is_indices(each)), None)
    if wrong is not None:
        raise InputError(
            f"data.real_labels: must be a JSON list of lists of class indices, got another entry {wrong} in {path}"
        )
    found = []
    for file in files:
        match = NUMBER.search(Path(file).name)
        number = int(match[1]) if match else 0
        if not 0 < number <= len(labels):
            raise InputError(
                f"data.real_labels: files must be ILSVRC2012_val_<number> that it covers, got {file}"
            )
        found.append(labels[number - 1])
    return found


def _is_indices(entry: object) -> bool:
    return isinstance(entry, list) and all(type(each) is int and each >= 0 for each in entry)


def read_text(key: str, path: str) -> str:
    """Read a text file that a key names.

    Args:
        key: The key, for the message.
        path: The file.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise InputError(f"{key}: must be a readable file, got {path} ({reason})") from error


def _kit_order(path: str) -> dict[str, str]:
    """ILSVRC2012 id -> WordNet id, from the development kit's list."""
    beside = Path(path).with_name("map_clsloc.txt")
    if not beside.is_file():
        raise InputError(
            f"data.ground_truth: {path} holds ILSVRC2012 ids (1 to 1000), whose order is not the model's; put "
            "the kit's map_clsloc.txt beside it, or give lines of 'file WordNet-id'"
        )
    lines = (line.split() for line in beside.read_text(encoding="utf-8").splitlines())
    return {line[1]: line[0] for line in lines if len(line) > 1}
