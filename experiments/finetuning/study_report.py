"""The study's journal as a table, a plot and JSON."""

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from prunevit.experiments.metrics import wilson

JOURNAL = "finetuning.jsonl"
NAME = "finetuning"
Entry = dict[str, Any]
COMMAND = (
    "python -m prunevit.experiments.finetuning.study --photos PHOTOS --output docs/results [max_epochs=N ...]"
)


@dataclass(frozen=True)
class Cell:
    """A policy at a keep rate, off the shelf or fine-tuned: what its seeds give.

    Attributes:
        entries: One a seed.
    """

    entries: Sequence[Entry]

    @property
    def top1(self) -> list[float]:
        """Accuracy of each seed, percent."""
        return [entry["row"]["top1"] for entry in self.entries]

    @property
    def mean(self) -> float:
        """Over the seeds; NaN without any."""
        return statistics.fmean(self.top1) if self.entries else math.nan

    @property
    def deviation(self) -> float:
        """Standard deviation over the seeds; NaN for one seed."""
        return statistics.stdev(self.top1) if len(self.entries) > 1 else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of Wilson's 95 % interval at the mean, for the number of photos; percent."""
        images = self.entries[0]["row"]["images"]
        low, high = wilson(round(self.mean / 100 * images), images)
        return 100 * low, 100 * high

    def __str__(self) -> str:
        """Mean, deviation over the seeds, interval over the photos."""
        if not self.entries:
            return "-"
        spread = "" if math.isnan(self.deviation) else f" ± {self.deviation:.2f}"
        low, high = self.interval
        return f"{self.mean:.2f}{spread} ({low:.1f} to {high:.1f})"


def read_journal(path: Path) -> list[Entry]:
    """Read the finished rows; half a line that an interrupted study left is passed over.

    Args:
        path: The journal.
    """
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def cell(entries: Sequence[Entry], policy: str, rate: float | None, tuned: bool) -> Cell:
    """Pick the entries of one cell.

    Args:
        entries: All.
        policy: Name.
        rate: Keep rate; None: without one.
        tuned: Whether fine-tuned.
    """
    return Cell(
        [
            each
            for each in entries
            if (each["row"]["policy"], each["row"]["keep_rate"], each["tuned"]) == (policy, rate, tuned)
        ]
    )


def unpruned(entries: Sequence[Entry]) -> float:
    """Accuracy of the unpruned model off the shelf, percent; a fine-tuned row's is that of its own weights.

    Args:
        entries: All.

    Returns:
        NaN without a row off the shelf.
    """
    return next((entry["row"]["dense_top1"] for entry in entries if not entry["tuned"]), math.nan)


def won_back(shelf: float, tuned: float, unpruned: float) -> float:
    """Share of what pruning lost that fine-tuning wins back: `(tuned - shelf) / (unpruned - shelf)`.

    Args:
        shelf: Accuracy off the shelf.
        tuned: Fine-tuned.
        unpruned: Of the unpruned model off the shelf.
    """
    return (tuned - shelf) / (unpruned - shelf) if unpruned > shelf else math.nan


