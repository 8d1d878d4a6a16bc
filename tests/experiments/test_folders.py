"""Where images stand: the split that was asked for or none, class folders of one level, everything counted."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
from PIL import Image
from timm.data import get_img_extensions

from prunevit.experiments.config import DataConfig, InputError
from prunevit.experiments.data import load_data
from prunevit.experiments.folders import check_depth, passed_over, split_folder
from prunevit.experiments.images import read_image

Folders = Callable[..., Path]


def config(root: Path, **keys: Any) -> DataConfig:
    return DataConfig(name="folder", root=str(root), num_workers=0, **keys)


@pytest.mark.parametrize(
    ("folders", "split", "expected"),
    [
        (["train", "val"], None, "val"),
        (["train", "validation", "val"], None, "validation"),
        (["train", "val"], "validation", "val"),
        (["train", "val"], "train", "train"),
        (["train", "test"], "test", "test"),
        (["folds", "val"], "folds", "folds"),
        (["cat", "dog"], None, "."),
        (["cat", "train"], None, "."),
        ([], None, "."),
    ],
)
def test_the_folder_of_a_split(tmp_path: Path, folders: list[str], split: str | None, expected: str) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    assert split_folder(tmp_path, split) == tmp_path / expected


@pytest.mark.parametrize(
    ("folders", "split", "message"),
    [
        (["cat", "dog"], "validation", r"data\.split: must be a folder inside data\.root, got validation"),
        (["train", "val"], "test", r"data\.split: must be a folder inside data\.root, got test"),
        (["train", "val"], "../elsewhere", r"data\.split: must be the name of a folder"),
        (["train", "val"], "..", r"data\.split: must be the name of a folder"),
        (["train", "test"], None, r"validation split, got test, train in .*choose one with data\.split"),
        (["train"], None, r"validation split, got train in"),
    ],
)
def test_a_split_that_is_not_there(
    tmp_path: Path, folders: list[str], split: str | None, message: str
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=message):
        split_folder(tmp_path, split)


def test_a_split_that_is_not_there_evaluates_nothing(folders: Folders, tmp_path: Path) -> None:
    folders(name="photos/train", a=1, b=1)
    model = timm.create_model("test_vit", num_classes=2)
    assert load_data(config(tmp_path / "photos", split="train"), model).size == 2
    for split in ("test", "../photos/train"):
        with pytest.raises(InputError, match=r"data\.split"):
            load_data(config(tmp_path / "photos", split=split), model)
    with pytest.raises(InputError, match="got train"):
        load_data(config(tmp_path / "photos"), model)


def test_a_folder_without_splits_has_none_of_a_tar(tmp_path: Path) -> None:
    (tmp_path / "photos.tar").write_bytes(b"")
    assert split_folder(tmp_path / "photos.tar", None) == tmp_path / "photos.tar"
    with pytest.raises(InputError, match="got test"):
        split_folder(tmp_path / "photos.tar", "test")


@pytest.mark.parametrize(
    ("names", "is_folder", "wrong"),
    [
        (["a/0.png", "b/1.png"], True, None),
        (["0.png", "1.png"], True, None),
        (["photos/a/0.png", "photos/b/0.png"], False, None),
        (["./a/0.png", "./b/0.png"], False, None),
        (["hat/dress/0.png"], True, "hat/dress/0.png"),
        (["hat/0.png", "hat/dress/1.png"], True, "hat/dress/1.png"),
        (["0.png", "hat/1.png"], True, "hat/1.png"),
        (["hat/0.png", "1.png"], True, "1.png"),
        (["photos/a/0.png", "photos/b/c/0.png"], False, "photos/b/c/0.png"),
    ],
)
def test_class_folders_are_one_level_deep(names: list[str], is_folder: bool, wrong: str | None) -> None:
    if wrong is None:
        return check_depth(names, is_folder)
    with pytest.raises(InputError, match=f"one level deep, got {wrong}"):
        check_depth(names, is_folder)


def test_a_nested_class_is_refused(folders: Folders, tmp_path: Path) -> None:
    folders(hat=1, shoe=1)
    folders(name="photos/hat", dress=1)
    with pytest.raises(InputError, match=r"one level deep, got hat/dress/0\.png"):
        load_data(config(tmp_path / "photos"), timm.create_model("test_vit", num_classes=3))


def test_what_is_passed_over_is_counted(folders: Folders) -> None:
    root = folders(a=2, b=1, c=0, d=0)
    for name in ("a/notes.txt", "b/raw.cr2", "labels.csv", "d/readme.md", ".hidden"):
        (root / name).write_text("")
    assert passed_over(root) == (4, 2)
    data = load_data(config(root), timm.create_model("test_vit", num_classes=2))
    assert (data.size, data.passed_over, data.empty_folders) == (3, 4, 2)


def test_a_broken_link_and_a_vanished_file_are_named(folders: Folders) -> None:
    root = folders(a=3, b=1)
    (root / "a" / "9.png").symlink_to(root / "nowhere.png")
    data = load_data(config(root), timm.create_model("test_vit", num_classes=2))
    os.unlink(root / "a" / "1.png")
    (batch,) = data.loader(8, 0)
    assert batch.positions.tolist() == [0, 2, 4]
    assert list(batch.failures) == [
        f"{root / 'a' / name}: cannot be opened (No such file or directory)" for name in ("1.png", "9.png")
    ]


@pytest.mark.parametrize("ending", [".webp", ".GIF", ".bmp", ".tiff", ".jfif", ".ppm"])
def test_every_format_that_pillow_opens_is_read(ending: str, tmp_path: Path) -> None:
    for name, colour in (("a", (250, 0, 0)), ("b", (0, 250, 0))):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40), colour).save(tmp_path / "photos" / name / f"0{ending}", lossless=True)
    before = get_img_extensions()
    data = load_data(config(tmp_path / "photos"), timm.create_model("test_vit", num_classes=2))
    assert get_img_extensions() == before
    assert (data.size, data.passed_over, data.empty_folders) == (2, 0, 0)
    (batch,) = data.loader(8, 0)
    assert (batch.targets.tolist(), batch.failures) == ([0, 1], ())
    # Colours survive: red is the largest channel of the first photo, green of the second.
    assert batch.images.mean((2, 3)).argmax(1).tolist() == [0, 1]


def test_of_an_animation_the_first_frame_is_read(tmp_path: Path) -> None:
    red, green = (Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 255, 0)))
    for ending in (".gif", ".webp"):
        red.save(tmp_path / f"moving{ending}", save_all=True, append_images=[green], lossless=True)
        pixel = read_image(str(tmp_path / f"moving{ending}"), "moving").getpixel((4, 4))
        assert pixel == (255, 0, 0)
