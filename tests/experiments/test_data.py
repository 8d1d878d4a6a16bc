"""Reading of folders, tars and streams: right labels, nothing replaced, nothing repeated."""

import io
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from prunevit.experiments import data as data_module
from prunevit.experiments.config import DataConfig, InputError
from prunevit.experiments.data import (
    EvaluationData,
    Photos,
    PhotoStream,
    StridedSampler,
    evaluation_transform,
    evenly_spaced,
    load_data,
)

Folders = Callable[..., Path]


def tiny(num_classes: int, **pretrained_cfg: Any) -> Any:
    return timm.create_model("test_vit", num_classes=num_classes, pretrained_cfg_overlay=pretrained_cfg)


def config(root: Path | str | None, **keys: Any) -> DataConfig:
    return DataConfig(name="folder", root=None if root is None else str(root), num_workers=0, **keys)


def targets(data: EvaluationData) -> list[int]:
    batches = list(data.loader(batch_size=4, num_workers=0))
    return torch.cat([batch.targets for batch in batches]).tolist()


def test_folders_by_position(folders: Folders) -> None:
    data = load_data(config(folders(a=2, b=1, c=2)), tiny(3))
    assert (data.size, targets(data)) == (5, [0, 0, 1, 2, 2])


def test_folders_by_the_models_names(folders: Folders) -> None:
    data = load_data(config(folders(hat=1, shoe=2)), tiny(3, label_names=("shoe", "scarf", "hat")))
    assert targets(data) == [2, 0, 0]


def test_a_subset_of_imagenet_by_id(folders: Folders) -> None:
    data = load_data(config(folders(n02124075=1, n15075141=1)), tiny(1000))
    assert targets(data) == [285, 999]


def test_integer_folders_of_imagenet(folders: Folders) -> None:
    root = folders(**{"2": 1, "10": 1, "9": 2})
    assert targets(load_data(config(root), tiny(1000))) == [2, 9, 9, 10]


def test_a_split_inside_root_is_found(folders: Folders, tmp_path: Path) -> None:
    folders(name="photos/val", a=1, b=1)
    folders(name="photos/train", a=3, b=3)
    assert load_data(config(tmp_path / "photos"), tiny(2)).size == 2


def test_a_tar_gives_the_same_photos(folders: Folders, tmp_path: Path) -> None:
    root = folders(a=2, b=2)
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        tar.add(root, arcname=".")
    from_folder, from_tar = (load_data(config(path), tiny(2)) for path in (root, tmp_path / "photos.tar"))
    for one, two in zip(from_folder.loader(4, 0), from_tar.loader(4, 0)):
        assert torch.equal(one.images, two.images)
        assert torch.equal(one.targets, two.targets)
    from_tar.photos.source.reader.tar_state.tf.close()  # timm keeps it open


def test_a_flat_folder_needs_its_ground_truth(folders: Folders, tmp_path: Path) -> None:
    flat = folders(photos=3) / "photos"
    with pytest.raises(InputError, match="got bare images"):
        load_data(config(flat), tiny(5))
    labels = tmp_path / "labels.txt"
    labels.write_text("0.png 4\n1.png 0\n2.png 3\n")
    assert targets(load_data(config(flat, ground_truth=str(labels)), tiny(5))) == [4, 0, 3]
    with pytest.raises(InputError, match="below the 4 classes, got 4"):
        load_data(config(flat, ground_truth=str(labels)), tiny(4))


