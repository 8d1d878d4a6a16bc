"""Images with their labels and their position in the data set, read once each and never silently replaced.

`timm.data.create_dataset` finds and opens the files; decoding is ours, because timm's data set puts the
next image in the place of a broken one. The transforms are those of the model's own timm configuration.
"""

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.data import create_dataset, create_transform, resolve_model_data_config
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from prunevit.experiments.config import DataConfig, InputError, first_line
from prunevit.experiments.folders import (
    VALIDATION,
    check_depth,
    check_root,
    every_image,
    passed_over,
    split_folder,
)
from prunevit.experiments.images import UNREADABLE, ImageError, read_image, to_rgb, upright
from prunevit.experiments.labels import class_names, ground_truth, head_indices, real_labels
from prunevit.experiments.sample_model import PHOTOS

HUB_PACKAGES = {"hfds/": "datasets", "wds/": "webdataset"}
"""What timm reads a data set of each kind with."""


@dataclass(frozen=True)
class Photo:
    """One image: `image [3, H, W]`, class index, position in the data set; or why it could not be read.

    `views` holds the same photo as other models want it.
    """

    image: Tensor | None
    target: int
    index: int
    failure: str = ""
    views: tuple[Tensor, ...] = ()


class Batch(NamedTuple):
    """`images [B, 3, H, W]`, `targets [B]`, `positions [B]` (int64), and a line for each unreadable image.

    `views` holds the same photos as other models want them.
    """

    images: Tensor
    targets: Tensor
    positions: Tensor
    failures: tuple[str, ...]
    views: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class EvaluationData:
    """What is evaluated.

    Attributes:
        photos: The whole data set, by position; or a stream.
        chosen: Positions to evaluate; empty for a stream.
        real: ReaL labels by position, or None.
        size: Number of images to evaluate.
        passed_over: Files of a folder that are no images by their ending.
        empty_folders: Class folders without an image.
    """

    photos: "Photos | PhotoStream"
    chosen: Sequence[int]
    real: list[list[int]] | None
    size: int
    passed_over: int = 0
    empty_folders: int = 0

    @property
    def is_stream(self) -> bool:
        """Whether the images come in the order of a stream, without positions."""
        return isinstance(self.photos, PhotoStream)

    def loader(
        self, batch_size: int, num_workers: int, rank: int = 0, world_size: int = 1
    ) -> DataLoader[Any]:
        """Make the loader of one process; the processes' shares are disjoint and cover everything once.

        Args:
            batch_size: Images a batch.
            num_workers: Reading processes; a stream has at most one, which keeps its order.
            rank: This process.
            world_size: Number of processes.
        """
        return DataLoader(
            self.photos,
            batch_size=batch_size,
            sampler=None if self.is_stream else StridedSampler(self.chosen, rank, world_size),
            num_workers=min(num_workers, 1) if self.is_stream else num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
        )


class StridedSampler(Sampler[int]):
    """Every `world_size`-th position, starting at `rank`: no image is repeated to make the shares equal."""

    def __init__(self, positions: Sequence[int], rank: int = 0, world_size: int = 1) -> None:
        """Take this process's share of the positions."""
        self.positions = positions[rank::world_size]

    def __iter__(self) -> Iterator[int]:
        """Run through the share in order."""
        return iter(self.positions)

    def __len__(self) -> int:
        """Count the share."""
        return len(self.positions)


