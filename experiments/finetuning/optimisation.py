"""What learns how fast: parameter groups, the optimiser, and the schedules by step. timm does the arithmetic."""

from collections.abc import Iterator
from typing import Any

from timm.layers import DropPath
from timm.optim import create_optimizer_v2, param_groups_layer_decay, param_groups_weight_decay
from timm.scheduler import create_scheduler_v2
from torch.optim import Optimizer

from prunevit.experiments.config import InputError, first_line
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.plan import Length
from prunevit.vit import RaggedViT

Group = dict[str, Any]


def parameter_groups(pruned: RaggedViT, config: FinetuneConfig) -> list[Group]:
    """Group the parameters as timm does on the bare model; policies' go with the head, in groups of their own.

    Args:
        pruned: The model.
        config: `weight_decay`, `layer_decay`, `backbone_lr_scale`.

    Returns:
        Groups with `lr_scale`, and with `backbone`: whether they hold the timm model's parameters or a policy's.
    """
    common: Group = {"weight_decay": config.weight_decay, "no_weight_decay_list": pruned.no_weight_decay()}
    groups = (
        param_groups_weight_decay(pruned, **common)
        if config.layer_decay is None
        else param_groups_layer_decay(pruned, **common, layer_decay=config.layer_decay)
    )
    return [part for group in groups for part in _split(group, pruned, config.backbone_lr_scale)]


def _split(group: Group, pruned: RaggedViT, scale: float) -> Iterator[Group]:
    own = {id(parameter) for parameter in pruned.policies.parameters()}
    for backbone in (True, False):
        chosen = [each for each in group["params"] if (id(each) not in own) == backbone]
        if chosen:
            lr_scale = group.get("lr_scale", 1.0) * (scale if backbone else 1.0)
            yield {**group, "params": chosen, "lr_scale": lr_scale, "backbone": backbone}


def make_optimizer(pruned: RaggedViT, config: FinetuneConfig) -> Optimizer:
    """Make timm's optimiser of that name.

    Args:
        pruned: The model.
        config: `opt`, `lr`, `lr_base_size` and those of `parameter_groups`.

    Raises:
        InputError: If timm knows no such optimiser, or it needs second derivatives.
    """
    groups = parameter_groups(pruned, config)
    peak = config.lr * config.batch_size / config.lr_base_size if config.lr_base_size else config.lr
    try:
        made = create_optimizer_v2(groups, opt=config.opt, lr=peak, weight_decay=config.weight_decay)
    except (ValueError, AssertionError) as error:
        raise InputError(
            f"opt: must be an optimiser of timm, got {config.opt} ({first_line(error)})"
        ) from error
    if getattr(made, "is_second_order", False):
        raise InputError(
            f"opt: must need first derivatives alone, got {config.opt}, which differentiates twice"
        )
    return made


class Schedule:
    """Learning rates and keep rate of each step, computed from its number alone."""

    def __init__(
        self, optimizer: Optimizer, pruned: RaggedViT, config: FinetuneConfig, length: Length
    ) -> None:
        """Take what is set at each step.

        Args:
            optimizer: From `make_optimizer`.
            pruned: Its policies' keep rates are warmed up.
            config: The numbers.
            length: Of the run.
        """
        self.optimizer, self.pruned = optimizer, pruned
        # timm's epochs are our steps: its own would have to be whole.
        self.learning_rate, _ = create_scheduler_v2(
            optimizer,
            sched=config.sched,
            num_epochs=length.steps,
            min_lr=config.min_lr,
            warmup_lr=config.warmup_lr,
            warmup_epochs=length.of_epochs(config.warmup_epochs, config.warmup_steps),
            step_on_epochs=False,
            updates_per_epoch=1,
        )
        self.frozen = length.of_epochs(config.frozen_epochs)
        self.unpruned = length.of_epochs(config.keep_rate_start_epochs)
        self.warmup = length.of_epochs(config.keep_rate_warmup_epochs, config.keep_rate_warmup_steps)

    def set(self, step: int) -> None:
        """Set everything for a step.

        Args:
            step: 0-based.
        """
        self.learning_rate.step_update(step)
        for group in self.optimizer.param_groups:
            if group["backbone"] and step < self.frozen:
                group["lr"] = 0.0
        for policy in self.pruned.policies:
            policy.warm(self.progress(step))  # type: ignore[operator]

    def progress(self, step: int) -> float:
        """How far the warm-up of the keep rate has come: 1 is its end.

        Args:
            step: 0-based.
        """
        if step < self.unpruned:
            return 0.0
        return min(1.0, (step - self.unpruned) / self.warmup) if self.warmup else 1.0

    @property
    def lr(self) -> float:
        """Largest learning rate of a group now."""
        return max(group["lr"] for group in self.optimizer.param_groups)


def freeze(pruned: RaggedViT, names: list[str]) -> None:
    """Exempt parameters of the timm model from training.

    Args:
        pruned: The model.
        names: As timm calls them.

    Raises:
        InputError: If it has no such parameter.
    """
    own = dict(pruned.model.named_parameters())
    for name in names:
        if name not in own:
            raise InputError(f"frozen_parameters: must be parameters of the model, got {name}")
        own[name].requires_grad_(False)


def set_drop_path(model: Any, rate: float) -> None:
    """Give the blocks stochastic depth, from 0 at the first to `rate` at the last, as timm's constructor does.

    Args:
        model: A timm `VisionTransformer`.
        rate: Probability at the last block; 0 leaves the model as it is.
    """
    last = max(len(model.blocks) - 1, 1)
    for number, block in enumerate(model.blocks if rate else ()):
        block.drop_path1, block.drop_path2 = DropPath(rate * number / last), DropPath(rate * number / last)
