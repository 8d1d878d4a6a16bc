"""`prunevit finetune`: from a configuration to a weights file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.loggers.logger import Logger
from omegaconf import OmegaConf

from prunevit.experiments.config import InputError, LoggerConfig
from prunevit.experiments.finetuning.atomic import atomically, remove_leftovers
from prunevit.experiments.finetuning.checkpoints import (
    AtomicIO,
    Checkpoints,
    Resumption,
    find_checkpoint,
)
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.data import load_training_data
from prunevit.experiments.finetuning.files import BEST, FINAL, LAST
from prunevit.experiments.finetuning.module import Diverged, FinetuneModule
from prunevit.experiments.finetuning.monitor import CURVE, Bar, Curve, Monitor
from prunevit.experiments.finetuning.plan import Length, length_of
from prunevit.experiments.finetuning.student import build, with_knob
from prunevit.experiments.finetuning.weights_file import describe, write_weights
from prunevit.experiments.finetuning.words import introduction, summary
from prunevit.experiments.journal import LOCK, locked
from prunevit.experiments.ranks import is_first_process, world_size
from prunevit.experiments.report import choose_output_dir
from prunevit.experiments.tracking import tracked
from prunevit.experiments.trainer import make_trainer, run_quietly

FILES = (CURVE, LAST, BEST, FINAL)
# The teacher's and the average's places say nothing about mistakes, nor does a part of a step without kernels.
EXPECTED = (".*module.* in eval mode at the start of training.*", "The CUDA Graph is empty.*")


def run(config: FinetuneConfig) -> None:
    """Fine-tune, and write `best.safetensors`, `last.safetensors`, `last.ckpt`, `metrics.csv` and `config.yaml`.

    Args:
        config: The composed configuration.

    Raises:
        InputError: If the input is wrong, a loss is not finite or the disk is full; what was saved before stays.
    """
    config = with_knob(config)
    resumption = find_checkpoint(config)
    folder = _folder(config, resumption)
    seed_everything(config.seed, workers=True, verbose=False)
    pruned = build(config)
    data = load_training_data(config, pruned.model)
    if world_size(config.devices) > data.held_out.size:
        raise InputError(
            f"devices: must be at most the {data.held_out.size} held-out images, got {world_size(config.devices)}"
        )
    length = length_of(config, len(data.training))
    before = _steps_before(config, length, resumption)
    module = FinetuneModule(pruned, data, config, length)
    logger = config.logger if is_first_process() else LoggerConfig()
    with _prepared(folder, config), tracked(logger, asdict(config)) as records:
        if is_first_process():
            print(introduction(config, length, resumption, before))
        try:
            run_quietly(partial(_fit, module, config, folder, resumption), EXPECTED)
        except Diverged as error:
            if (folder / CURVE).exists():
                raise InputError(f"{error}; {folder / CURVE} holds the steps before") from error
            raise
        except KeyboardInterrupt:
            if (folder / LAST).exists():
                raise KeyboardInterrupt(
                    f"{folder / LAST} is whole; go on with ckpt_path={folder / LAST}"
                ) from None
            raise
        if module.trainer.is_global_zero:
            records.append(module.val)
    if module.trainer.is_global_zero:
        print(summary(module.val, Curve.read(folder / CURVE), folder))


def _folder(config: FinetuneConfig, resumption: Resumption | None) -> Path:
    """Where the files go: where the checkpoint lies, unless another place is named."""
    if resumption and config.output_dir in (None, str(resumption.path.parent)):
        return resumption.path.parent
    return choose_output_dir(config, FILES)


def _steps_before(config: FinetuneConfig, length: Length, resumption: Resumption | None) -> int:
    """How many steps the run was to have when its checkpoint was made; it may have more now, and no fewer."""
    if resumption is None:
        return length.steps
    until_now = replace(config, max_epochs=resumption.max_epochs, max_steps=resumption.max_steps)
    steps = length_of(until_now, length.images).steps
    if length.steps < steps:
        raise InputError(
            f"max_steps: a run that goes on must have at least the {steps} steps that it had, got {length.steps}; "
            "raise max_steps or max_epochs, or start anew from weights="
        )
    return steps


def _fit(module: FinetuneModule, config: FinetuneConfig, folder: Path, resumption: Resumption | None) -> None:
    length, parts = module.length, config.accumulate_grad_batches
    recipe = config.training()

    def write(path: Path) -> None:
        said = describe(config, module.result, recipe)
        write_weights(path, module.result, said | {"step": module.global_step, "val": module.val})

    def validates(step: int) -> bool:
        return step % validation == 0 or step == length.steps

    monitor = Monitor(length, parts, config.log_every_n_steps)
    every = length.epoch if config.checkpoint_every_n_steps is None else config.checkpoint_every_n_steps
    validation = length.epoch * config.check_val_every_n_epoch
    trainer = make_trainer(
        config,
        Bar(monitor),
        callbacks=[monitor, Checkpoints(folder, every, validates, write)],
        plugins=[AtomicIO()],
        logger=[Curve(folder / CURVE, resumption.step if resumption else None), *_wandb(config)],
        strategy="ddp" if world_size(config.devices) > 1 else "auto",
        enable_checkpointing=True,
        max_epochs=1,  # of Lightning: all ours are one pass over the plan
        max_steps=length.steps,
        val_check_interval=validation * parts,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=config.num_sanity_val_steps,  # the row of step 0
        accumulate_grad_batches=parts,
        gradient_clip_val=config.gradient_clip_val or None,
        log_every_n_steps=1,
        inference_mode=False,
    )
    trainer.fit(module, ckpt_path=str(resumption.path) if resumption else None)


@contextmanager
def _prepared(folder: Path, config: FinetuneConfig) -> Iterator[None]:
    """Make the folder and keep other runs out of it; `config.yaml` repeats the run."""
    if not is_first_process():
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = locked(folder)
    if lock is None:
        raise InputError(f"output_dir: must be a folder that no other run works in, got {folder}")
    try:
        remove_leftovers(folder)
        settings = asdict(config) | {"ckpt_path": None}
        with atomically(folder / "config.yaml") as temporary:
            temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(settings)), encoding="utf-8")
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(lock)


def _wandb(config: FinetuneConfig) -> list[Logger]:
    """Lightning's logger around the run that `tracked` opened."""
    if config.logger.name != "wandb" or not is_first_process():
        return []
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    experiment: Any = wandb.run
    return [WandbLogger(experiment=experiment)]
