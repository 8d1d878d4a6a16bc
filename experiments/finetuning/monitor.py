"""What a run shows and remembers as it goes: rows for metrics.csv and wandb, and the progress bar."""

import csv
import io
import math
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from prunevit.experiments.finetuning.atomic import atomically
from prunevit.experiments.finetuning.plan import Length

CURVE = "metrics.csv"
Row = dict[str, float]


class Monitor(Callback):
    """Assembles a row every few steps, and one for each validation.

    A step's figures are means over its parts and over the processes. `step_time_s` and `images_per_s` are those of the
    steps since the last row, `data_share` the part of that time that was spent waiting for images, or for a checkpoint
    to be written, `gpu_hours` the time so far of all processes, runs before a checkpoint included.
    """

    def __init__(self, length: Length, parts: int, every: int) -> None:
        """Say how often.

        Args:
            length: Of the run.
            parts: Batches that make a step.
            every: Steps between two rows.
        """
        self.length, self.parts, self.every = length, parts, every
        self.shown: Row = {}
        self.hours_before = 0.0
        self.sums: dict[str, Tensor] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Start the clock; the first row is what the unpruned weights reach with the policy."""
        self.started = self.row_started = self.batch_ended = time.perf_counter()
        self.waited, self.steps, self.processes = 0.0, 0, trainer.world_size

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Count the wait for the images."""
        self.waited += time.perf_counter() - self.batch_ended

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add a part; write a row if it is time."""
        figures = {"loss": sum(outputs["parts"].values()), "kept": outputs["kept"], **outputs["parts"]}
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0) + value / self.parts
        if (batch_idx + 1) % self.parts == 0:
            self.steps += 1
            step = trainer.global_step
            if step % self.every == 0 or step == self.length.steps:
                self._log(trainer, pl_module, step)
            self.sums = {}
        self.batch_ended = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Write the validation's row; before training it is that of step 0."""
        row = {"step": trainer.global_step, "epoch": trainer.global_step / self.length.epoch, **pl_module.val}
        self.shown |= {"top1": pl_module.val["val/top1"]}
        self._write(trainer, row)
        self.row_started = self.batch_ended = time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        """The hours so far."""
        return {"hours": self._hours()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.hours_before = state_dict["hours"]

    def _log(self, trainer: Trainer, module: Any, step: int) -> None:
        reduced = trainer.strategy.reduce(
            torch.stack([each.double() for each in self.sums.values()]), reduce_op="mean"
        )
        figures = dict(zip(self.sums, reduced.tolist()))
        now = time.perf_counter()
        seconds = now - self.row_started
        policy = module.pruned.policies[0]
        rate = policy.rate(policy.layers[0]) if policy.knob == "keep_rate" else float("nan")
        row = {
            "step": step,
            "epoch": step / self.length.epoch,
            **{f"train/{name}": value for name, value in figures.items()},
            "keep_rate": rate,
            "lr": module.schedule.lr,
            "step_time_s": seconds / self.steps,
            "images_per_s": self.steps * self.length.batch_size / seconds,
            "data_share": self.waited / seconds,
            "gpu_hours": self._hours() if trainer.strategy.root_device.type == "cuda" else float("nan"),
        }
        self.shown |= {"loss": figures["loss"], "keep_rate": rate, "images_per_s": row["images_per_s"]}
        self._write(trainer, row)
        self.row_started, self.waited, self.steps = now, 0.0, 0

    def _write(self, trainer: Trainer, row: Row) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(row, step=int(row["step"]))

    def _hours(self) -> float:
        return self.hours_before + self.processes * (time.perf_counter() - self.started) / 3600


class Curve(Logger):
    """`metrics.csv`: a line for each row, written as it comes; a run that goes on drops what it repeats."""

    def __init__(self, path: Path, done: int | None = None) -> None:
        """Start a file, or go on with one.

        Args:
            path: The file.
            done: Steps done by the checkpoint that the run goes on from; None: a new run.
        """
        super().__init__()
        self.path, self.done = path, done
        self.columns: list[str] = []

    @property
    def name(self) -> str:
        """Of the logger."""
        return "curve"

    @property
    def version(self) -> str:
        """It has none."""
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """They stand in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Row, step: int | None = None) -> None:
        """Write a row.

        Args:
            metrics: It.
            step: Stands in the row.
        """
        news = [name for name in metrics if name not in self.columns]
        if news:
            rows = self._rows()
            self.columns = [*dict.fromkeys([*(rows[0] if rows else ()), *self.columns, *metrics])]
            with atomically(self.path) as temporary:
                temporary.write_text(
                    self._text([dict(zip(self.columns, self.columns)), *rows]), encoding="utf-8"
                )
        with self.path.open("a", encoding="utf-8") as file:
            file.write(
                self._text([{name: "" if value != value else repr(value) for name, value in metrics.items()}])
            )

    @staticmethod
    def read(path: Path) -> list[dict[str, str]]:
        """The rows of a file, without the half line that a killed run may leave.

        Args:
            path: The file; none is one without rows.
        """
        if not path.is_file():
            return []
        with path.open(encoding="utf-8", newline="") as file:
            return [row for row in csv.DictReader(file) if None not in row.values()]

    def _rows(self) -> list[dict[str, str]]:
        """The rows that stay: of this run all; of an earlier one those of the steps that are not repeated."""
        if self.done is None and not self.columns:
            return []
        rows = self.read(self.path)
        upto, self.done = self.done if self.done is not None else math.inf, None
        return [row for row in rows if int(row["step"]) <= upto]

    def _text(self, rows: list[dict[str, str]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, lineterminator="\n", restval="").writerows(rows)
        return text.getvalue()


class Bar(RichProgressBar):
    """Lightning's progress bar over all steps of the run, with images/s, keep rate and loss."""

    def __init__(self, monitor: Monitor) -> None:
        """Show what a monitor has."""
        # The bar goes to stderr: stdout holds the report alone.
        super().__init__(console_kwargs={"stderr": True})
        self.monitor = monitor

    def get_metrics(self, trainer: Trainer, pl_module: Any) -> dict[str, Any]:
        """Figures of the last rows."""
        return {name: f"{value:.4g}" for name, value in self.monitor.shown.items() if value == value}

    def _get_train_description(self, current_epoch: int) -> str:
        # Lightning's epoch is the whole run here.
        return f"{self.monitor.length.steps} steps"
