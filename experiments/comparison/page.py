"""The page: one HTML file with everything in it, which opens from disk and asks nothing of the network."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from io import BytesIO
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from PIL import Image

from prunevit.experiments.comparison.charts import charts
from prunevit.experiments.comparison.saved import UNPRUNED, Measured, Run, by_data
from prunevit.experiments.comparison.series import Row, unpruned
from prunevit.experiments.comparison.ties import SHARED, ties
from prunevit.experiments.config import InputError
from prunevit.experiments.images import UNREADABLE
from prunevit.experiments.knob_text import row_label
from prunevit.experiments.report import COLUMNS, finite, in_figures, spread

TEMPLATE = files("prunevit.experiments.comparison").joinpath("template")
PICTURE_BYTES = 3_200_000  # of all pictures as the page holds them: the page stays below 5 MB
PICTURE_WIDTH = 1200  # px
# What the table shows at first: title and number format.
SHOWN = {
    "name": ("row", ""),
    "top1": ("top-1 %", ".2f"),
    "unpruned_difference": ("gap to unpruned, points", "+.2f"),
    "agreement": ("agreement %", ".2f"),
    "gmacs": ("GMACs", ".3f"),
    "images_per_s": ("images/s", ""),
    "speedup": ("speedup", ".2f"),
    "logit_kl": ("logit KL", ".3g"),
    "tokens_mean": ("tokens a block", ".1f"),
}


@dataclass(frozen=True)
class Picture:
    """A picture as the page holds it: a `data:` address, what is on it, and its size in px."""

    source: str
    title: str
    width: int
    height: int


def render_page(runs: Sequence[Run], metric: str = "top1", deviation: str = "logit_kl") -> str:
    """Make the page of one or several runs.

    Args:
        runs: At least one.
        metric: A key of `series.METRICS`: what the accuracy charts show.
        deviation: A key of `series.DEVIATIONS`.

    Returns:
        The HTML text. Rows of different images stand in separate charts and tables, and the page says so.
    """
    measured = by_data(runs)
    pictures, left_out = _pictures(runs)
    drawn = [charts(each.rows, metric, deviation) for each in measured]
    content = [
        {"charts": own, "pairs": each.pairs, "reference": _reference(each)}
        for own, each in zip(drawn, measured)
    ]
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(_read("page.html")).render(
        title="Accuracy on " + " and on ".join(each.title for each in measured),
        sections=[_section(n, each, drawn[n], len(runs) > 1) for n, each in enumerate(measured)],
        notes=_notes(runs, measured),
        pictures=pictures,
        left_out=left_out,
        runs=[{**asdict(run), "config": json.dumps(run.config, indent=1)} for run in runs],
        content=json.dumps(finite(content), allow_nan=False).replace("<", "\\u003c"),
        css=_read("page.css"),
        script=_read("page.js"),
        plotly=_read("plotly-basic.min.js"),
    )


def _read(name: str) -> str:
    return TEMPLATE.joinpath(name).read_text(encoding="utf-8")


def _section(number: int, measured: Measured, drawn: list[dict[str, Any]], several: bool) -> dict[str, Any]:
    names = [*SHOWN, *(["run"] if several else []), *(name for name in COLUMNS if name not in SHOWN)]
    names = [name for name in names if any(row.get(name) is not None for row in measured.rows)]
    columns = [
        {"name": n, "title": SHOWN.get(n, (n, ""))[0], "more": n not in (*SHOWN, "run")} for n in names
    ]
    dense = unpruned(measured.rows)
    letters = ties([*dense, *measured.rows])
    marked = [row | {"tied": letter} for row, letter in zip([*dense, *measured.rows], letters)]
    return {
        "number": number,
        "title": measured.title,
        "unpruned": [_unpruned_line(row, measured.title, len(dense) > 1) for row in marked[: len(dense)]],
        "charts": drawn,
        "columns": columns,
        "rows": [[_cell(row, name) for name in names] for row in marked[len(dense) :]],
        "shared": SHARED if any(letters) else "",
        "failed": measured.failed,
        "pairs": measured.pairs,
        "seeds": measured.seeds,
    }


def _reference(measured: Measured) -> str:
    """What the differences are taken to at first: the unpruned model, or the best row."""
    if any(pair["b"] == UNPRUNED for pair in measured.pairs):
        return UNPRUNED
    return max(measured.rows, key=lambda row: row["top1"])["name"] if measured.rows else ""


def _unpruned_line(row: Row, title: str, several: bool) -> str:
    interval = ""
    if row.get("top1_low") is not None:
        interval = f" (95 % interval {row['top1_low']:.1f} to {row['top1_high']:.1f})"
    speed = f", {_speed(row, ' images/s')}" if row.get("images_per_s") is not None else ""
    beside = f"; beside it: {', '.join(row['beside'])}" if several else ""
    return (
        f"Unpruned top-1: {row['top1']:.2f} %{interval} on {title}, {row['gmacs']:.3f} GMACs{speed} "
        f"(model {row['model']}, weights {row['weights']}){beside}"
    )


def _cell(row: Row, name: str) -> dict[str, str]:
    value = row.get(name)
    if value is None:
        return {"text": "-", "value": ""}
    text = (
        row_label(row)
        if name == "name"
        else _speed(row)
        if name == "images_per_s"
        else format(value, SHOWN[name][1])
        if name in SHOWN
        else f"{value:.5g}"
        if type(value) is float
        else str(value)
    )
    if name == "top1" and row.get("top1_low") is not None:
        text += f" ({row['top1_low']:.1f} to {row['top1_high']:.1f})"
    if name == "unpruned_difference" and row["unpruned_low"] <= 0 <= row["unpruned_high"]:
        text += ", no difference shown"
    return {"text": text, "value": str(value)}


def _speed(row: Row, unit: str = "") -> str:
    scatter = f" ({' to '.join(map(in_figures, ends))}) {row['tied']}" if (ends := spread(row)) else ""
    return f"{in_figures(row['images_per_s'])}{unit}{scatter}".rstrip()


def _notes(runs: Sequence[Run], measured: Sequence[Measured]) -> list[str]:
    """What a reader must know before comparing."""
    rows, notes = [row for each in measured for row in each.rows], []
    if len(measured) > 1:
        notes.append(
            f"These rows were measured on {len(measured)} different sets of images, and accuracies on different "
            "images do not compare: each set has its own charts and table."
        )
    if any(row["accelerator"] == "cpu" and row["images_per_s"] is not None for row in rows):
        notes.append("Speeds on a CPU are not representative: they say nothing of a GPU.")
    machines = {(run.environment.get("platform"), *run.environment.get("gpus", [])) for run in runs}
    if len(machines) > 1:
        notes.append("The runs come from different machines: speeds compare within one run only.")
    random = [row["name"] for row in rows if row["weights"] == "random" or row.get("predictors") == "random"]
    if random:
        notes.append(f"Random weights, whose accuracy says nothing: {', '.join(random)}.")
    failed = [row["name"] for each in measured for row in each.failed]
    if failed:
        notes.append(f"Failed, and in no chart: {', '.join(failed)}.")
    return notes


def _pictures(runs: Sequence[Run]) -> tuple[list[Picture], int]:
    """The runs' pictures, shrunk for the page, and how many had no room."""
    paths = [path for run in runs for path in sorted((run.folder / "pictures").glob("*.png"))]
    found: list[Picture] = []
    for number, path in enumerate(paths):
        found.append(_embed(path))
        if sum(len(each.source) for each in found) > PICTURE_BYTES:
            return found[:-1], len(paths) - number
    return found, 0


def _embed(path: Path) -> Picture:
    try:
        with Image.open(path) as image:
            title = str(image.info.get("Description", path.name))
            small = image.convert("RGB")
    except UNREADABLE as error:
        raise InputError(
            f"runs: {path} must be a whole picture ({error}); remove it or repeat the run"
        ) from error
    small.thumbnail((PICTURE_WIDTH, 16 * PICTURE_WIDTH))
    content = BytesIO()
    small.save(content, format="WEBP", quality=75, method=4)
    source = "data:image/webp;base64," + base64.b64encode(content.getvalue()).decode()
    return Picture(source, title, *small.size)
