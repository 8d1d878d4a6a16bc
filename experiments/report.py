"""What a run leaves behind: a table on the screen, and results.json, results.csv and config.yaml on disk."""

import csv
import io
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from prunevit.experiments.config import ImagesConfig, InputError, OutputConfig
from prunevit.experiments.output_dir import reserve

SCHEMA = 1
RESULTS = "results.json"  # written last: where it stands, the run is complete
FILES = ("config.yaml", "results.csv", RESULTS)
PACKAGES = ("torch", "triton", "timm", "lightning", "torchmetrics", "omegaconf", "wandb")
LONGEST_NAME = 255  # bytes, of every file system in use
SPEED_COLUMNS = (
    *(
        "images_per_s",
        "dense_images_per_s",
        "speedup",
        "latency_ms",
        "dense_latency_ms",
        "peak_mb",
        "dense_peak_mb",
    ),
)
COLUMNS = (
    *(
        "policy",
        "keep_rate",
        "knob",
        "knob_value",
        "layers",
        "model",
        "weights",
        "trained",
        "seed",
        "img_size",
    ),
    *("images", "top1", "top1_low", "top1_high", "top5", "dense_top1", "dense_top5", "agreement"),
    *("logit_max_abs", "logit_mean_abs", "logit_kl", "logit_cosine", "numeric_max_abs"),
    *("tokens_mean", "tokens_p5", "tokens_p95", "gmacs", "policy_gmacs", "dense_gmacs"),
    *SPEED_COLUMNS,
    *("batch_size", "mode", "backend", "accelerator", "precision"),
)
LEFT_OUT = {
    "skipped": "unreadable images left out",
    "passed_over": "files passed over, which no image format ends like",
    "empty_folders": "class folders without images",
}
Row = dict[str, Any]


def choose_output_dir(config: OutputConfig, files: Sequence[str] = FILES) -> Path:
    """Settle where the results go, and make sure that they can go there, before anything expensive runs.

    Only the folder of a run that names none is made now, so that no other run takes it; see `reserve`.

    Args:
        config: `output_dir` and `overwrite`.
        files: What the run writes there.

    Raises:
        InputError: If the folder already holds results or cannot be written.
    """
    path = Path(config.output_dir or Path("outputs") / datetime.now().strftime("%Y-%m-%d_%H-%M-%S"))
    try:
        obstacle = _obstacle(path, files)
        if not obstacle and config.output_dir is None:
            return reserve(path)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        obstacle = error.strerror if isinstance(error, OSError) else str(error)
    if obstacle:
        raise InputError(f"output_dir: must be a folder that can be written, got {path} ({obstacle})")
    refuse_results(path, config, files)
    return path


def refuse_results(path: Path, config: OutputConfig, files: Sequence[str] = FILES) -> None:
    """Refuse a folder that holds results, unless they may be replaced: ahead of the run, and again ahead of writing.

    Args:
        path: The output folder.
        config: `overwrite`.
        files: What the run writes there; a configuration alone is no result.

    Raises:
        InputError: If it does.
    """
    if not config.overwrite and any((path / name).exists() for name in files if name != "config.yaml"):
        raise InputError(f"output_dir: {path} already holds results; choose another or set overwrite=true")


def _obstacle(path: Path, files: Sequence[str]) -> str | None:
    """Say what keeps a folder from being made and written; raises what the file system says itself."""
    if any(len(os.fsencode(part)) > LONGEST_NAME for part in path.parts):
        return "a name is too long"
    for folder in (path, *path.absolute().parents):
        try:
            folder.stat()
        except FileNotFoundError:
            if folder.is_symlink():
                return f"{folder} is a link to nothing"
            continue
        with tempfile.TemporaryFile(dir=folder):
            break
    taken = [name for name in files if (path / name).is_dir()]
    return f"{taken[0]} there is a folder" if taken else None


