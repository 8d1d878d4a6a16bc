"""Weights & Biases; imported only when `logger=wandb`.

What the configuration leaves open follows wandb's environment variables (`WANDB_MODE`, `WANDB_PROJECT`).
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from matplotlib.figure import Figure

from prunevit.experiments.config import InputError, LoggerConfig, first_line
from prunevit.experiments.report import Row

INIT_TIMEOUT_S = 20  # without a network a run that cannot begin says so after about twice that


@contextmanager
def tracked(config: LoggerConfig, settings: Row) -> Iterator[list[Row]]:
    """Open a run before the work and record the row after it; the run is finished in any case.

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
    with _run(config, config=settings) as run:
        yield rows
        for row in rows:
            run.summary.update(row)


class Comparison:
    """The runs of a comparison: one for each row, and one for the whole, all in one group."""

    def __init__(self, config: LoggerConfig, group: str, run: Any) -> None:
        """Take the run of the whole.

        Args:
            config: The logger group.
            group: What ties the runs together.
            run: The run of the whole, begun.
        """
        self.config, self.group, self.run = config, group, run

    def record(
        self, rows: Sequence[Row], columns: Sequence[str], pictures: Mapping[str, Sequence[Figure]]
    ) -> None:
        """Record each row in a run of its own, then the table and the Pareto chart in that of the whole.

        Args:
            rows: Complete rows.
            columns: Of the tables.
            pictures: Kept patches, by the name of the row.
        """
        import wandb

        for row in rows:
            settings = {"config": row["config"], "name": row["name"], "job_type": "row"}
            with _run(self.config, True, group=self.group, reinit="create_new", **settings) as run:
                _record_row(run, row, columns, pictures.get(row["name"], ()))
        table = _table(rows, columns)
        chart = wandb.plot.scatter(table, "gmacs", "top1", title="top-1 against GMACs")
        self.run.log({"rows": table, "pareto": chart})


@contextmanager
def tracked_comparison(config: LoggerConfig, settings: Row, group: str) -> Iterator[Comparison | None]:
    """Open the run of the whole before the work, so that what keeps wandb from starting is known then.

    Args:
        config: The logger group.
        settings: The configuration of the comparison.
        group: What ties the runs together, unless the configuration says it.

    Yields:
        What records the rows; None if nothing is to be recorded.

    Raises:
        InputError: If wandb cannot start, for instance online without a key.
    """
    if config.name == "none":
        yield None
        return
    group = config.group or group
    with _run(config, config=settings, group=group, job_type="comparison", reinit="create_new") as run:
        yield Comparison(config, group, run)


@contextmanager
def _run(logger: LoggerConfig, quiet: bool = False, **settings: Any) -> Iterator[Any]:
    """A run that is finished in any case: as failed, if the work fails; a quiet one says nothing of itself."""
    import wandb

    chosen = {"mode": logger.mode, "entity": logger.entity, "group": logger.group, "name": logger.run_name}
    settings = {**{name: value for name, value in chosen.items() if value}, **settings}
    settings.setdefault("project", logger.project or os.environ.get("WANDB_PROJECT", "prunevit"))
    settings.setdefault("dir", os.environ.get("WANDB_DIR", "."))
    timeout = float(os.environ.get("WANDB_INIT_TIMEOUT", INIT_TIMEOUT_S))
    said: dict[str, Any] = {"quiet": True} if quiet else {}  # else WANDB_QUIET decides
    try:
        _check_key(logger.mode or os.environ.get("WANDB_MODE", "online"))
        run = wandb.init(**settings, settings={"init_timeout": timeout, **said})
    except wandb.errors.Error as error:
        raise InputError(
            f"logger: wandb could not start ({first_line(error)}); log in with `wandb login`, or use "
            "logger.mode=offline"
        ) from error
    try:
        yield run
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()


def _check_key(mode: str) -> None:
    """Refuse to go online without a key, where wandb would ask for one and wait."""
    import wandb

    if mode == "online" and wandb.run is None and not wandb.login(prompt=False, verify=False):
        raise wandb.errors.UsageError("no API key")


def _record_row(run: Any, row: Row, columns: Sequence[str], pictures: Sequence[Figure]) -> None:
    import wandb

    run.define_metric("block")
    run.define_metric("tokens/*", step_metric="block")
    for block, tokens in enumerate(row.get("tokens_by_block", ())):
        run.log({"block": block, **{f"tokens/{name}": value for name, value in tokens.items()}})
    if pictures:
        run.log({"kept": [wandb.Image(figure) for figure in pictures]})
    run.summary.update(row)
    artifact = wandb.Artifact(re.sub(r"[^\w.-]+", "-", f"row-{row['name']}"), type="row")
    artifact.add(_table([row], columns), "row")
    run.log_artifact(artifact)


def _table(rows: Sequence[Row], columns: Sequence[str]) -> Any:
    import wandb

    values = [[row.get(name) for name in columns] for row in rows]
    written = [[str(each) if isinstance(each, list) else each for each in line] for line in values]
    return wandb.Table(columns=[*columns], data=written, allow_mixed_types=True)
