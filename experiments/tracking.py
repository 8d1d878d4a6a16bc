"""Weights & Biases through Lightning's logger; imported only when `logger=wandb`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prunevit.experiments.config import InputError, LoggerConfig, first_line

Row = dict[str, Any]


@contextmanager
def tracked(config: LoggerConfig, settings: Row) -> Iterator[list[Row]]:
    """Open a run before the work and record the row after it; the run is finished in any case.

    What the configuration leaves open follows wandb's environment variables (`WANDB_MODE`, `WANDB_PROJECT`).

    Args:
        config: The logger group.
        settings: The run's whole configuration.

    Yields:
        A list; the row put into it becomes the run's summary.

    Raises:
        InputError: If wandb cannot start, for instance online without a key.
    """
    rows: list[Row] = []
    if config.name == "none":
        yield rows
        return
    run = _start(config, settings)
    try:
        yield rows
        for row in rows:
            run.summary.update(row)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _start(config: LoggerConfig, settings: Row) -> Any:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    chosen = {name: getattr(config, name) for name in ("mode", "entity", "group") if getattr(config, name)}
    project = config.project or os.environ.get("WANDB_PROJECT", "prunevit")
    logger = WandbLogger(
        name=config.run_name,
        project=project,
        save_dir=os.environ.get("WANDB_DIR", "."),
        config=settings,
        **chosen,
    )
    try:
        return logger.experiment
    except wandb.errors.Error as error:
        raise InputError(
            f"logger: wandb could not start ({first_line(error)}); log in with `wandb login`, or use "
            "logger.mode=offline"
        ) from error
