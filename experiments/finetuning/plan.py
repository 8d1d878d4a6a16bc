"""Which images each batch of each process holds: a function of the seed and the step, so that it can start anywhere."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import Sampler

from prunevit.experiments.compose import group_names, read_yaml
from prunevit.experiments.config import InputError
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.seeding import Purpose

Draw = tuple[int, int]
"""Epoch, and position of an image in the data set."""


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Attributes:
        images: In the training split.
        batch_size: Images of a step.
        steps: Of the run.
    """

    images: int
    batch_size: int
    steps: int

    @property
    def epoch(self) -> int:
        """Steps of an epoch; the images left over are dropped, others in each epoch."""
        return self.images // self.batch_size

    def of_epochs(self, epochs: float, steps: int | None = None) -> int:
        """Count the steps of so many epochs, or take the number given instead."""
        return round(epochs * self.epoch) if steps is None else steps


def length_of(config: FinetuneConfig, images: int) -> Length:
    """Say how long a run is.

    Args:
        config: `batch_size`, `max_epochs`, `max_steps`.
        images: In the training split.

    Raises:
        InputError: If they do not make one batch.
    """
    if images < config.batch_size:
        raise InputError(
            f"batch_size: must be at most the {images} training images, got {config.batch_size}{_advice(config)}"
        )
    steps = config.max_steps or config.max_epochs * (images // config.batch_size)
    return Length(images, config.batch_size, steps)


def _advice(config: FinetuneConfig) -> str:
    """What to do about a batch that is the recipe's."""
    name = config.recipe.name
    shipped = read_yaml(f"recipe/{name}.yaml") if name in group_names("recipe") else {}
    if shipped.get("batch_size") != config.batch_size:
        return ""
    scaled = ", lr is scaled with it" if config.lr_base_size else " and lr"
    return (
        f" from recipe {name}, which is for larger data; set batch_size{scaled}; or take its policy alone: "
        f"recipe=sample policy={config.policy['name']}"
    )


class BatchPlan(Sampler[list[Draw]]):
    """The batches of one process, from a step on to the end of the run.

    Each epoch is a permutation of its own. A step's images are cut into parts, and each part into the shares of the
    processes, so any number of processes and parts computes on the same images.
    """

    def __init__(
        self, length: Length, seed: int, parts: int = 1, rank: int = 0, world_size: int = 1, start: int = 0
    ) -> None:
        """Plan.

        Args:
            length: Of the run.
            seed: Of the run.
            parts: Batches that a process computes for a step.
            rank: This process.
            world_size: Number of processes.
            start: Steps already done.
        """
        self.length, self.seed, self.parts = length, seed, parts
        self.rank, self.world_size, self.start = rank, world_size, start

    def __iter__(self) -> Iterator[list[Draw]]:
        """Yield batches."""
        epoch, order = -1, np.empty(0, dtype=np.int64)
        share = self.length.batch_size // (self.parts * self.world_size)
        for step in range(self.start, self.length.steps):
            if step // self.length.epoch != epoch:
                epoch = step // self.length.epoch
                order = np.random.default_rng([self.seed, Purpose.ORDER, epoch]).permutation(
                    self.length.images
                )
            first = step % self.length.epoch * self.length.batch_size + self.rank * share
            for part in range(self.parts):
                begin = first + part * self.world_size * share
                yield [(epoch, int(position)) for position in order[begin : begin + share]]

    def __len__(self) -> int:
        """Count the batches of the whole run, those already done included: Lightning's counters go on."""
        return self.length.steps * self.parts
