"""What is drawn, on the page and for a paper alike: which rows make a line, how it looks, and the Pareto front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]

# Okabe and Ito's palette, which the colour-blind can tell apart; black is left to the unpruned model.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#F0E442")
SHAPES = 8  # as many marker shapes have a name in plotly and in matplotlib
METRICS = {
    "top1": "top-1 accuracy, %",
    "top5": "top-5 accuracy, %",
    "real_top1": "ReaL top-1 accuracy, %",
    "agreement": "images with the unpruned model's first class, %",
}
DEVIATIONS = {
    "logit_kl": "KL divergence of the logits, nats",
    "logit_mean_abs": "mean absolute deviation of the logits",
    "logit_max_abs": "largest deviation of a logit",
}
UNPRUNED = {"resize": "unpruned, smaller input", "model": "unpruned, smaller model"}  # by a row's kind
COST = "GMACs an image"


@dataclass(frozen=True)
class Series:
    """The rows of one policy on one model in one run, in the order of their cost.

    Attributes:
        label: For the legend.
        rows: At least one.
        colour: Its own for each policy.
        shape: 0 to 7; its own for each series.
    """

    label: str
    rows: list[Row]
    colour: str
    shape: int


@dataclass(frozen=True)
class Plot:
    """One chart of two columns.

    Attributes:
        name: Of its file.
        title: Above it.
        x: Column.
        y: Column.
        x_label: With its unit.
        y_label: With its unit.
        less_x: Whether a smaller x is better; else a larger one.
        less_y: The same of y.
    """

    name: str
    title: str
    x: str
    y: str
    x_label: str
    y_label: str
    less_x: bool
    less_y: bool

    def points(self, rows: Sequence[Row]) -> list[Row]:
        """Those of the rows that have both columns."""
        return [row for row in rows if row.get(self.x) is not None and row.get(self.y) is not None]

    def front(self, rows: Sequence[Row]) -> list[Row]:
        """The Pareto front: rows that no other one beats in one column without losing in the other, by rising x."""
        left, below = (1 if self.less_x else -1), (1 if self.less_y else -1)
        best: list[Row] = []
        for row in sorted(self.points(rows), key=lambda row: (left * row[self.x], below * row[self.y])):
            if not best or below * row[self.y] < below * best[-1][self.y]:
                best.append(row)
        return sorted(best, key=lambda row: row[self.x])


def plots(rows: Sequence[Row], metric: str = "top1", deviation: str = "logit_kl") -> list[Plot]:
    """The charts of a report.

    Args:
        rows: They say whether speed was measured on a CPU.
        metric: A key of `METRICS`.
        deviation: A key of `DEVIATIONS`.
    """
    on_cpu = any(row["accelerator"] == "cpu" for row in rows)
    speed = "images/s" + (" on a CPU: not representative" if on_cpu else "")
    quality, noun = METRICS[metric], metric.replace("_", " ").replace("top", "top-")
    return [
        Plot("accuracy_gmacs", f"{noun} against cost", "gmacs", metric, COST, quality, True, False),
        Plot("accuracy_speed", f"{noun} against speed", "images_per_s", metric, speed, quality, False, False),
        Plot(
            "deviation_gmacs",
            "Logit deviation against cost",
            "gmacs",
            deviation,
            COST,
            DEVIATIONS[deviation],
            True,
            True,
        ),
    ]


def series(rows: Sequence[Row]) -> list[Series]:
    """Sort rows into lines.

    Args:
        rows: Of one data set, without errors.
    """
    pruned = [row for row in rows if row["kind"] == "policy"]
    differing = [name for name in ("model", "weights", "run") if len({row[name] for row in pruned}) > 1]
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        more = differing if row["kind"] == "policy" else [name for name in differing if name == "run"]
        policy = row["policy"] if row["kind"] == "policy" else UNPRUNED[row["kind"]]
        found.setdefault((policy, *(str(row[name]) for name in more)), []).append(row)
    policies = [*dict.fromkeys(key[0] for key in found)]
    lines, seen = [], dict.fromkeys(policies, 0)
    for key, members in found.items():
        number = policies.index(key[0])
        label = key[0] + (f" ({', '.join(key[1:])})" if key[1:] else "")
        members = sorted(members, key=lambda row: row["gmacs"])
        shape = (number + seen[key[0]]) % SHAPES
        lines.append(Series(label, members, PALETTE[number % len(PALETTE)], shape))
        seen[key[0]] += 1
    return lines


def unpruned(rows: Sequence[Row]) -> list[Row]:
    """The unpruned models that the rows stand beside, each once, as rows with the same columns.

    Args:
        rows: Rows without an error.

    Returns:
        With `beside`, the names of the rows that are compared with it.
    """
    found: dict[tuple[Any, ...], Row] = {}
    # Older results do not say what a row stands beside: what it prunes, if it prunes.
    for row in [row for row in rows if row["kind"] == "policy" or "dense_model" in row] or rows:
        said = {name: row[name] for name in ("model", "weights", "img_size", "images", "accelerator")}
        dense = {**said, **_of_dense(row), "timing": _of_dense(row.get("timing") or {})}
        zero = {**dict.fromkeys(DEVIATIONS, 0.0), "agreement": 100.0, "name": "unpruned", "beside": []}
        key = (dense["model"], dense["weights"], str(dense["img_size"]), dense["top1"])
        found.setdefault(key, {**zero, **dense})["beside"].append(row["name"])
    models = [*found.values()]
    return (
        models
        if len(models) < 2
        else [{**row, "name": f"unpruned {row['model']}, weights {row['weights']}"} for row in models]
    )


def _of_dense(values: Row) -> Row:
    """What is said of the unpruned model, by the names that it has of a pruned one."""
    return {name.removeprefix("dense_"): each for name, each in values.items() if name.startswith("dense_")}
