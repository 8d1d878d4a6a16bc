# ruff: noqa: RUF009 (`key` and `group` return dataclass fields)
"""The keys of `prunevit finetune`, by the names that Lightning and timm give them."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from prunevit.experiments.config import RunConfig, group, key
from prunevit.experiments.ranks import world_size

PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")
MODES = ("eager", "compile", "compile+graph")
# What may differ when a run goes on from a checkpoint: where and how it runs, not what it computes.
PLACES = (
    *("accelerator", "devices", "accumulate_grad_batches", "backend", "mode", "grad_checkpointing", "logger"),
    *("progress", "output_dir", "overwrite", "ckpt_path", "checkpoint_every_n_steps", "log_every_n_steps"),
)


@dataclass
class RecipeConfig:
    """What a recipe says of itself. The rest of its file are keys of the run."""

    name: str = key("", "name of the recipe")
    version: int = key(1, "raised when a number of it changes", low=1)
    verified: str = key("none", "on what it was run", choices=("none", "clothing10", "imagenet"))
    source: str = key("", "whose numbers they are")
    differs: list[str] = key([], "what differs from the source")
    widths: list[int] = key([], "channels of the models that it is for; empty: any", low=1)
    learnable: bool = key(False, "whether it trains parameters of the policy")


@dataclass
class FinetuneConfig(RunConfig):
    """The keys of `prunevit finetune`."""

    batch_size: int = key(16, "images of an optimiser step, over all processes and parts", low=1)
    precision: str = key("32-true", "Lightning's name of the number format", choices=PRECISIONS)
    mode: str | None = key(None, "how training is executed; null: eager", choices=MODES)
    recipe: RecipeConfig = group(RecipeConfig, "a file of configs/recipe: defaults of all keys below")
    train_split: str = key("train", "split that is trained on; validation is on data.split")
    max_epochs: int = key(30, "passes over the training images", low=1)
    max_steps: int | None = key(None, "optimiser steps, in place of max_epochs", low=1)
    opt: str = key("adamw", "optimiser, by timm's name")
    lr: float = key(1e-4, "peak learning rate", low=0)
    lr_base_size: int | None = key(
        None, "batch size that lr is for: it is scaled in proportion; null: not", low=1
    )
    weight_decay: float = key(0.05, "of the optimiser", low=0)
    layer_decay: float | None = key(None, "factor on lr for each layer below the head", low=0, high=1)
    backbone_lr_scale: float = key(1.0, "factor on lr for all but the policy's parameters", low=0)
    sched: str = key("cosine", "schedule of lr, by timm's name", choices=("cosine", "tanh", "poly"))
    min_lr: float = key(0.0, "lr at the end", low=0)
    warmup_lr: float = key(1e-6, "lr at the beginning of its warm-up", low=0)
    warmup_epochs: float = key(0.0, "epochs of linear warm-up of lr", low=0)
    warmup_steps: int | None = key(None, "steps, in place of warmup_epochs", low=0)
    keep_rate_start_epochs: float = key(0.0, "epochs without pruning, before its warm-up", low=0)
    keep_rate_warmup_epochs: float = key(0.0, "epochs in which keep_rate falls from 1, by a cosine", low=0)
    keep_rate_warmup_steps: int | None = key(None, "steps, in place of keep_rate_warmup_epochs", low=0)
    frozen_epochs: float = key(0.0, "epochs in which only the policy's parameters learn", low=0)
    frozen_parameters: list[str] = key([], "timm parameters that never learn, for example pos_embed")
    drop_path: float = key(0.0, "stochastic depth of the last block, rising linearly to it", low=0, high=0.99)
    label_smoothing: float = key(0.0, "mass spread over all classes", low=0, high=1)
    mixup: float = key(0.0, "alpha of mixup; 0: none", low=0)
    cutmix: float = key(0.0, "alpha of CutMix; 0: none", low=0)
    scale_min: float = key(0.08, "least area of a random resized crop", low=0, high=1)
    hflip: float = key(0.5, "probability of a mirror image", low=0, high=1)
    color_jitter: float = key(0.0, "strength of colour jitter; not with aa", low=0)
    aa: str | None = key(None, "timm's automatic augmentation, for example rand-m9-mstd0.5-inc1")
    reprob: float = key(0.0, "probability of random erasing", low=0, high=1)
    ema_decay: float = key(
        0.0, "of the moving average of the weights, which is then kept; 0: none", low=0, high=1
    )
    distillation_weight: float = key(0.0, "weight of the divergence from the unpruned model", low=0)
    distillation_temperature: float = key(1.0, "softens both distributions", low=1e-3)
    gradient_clip_val: float = key(1.0, "largest norm of the gradient; 0: any", low=0)
    accumulate_grad_batches: int = key(1, "parts that a batch is computed in, one after another", low=1)
    grad_checkpointing: bool = key(False, "compute activations again in the backward pass, to save memory")
    ckpt_path: str | None = key(
        None, "checkpoint to go on from; last: last.ckpt of output_dir, or the newest"
    )
    checkpoint_every_n_steps: int | None = key(
        None, "steps between two last.ckpt; null: an epoch; 0: none", low=0
    )
    check_val_every_n_epoch: int = key(
        1, "epochs between two validations; the last step has one anyway", low=1
    )
    num_sanity_val_steps: int = key(-1, "validation before the first step: -1 whole, 0 none", low=-1, high=0)
    log_every_n_steps: int = key(1, "steps between two rows of metrics.csv", low=1)

    def problems(self) -> list[str]:
        """Say what this machine cannot do or what contradicts itself, a line each."""
        lines = super().problems()
        parts = world_size(self.devices) * self.accumulate_grad_batches
        if self.batch_size % parts:
            lines.append(
                f"batch_size: must be a multiple of processes x accumulate_grad_batches, {parts}, got "
                f"{self.batch_size}; it counts the images of a step over all processes"
            )
        elif (self.mixup or self.cutmix) and self.batch_size // parts % 2:
            lines.append(
                f"batch_size: mixup and cutmix pair the images of a part, got parts of {self.batch_size // parts}"
            )
        if self.mode == "compile+graph" and self.accumulate_grad_batches > 1:
            lines.append(
                "accumulate_grad_batches: must be 1 with mode=compile+graph, whose gradients last for one pass, got "
                f"{self.accumulate_grad_batches}; use mode=compile"
            )
        if self.scale_min == 0:
            lines.append("scale_min: must be above 0, got 0")
        return lines

    def training(self) -> dict[str, Any]:
        """All numbers of the recipe as they were in the end: what the weights file remembers."""
        own = {each.name for each in fields(type(self))} - {each.name for each in fields(RunConfig)}
        values = asdict(self)
        chosen = [name for name in values if name in own and name not in ("recipe", *PLACES)]
        return {**values["recipe"], **{name: values[name] for name in (*chosen, "batch_size", "precision")}}

    def computation(self) -> dict[str, Any]:
        """Everything that decides the result, by flat key: equal in two runs that may continue each other."""
        values = {name: value for name, value in asdict(self).items() if name not in PLACES}
        flat: dict[str, Any] = {}
        for name, value in values.items():
            flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        return {name: value for name, value in flat.items() if name != "data.num_workers"}
