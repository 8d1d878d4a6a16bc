# ruff: noqa: RUF009 (`key` and `group` return dataclass fields)
"""The schema of the configuration: every key with its type, default, bounds and meaning.

`compose` fills these classes from the YAML files and the command line. A verb's schema extends `RunConfig`.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

GROUPS = ("model", "policy", "data", "logger", "recipe")
MODES = ("eager", "compile", "graph", "compile+graph", "best")
PRECISIONS = ("32-true", "16-true", "bf16-true", "64-true", "16-mixed", "bf16-mixed")


class InputError(ValueError):
    """Wrong input of the user: one clear line for each problem, exit code 2, no traceback."""

    def __init__(self, *problems: str) -> None:
        """Take one line for each problem."""
        super().__init__("\n".join(problems))
        self.problems = problems


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float = 2**31 - 1,
    choices: tuple[str, ...] = (),
) -> Any:
    """Declare a key of the configuration.

    Args:
        default: Its value when nobody sets it.
        help: What `--help` says.
        low: Smallest value allowed; of a list, of each entry.
        high: Largest value allowed.
        choices: The only values allowed; of a list, for each entry.
    """
    metadata = {"help": help, "low": low, "high": high, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(schema: type, help: str) -> Any:
    """Declare a group: a nested schema that one file of `configs/<group>/` fills."""
    return field(
        default_factory=schema, metadata={"help": help, "low": None, "high": math.inf, "choices": ()}
    )


@dataclass
class ModelConfig:
    """What `configs/model/*.yaml` may say."""

    name: str = key(MISSING, "timm architecture, hf-hub:OWNER/NAME, or sample (the bundled one)")
    pretrained: bool = key(True, "trained weights; false: random weights")
    img_size: Any = key(None, "input size, px or [height, width]; null: the model's own")
    num_classes: int | None = key(None, "classes of the head; null: the model's own", low=1)

    def problems(self) -> list[str]:
        """Say what is wrong with the input size, which may be one number or two."""
        size = self.img_size
        sides = size if isinstance(size, list) and len(size) == 2 else [size]
        if size is None or all(type(side) is int and side > 0 for side in sides):
            return []
        return [f"model.img_size: must be px or [height, width], got {size}"]


@dataclass
class DataConfig:
    """What `configs/data/*.yaml` may say."""

    name: str = key(MISSING, "the name in reports; sample: the bundled photos")
    dataset: str = key(
        "", "name for timm.data.create_dataset: hfds/NAME, wds/NAME; empty: folder or .tar at root"
    )
    root: str | None = key(
        None, "folder of class folders, flat ImageNet folder, .tar file, or cache of the dataset"
    )
    split: str | None = key(
        None, "split: folder of that name inside root; null: validation, where root has splits"
    )
    class_map: str | None = key(None, "text file: class folder names, a line each, in the order of the head")
    ground_truth: str | None = key(
        None, "labels of a flat folder: lines of 'file label', or a label for each number"
    )
    real_labels: str | None = key(
        None, "ReaL labels (JSON list of lists) for ILSVRC2012_val files; timm: its copy"
    )
    num_images: int | None = key(
        None, "evaluate so many images, evenly spaced over the set; null: all", low=1
    )
    on_error: str = key(
        "raise", "what an unreadable image does: stop, or be counted", choices=("raise", "skip")
    )
    num_workers: int = key(2, "processes that read and transform", low=0)


@dataclass
class LoggerConfig:
    """What `configs/logger/*.yaml` may say. null: wandb and its environment decide."""

    name: str = key("none", "where the row is logged", choices=("none", "wandb"))
    mode: str | None = key(None, "what wandb does with it", choices=("online", "offline", "disabled"))
    project: str | None = key(None, "wandb project")
    entity: str | None = key(None, "wandb account or team")
    group: str | None = key(None, "wandb group")
    run_name: str | None = key(None, "name of the run")


@dataclass
class VerbConfig:
    """What the configurations of all verbs have in common."""

    @classmethod
    def beneath(cls, words: Mapping[str, Any]) -> dict[str, Any]:
        """Groups that other keys of the command line stand for; laid over the verb's file, beneath the user's words.

        Args:
            words: Keys and values of the command line.

        Raises:
            InputError: If such a key is wrong.
        """
        return {}

    def problems(self) -> list[str]:
        """Say what this machine cannot do or what contradicts itself, a line each."""
        return []


@dataclass
class OutputConfig(VerbConfig):
    """The keys of every verb that writes results."""

    output_dir: str | None = key(None, "where the results go; null: outputs/<time>")
    overwrite: bool = key(False, "replace results that are already in output_dir")


@dataclass
class ImagesConfig(OutputConfig):
    """The keys of every verb that runs models on images."""

    model: ModelConfig = group(ModelConfig, "a file of configs/model, or a timm architecture")
    data: DataConfig = group(DataConfig, "a file of configs/data")
    logger: LoggerConfig = group(LoggerConfig, "a file of configs/logger")
    weights: str | None = key(
        None, "weights file of the model: safetensors, or a torch pickle of tensors only"
    )
    batch_size: int = key(16, "images a batch", low=1)
    accelerator: str = key("auto", "where the model runs", choices=("auto", "cpu", "gpu"))
    devices: int = key(1, "processes, one for each device", low=1)
    precision: str = key("32-true", "Lightning's name of the number format", choices=PRECISIONS)
    backend: str = key("auto", "attention kernel", choices=("auto", "triton", "padded", "reference"))
    mode: str | None = key(
        None, "how the models are executed while timed; null: best on a GPU, else eager", choices=MODES
    )
    seed: int = key(
        0,
        "seed of all draws; a policy that draws gets it unless policy.seed is set",
        low=0,
        high=2**32 - 1,
    )
    calibration_images: int = key(
        512, "training photos on which policy.gmacs=... sets a knob whose cost depends on the data", low=1
    )
    progress: bool = key(True, "show a progress bar; without a terminal, a line at the start")

    def problems(self) -> list[str]:
        """Say what this machine cannot do or what contradicts itself, a line each."""
        import torch

        gpus, lines = torch.cuda.device_count(), []
        if self.accelerator == "gpu" and gpus == 0:
            lines.append('accelerator: "gpu" needs a CUDA device, found none; use accelerator=cpu')
        elif self.on_gpu and self.devices > gpus:
            lines.append(f"devices: must be at most the {gpus} CUDA devices found, got {self.devices}")
        elif not self.on_gpu and self.devices > (most := max(os.cpu_count() or 1, 2)):
            lines.append(f"devices: must be at most {most} processes on this CPU, got {self.devices}")
        if self.precision == "16-mixed" and not self.on_gpu:
            lines.append('precision: "16-mixed" needs a CUDA device; use precision=bf16-mixed')
        if self.backend == "triton" and not self.on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            lines.append('backend: "triton" needs a CUDA device; use backend=auto or backend=padded')
        if self.mode is not None and "graph" in self.mode and not self.on_gpu:
            lines.append(f'mode: "{self.mode}" needs a CUDA device; use mode=eager, or leave it out')
        if self.logger.name == "none":
            unused = ("mode", "project", "entity", "group", "run_name")
            lines += [f"logger.{name}: needs logger=wandb" for name in unused if getattr(self.logger, name)]
        return lines + self.model.problems()

    @property
    def on_gpu(self) -> bool:
        """Whether the models run on CUDA devices."""
        import torch

        return self.accelerator != "cpu" and torch.cuda.is_available()

    @property
    def execution(self) -> str:
        """The mode in which speed is measured."""
        return self.mode or ("best" if self.on_gpu else "eager")


@dataclass
class RunConfig(ImagesConfig):
    """The keys of every verb that runs one policy on images."""

    policy: dict[str, Any] = group(dict, "a file of configs/policy, package.module:Class or file.py:Class")


@dataclass
class MeasureConfig(ImagesConfig):
    """The keys of every verb that measures pruned models beside unpruned ones."""

    numeric_images: int = key(
        64, "photos on which the backend is compared with the reference; 0: none", low=0
    )
    timing_s: float = key(6.0, "seconds for each of throughput and latency; 0: not measured", low=0)


@dataclass
class EvaluateConfig(RunConfig, MeasureConfig):
    """The keys of `prunevit evaluate`."""


@dataclass
class PoliciesConfig(VerbConfig):
    """The keys of `prunevit policies`: none."""


@dataclass
class CheckConfig(VerbConfig):
    """The keys of `prunevit check`."""

    policy: dict[str, Any] = group(dict, "a file of configs/policy, package.module:Class or file.py:Class")
    all: bool = key(False, "check every shipped policy, with the settings of its file (also --all)")
    accelerator: str = key(
        "auto", "where waiting, graphs and cost are looked at", choices=("auto", "cpu", "gpu")
    )

    def problems(self) -> list[str]:
        """Say what contradicts itself, or what this machine cannot do."""
        import torch

        lines = []
        if bool(self.policy) == self.all:
            lines.append("policy: name one policy, as in prunevit check evit, or all of them: --all")
        if self.accelerator == "gpu" and not torch.cuda.is_available():
            lines.append('accelerator: "gpu" needs a CUDA device, found none; use accelerator=cpu')
        return lines


def first_line(error: BaseException) -> str:
    """Say in one line what an exception of another library says.

    Args:
        error: The exception.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def leaves(schema: type, prefix: str = "") -> dict[str, Any]:
    """List the fields of a schema by dotted key, nested ones in place of their group.

    Args:
        schema: A dataclass.
        prefix: Put before each key.
    """
    found: dict[str, Any] = {}
    for each in fields(schema):
        inner = each.default_factory
        if isinstance(inner, type) and is_dataclass(inner):
            found |= leaves(inner, f"{prefix}{each.name}.")
        else:
            found[prefix + each.name] = each
    return found
