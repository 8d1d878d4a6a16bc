"""`prunevit report`: results on disk made into a page, a table and figures, without a GPU or the data."""

from collections.abc import Sequence
from pathlib import Path

from prunevit.experiments.comparison.config import ReportConfig
from prunevit.experiments.comparison.figures import figures
from prunevit.experiments.comparison.page import render_page
from prunevit.experiments.comparison.saved import by_data, read_runs
from prunevit.experiments.comparison.tables import latex
from prunevit.experiments.config import InputError
from prunevit.experiments.report import replace_files


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
