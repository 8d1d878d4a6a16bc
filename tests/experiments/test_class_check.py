"""Class folders that do not fit the head are told ahead of any download, and only they are."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm

from prunevit.experiments import models
from prunevit.experiments.class_check import check_classes
from prunevit.experiments.config import DataConfig, InputError, ModelConfig

Folders = Callable[..., Path]
Evaluate = Callable[..., int]


def data(root: Path | None, **keys: Any) -> DataConfig:
    return DataConfig(name="folder", root=None if root is None else str(root), **keys)


def test_a_misfit_is_told_before_weights_are_fetched(
    folders: Folders,
    evaluate: Evaluate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fetch(name: str, **settings: Any) -> Any:
        assert not settings.get("pretrained"), "the weights were fetched"
        return create(name, **settings)

    create = timm.create_model
    monkeypatch.setattr(models.timm, "create_model", fetch)
    root = folders(cat=1, dog=1)
    words = ["model=vit_tiny_patch16_224", "model.pretrained=true", "model.num_classes=null"]
    assert evaluate(root, tmp_path / "out", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('prunevit: data.root: class folders must be classes of the model, got "cat"')


@pytest.mark.parametrize(
    ("name", "classes", "message"),
    [
        ("vit_tiny_patch16_224", None, 'must be classes of the model, got "a"'),
        ("vit_tiny_patch16_224", 4, "for each of the 4 classes of the head, got 3"),
        ("vit_tiny_patch16_224.augreg_in21k", None, 'must be classes of the model, got "a"'),
        ("test_vit", 3, None),
        ("sample", None, None),
        ("hf-hub:owner/name", None, None),
    ],
)
def test_the_head_of_an_architecture(
    folders: Folders, name: str, classes: int | None, message: str | None
) -> None:
    # Neither a folder without images nor a hidden file counts.
    root = folders(a=1, b=1, c=1, d=0)
    (root / ".hidden").write_text("")
    model = ModelConfig(name=name, num_classes=classes)
    if message is not None and "got 3" in message:
        message += f" in {root};"
    if message is None:
        return check_classes(data(root), model)
    with pytest.raises(InputError, match=message):
        check_classes(data(root), model)


def test_what_is_no_folder_of_class_folders_is_passed_over(folders: Folders, tmp_path: Path) -> None:
    model = ModelConfig(name="test_vit", num_classes=3)
    flat = folders(photos=2) / "photos"
    for asked in (data(flat), data(flat, ground_truth="labels.txt")):
        check_classes(asked, model)
    check_classes(data(tmp_path, dataset="hfds/owner/set"), model)


def test_a_place_that_is_none_is_told_before_anything_is_fetched() -> None:
    model = ModelConfig(name="deit_tiny_patch16_224")
    with pytest.raises(InputError, match=r"data\.root: must exist, got /no/such/place"):
        check_classes(DataConfig(name="imagenet", root="/no/such/place"), model)
    with pytest.raises(InputError, match=r"data\.root: must be set to a folder or a \.tar file"):
        check_classes(DataConfig(name="folder"), model)
    check_classes(DataConfig(name="sample"), model)
    check_classes(DataConfig(name="imagenet", dataset="hfds/imagenet-1k"), model)