def write_results(
    path: Path,
    config: ImagesConfig,
    rows: Sequence[Row],
    columns: Sequence[str] = COLUMNS,
    more: Mapping[str, Any] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the three files: all of them or none, each whole, and results.json last.

    In config.yaml a number that is not finite stays what it was, so that the run can be repeated.

    Args:
        path: The output folder.
        config: The configuration of the run.
        rows: At least one row: `columns` and whatever detail was measured.
        columns: Of the table; what a row lacks is left empty.
        more: What results.json says beside the rows.
        files: Further files, by name.

    Raises:
        InputError: If the disk does not take them, or another run has written there in the meantime.
    """
    settings = asdict(config)
    content = {
        "schema": SCHEMA,
        "environment": environment(),
        "config": finite(settings),
        "rows": [*map(finite, rows)],
        **finite(dict(more or {})),
    }
    texts = (
        OmegaConf.to_yaml(OmegaConf.create(settings)),
        _table(rows, columns),
        json.dumps(content, indent=1, allow_nan=False) + "\n",
    )
    refuse_results(path, config)  # another run may have been faster
    try:
        path.mkdir(parents=True, exist_ok=True)
        contents: dict[str, str | bytes] = {**(files or {}), **dict(zip(FILES, texts))}
        replace_files({path / name: content for name, content in contents.items()})
    except OSError as error:
        raise InputError(
            f"output_dir: the results could not be written to {path} ({error.strerror})"
        ) from error


def finite(value: Any) -> Any:
    """Replace numbers that JSON lacks by null, at any depth.

    Args:
        value: What is to be written.
    """
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def origin() -> Row:
    """Say what made a row: `commit` of the checkout, and `versions` of the packages."""
    versions = {name: _version(name) for name in ("prunevit", *PACKAGES)}
    return {"commit": _commit(), "versions": {"python": platform.python_version(), **versions}}


def environment() -> Row:
    """Describe the machine and the versions that made the results."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "prunevit": _version("prunevit"),
        "commit": _commit(),
        "command": shlex.join(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "cpu_threads": torch.get_num_threads(),
    }


def print_report(row: Row, console: Console | None = None) -> None:
    """Show one row beside the unpruned model.

    Args:
        row: The row.
        console: Where to print; the terminal by default.
    """
    console = console or Console()
    console.print(
        f"unpruned top-1 {row['dense_top1']:.2f} % on {row['images']} images "
        f"({row['model']}, weights {row['weights']})",
        soft_wrap=True,
        highlight=False,
    )
    knob = f" {row['knob']}={row['knob_value']}" if row["knob"] else ""
    table = Table(title=f"{row['policy']}{knob} layers={row['layers']}", title_style="bold")
    for name in ("", "unpruned", "pruned"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for label, dense, pruned in _lines(row):
        if pruned != "-":
            table.add_row(label, dense, pruned)
    if row["accelerator"] == "cpu" and row["images_per_s"] is not None:
        table.caption = "speeds on a CPU are not representative"
    console.print(table)
    for name, said in LEFT_OUT.items():
        if row[name]:
            console.print(f"{said}: {row[name]}", highlight=False)


def spread(row: Row, name: str = "images_per_s") -> tuple[float, float] | None:
    """20th and 80th percentile of a time or a speed, or None where it was not measured.

    Args:
        row: With `timing`.
        name: A key of it.
    """
    measured = (row.get("timing") or {}).get(name)
    return (measured["p20"], measured["p80"]) if measured else None


def in_figures(value: float) -> str:
    """Write a time or a speed with the decimals that five signs have room for.

    Args:
        value: Not negative.
    """
    return f"{value:.{2 if value < 10 else 1 if value < 1000 else 0}f}"


def _lines(row: Row) -> list[tuple[str, str, str]]:
    """Label, unpruned and pruned figure of each line; "-" where there is none."""

    def both(name: str, digits: int) -> tuple[str, str]:
        return _number(row[f"dense_{name}"], digits), _number(row[name], digits)

    def interval(name: str) -> str:
        return f"{row[name]:.2f} ({row[f'{name}_low']:.1f} to {row[f'{name}_high']:.1f})"

    def spread_of(name: str) -> str:
        ends = spread(row, name)
        return in_figures(row[name]) + (f" ({'-'.join(map(in_figures, ends))})" if ends else "")

    def speeds(name: str) -> tuple[str, str]:
        return ("-", "-") if row[name] is None else (spread_of(f"dense_{name}"), spread_of(name))

    tokens = f"{row['tokens_mean']:.1f} ({row['tokens_p5']:.1f} to {row['tokens_p95']:.1f})"
    return [
        ("top-1 % (95 % interval)", interval("dense_top1"), interval("top1")),
        ("top-5 % (95 % interval)", interval("dense_top5"), interval("top5")),
        ("ReaL top-1 %", *both("real_top1", 2)),
        ("same first class %", "", _number(row["agreement"], 2)),
        ("GMACs an image", *both("gmacs", 3)),
        ("block tokens (p5 to p95)", str(row["dense_tokens"]), tokens),
        ("images/s (p20-p80)", *speeds("images_per_s")),
        ("ms at batch 1 (p20-p80)", *speeds("latency_ms")),
        ("peak MB", *both("peak_mb", 0)),
        (
            "policy effect: max, mean",
            "",
            f"{row['logit_max_abs']:.3g}, {row['logit_mean_abs']:.3g}",
        ),
        ("policy effect: KL, cos", "", f"{row['logit_kl']:.3g}, {row['logit_cosine']:.4f}"),
        ("numeric effect: max", "", _number(row["numeric_max_abs"], 7)),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in map(finite, rows):
        values = [row.get(name) for name in columns]
        writer.writerow([json.dumps(each) if isinstance(each, list) else each for each in values])
    return text.getvalue()


def replace_files(contents: Mapping[Path, str | bytes]) -> None:
    """Write all beside their targets, then move them into place: no reader sees half a file or half a set.

    Args:
        contents: What each file is to hold; text becomes UTF-8.
    """
    staged: dict[Path, str] = {}
    new = [path for path in contents if not path.exists()]
    try:
        for path, content in contents.items():
            handle, staged[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            os.chmod(staged[path], 0o666 & ~_umask())
        for path, temporary in staged.items():
            os.replace(temporary, path)
    except BaseException:
        for leftover in (*map(Path, staged.values()), *new):
            leftover.unlink(missing_ok=True)
        raise


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that this file runs from, or None for an installed package."""
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
            timeout=10,
        )
    except OSError:
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None
