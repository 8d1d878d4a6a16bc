"""The training of a pruned model as a Lightning module."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from prunevit.experiments.config import InputError
from prunevit.experiments.data import Batch
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.data import FinetuneData
from prunevit.experiments.finetuning.files import OURS
from prunevit.experiments.finetuning.objective import Objective
from prunevit.experiments.finetuning.optimisation import Schedule, make_optimizer
from prunevit.experiments.finetuning.plan import BatchPlan, Length
from prunevit.experiments.finetuning.seeding import Purpose, seed_draws
from prunevit.experiments.fingerprint import code_fingerprint, weights_fingerprint
from prunevit.experiments.metrics import Accuracy, Average
from prunevit.trace import Trace
from prunevit.vit import RaggedViT

AVERAGE = "average"  # key of the moving average in a checkpoint


def compiled(forward: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Prepare a forward pass for training.

    Args:
        forward: A model, or a method of one.
        mode: One of `MODES`. In "compile+graph" a step's outputs and gradients are gone once the next one begins.
    """
    if mode == "eager":
        return forward
    return torch.compile(forward, mode="reduce-overhead" if mode == "compile+graph" else None)


class Diverged(InputError):
    """A loss that is no finite number: what was logged before it is worth keeping."""


class FinetuneModule(LightningModule):
    """Trains what `pruned` holds: the timm model and the policies.

    The teacher and the moving average stand beside, not inside: they are no part of the state dict and need no
    gradients.

    Attributes:
        val: Figures of the last validation, in percent.
        begun_with: A hash of each thing that a name in the configuration stands for.
    """

    def __init__(self, pruned: RaggedViT, data: FinetuneData, config: FinetuneConfig, length: Length) -> None:
        """Take what is trained, on what, and how.

        Args:
            pruned: The model, with the weights to start from.
            data: Both splits.
            config: All numbers.
            length: Of the run.
        """
        super().__init__()
        self.pruned, self.data, self.config, self.length = pruned, data, config, length
        teacher = copy.deepcopy(pruned.model).eval().requires_grad_(False)
        self.objective = Objective(pruned, teacher, config)
        self._beside: dict[str, Any] = {"teacher": teacher}
        if config.ema_decay:
            self._beside[AVERAGE] = ModelEmaV3(pruned, decay=config.ema_decay).requires_grad_(False)
        pruned.set_grad_checkpointing(config.grad_checkpointing)
        self.val: dict[str, float] = {}
        self.begun_with = {"weights": weights_fingerprint(teacher), "training images": data.fingerprint()}
        if user := [each for each in pruned.policies if ":" in config.policy["name"]]:
            codes = [code_fingerprint(each, shipped=False) for each in user]  # type: ignore[arg-type]
            self.begun_with["policy's files"] = " ".join(codes)

    @property
    def result(self) -> RaggedViT:
        """The model that is validated and kept: the moving average, where there is one."""
        return self._beside[AVERAGE].module if AVERAGE in self._beside else self.pruned

    def configure_optimizers(self) -> Optimizer:
        """Make the optimiser; the schedule is set at each step, from the step alone."""
        optimizer = make_optimizer(self.pruned, self.config)
        self.schedule = Schedule(optimizer, self.pruned, self.config, self.length)
        return optimizer

    def train_dataloader(self) -> DataLoader[Any]:
        """Load this process's batches, from the step on that the run has come to."""
        trainer, parts = self.trainer, self.config.accumulate_grad_batches
        where = {"rank": trainer.global_rank, "world_size": trainer.world_size, "start": trainer.global_step}
        plan = BatchPlan(self.length, self.config.seed, parts, **where)
        return self.data.loader(plan, self.config.data.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        """Load this process's share of the held-out images."""
        trainer, config = self.trainer, self.config
        share = config.batch_size // (trainer.world_size * config.accumulate_grad_batches)
        return self.data.held_out.loader(
            share, config.data.num_workers, trainer.global_rank, trainer.world_size
        )

    def on_fit_start(self) -> None:
        """Bring what stands beside to this process's device."""
        for each in self._beside.values():
            each.to(self.device, self.dtype)
        self.pruned.train()
        self._compiled: Callable[..., Trace] = compiled(self.pruned.trace, self.config.mode or "eager")

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Set the schedules, and every generator."""
        step, part = self.global_step, batch_idx % self.config.accumulate_grad_batches
        self.schedule.set(step)
        seed_draws(self.config.seed, Purpose.STEP, step, part, self.global_rank)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        """Compute the loss of a batch.

        Returns:
            `loss`; `parts`, each part of it; `kept`, the share of the patches left in the last block.
        """
        self._refuse_failures(batch)
        if not len(batch.targets):
            raise InputError(f"data: no image of a batch could be read, the first: {batch.failures[0]}")
        images, targets = self.objective.mix(batch.images, batch.targets)
        trace = self._trace(images, batch.positions[: len(images)])
        parts = self.objective.parts(trace, images, targets)
        loss = torch.stack([*parts.values()]).sum()
        self._require_finite(loss, images, batch.positions)
        return {
            "loss": loss,
            "parts": {name: each.detach() for name, each in parts.items()},
            "kept": self._kept(trace).mean(),
        }

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, and move the average: before any callback saves."""
        super().optimizer_step(*args, **kwargs)
        for policy in self.pruned.policies:
            policy.constrain()  # type: ignore[operator]
        if AVERAGE in self._beside:
            self._beside[AVERAGE].update(self.pruned)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """Ask for the last validation at the end."""
        if self.global_step >= self.length.steps:
            self.trainer.should_stop = True

    def on_validation_start(self) -> None:
        """Prune as the schedule's end says, whatever the warm-up has come to."""
        for policy in self.result.policies:
            policy.warm(1.0)  # type: ignore[operator]
        metrics: dict[str, Metric] = {"top1": Accuracy(), "loss": Average(), "kept": Average()}
        self._metrics = {name: metric.to(self.device) for name, metric in metrics.items()}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Count a batch of held-out images."""
        self._refuse_failures(batch)
        if not len(batch.targets):
            return
        trace = self.result.trace(batch.images, batch.positions)
        self._metrics["top1"].update(trace.logits, batch.targets)
        self._metrics["loss"].update(
            torch.nn.functional.cross_entropy(trace.logits.float(), batch.targets, reduction="none")
        )
        self._metrics["kept"].update(self._kept(trace))

    def on_validation_epoch_end(self) -> None:
        """Add the processes up."""
        self.val = {
            "val/top1": self._metrics["top1"].compute()["top1"],
            "val/loss": self._metrics["loss"].compute(),
            "val/kept": self._metrics["kept"].compute(),
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what decides the result, the last validation and the moving average."""
        checkpoint[OURS] = {
            "computation": self.config.computation(),
            "val": self.val,
            "begun_with": self.begun_with,
        }
        if AVERAGE in self._beside:
            checkpoint[AVERAGE] = self._beside[AVERAGE].state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the last validation and the moving average back.

        Raises:
            InputError: If the files behind the same keys are others than when the run began.
        """
        earlier = checkpoint[OURS].get("begun_with", self.begun_with)
        if changed := [
            name for name, digest in self.begun_with.items() if earlier.get(name, digest) != digest
        ]:
            raise InputError(
                f"ckpt_path: the {changed[0]} must be the ones that the run began with, got others under the same "
                "name; put them back, or start anew from weights="
            )
        # Lightning notes whether a batch was the last one: of a run that has grown it no longer is.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        progress["is_last_batch"] = checkpoint["global_step"] >= self.length.steps
        self.val = checkpoint[OURS]["val"]
        if AVERAGE in self._beside:
            self._beside[AVERAGE].load_state_dict(checkpoint[AVERAGE])

    def _trace(self, images: Tensor, positions: Tensor) -> Trace:
        """Walk; compiled code only once the keep rate stands still, for each count is a program of its own."""
        if self.schedule.progress(self.global_step) == 1:
            torch.compiler.cudagraph_mark_step_begin()
            return self._compiled(images, positions)
        return self.pruned.trace(images, positions)

    def _kept(self, trace: Trace) -> Tensor:
        """Share of its patches that each image has in the last block, by rows or, in training, by mask, `[B]`."""
        patches = trace.tokens.grid[0] * trace.tokens.grid[1]
        tokens = trace.tokens
        if tokens.soft is not None:
            return tokens.sum(tokens.soft.detach().masked_fill(~tokens.is_patch, 0)) / patches
        return (trace.mlp_rows[-1] - tokens.num_prefix_tokens).float() / patches

    def _require_finite(self, loss: Tensor, images: Tensor, positions: Tensor) -> None:
        """Stop at the first loss that is not finite, in all processes together, before it spoils the weights."""
        finite = bool(loss.isfinite())
        if self.trainer.strategy.reduce_boolean_decision(finite, all=True):
            return
        where = None if finite else self.pruned.find_nan(images, positions)
        found = where or ("the loss itself" if not finite else "another process has the place")
        raise Diverged(
            f"loss: must be finite, got {float(loss.detach())} at step {self.global_step + 1}; {found}; lower "
            "lr, or clip more with gradient_clip_val"
        )

    def _refuse_failures(self, batch: Batch) -> None:
        if batch.failures and self.config.data.on_error == "raise":
            raise InputError(
                f"data: {batch.failures[0]}; remove it, or leave such images out with data.on_error=skip"
            )
