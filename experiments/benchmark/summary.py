"""The Markdown summary of a benchmark: what was to be reached, and every figure."""

from collections.abc import Sequence
from typing import Any

from prunevit.experiments.benchmark.measurements import Measurement, Measurements, Target

MET = {True: "yes", False: "**no**", None: "-"}


def summary(
    header: dict[str, Any], figures: Measurements, targets: Sequence[Target], notes: Sequence[str]
) -> str:
    """Text of `summary.md`.

    Args:
        header: The machine, versions and command.
        figures: The measurements.
        targets: The comparisons.
        notes: Sentences below them.
    """
    parts = [f"# prunevit bench suite={header.get('suite', '')}", ""]
    parts += [f"- {name}: {value}" for name, value in header.items() if value not in (None, [], "")]
    if targets:
        parts += ["", "## To be reached", "", *target_table(targets)]
    if notes:
        parts += ["", *(f"- {note}" for note in notes)]
    parts += ["", "## Measured", "", "Median (20th to 80th percentile), taken in turn in one process."]
    for place in figures.places():
        parts += ["", f"### {place}", "", *figure_table([each for each in figures if each.place == place])]
    return "\n".join(parts) + "\n"


def target_table(targets: Sequence[Target]) -> list[str]:
    """Lines of the table of comparisons; a ratio without a correct figure on both sides is not printed.

    Args:
        targets: The comparisons.
    """
    lines = ["| what | at | reach | got | met | figures |", "|---|---|---|---|---|---|"]
    for each in targets:
        sign = "<=" if each.at_most else ">="
        got = "-" if each.ratio is None else f"{each.ratio:.3f}"
        lines.append(
            f"| {each.what} | {each.at} | {sign} {each.reach:.3g} | {got} | {MET[each.met]} | {each.note} |"
        )
    return lines


def figure_table(figures: Sequence[Measurement]) -> list[str]:
    """Lines of the table of one place: a row for each contestant and mode.

    Args:
        figures: The measurements.
    """
    quantities = list(dict.fromkeys(each.quantity for each in figures))
    rows: dict[tuple[str, str], dict[str, Measurement]] = {}
    for each in figures:
        rows.setdefault((each.contestant, each.mode), {})[each.quantity] = each
    rate = any(each.images for each in figures)
    titles = ["contestant", "mode", *quantities, *(["images/s"] if rate else []), "note"]
    lines = ["| " + " | ".join(titles) + " |", "|---|---|" + "---:|" * (len(titles) - 3) + "---|"]
    for (contestant, mode), found in rows.items():
        cells = [_cell(found.get(quantity)) for quantity in quantities]
        if rate:
            cells.append(_rate(found.get(quantities[0])))
        note = "; ".join(dict.fromkeys(each.note for each in found.values() if each.note))
        lines.append("| " + " | ".join([contestant, mode, *cells, note.replace("|", "/")]) + " |")
    return lines


def _cell(figure: Measurement | None) -> str:
    if figure is None or figure.value is None:
        return "-"
    value = figure.value
    if value.p20 == value.p80:
        return f"{value.median:.4g}"
    return f"{value.median:.4g} ({value.p20:.4g} to {value.p80:.4g})"


def _rate(figure: Measurement | None) -> str:
    if figure is None or figure.value is None or not figure.images:
        return "-"
    return f"{figure.value.per_second(figure.images).median:.0f}"
