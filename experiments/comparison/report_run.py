# ruff: noqa: RUF009 (`key` returns dataclass fields)
"""`prunevit report`: results on disk made into a page, a table and figures, without a GPU or the data."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prunevit.experiments.comparison.figures import figures
from prunevit.experiments.comparison.page import render_page
from prunevit.experiments.comparison.saved import by_data, read_runs
from prunevit.experiments.comparison.series import DEVIATIONS, METRICS
from prunevit.experiments.comparison.tables import latex
from prunevit.experiments.config import InputError, VerbConfig, key
from prunevit.experiments.report import replace_files


@dataclass
class ReportConfig(VerbConfig):
    """The keys of `prunevit report`."""

    runs: list[str] = key([], "folders that evaluate or compare wrote")
    output: str | None = key(
        None, "the HTML file, replaced if it is there; null: report.html in the folder, of several: here"
    )
    metric: str = key("top1", "what the accuracy charts show", choices=tuple(METRICS))
    deviation: str = key("logit_kl", "what the chart of logits shows", choices=tuple(DEVIATIONS))

    def problems(self) -> list[str]:
        """Say what is wrong with the paths, a line each."""
        lines = []
        if not self.runs:
            lines.append("runs: must name at least one folder of results, got none")
        if self.output is not None and Path(self.output).suffix != ".html":
            lines.append(f"output: must end in .html, got {self.output}")
        return lines

    @property
    def page(self) -> Path:
        """The HTML file."""
        return Path(self.output or (Path(self.runs[0]) if len(self.runs) == 1 else Path()) / "report.html")


def run(config: ReportConfig) -> list[Path]:
    """Make the report.

    Args:
        config: The composed configuration.

    Returns:
        The files, the page first.

    Raises:
        InputError: If the input is wrong; nothing is written then.
    """
    written = write_report([*map(Path, config.runs)], config.page, config.metric, config.deviation)
    print(f"report in {written[0]}; beside it {written[1].name} and {len(written) - 2} figures")
    return written


def write_report(
    folders: Sequence[Path], page: Path, metric: str = "top1", deviation: str = "logit_kl"
) -> list[Path]:
    """Write the page, and beside it table.tex and figures/*: all of them or none.

    Args:
        folders: Result folders; their pictures/*.png go into the page.
        page: The HTML file.
        metric: A key of `series.METRICS`.
        deviation: A key of `series.DEVIATIONS`.

    Returns:
        The files, the page first.

    Raises:
        InputError: If results cannot be read, no row has the metric, or the target cannot be written.
    """
    runs = read_runs(folders)
    measured = by_data(runs)
    rows = [row for each in measured for row in each.rows]
    if not rows:
        raise InputError(
            f"runs: at least one row must have succeeded, got none in {', '.join(map(str, folders))}"
        )
    if all(row.get(metric) is None for row in rows):
        raise InputError(f"metric: no row has {metric}; choose another")
    contents: dict[Path, str | bytes] = {
        page: render_page(runs, metric, deviation),
        page.parent / "table.tex": latex(measured),
    }
    for number, each in enumerate(measured):
        folder = page.parent / "figures" / (f"data{number + 1}" if len(measured) > 1 else "")
        contents |= {
            folder / name: content for name, content in figures(each.rows, metric, deviation).items()
        }
    try:
        for folder in {path.parent for path in contents}:
            folder.mkdir(parents=True, exist_ok=True)
        replace_files(contents)
    except OSError as error:
        raise InputError(
            f"output: must be a file that can be written, got {page} ({error.strerror})"
        ) from error
    return [*contents]
