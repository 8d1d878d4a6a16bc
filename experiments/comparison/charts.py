"""The charts of the page, as plotly's own descriptions (`data` and `layout`).

Colours that depend on the reader's colour scheme are written as "var(--ink)"; the page's script puts the scheme's in.
"""

from collections.abc import Sequence
from html import escape
from typing import Any

from prunevit.experiments.comparison.series import Plot, Row, plots, series, unpruned
from prunevit.experiments.knob_text import row_label

SHAPES = (
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "x",
    "star",
    "pentagon",
)  # of series.Series.shape
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
INK = "var(--ink)"
Chart = dict[str, Any]


def charts(rows: Sequence[Row], metric: str, deviation: str) -> list[Chart]:
    """Describe the charts of one data set; one without a point is left out.

    Args:
        rows: Rows without an error, of the same images.
        metric: A key of `series.METRICS`.
        deviation: A key of `series.DEVIATIONS`.

    Returns:
        For each: `name`, `title`, `note`, and plotly's `data` and `layout`.
    """
    drawn = [_chart(plot, rows) for plot in plots(rows, metric, deviation) if plot.points(rows)]
    return [*drawn, _tokens(rows)] if any(row.get("tokens_by_block") for row in rows) else drawn


def _chart(plot: Plot, rows: Sequence[Row]) -> Chart:
    dense = unpruned(rows)
    front = plot.front([*rows, *dense])
    lines = [
        _points(plot, each.label, each.rows, each.colour, SHAPES[each.shape])
        for each in series(rows)
        if plot.points(each.rows)
    ]
    if plot.points(dense):
        lines.append(_points(plot, "unpruned", dense, INK, "hexagram"))
    note = []
    if len(front) > 1:  # one point has no line
        stairs = _line("Pareto front", [row[plot.x] for row in front], [row[plot.y] for row in front])
        look = {"color": INK, "width": 1, "dash": "dot", "shape": "hv" if plot.less_x else "vh"}
        lines.insert(0, {**stairs, "line": look})
        note.append("Dotted: the Pareto front.")
    if any(f"{plot.y}_low" in row for row in rows):
        note.append("Whiskers: 95 % interval (Wilson).")
    return {
        "name": plot.name,
        "title": plot.title[:1].upper() + plot.title[1:],
        "note": " ".join(note),
        "data": lines,
        "layout": _layout(plot.x_label, plot.y_label),
    }


def _points(plot: Plot, label: str, rows: Sequence[Row], colour: str, shape: str) -> Chart:
    rows = plot.points(rows)
    trace: Chart = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(label),
        "x": [row[plot.x] for row in rows],
        "y": [row[plot.y] for row in rows],
        "text": [_hover(row) for row in rows],
        "hovertemplate": "%{text}<extra></extra>",
        "marker": {"color": colour, "symbol": shape, "size": 10},
        "line": {"color": colour, "width": 1},
    }
    if all(row.get(f"{plot.y}_low") is not None for row in rows):
        up = [row[f"{plot.y}_high"] - row[plot.y] for row in rows]
        down = [row[plot.y] - row[f"{plot.y}_low"] for row in rows]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, "width": 3}
        trace["error_y"] |= {"color": colour, "thickness": 1}
    return trace


def _tokens(rows: Sequence[Row]) -> Chart:
    """Mean tokens of an image in each block, a line for each row."""
    lines = []
    for each in series(rows):
        for number, row in enumerate(each.rows):
            blocks = row.get("tokens_by_block") or []
            means = [block["mean"] for block in blocks]
            # From the MLP of a block to the next one's: a stage within a block stands at its number, as in a plan.
            line = _line(row_label(row), *to_the_end(means))
            spread = [f"{block['mean']:.1f} ({block['p5']:.0f} to {block['p95']:.0f})" for block in blocks]
            look = {"color": each.colour, "width": 2, "shape": "hv", "dash": DASHES[number % len(DASHES)]}
            hover = ["text+name+x"] * len(means) + ["skip"]
            told = {"text": [*spread, ""], "hoverinfo": hover, "hoverlabel": {"namelength": -1}}
            lines.append({**line, "line": look, **told})
    return {
        "name": "tokens_by_block",
        "title": "Tokens by block",
        "note": "Mean over the images of the tokens that enter a block's MLP; a point tells the 5th and 95th "
        "percentile.",
        "data": lines,
        "layout": _layout("block", "tokens of an image") | {"hovermode": "closest"},
    }


def to_the_end(means: Sequence[float]) -> tuple[list[float], list[float]]:
    """Where the tokens of each block are drawn, and they, the last one as long as a block's MLP.

    Args:
        means: One a block.
    """
    end = [len(means) - 0.5] if means else []
    return [*range(len(means)), *end], [*means, *means[-1:]]


def _line(label: str, x: Sequence[float], y: Sequence[float]) -> Chart:
    return {"type": "scatter", "mode": "lines", "name": escape(label), "x": x, "y": y, "hoverinfo": "skip"}


def _layout(x_label: str, y_label: str) -> Chart:
    return {"xaxis": {"title": {"text": x_label}}, "yaxis": {"title": {"text": y_label}}}


def _hover(row: Row) -> str:
    """All that a point stands for, in plotly's few HTML tags."""
    said = [f"<b>{escape(row_label(row))}</b>", escape(f"{row['model']}, weights {row['weights']}")]
    if row.get("top1_low") is not None:
        said.append(f"top-1 {row['top1']:.2f} % ({row['top1_low']:.1f} to {row['top1_high']:.1f})")
    figures = (
        ("agreement", "{:.2f} % agree with the unpruned model"),
        ("gmacs", "{:.3f} GMACs"),
        ("images_per_s", "{:.1f} images/s"),
        ("logit_kl", "logit KL {:.3g}"),
    )
    said += [words.format(row[name]) for name, words in figures if row.get(name) is not None]
    return "<br>".join(said)
