"""Where the images of a folder stand: the folder of the split, class folders one level deep, what is passed over."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from timm.data import get_img_extensions, set_img_extensions

from prunevit.experiments.config import InputError
from prunevit.experiments.images import readable_endings

VALIDATION = ("validation", "val", "valid", "eval", "evaluation")
TRAINING = ("train", "training")
SPLITS = (*VALIDATION, *TRAINING, "test", "testing")


@contextmanager
def every_image() -> Iterator[None]:
    """Let timm take for an image what Pillow opens, while a data set is made; by itself it takes .png and .jpg."""
    before = get_img_extensions()
    set_img_extensions(readable_endings())
    try:
        yield
    finally:
        set_img_extensions(before)


def check_root(root: str | None) -> None:
    """Refuse a place for images that is none.

    Args:
        root: A folder or a .tar file.

    Raises:
        InputError: If it is not set or does not exist.
    """
    if root is None:
        raise InputError("data.root: must be set to a folder or a .tar file")
    if not os.path.exists(root):
        raise InputError(f"data.root: must exist, got {root}")


def split_folder(root: Path, split: str | None) -> Path:
    """Find the folder of a split.

    Args:
        root: A folder or a .tar file.
        split: Its name, or another usual name of the same; None: validation where there is one, else `root`.

    Raises:
        InputError: If the split is not there, or if `root` holds splits and none for validation.
    """
    if split is not None and (split in (".", "..") or PurePath(split).name != split):
        raise InputError(f"data.split: must be the name of a folder inside data.root, got {split}")
    names = next((group for group in (VALIDATION, TRAINING) if (split or VALIDATION[0]) in group), ())
    for name in dict.fromkeys((*([split] if split else []), *names)):
        if (root / name).is_dir():
            return root / name
    if split is not None:
        raise InputError(f"data.split: must be a folder inside data.root, got {split}, not in {root}")
    inside = sorted(each.name for each in root.iterdir() if each.is_dir()) if root.is_dir() else []
    if inside and set(inside) <= set(SPLITS):
        raise InputError(
            f"data.root: must hold class folders or a validation split, got {', '.join(inside)} in {root}; "
            "choose one with data.split"
        )
    return root


def check_depth(names: Sequence[str], is_folder: bool) -> None:
    """Refuse images that do not stand in class folders of one level, or bare images beside such.

    Args:
        names: Paths of the images below the root.
        is_folder: Whether the root is a folder; a .tar file may have folders above the class folders.

    Raises:
        InputError: Names the first image that stands elsewhere.
    """
    parents = [PurePath(name).parent for name in names]
    expected = PurePath(".") if is_folder else parents[0].parent
    bare = parents[0] == PurePath(".")
    for name, parent in zip(names, parents):
        if (parent == PurePath(".")) != bare or (not bare and parent.parent != expected):
            raise InputError(
                f"data.root: images must stand in class folders one level deep, got {name} beside {names[0]}"
                if name != names[0]
                else f"data.root: images must stand in class folders one level deep, got {name}"
            )


def passed_over(root: Path) -> tuple[int, int]:
    """Count the files that are no images by their ending, and the class folders that hold no image.

    Args:
        root: The folder of the class folders; hidden files are not counted.

    Raises:
        InputError: If a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise InputError(f"data.root: {error.filename} must be readable ({error.strerror})") from error

    endings, others, empty = readable_endings(), 0, 0
    for folder, inside, files in os.walk(root, followlinks=True, onerror=refuse):
        known = [os.path.splitext(file)[1].lower() in endings for file in files if not file.startswith(".")]
        others += known.count(False)
        empty += not any(known) and not inside and Path(folder) != root
    return others, empty
