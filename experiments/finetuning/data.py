"""Training images: found and labelled as those of an evaluation are, but cropped and altered at random."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import torch
from timm.data import create_transform, resolve_model_data_config
from torch.utils.data import DataLoader, Dataset

from prunevit.experiments.config import InputError, first_line
from prunevit.experiments.data import EvaluationData, Photo, Photos, collate, load_data
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.plan import BatchPlan, Draw
from prunevit.experiments.finetuning.seeding import Purpose, seed_draws
from prunevit.experiments.folders import VALIDATION
from prunevit.experiments.labels import class_names


class TrainingPhotos(Dataset[Photo]):
    """Photos by epoch and position; the two, with the seed, decide how a photo is altered."""

    def __init__(self, photos: Photos, seed: int) -> None:
        """Wrap photos whose transform draws at random."""
        self.photos, self.seed = photos, seed

    def __len__(self) -> int:
        """Count the photos."""
        return len(self.photos)

    def __getitem__(self, draw: Draw) -> Photo:
        """Read and alter one photo."""
        seed_draws(self.seed, Purpose.PHOTO, *draw)
        return self.photos[draw[1]]


class PlannedLoader(DataLoader[Photo]):
    """A loader whose plan starts where the checkpoint ends: it has no state besides, and says so to Lightning."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take nothing."""


@dataclass(frozen=True)
class FinetuneData:
    """What is trained on, and what is held out.

    Attributes:
        training: The photos of the training split.
        held_out: Those of the validation split.
    """

    training: TrainingPhotos
    held_out: EvaluationData

    def fingerprint(self) -> str:
        """A hash of the names of the training images in their order, which a plan counts on."""
        source = self.training.photos.source
        names = "\n".join(str(source.filename(position)) for position in range(len(self.training)))
        return sha256(names.encode(errors="surrogateescape")).hexdigest()

    def loader(self, plan: BatchPlan, num_workers: int) -> PlannedLoader:
        """Make the loader of one process.

        Args:
            plan: Its batches.
            num_workers: Reading processes.
        """
        return PlannedLoader(
            self.training,
            batch_sampler=plan,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=torch.cuda.is_available(),
        )


def load_training_data(config: FinetuneConfig, model: Any) -> FinetuneData:
    """Find the images of both splits.

    Args:
        config: The data group, `train_split`, and how images are altered.
        model: The timm model, for its input size, its normalisation and its classes.

    Raises:
        InputError: If a split or a class is missing, or they do not fit the model.
    """
    held_out = load_data(config.data, model)
    if held_out.is_stream:
        raise InputError(
            f"data.dataset: fine-tuning needs images by position, {config.data.dataset} is a stream; unpack it"
        )
    wanted = replace(
        config.data, split=config.train_split, num_images=None, real_labels=None, ground_truth=None
    )
    try:
        found = load_data(wanted, model)
    except InputError as error:
        raise InputError(*(line.replace("data.split:", "train_split:") for line in error.problems)) from error
    assert isinstance(found.photos, Photos)
    assert isinstance(held_out.photos, Photos)
    _check_apart(config, found.photos, held_out.photos)
    _check_classes(found.photos, held_out.photos, class_names(model, config.data.class_map))
    photos = Photos(
        found.photos.source, training_transform(config, model), found.photos.targets, found.photos.heads
    )
    return FinetuneData(TrainingPhotos(photos, config.seed), held_out)


def training_transform(config: FinetuneConfig, model: Any) -> Any:
    """Make timm's training transform for a model at its present input size.

    Args:
        config: How images are altered.
        model: A timm model.

    Raises:
        InputError: If timm knows no such `aa`.
    """
    data = resolve_model_data_config(model)
    try:
        return create_transform(
            input_size=(3, *model.patch_embed.img_size),
            is_training=True,
            scale=(config.scale_min, 1.0),
            hflip=config.hflip,
            color_jitter=config.color_jitter or None,  # type: ignore[arg-type]  # as timm's own scripts give it
            auto_augment=config.aa,
            interpolation=data["interpolation"],
            mean=data["mean"],
            std=data["std"],
            re_prob=config.reprob,
            re_mode="pixel",
        )
    except (AssertionError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(
            f"aa: must be an automatic augmentation of timm, got {config.aa} ({first_line(error)})"
        ) from error


def _check_apart(config: FinetuneConfig, training: Photos, held_out: Photos) -> None:
    """Refuse to train on the images that are held out."""
    if config.data.dataset:  # whose images have no file names
        same = config.train_split == (config.data.split or VALIDATION[0])
    else:
        same = training.name(0) == held_out.name(0)
    if same:
        raise InputError(
            f"train_split: must be other images than those held out, got {config.train_split}, which is the "
            "validation split too; choose another, or another data.split"
        )


def _check_classes(training: Photos, held_out: Photos, names: list[str] | None) -> None:
    """Refuse a class that has images in one split only: it would be learned unseen, or never."""
    there, here = (
        {*photos.targets} if photos.targets else {*photos.heads} for photos in (training, held_out)
    )
    for missing, split in ((there - here, "validation"), (here - there, "training")):
        if missing:
            label = min(missing)
            name = names[label] if names else f"number {label}"
            raise InputError(
                f"data.root: every class must have images in both splits, got none of class {name} in the "
                f"{split} split (classes without: {len(missing)})"
            )
