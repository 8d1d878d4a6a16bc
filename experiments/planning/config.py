# ruff: noqa: RUF009 (`key` and `group` return dataclass fields)
"""The keys of `prunevit plan` and of `prunevit reproduce`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prunevit.experiments.compose import nearest, read_yaml
from prunevit.experiments.config import (
    DataConfig,
    EvaluateConfig,
    InputError,
    ModelConfig,
    OutputConfig,
    group,
    key,
)


@dataclass
class PlanConfig(OutputConfig):
    """The keys of `prunevit plan`."""

    suite: str = key(
        "policy", "one policy on one model, or all the papers' figures", choices=("policy", "papers")
    )
    model: ModelConfig = group(ModelConfig, "a file of configs/model, or a timm architecture")
    policy: dict[str, Any] = group(dict, "a file of configs/policy, package.module:Class or file.py:Class")
    data: DataConfig = group(DataConfig, "a file of configs/data; only where counts depend on the data")
    weights: str | None = key(None, "weights file of the model; only where counts depend on the data")
    calibration_images: int = key(
        512, "training photos on which a cost that depends on the data is measured", low=1
    )
    batch_size: int = key(16, "photos a batch", low=1)
    accelerator: str = key("auto", "where photos are run", choices=("auto", "cpu", "gpu"))
    seed: int = key(0, "seed of a policy that draws", low=0, high=2**32 - 1)
    output_dir: str | None = key(None, "where the files go; null: only the screen")

    def problems(self) -> list[str]:
        """Say what is wrong with the model, and what this machine cannot do, a line each."""
        import torch

        lines = self.model.problems()
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            lines.append('accelerator: "gpu" needs a CUDA device, found none; use accelerator=cpu')
        return lines


@dataclass
class ReproduceConfig(EvaluateConfig):
    """The keys of `prunevit reproduce`: those of an evaluation, whose model and policy the row names."""

    name: str = key("", "a published row; without one they are listed")

    @classmethod
    def beneath(cls, words: Mapping[str, Any]) -> dict[str, Any]:
        """The groups that the row stands for.

        Raises:
            InputError: If there is no such row.
        """
        from prunevit.experiments.planning.published import REPRODUCIBLE

        name = str(words.get("name", ""))
        if name == "":
            return {}
        if name not in REPRODUCIBLE:
            raise InputError(f"name: unknown row, got {name}; {nearest(name, list(REPRODUCIBLE))}")
        row = REPRODUCIBLE[name]
        policy = {**read_yaml(f"policy/{row.policy['name']}.yaml"), **row.policy}
        model = {**read_yaml("model/timm.yaml"), "name": row.model, "img_size": row.img_size}
        return {"model": model, "policy": policy, "data": "imagenet"}
