"""The charts of a report for a paper, by matplotlib: the same series, colours and front as on the page."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from prunevit.experiments.comparison.charts import DASHES, to_the_end
from prunevit.experiments.comparison.series import Plot, Row, plots, series, unpruned
from prunevit.experiments.knob_text import row_label

SHAPES = ("o", "s", "D", "^", "P", "X", "*", "p")  # of series.Series.shape
STYLES = dict(zip(DASHES, ("-", "--", ":", "-.", (0, (8, 3)))))
WIDTH, HEIGHT = 5.5, 3.8  # inches
FORMATS = ("pdf", "svg")


def figures(rows: Sequence[Row], metric: str = "top1", deviation: str = "logit_kl") -> dict[str, bytes]:
    """Draw the charts of one data set.

    Args:
        rows: Rows without an error, of the same images.
        metric: A key of `series.METRICS`.
        deviation: A key of `series.DEVIATIONS`.

    Returns:
        The content of each file by its name: PDF with its fonts, and SVG with its text as text.
    """
    drawn = {plot.name: draw(plot, rows) for plot in plots(rows, metric, deviation) if plot.points(rows)}
    if any(row.get("tokens_by_block") for row in rows):
        drawn["tokens_by_block"] = draw_tokens(rows)
    return {f"{name}.{kind}": _content(each, kind) for name, each in drawn.items() for kind in FORMATS}


def draw(plot: Plot, rows: Sequence[Row]) -> Figure:
    """Draw one chart with its intervals and its Pareto front.

    Args:
        plot: Which columns.
        rows: Rows without an error, of the same images.
    """
    figure, axes = _empty(plot.x_label, plot.y_label)
    dense = unpruned(rows)
    front = plot.front([*rows, *dense])
    if len(front) > 1:  # one point has no line
        axes.plot(
            [row[plot.x] for row in front],
            [row[plot.y] for row in front],
            color="black",
            linestyle=":",
            linewidth=0.8,
            drawstyle="steps-post" if plot.less_x else "steps-pre",
            label="Pareto front",
        )
    for each in series(rows):
        _points(axes, plot, each.label, each.rows, each.colour, SHAPES[each.shape])
    _points(axes, plot, "unpruned", dense, "black", "*")
    return _with_legend(figure, axes)


def draw_tokens(rows: Sequence[Row]) -> Figure:
    """Draw the mean tokens of an image in each block, a line for each row.

    Args:
        rows: Rows without an error; those without `tokens_by_block` are left out.
    """
    figure, axes = _empty("block", "tokens of an image")
    for each in series(rows):
        for number, row in enumerate(each.rows):
            means = [block["mean"] for block in row.get("tokens_by_block") or []]
            style = STYLES[DASHES[number % len(DASHES)]]
            axes.step(
                *to_the_end(means), where="post", color=each.colour, linestyle=style, label=row_label(row)
            )
    return _with_legend(figure, axes)


def _points(axes: Axes, plot: Plot, label: str, rows: Sequence[Row], colour: str, shape: str) -> None:
    rows = plot.points(rows)
    if not rows:
        return
    spread = None
    if all(row.get(f"{plot.y}_low") is not None for row in rows):
        # Results on disk may have a share of 100 % beyond its upper end by a rounding error.
        spread = [
            [max(row[plot.y] - row[f"{plot.y}_low"], 0.0) for row in rows],
            [max(row[f"{plot.y}_high"] - row[plot.y], 0.0) for row in rows],
        ]
    axes.errorbar(
        [row[plot.x] for row in rows],
        [row[plot.y] for row in rows],
        yerr=spread,
        color=colour,
        marker=shape,
        markersize=5,
        linewidth=0.8,
        elinewidth=0.6,
        capsize=2,
        label=label,
    )


def _empty(x_label: str, y_label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label, fontsize=9)
    axes.set_ylabel(y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(linewidth=0.3)
    return figure, axes


def _with_legend(figure: Figure, axes: Axes) -> Figure:
    lines = len(axes.get_legend_handles_labels()[1])
    with rc_context({"text.parse_math": False}):  # a name may hold dollar signs
        figure.legend(loc="outside lower left", ncols=3, fontsize=7, frameon=False)
    figure.set_figheight(HEIGHT + 0.17 * (lines // 3))
    return figure


@contextmanager
def any_script() -> Iterator[None]:
    """Draw names of files and folders in any script, without a warning for each letter that the font lacks."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ ")
        yield


def _content(figure: Figure, kind: str) -> bytes:
    content = BytesIO()
    # The same rows give the same bytes: no date, and no random names inside an SVG.
    with any_script(), rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "prunevit"}):
        figure.savefig(content, format=kind, metadata={"CreationDate" if kind == "pdf" else "Date": None})
    return content.getvalue()