def write_report(output: Path) -> None:
    """Write `finetuning.json`, `.md` and `.png` from the journal.

    Args:
        output: Folder of the journal.
    """
    entries = sorted(read_journal(output / JOURNAL), key=lambda entry: entry["name"])
    content = {"schema": 1, "command": COMMAND, "rows": entries}
    (output / f"{NAME}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (output / f"{NAME}.md").write_text(report(entries), encoding="utf-8")
    plot(entries).savefig(output / f"{NAME}.png", dpi=150)


def report(entries: Sequence[Entry]) -> str:
    """The table, in Markdown, and the commands of each row.

    Args:
        entries: All.
    """
    dense, images = unpruned(entries), entries[0]["row"]["images"]
    lines = [
        "# What fine-tuning wins back",
        "",
        f"`{COMMAND}`, {'; '.join(_machines(entries))}.",
        "",
        f"The bundled ViT-S (197 tokens), pruned at blocks 3, 6 and 9, on {images} held-out photos of ten classes. "
        f"**Unpruned, off the shelf: {dense:.2f} %.** Accuracies are top-1 in percent: the mean over the seeds ± "
        "their standard deviation, and in brackets the 95 % interval (Wilson) that the number of photos leaves. The "
        "weights are those of the last step: the held-out photos chose nothing. Off the shelf, the predictors of "
        "DynamicViT are random. `none` is the unpruned model: what the same training does without any pruning.",
        "",
        "| policy | keep rate | GMACs | off the shelf | fine-tuned | of the loss won back |",
        "|---|---|---|---|---|---|",
    ]
    for policy, rate in _places(entries):
        shelf, tuned = (cell(entries, policy, rate, each) for each in (False, True))
        back = won_back(shelf.mean, tuned.mean, dense) if shelf.entries and tuned.entries else math.nan
        some = (shelf.entries or tuned.entries)[0]["row"]
        lines.append(
            f"| {policy} | {'-' if rate is None else f'{rate:g}'} | {some['gmacs']:.2f} | {shelf} | {tuned} | "
            f"{'-' if math.isnan(back) else f'{back:.0%}'} |"
        )
    lines += ["", f"![accuracy by keep rate]({NAME}.png)", "", "## Commands", ""]
    lines += [f"Those of each row's first seed; the other seeds' are in `{NAME}.json`.", "", "```"]
    lines += [
        command
        for place, tuned in product(_places(entries), (False, True))
        for entry in cell(entries, *place, tuned).entries[:1]
        for command in entry["commands"]
    ]
    return "\n".join([*lines, "```", ""])


def plot(entries: Sequence[Entry]) -> Figure:
    """Accuracy by keep rate: dashed off the shelf, solid fine-tuned; bars are the deviation over the seeds.

    Args:
        entries: All.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    places = _places(entries)
    for number, policy in enumerate(dict.fromkeys(name for name, rate in places if rate is not None)):
        for tuned, line in ((False, "--"), (True, "-")):
            rates = [rate for name, rate in places if name == policy and rate is not None]
            cells = [(rate, cell(entries, policy, rate, tuned)) for rate in rates]
            shown = [(rate, each) for rate, each in cells if each.entries]
            axes.errorbar(
                [rate for rate, _ in shown],
                [each.mean for _, each in shown],
                yerr=[0.0 if math.isnan(each.deviation) else each.deviation for _, each in shown],
                color=f"C{number}",
                linestyle=line,
                marker="osD^"[number % 4],
                capsize=3,
                label=policy if tuned else None,
            )
    axes.axhline(unpruned(entries), color="0.5", linewidth=1, label="unpruned")
    axes.set(
        xlabel="keep rate at blocks 3, 6, 9",
        ylabel="top-1, %",
        title="dashed: off the shelf; solid: fine-tuned",
    )
    axes.invert_xaxis()
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def _machines(entries: Sequence[Entry]) -> list[str]:
    """Where the rows ran, with the commits they ran at; one text a machine and version of torch."""
    commits: dict[str, dict[str, None]] = {}
    for where in (entry["environment"] for entry in entries):
        machine = f"{', '.join(where['gpus']) or 'CPU'}, torch {where['torch']}"
        commits.setdefault(machine, {})[(where["commit"] or "unknown")[:7]] = None
    return [f"{machine}, commit {', '.join(found)}" for machine, found in commits.items()]


def _places(entries: Sequence[Entry]) -> list[tuple[str, float | None]]:
    """Policies with their keep rates, from the highest; the ones without at the end."""
    found = {(entry["row"]["policy"], entry["row"]["keep_rate"]) for entry in entries}
    return sorted(found, key=lambda place: (place[1] is None, place[0], -(place[1] or 0)))
