"""The table of a comparison on the screen."""

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prunevit.experiments.comparison.statistics import NO_DIFFERENCE
from prunevit.experiments.knob_text import row_label
from prunevit.experiments.report import LEFT_OUT, Row


def print_comparison(
    rows: Sequence[Row], seeds: Sequence[dict[str, Any]], console: Console | None = None
) -> None:
    """Show all rows under the unpruned model, and what failed beneath.

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
    first = measured[0]
    console.print(
        f"unpruned top-1 {first['dense_top1']:.2f} % on {first['images']} images "
        f"({first['model']}, weights {first['weights']}), {first['dense_gmacs']:.2f} GMACs",
        soft_wrap=True,
        highlight=False,
        markup=False,
    )
    timed = first["images_per_s"] is not None
    table = _table(measured, timed, with_cost=True)
    if (
        console.measure(table, options=console.options.update(width=1000)).maximum > console.width
    ):  # the cost has a column of its own
        table = _table(measured, timed, with_cost=False)
    if first["accelerator"] == "cpu" and timed:
        table.caption = "speeds on a CPU are not representative"
    console.print(table)
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


def _table(rows: Sequence[Row], timed: bool, with_cost: bool) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for heading in (
        "row",
        "top-1 %",
        "95 %",
        "less unpruned",
        "GMACs",
        *(("img/s", "speed") if timed else ()),
    ):
        table.add_column(heading, justify="left" if heading == "row" else "right", overflow="fold")
    for row in rows:
        table.add_row(*_cells(row, timed, with_cost))
    return table


def _cells(row: Row, timed: bool, with_cost: bool) -> list[str]:
    interval = f"{row['top1_low']:.1f}-{row['top1_high']:.1f}"
    less = NO_DIFFERENCE if row["unpruned_verdict"] == NO_DIFFERENCE else f"{row['unpruned_difference']:+.2f}"
    cells = [escape(row_label(row, with_cost)), f"{row['top1']:.2f}", interval, less, f"{row['gmacs']:.2f}"]
    return [*cells, f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}"] if timed else cells