class Photos(Dataset[Photo]):
    """A timm `ImageDataset` by position."""

    def __init__(
        self,
        source: Any,
        transform: Any,
        targets: Sequence[int] | None,
        heads: Sequence[int],
        views: Sequence[Any] = (),
    ) -> None:
        """Wrap a data set.

        Args:
            source: The timm data set; only its reader is used.
            transform: From a PIL image to a tensor.
            targets: Class index of each image, or None: the reader's label, translated by `heads`.
            heads: Class index of each of the reader's labels.
            views: Transforms of further models: the image is decoded once for all.
        """
        self.source, self.transform, self.targets, self.heads = source, transform, targets, heads
        self.views = views

    def __len__(self) -> int:
        """Count the images."""
        return len(self.source)

    def __getitem__(self, index: int) -> Photo:
        """Read and transform one image; one that cannot be read is returned as a failure."""
        try:
            file, label = self.source.reader[index]
            with file:
                image = read_image(file, self.name(index))
        except ImageError as error:
            return Photo(None, -1, index, str(error))
        except (*UNREADABLE, tarfile.TarError, KeyError) as error:
            return Photo(None, -1, index, f"{self.name(index)}: cannot be opened ({_reason(error)})")
        target = self.heads[label] if self.targets is None else self.targets[index]
        views = tuple(transform(image) for transform in self.views)
        return Photo(self.transform(image), target, index, views=views)

    def name(self, index: int) -> str:
        """Say which file an image comes from."""
        return self.source.filename(index, absolute=True) or f"image {index}"


class PhotoStream(IterableDataset[Photo]):
    """A timm `IterableImageDataset` (webdataset shards), read by one process in the order of the shards."""

    def __init__(
        self, source: Any, transform: Any, num_classes: int, limit: int | None, views: Sequence[Any] = ()
    ) -> None:
        """Wrap a stream.

        Args:
            source: The timm data set, which yields PIL images and class indices.
            transform: From a PIL image to a tensor.
            num_classes: Classes of the head, which bound the indices.
            limit: Stop after so many images.
            views: Transforms of further models: the image is decoded once for all.
        """
        self.source, self.transform, self.num_classes, self.limit = source, transform, num_classes, limit
        self.views = views

    def __iter__(self) -> Iterator[Photo]:
        """Yield the images, and at the end a failure for each one that was broken: timm drops those."""
        expected = min(len(self.source), self.limit or len(self.source))
        seen = 0
        for image, target in islice(self.source, expected):
            yield self._photo(image, int(target), seen)
            seen += 1
        for index in range(seen, expected):
            yield Photo(
                None, -1, index, f"image {index}: the stream ended early; timm dropped a broken image"
            )

    def _photo(self, image: Any, target: int, index: int) -> Photo:
        if not 0 <= target < self.num_classes:
            return Photo(None, -1, index, f"image {index}: label {target} is not a class of the model")
        try:
            image = to_rgb(upright(image))
            views = tuple(transform(image) for transform in self.views)
            return Photo(self.transform(image), target, index, views=views)
        except UNREADABLE as error:
            return Photo(None, -1, index, f"image {index}: not a readable image ({error})")


def collate(photos: Sequence[Photo]) -> Batch:
    """Stack the readable photos.

    Args:
        photos: At least one.
    """
    good = [photo for photo in photos if photo.image is not None]
    images = [photo.image for photo in good if photo.image is not None]
    return Batch(
        torch.stack(images) if images else torch.empty(0),
        torch.tensor([photo.target for photo in good], dtype=torch.int64),
        torch.tensor([photo.index for photo in good], dtype=torch.int64),
        tuple(photo.failure for photo in photos if photo.image is None),
        tuple(torch.stack(view) for view in zip(*(photo.views for photo in good))),
    )