def test_real_labels_stand_by_position(tmp_path: Path) -> None:
    (tmp_path / "photos" / "n02124075").mkdir(parents=True)
    for number in (3, 1):
        Image.new("RGB", (20, 20)).save(
            tmp_path / "photos" / "n02124075" / f"ILSVRC2012_val_0000000{number}.JPEG"
        )
    (tmp_path / "real.json").write_text("[[1], [2], [3, 4]]")
    data = load_data(config(tmp_path / "photos", real_labels=str(tmp_path / "real.json")), tiny(1000))
    assert data.real == [[1], [3, 4]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tmp: config(tmp / "nowhere"), r"data\.root: must exist"),
        (lambda tmp: config(tmp), r"data: no images found in"),
        (lambda tmp: config(None), r"data\.root: must be set"),
        (lambda tmp: config(None, dataset="mnist"), r"data\.dataset: must be empty, hfds/NAME or wds/NAME"),
        (lambda tmp: config(_broken_tar(tmp)), r"data: no images found in .*broken\.tar"),
    ],
    ids=["missing", "empty", "unset", "unknown set", "broken tar"],
)
def test_missing_data_is_one_line(tmp_path: Path, make: Callable[[Path], DataConfig], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_data(make(tmp_path), tiny(2))


def _broken_tar(folder: Path) -> Path:
    (folder / "broken.tar").write_bytes(b"no tar")
    return folder / "broken.tar"


def test_a_broken_image_is_reported_and_not_replaced(folders: Folders) -> None:
    root = folders(a=3)
    (root / "a" / "1.png").write_bytes(b"")
    (batch,) = load_data(config(root), tiny(1)).loader(4, 0)
    assert batch.positions.tolist() == [0, 2]
    assert len(batch.failures) == 1
    assert str(root / "a" / "1.png") in batch.failures[0]


def test_a_batch_of_broken_images(folders: Folders) -> None:
    root = folders(a=1)
    (root / "a" / "0.png").write_bytes(b"nothing")
    (batch,) = load_data(config(root), tiny(1)).loader(4, 0)
    assert (len(batch.targets), len(batch.failures)) == (0, 1)


def test_the_transform_is_that_of_the_model() -> None:
    model = tiny(2)
    transform = evaluation_transform(model)
    assert transform(Image.new("RGB", (300, 200))).shape == (3, 160, 160)
    grey = transform(Image.new("RGB", (300, 200), (128, 128, 128)))
    mean, std = (torch.tensor(model.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    assert torch.allclose(grey, ((128 / 255 - mean) / std).expand_as(grey), atol=1e-6)
    model.set_input_size(img_size=(96, 128))
    assert evaluation_transform(model)(Image.new("RGB", (300, 200))).shape == (3, 96, 128)


@pytest.mark.parametrize("shape", [(1, 1), (2, 300)])
def test_tiny_and_thin_images_reach_the_input_size(shape: tuple[int, int]) -> None:
    assert evaluation_transform(tiny(2))(Image.new("RGB", shape)).shape == (3, 160, 160)


def test_evenly_spaced_positions_cover_all_classes() -> None:
    assert list(evenly_spaced(10, None)) == list(range(10))
    assert list(evenly_spaced(10, 20)) == list(range(10))
    assert list(evenly_spaced(10, 4)) == [0, 2, 5, 7]
    per_class = np.bincount([position // 50 for position in evenly_spaced(50_000, 3000)])
    assert (per_class == 3).all()


@pytest.mark.parametrize(("size", "world"), [(21, 2), (21, 4), (1, 3), (8, 2)])
def test_shares_are_disjoint_and_complete(size: int, world: int) -> None:
    shares = [list(StridedSampler(range(size), rank, world)) for rank in range(world)]
    assert sorted(position for share in shares for position in share) == list(range(size))


class Shards:
    """Stands for timm's webdataset reader, which drops what it cannot decode."""

    def __init__(self, length: int, items: list[tuple[Image.Image, int]]) -> None:
        self.length, self.items = length, items

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.items)


def test_a_stream_counts_in_order_and_tells_what_was_dropped() -> None:
    transform = evaluation_transform(tiny(2))
    photo = Image.new("L", (30, 30))
    stream = PhotoStream(
        Shards(4, [(photo, 1), (photo, 0), (photo, 9)]), transform, num_classes=2, limit=None
    )
    (batch,) = EvaluationData(stream, (), None, 4).loader(8, num_workers=0)
    assert (batch.targets.tolist(), batch.positions.tolist()) == ([1, 0], [0, 1])
    assert batch.failures[0] == "image 2: label 9 is not a class of the model"
    assert batch.failures[1].startswith("image 3: the stream ended early")


def test_a_limited_stream_reads_no_more() -> None:
    photo = Image.new("RGB", (30, 30))
    stream = PhotoStream(Shards(9, [(photo, 0)] * 9), evaluation_transform(tiny(2)), num_classes=2, limit=3)
    assert len(list(stream)) == 3


def test_photos_of_a_reader_without_names_are_numbered() -> None:
    class Nameless:
        def __init__(self) -> None:
            self.reader = [(io.BytesIO(b""), 0)]

        def filename(self, index: int, absolute: bool) -> None:
            return None

    assert Photos(Nameless(), None, None, [0])[0].failure.startswith("image 0: not a readable image")


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ({"hat": 0, "shoe": 1, "scarf": 2}, [2, 0]),  # the model's names, in another order
        ({"Hat, with brim": 0, "Shoe": 1, "Scarf": 2}, [0, 1]),  # its own names: its numbers count
        ({}, [0, 1]),  # numbers alone
    ],
)
def test_class_lists_of_a_hub_data_set(
    classes: dict[str, int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Hub:
        """Stands for timm's data set over Hugging Face's library."""

        def __init__(self) -> None:
            self.reader = self
            self.class_to_idx = classes

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[io.BytesIO, int]:
            file = io.BytesIO()
            Image.new("RGB", (9, 9)).save(file, "PNG")
            file.seek(0)
            return file, index

        def filename(self, index: int, absolute: bool) -> None:
            return None

    asked: list[Any] = []

    def create_dataset(*names: str, **keys: Any) -> Hub:
        asked.append((names, keys))
        return Hub()

    monkeypatch.setattr(data_module, "create_dataset", create_dataset)
    model = tiny(3, label_names=("shoe", "scarf", "hat"))
    data = load_data(config(None, dataset="hfds/owner/set", split="test"), model)
    assert targets(data) == expected
    ((names, keys),) = asked
    assert names == ("hfds/owner/set",)
    assert keys["split"] == "test"


@pytest.mark.parametrize(("dataset", "package"), [("hfds/owner/set", "datasets"), ("wds/set", "webdataset")])
def test_a_missing_package_is_one_line(
    dataset: str,
    package: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"timm.data.readers.reader_{dataset[:3]}", raising=False)
    asked = config(tmp_path, dataset=dataset) if package == "webdataset" else config(None, dataset=dataset)
    with pytest.raises(InputError) as caught:
        load_data(asked, tiny(3))
    kind = dataset.partition("/")[0]
    assert caught.value.problems == (
        f"data.dataset: {kind}/NAME needs the package {package}, found none; pip install {package}",
    )
    assert capsys.readouterr().out == ""
