"""The table of a comparison on the screen."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prunevit.experiments.comparison.series import unpruned
from prunevit.experiments.comparison.statistics import NO_DIFFERENCE
from prunevit.experiments.comparison.ties import SHARED, ties
from prunevit.experiments.knob_text import row_label
from prunevit.experiments.report import LEFT_OUT, Row, in_figures, spread


def print_comparison(
    rows: Sequence[Row], seeds: Sequence[dict[str, Any]], console: Console | None = None
) -> None:
    """Show all rows under the unpruned models that they are compared with, and what failed beneath.

    Args:
        rows: In their order.
        seeds: Groups of rows that differ by the seed, from `seed_groups`.
        console: Where to print; the terminal by default.
    """
    console = console or Console()
    measured = [row for row in rows if row["error"] is None]
    for row in rows:
        if row["error"] is not None:
            console.print(
                f"{row['name']} failed: {row['error']}", soft_wrap=True, highlight=False, markup=False
            )
    if not measured:
        return
    first, dense = measured[0], unpruned(measured)
    letters = ties([*dense, *measured])
    for row, letter in zip(dense, letters):
        console.print(
            _unpruned_line(row, letter, several=len(dense) > 1), soft_wrap=True, highlight=False, markup=False
        )
    timed = first["images_per_s"] is not None
    table = _table(measured, letters[len(dense) :], timed, with_cost=True)
    if (
        console.measure(table, options=console.options.update(width=1000)).maximum > console.width
    ):  # the cost has a column of its own
        table = _table(measured, letters[len(dense) :], timed, with_cost=False)
    console.print(table)
    if any(letters):
        console.print(SHARED, highlight=False)
    if first["accelerator"] == "cpu" and timed:
        console.print("speeds on a CPU are not representative", highlight=False)
    for group in seeds:
        said = f"top-1 {group['top1_mean']:.2f} +- {group['top1_std']:.2f} % over {len(group['rows'])} seeds"
        said = f"{_in_common(group['rows'])}: {said}"
        console.print(said, soft_wrap=True, highlight=False, markup=False)
    for name, said in LEFT_OUT.items():
        if first[name]:
            console.print(f"{said}: {first[name]}", highlight=False)


def _in_common(names: Sequence[str]) -> str:
    """The words with which all names begin; where there are none, the first name and how many follow."""
    words = [
        each[0] for each in takewhile(lambda each: len({*each}) == 1, zip(*(name.split() for name in names)))
    ]
    return " ".join(words) or f"{names[0]} and {len(names) - 1} more"


def _unpruned_line(row: Row, letter: str, several: bool) -> str:
    """What the rows are compared with; of several models, which rows."""
    said = (
        f"unpruned top-1 {row['top1']:.2f} % on {row['images']} images "
        f"({row['model']}, weights {row['weights']}), {row['gmacs']:.2f} GMACs"
    )
    if row["images_per_s"] is not None:
        said += f", {in_figures(row['images_per_s'])} img/s ({_spread(row)}){f' {letter}' if letter else ''}"
    return f"{said}; beside it: {', '.join(row['beside'])}" if several else said


def _table(rows: Sequence[Row], letters: Sequence[str], timed: bool, with_cost: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    columns = {
        "row": [escape(row_label(row, with_cost)) for row in rows],
        "top-1\n%": [f"{row['top1']:.2f}" for row in rows],
        "95 %": [f"{row['top1_low']:.1f}-{row['top1_high']:.1f}" for row in rows],
        "gap to\nunpruned,\npoints": [_difference(row) for row in rows],
        "GMACs": [f"{row['gmacs']:.2f}" for row in rows],
    }
    if timed:
        columns["img/s"] = [in_figures(row["images_per_s"]) for row in rows]
        columns["p20-p80"] = [_spread(row) for row in rows]
        if any(letters):
            columns[""] = [*letters]
        columns["speed"] = [f"{row['speedup']:.2f}" for row in rows]
    for heading in columns:
        left = heading in ("row", "")
        table.add_column(heading, justify="left" if left else "right", overflow="fold", vertical="bottom")
    for cells in zip(*columns.values()):
        table.add_row(*cells)
    return table


def _difference(row: Row) -> str:
    return "not shown" if row["unpruned_verdict"] == NO_DIFFERENCE else f"{row['unpruned_difference']:+.2f}"


def _spread(row: Row) -> str:
    return "-".join(map(in_figures, spread(row) or ()))