def load_data(config: DataConfig, model: Any, others: Sequence[Any] = ()) -> EvaluationData:
    """Find the images and labels that a configuration names.

    Args:
        config: The data group.
        model: The timm model, for its transforms and its classes.
        others: Further models, each of which gets the photos in a view of its own.

    Raises:
        InputError: If they cannot be found or do not fit the model.
    """
    source, transform = _open(config), evaluation_transform(model)
    views = [*map(evaluation_transform, others)]
    names = class_names(model, config.class_map)
    if config.dataset.startswith("wds/"):
        size = min(len(source), config.num_images or len(source))
        stream = PhotoStream(source, transform, model.num_classes, config.num_images, views)
        return EvaluationData(stream, (), None, size)
    labels = _label_names(source.reader)
    root = None if config.dataset else Path(source.reader.root)
    targets, heads = None, []
    if root is not None and config.ground_truth is None:
        check_depth(source.filenames(), root.is_dir())
    if config.ground_truth is not None:
        targets = ground_truth(config.ground_truth, source.filenames(), names)
        _check_range(targets, model.num_classes)
    elif labels == [""]:
        raise InputError(
            f"data.root: must hold class folders, got bare images in {source.reader.root}; "
            "give data.ground_truth"
        )
    else:
        heads = _heads(config, labels, names, model.num_classes, root)
    chosen = evenly_spaced(len(source), config.num_images)
    real = real_labels(config.real_labels, source.filenames()) if config.real_labels else None
    over = passed_over(root) if root is not None and root.is_dir() else (0, 0)
    photos = Photos(source, transform, targets, heads, views)
    return EvaluationData(photos, chosen, real, len(chosen), *over)


def evenly_spaced(size: int, count: int | None) -> Sequence[int]:
    """Choose positions with equal steps between them: the same ones each time, all classes in proportion.

    Args:
        size: Number of images, which stand class by class.
        count: How many to choose; None: all.
    """
    if count is None or count >= size:
        return range(size)
    return [position * size // count for position in range(count)]


def evaluation_transform(model: Any) -> Any:
    """Make timm's evaluation transform for a model at its present input size.

    Args:
        model: A timm model.
    """
    size = {"input_size": (3, *model.patch_embed.img_size)}
    return create_transform(**resolve_model_data_config(model, args=size), is_training=False)


def _open(config: DataConfig) -> Any:
    root = str(PHOTOS) if config.name == "sample" and config.root is None else config.root
    folder = not config.dataset
    if not folder and not config.dataset.startswith(tuple(HUB_PACKAGES)):
        raise InputError(f"data.dataset: must be empty, hfds/NAME or wds/NAME, got {config.dataset}")
    if folder:
        check_root(root)
    try:
        if folder:
            root = str(split_folder(Path(str(root)), config.split))
        # An empty mode keeps timm from converting: 16-bit and EXIF need the image as it was stored.
        split = config.split or VALIDATION[0]
        with every_image(), redirect_stdout(io.StringIO()):  # timm prints what a missing package is called
            return create_dataset(
                config.dataset, root=root, split=split, input_img_mode="", search_split=False
            )
    except InputError:
        raise
    except (
        RuntimeError,
        ValueError,
        OSError,
        ImportError,
        AttributeError,
        AssertionError,
        tarfile.TarError,
    ) as error:
        for kind, package in HUB_PACKAGES.items():
            if config.dataset.startswith(kind) and find_spec(package) is None:
                raise InputError(
                    f"data.dataset: {kind}NAME needs the package {package}, found none; pip install {package}"
                ) from error
        raise InputError(
            f"data: no images found in {config.dataset or root} ({first_line(error)})"
        ) from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or first_line(error)


def _label_names(reader: Any) -> list[str]:
    """Names of the reader's labels, by label."""
    by_name = getattr(reader, "class_to_idx", None) or getattr(reader, "class_name_to_idx", {})
    return [name for name, _ in sorted(by_name.items(), key=lambda item: item[1])]


def _heads(
    config: DataConfig, labels: list[str], names: list[str] | None, num_classes: int, place: Path | None
) -> list[int]:
    if config.dataset and not (labels and set(labels) <= set(names or ())):
        # The class names of a hub's data set are not the model's: its numbers count, for its list is complete.
        labels, names = labels or [*map(str, range(num_classes))], None
    return head_indices(labels, names, num_classes, place)


def _check_range(targets: Sequence[int], num_classes: int) -> None:
    if max(targets) >= num_classes:
        raise InputError(
            f"data.ground_truth: labels must be below the {num_classes} classes, got {max(targets)}"
        )
