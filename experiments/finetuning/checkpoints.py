"""What a run saves.

`last.ckpt`, to go on from, exactly; `best.safetensors`, the weights of the best validation; `last.safetensors`, those
of the last step, which no look at the held-out images has chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from prunevit.experiments.config import InputError, first_line
from prunevit.experiments.finetuning.atomic import atomically
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.files import BEST, FINAL, LAST, OURS
from prunevit.experiments.weights import UNREADABLE

LENGTH = ("max_epochs", "max_steps")  # what may grow when a run goes on


class AtomicIO(TorchCheckpointIO):
    """Lightning's checkpoint files, never half written."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            InputError: If the disk does not take it.
        """
        with atomically(Path(path)) as temporary:
            torch.save(checkpoint, temporary)


class Checkpoints(Checkpoint):
    """Saves as the run goes on; its own state is the best accuracy so far.

    Where a validation follows a step the checkpoint is saved behind it, so that a run that goes on from there repeats
    no validation and leaves none out.
    """

    def __init__(
        self, folder: Path, every: int, validates: Callable[[int], bool], write: Callable[[Path], None]
    ) -> None:
        """Say where and when.

        Args:
            folder: Of the files.
            every: Steps between two checkpoints; 0: none.
            validates: Whether a validation follows a step (a number of steps done).
            write: Writes the weights file.
        """
        self.folder, self.every, self.validates, self.write = folder, every, validates, write
        self.best: float | None = None
        self.saved_at = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        """Save if it is time and no validation follows."""
        if not self.validates(trainer.global_step):
            self._save(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Keep the weights if they are the best, then save."""
        if trainer.sanity_checking:
            return
        top1 = float(pl_module.val["val/top1"])
        if self.best is None or top1 > self.best:
            self.best = top1
            if trainer.is_global_zero:
                self.write(self.folder / BEST)
        if trainer.should_stop and trainer.is_global_zero:
            self.write(self.folder / FINAL)
        self._save(trainer, at_the_end=trainer.should_stop)

    def state_dict(self) -> dict[str, Any]:
        """The best accuracy so far."""
        return {"best": self.best, "saved_at": self.saved_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there."""
        self.best, self.saved_at = state_dict["best"], state_dict["saved_at"]

    def _save(self, trainer: Trainer, at_the_end: bool = False) -> None:
        step = trainer.global_step
        if self.every and (at_the_end or step % self.every == 0) and step != self.saved_at:
            self.saved_at = step
            trainer.save_checkpoint(self.folder / LAST)


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on.

    Attributes:
        path: The checkpoint.
        step: Steps done.
        max_epochs: As it was when the checkpoint was made.
        max_steps: Likewise.
    """

    path: Path
    step: int
    max_epochs: int
    max_steps: int | None


def find_checkpoint(config: FinetuneConfig) -> Resumption | None:
    """Find the checkpoint to go on from, and check that it continues this run.

    Args:
        config: `ckpt_path`, `output_dir`, and everything that decides the result.

    Raises:
        InputError: If there is none, it cannot be read, or it is of another run; names the first key that differs.
    """
    if config.ckpt_path is None:
        return None
    path = _newest(config.output_dir) if config.ckpt_path == "last" else Path(config.ckpt_path)
    if not path.is_file():
        raise InputError(
            f"ckpt_path: must be a checkpoint of prunevit finetune, got {path}, which is no file"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        earlier = dict(content[OURS]["computation"])
        resumption = Resumption(path, int(content["global_step"]), *(earlier[name] for name in LENGTH))
    except UNREADABLE as error:
        raise InputError(
            f"ckpt_path: must be a checkpoint of prunevit finetune, got {path} ({first_line(error)})"
        ) from error
    now = config.computation()
    for name in (
        each for each in now if each in earlier and each not in LENGTH
    ):  # others: of another version
        if earlier[name] != now[name]:
            raise InputError(
                f"ckpt_path: {path} is of another run, {name} was {earlier[name]} there, got {now[name]}; go on with "
                "the same keys, or start anew from weights="
            )
    return resumption


def _newest(output_dir: str | None) -> Path:
    if output_dir is not None:
        return Path(output_dir) / LAST
    found = sorted(Path("outputs").glob(f"*/{LAST}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise InputError(
            f"ckpt_path: last needs a {LAST} in outputs/*/, found none; name a file, or output_dir"
        )
    return found[-1]
