"""Photos of the training split, on which a knob is set whose cost depends on the data."""

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunevit import RaggedTokens, RaggedViT
from prunevit.experiments.config import DataConfig, ImagesConfig, InputError
from prunevit.experiments.data import load_data
from prunevit.experiments.folders import SPLITS, TRAINING, check_root, split_folder
from prunevit.experiments.sample_model import PHOTOS

FEW = 64


@dataclass
class Calibration:
    """The photos, read when they are first asked for and then kept.

    Attributes:
        data: Where the photos to evaluate are; the training split is beside them.
        model: The timm model, for its transforms.
        images: How many to take, evenly spaced over the split.
        batch_size: Images a batch.
        device: Where they go.
        costs: What was measured on them, GMACs by what it was measured of.
    """

    data: DataConfig
    model: Any
    images: int
    batch_size: int
    device: torch.device | str = "cpu"
    costs: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _entering: tuple[Any, int, list[RaggedTokens]] = field(default=(None, 0, []), init=False, repr=False)

    @classmethod
    def of(cls, config: ImagesConfig, model: Any) -> "Calibration":
        """The photos for the models of a run.

        Args:
            config: `data`, `calibration_images`, `batch_size` and where the models run.
            model: The timm model, for its transforms.
        """
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if config.on_gpu else "cpu"
        return cls(config.data, model, config.calibration_images, config.batch_size, device)

    @cached_property
    def batches(self) -> list[tuple[Tensor, Tensor]]:
        """`images [B, 3, H, W]` and their positions, int64 `[B]`.

        Raises:
            InputError: If there is no training split, or a photo cannot be read.

        Cost:
            Holds all photos on the device: 308 MB for 512 of 224 px.
        """
        data = load_data(training_split(self.data, self.images), self.model)
        batches = []
        for batch in data.loader(self.batch_size, self.data.num_workers):
            if batch.failures and self.data.on_error == "raise":
                raise InputError(
                    f"data: {batch.failures[0]}; remove it, or leave such out with data.on_error=skip"
                )
            if len(batch.targets):
                batches.append((batch.images.to(self.device), batch.positions.to(self.device)))
        if not batches:
            raise InputError("data: at least one training photo must be readable, got none")
        return batches

    @cached_property
    def few(self) -> "Calibration":
        """At most `FEW` of the photos, as evenly spaced, to look around with."""
        return self if self.images <= FEW else replace(self, images=FEW)

    def entering(self, pruned: RaggedViT, half: int) -> list[RaggedTokens]:
        """The rows that enter a half-block ahead of which no policy acts, a batch each.

        They are kept for the next policy, or the next value of a knob, that leaves the model alone up to there.

        Args:
            pruned: A model that shares its weights with those before.
            half: As in `RaggedViT.walk`.

        Cost:
            Holds the rows: 155 MB for 512 photos of DeiT-S in fp32.
        """
        model, at, _ = self._entering
        if model is not pruned.model or at != half:
            rows = [pruned.embed(*batch) for batch in self.batches]
            if half:
                rows = [pruned.walk(each, last=half) for each in rows]
            self._entering = pruned.model, half, rows
        return self._entering[2]


def training_split(data: DataConfig, images: int) -> DataConfig:
    """The data group of the training split that belongs to a validation split.

    Args:
        data: The data group of the photos to evaluate.
        images: How many to take.

    Raises:
        InputError: If there is none.
    """
    plain = replace(data, num_images=images, ground_truth=None, real_labels=None)
    if data.dataset:
        return replace(plain, split=TRAINING[0])
    if data.name != "sample":
        check_root(data.root)
    root = PHOTOS if data.root is None else Path(data.root)
    for place in (root, root.parent) if root.name in SPLITS else (root,):
        try:
            return replace(plain, root=str(split_folder(place, TRAINING[0])), split=None)
        except InputError:
            continue
    raise InputError(
        "data.root: what the policy keeps depends on the data, so its cost is measured on training photos; there must "
        f"be a folder train in data.root, or beside it where that is a split itself, got {root}"
    )
