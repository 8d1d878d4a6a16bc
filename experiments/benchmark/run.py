"""`prunevit bench`: runs a suite on a GPU and writes results.jsonl, summary.md and pictures."""

import json
import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from prunevit.experiments.benchmark import attention_suite, model_suite, policy_suite, stage_suite
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.measurements import Measurement, Measurements, Target, break_even
from prunevit.experiments.benchmark.model_rows import cases
from prunevit.experiments.benchmark.plots import draw
from prunevit.experiments.benchmark.summary import summary
from prunevit.experiments.config import InputError
from prunevit.experiments.report import choose_output_dir, environment, finite

RESULTS = "results.jsonl"
SUMMARY = "summary.md"
SUITES: dict[str, Any] = {
    "attention": attention_suite,
    "model": model_suite,
    "stages": stage_suite,
    "policies": policy_suite,
}
log = logging.getLogger("prunevit")
CLOCKS = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu"


def run(config: BenchConfig) -> Measurements:
    """Run a suite and write what `prunevit bench` promises.

    `results.jsonl` grows line by line; `summary.md` comes last. A run that is stopped leaves both of what it measured.

    Args:
        config: The composed configuration.

    Raises:
        InputError: If there is no GPU, the output folder cannot be used, or the keys name no row.
        KeyboardInterrupt: If it is stopped, saying what it leaves.
    """
    device = find_gpu(config.suite)
    output = choose_output_dir(config, [RESULTS])
    if config.suite != "attention":
        SUITES[config.suite].cases(config)  # raises ahead of the work
    try:
        with _progress():
            return _run(config, device, output)
    except OSError as error:
        raise InputError(f"output_dir: {output} could not be written ({error.strerror})") from error


def _run(config: BenchConfig, device: torch.device, output: Path) -> Measurements:
    header = {"suite": config.suite, **environment(), "clocks before": clocks()}
    suite, figures, stopped = SUITES[config.suite], Measurements(), None
    output.mkdir(parents=True, exist_ok=True)
    with (output / RESULTS).open("w", encoding="utf-8") as lines:
        _write(lines, {"kind": "header", **header, "config": asdict(config)})
        try:
            for each in suite.run(config, device):
                log.info("%s: %s (%s) %s", each.place, each.contestant, each.mode, _said(each))
                figures.entries.append(each)
                _write(lines, {"kind": "measurement", **asdict(each)})
        except KeyboardInterrupt as error:
            stopped = error
        targets = suite.targets(figures, config)
        for target in targets:
            _write(lines, {"kind": "target", **asdict(target), "met": target.met})
    header["clocks after"] = clocks()
    notes = _break_even(config, figures) if config.suite == "model" and not stopped else []
    notes += ["stopped before all was measured"] if stopped else []
    (output / SUMMARY).write_text(summary(header, figures, targets, notes), encoding="utf-8")
    draw(figures, output)
    if stopped:
        raise KeyboardInterrupt(f"what was measured until then is in {output}") from stopped
    _print(targets, notes)
    print(f"results in {output}")
    return figures


@contextmanager
def _progress() -> Iterator[None]:
    """Say on stderr, with the seconds passed, what is being done."""
    handler, level = logging.StreamHandler(), log.level
    handler.setFormatter(logging.Formatter("[%(relativeCreated)8.0f ms] %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def find_gpu(suite: str) -> torch.device:
    """The current CUDA device.

    Args:
        suite: What needs it.

    Raises:
        InputError: If there is none.
    """
    if not torch.cuda.is_available():
        raise InputError(f"bench: suite={suite} needs a CUDA device (a GPU), found none")
    return torch.device("cuda", torch.cuda.current_device())


def clocks() -> str:
    """GPU, driver, clocks, power and temperature as nvidia-smi reads them; nothing is set."""
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names, *rows = done.stdout.splitlines() or [""]
    return "; ".join(
        ", ".join(f"{name} {value}" for name, value in zip(names.split(", "), row.split(", ")))
        for row in rows
    )


def _said(figure: Measurement) -> str:
    return figure.note if figure.value is None else f"{figure.value.median:.4g} {figure.quantity}"


def _break_even(config: BenchConfig, figures: Measurements) -> list[str]:
    """For each policy the batch from which on it beats the best dense model."""
    notes = []
    for case in cases(config):
        for dtype in config.dtypes:
            places = {batch: case.place(batch, dtype) for batch in case.batch_sizes}
            for name in case.policies:
                batch = break_even(figures, name, "dense", model_suite.MS, places)
                said = "loses at the largest batch" if batch is None else f"wins from batch {batch} on"
                measured = ", ".join(map(str, case.batch_sizes))
                notes.append(f"break-even of {name}, {case.model}, {dtype}: {said} (measured: {measured})")
    return notes


def _write(lines: Any, content: dict[str, Any]) -> None:
    lines.write(json.dumps(finite(content), allow_nan=False) + "\n")
    lines.flush()


def _print(targets: list[Target], notes: list[str]) -> None:
    console = Console(soft_wrap=True, highlight=False)
    for each in targets:
        got = "-" if each.ratio is None else f"{each.ratio:.3f}"
        sign, met = ("<=", ">=")[not each.at_most], {True: "met", False: "NOT MET", None: "-"}[each.met]
        console.print(f"{met:<8}{got:>8} ({sign} {each.reach:.3g})  {each.what}; {each.at}: {each.note}")
    for note in notes:
        console.print(note)
