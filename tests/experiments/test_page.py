"""`prunevit report`: reading result folders, what is drawn from them, and one clear line for what is wrong."""

import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from result_folders import DATA, a_pair, a_row, two_policies, write_run

from prunevit.experiments.cli import main
from prunevit.experiments.comparison.charts import charts
from prunevit.experiments.comparison.figures import figures
from prunevit.experiments.comparison.page import render_page
from prunevit.experiments.comparison.report_run import write_report
from prunevit.experiments.comparison.saved import UNPRUNED, by_data, read_runs
from prunevit.experiments.comparison.series import plots, series, unpruned
from prunevit.experiments.comparison.tables import escape, latex
from prunevit.experiments.config import InputError

OTHER_DATA = {"name": "photos", "files": 200, "sha256": "2e" * 32}


def content(page: str) -> Any:
    """What the page's script draws."""
    return json.loads(re.findall(r'<script type="application/json" id="content">(.*?)</script>', page)[0])


def drawn(page: str) -> list[list[str]]:
    """Names of the rows in the first chart of each data set."""
    hovers = [
        [text for line in each["charts"][0]["data"] for text in line.get("text", [])]
        for each in content(page)
    ]
    return [[re.findall("<b>(.*?)</b>", text)[0] for text in texts] for texts in hovers]


def test_the_front_holds_what_nothing_else_beats() -> None:
    rows = two_policies()
    cost, speed, deviation = plots(rows)
    assert [row["name"] for row in cost.front(rows)] == ["tome r=16", "evit keep_rate=0.5", "tome r=8"]
    assert [row["name"] for row in speed.front(rows)] == ["tome r=8", "evit keep_rate=0.5", "tome r=16"]
    # The deviation falls as the cost rises, so no row beats another.
    assert [row["gmacs"] for row in deviation.front(rows)] == [1.5, 2.5, 2.75, 3.0]


def test_of_equals_the_front_has_one_and_of_equal_cost_the_better() -> None:
    rows = [a_row("a", 80, 2.0), a_row("b", 80, 2.0), a_row("c", 81, 2.0), a_row("d", 81, 2.5)]
    assert [row["name"] for row in plots(rows)[0].front(rows)] == ["c"]


def test_a_policy_has_its_colour_and_each_line_its_shape() -> None:
    rows = [{**row, "run": run} for run in ("A", "B") for row in two_policies()]
    lines = series(rows)
    assert [line.label for line in lines] == ["evit (A)", "tome (A)", "evit (B)", "tome (B)"]
    assert lines[0].colour == lines[2].colour != lines[1].colour
    assert lines[0].shape != lines[2].shape
    assert [row["gmacs"] for row in lines[0].rows] == [2.5, 3.0]


def test_the_unpruned_model_is_a_point_once() -> None:
    (dense,) = unpruned([{**row, "run": run} for run in ("A", "B") for row in two_policies()])
    assert (dense["top1"], dense["gmacs"], dense["logit_kl"], dense["agreement"]) == (91.0, 4.5, 0.0, 100.0)


def test_charts_hold_every_row_with_its_interval() -> None:
    rows = [{**row, "run": "A"} for row in two_policies()]
    found = {chart["name"]: chart for chart in charts(rows, "top1", "logit_kl")}
    assert list(found) == ["accuracy_gmacs", "accuracy_speed", "deviation_gmacs", "tokens_by_block"]
    lines = {line["name"]: line for line in found["accuracy_gmacs"]["data"]}
    assert lines["tome"]["x"] == [1.5, 2.75]
    assert lines["tome"]["y"] == [70.0, 86.0]
    assert lines["tome"]["error_y"]["array"] == [3, 3]
    assert lines["tome"]["error_y"]["arrayminus"] == [4, 4]
    assert lines["unpruned"]["y"] == [91.0]
    assert lines["Pareto front"]["x"] == [1.5, 2.5, 2.75, 4.5]
    assert "not representative" in found["accuracy_speed"]["layout"]["xaxis"]["title"]["text"]
    assert [line["name"] for line in found["tokens_by_block"]["data"]][:2] == [
        "evit keep_rate=0.5",
        "evit keep_rate=0.7",
    ]
    assert found["tokens_by_block"]["data"][0]["x"] == [*range(12), 11.5]
    assert found["tokens_by_block"]["data"][0]["y"] == [*(197.0 - 10 * block for block in range(12)), 87.0]


def test_a_front_of_one_row_is_no_line() -> None:
    """It is as accurate as the unpruned model, and cheaper."""
    row = {**a_row("evit", 91.0, 2.0), "run": "A"}
    (chart, *_) = charts([row], "top1", "logit_kl")
    assert [line["name"] for line in chart["data"]] == ["evit", "unpruned"]
    assert "Pareto" not in chart["note"]
    assert b"Pareto" not in figures([row])["accuracy_gmacs.svg"]


def test_a_speed_that_was_not_measured_is_no_point() -> None:
    rows = [{**row, "run": "A", "images_per_s": None, "dense_images_per_s": None} for row in two_policies()]
    assert "accuracy_speed" not in [chart["name"] for chart in charts(rows, "top1", "logit_kl")]


def test_a_folder_of_evaluate_needs_no_names(tmp_path: Path) -> None:
    """One row without name, kind, error and data."""
    plain = a_row("evit", 85.0, 3.0, knob="keep_rate", knob_value=0.7)
    row = {key: value for key, value in plain.items() if key not in ("name", "kind", "error", "data")}
    (run,) = read_runs([write_run(tmp_path / "A", [{**row, "error": None}])])
    assert [row["name"] for row in run.rows] == ["evit keep_rate=0.7"]
    folder = tmp_path / "B"
    folder.mkdir()
    whole = json.loads((tmp_path / "A" / "results.json").read_text())
    (folder / "results.json").write_text(
        json.dumps({key: whole[key] for key in ("schema", "environment", "config")} | {"rows": [row]})
    )
    page = render_page(read_runs([folder]))
    assert "<title>Accuracy on 200 images of photos</title>" in page
    assert drawn(page) == [["evit keep_rate=0.7", "unpruned"]]


def test_rows_of_different_images_are_never_in_one_chart(tmp_path: Path) -> None:
    folders = [
        write_run(tmp_path / "A", two_policies()),
        write_run(tmp_path / "B", [a_row("topk", 80, 2.0)]),
        write_run(tmp_path / "C", [a_row("ats", 60, 2.0, data=OTHER_DATA)]),
    ]
    page = render_page(read_runs(folders))
    first, second = drawn(page)
    assert {"tome r=8", "topk"} <= {*first}
    assert "ats" not in first
    assert second == ["ats", "unpruned"]
    assert "measured on 2 different sets of images" in page
    assert "(files 1f1f1f1f) and on 200 images of photos (files 2e2e2e2e)" in page
    one_set = render_page(read_runs(folders[:2]))
    assert "different sets" not in one_set
    assert len(content(one_set)) == 1


def test_fewer_images_of_a_set_are_other_images(tmp_path: Path) -> None:
    plain = {"data": {"name": "photos"}}  # of a run without hashes
    folders = [
        write_run(tmp_path / "A", [a_row("a", 80, 2.0, **plain)]),
        write_run(tmp_path / "B", [a_row("b", 80, 2.0, **plain, images=100)]),
    ]
    titles = [each.title for each in by_data(read_runs(folders))]
    assert titles == ["200 images of photos", "100 images of photos"]


def test_one_name_in_two_runs_gets_the_folder_behind_it(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, two_policies()[:2]) for name in ("A", "B")]
    (measured,) = by_data(read_runs(folders))
    assert [row["name"] for row in measured.rows] == [
        f"evit keep_rate={rate} ({folder.name})" for folder in folders for rate in (0.7, 0.5)
    ]
    between = [pair for pair in measured.pairs if pair["b"] != UNPRUNED]
    assert [pair["a"] for pair in between] == [f"evit keep_rate=0.7 ({folder.name})" for folder in folders]


def test_folders_of_one_name_are_told_apart_by_those_above(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / where / "out", two_policies()[:1]) for where in ("x/1", "y/1", "y/2")]
    names = [row["name"] for run in read_runs(folders) for row in run.rows]
    assert names == [f"evit keep_rate=0.7 ({where}/out)" for where in ("x/1", "y/1", "y/2")]


def test_a_row_that_failed_is_told_and_in_no_chart(tmp_path: Path) -> None:
    broken = {"name": "bad", "policy": "my:P", "kind": "policy", "error": "<b>boom</b>", "data": DATA}
    page = render_page(read_runs([write_run(tmp_path / "A", [*two_policies(), broken])]))
    assert "Failed, and in no chart: bad." in page
    assert "&lt;b&gt;boom&lt;/b&gt;" in page
    assert all("bad" not in names for names in drawn(page))


def test_what_the_page_says_first(tmp_path: Path) -> None:
    page = render_page(read_runs([write_run(tmp_path / "A", two_policies(weights="random"))]))
    body = page[page.index("<body>") :]
    lines = re.findall(r"<(?:h1|p)[^>]*>(.*?)</", body)
    assert lines[0] == "Accuracy on 200 images of photos"
    assert lines[1].startswith(
        "Unpruned top-1: 91.00 % (95 % interval 86.0 to 94.0) on 200 images of photos, 4.500 GMACs"
    )
    assert "Speeds on a CPU are not representative" in lines[2]
    assert lines[3].startswith("Random weights, whose accuracy says nothing: evit keep_rate=0.7")
    assert "prunevit compare policies=[evit]" in page


def test_the_page_holds_everything_itself(tmp_path: Path) -> None:
    """No address is left that a browser would fetch, whatever the names of the rows."""
    rows = [*two_policies(), a_row("</script><img src=x>", 60, 1.0)]
    page = render_page(read_runs([write_run(tmp_path / "A", rows)]))
    assert "</script><img" not in page
    assert re.findall(r"""(?:src|href)=["'](?!data:)""", page[: page.index("/**\n* plotly.js")]) == []
    assert "default-src 'none'" in page
    assert [row for row in drawn(page)[0] if "script" in row] == ["&lt;/script&gt;&lt;img src=x&gt;"]


def test_twenty_rows_with_pictures_stay_below_5_mb(tmp_path: Path) -> None:
    rows = [a_row(f"p{number} keep_rate=0.5", 80 + number / 2, 2 + number / 10) for number in range(20)]
    folder = write_run(tmp_path / "A", rows)
    (folder / "pictures").mkdir()
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), dtype=np.uint8)
    for number in range(7):
        Image.fromarray(noise).save(folder / "pictures" / f"{number}.png", compress_level=0)
    page, *_ = write_report([folder], folder / "report.html")
    assert page.stat().st_size < 5_000_000
    shown, left = (
        page.read_text().count("data:image/webp"),
        re.findall(r"(\d+) more in the run", page.read_text()),
    )
    assert shown + int(left[0]) == 7
    assert shown >= 1


def test_latex_is_escaped_and_says_what_is_not_shown(tmp_path: Path) -> None:
    assert escape(r"a_b & 50 % #1 {x} \y ~^ <$") == (
        r"a\_b \& 50 \% \#1 \{x\} \textbackslash{}y \textasciitilde{}\textasciicircum{} \textless{}\$"
    )
    text = latex(by_data(read_runs([write_run(tmp_path / "A", two_policies())])))
    lines = text.splitlines()
    assert r"unpruned & 91.00 (86.0--94.0) & 100.00 & 4.500 & 10.0 &  \\" in lines
    assert r"evit keep\_rate=0.7 & 85.00 (81.0--88.0) & 87.00 & 3.000 & 15.0 & $-6.00$ \\" in lines
    assert r"evit keep\_rate=0.5 & 80.00 (76.0--83.0) & 82.00 & 2.500 & 18.0 & $-11.00$ \\" in lines
    assert r"tome r=8 & 86.00 (82.0--89.0) & 88.00 & 2.750 & 16.4 & $-5.00$\textsuperscript{=} \\" in lines
    assert lines[0] == r"% \usepackage{array,booktabs}"
    assert [line for line in lines if "{table*}" in line] == [r"\begin{table*}", r"\end{table*}"]
    assert (
        r"\caption{Accuracy on 200 images of photos. Gap: to the unpruned model on the same images; " in text
    )
    body = [line for line in lines if line.endswith(r"\\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in body} == {5}


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_latex_fits_over_both_columns(tmp_path: Path) -> None:
    rows = [
        {**row, "weights": f"outputs/{n}-12-01_10-00-00/best.safetensors"}
        for n, row in enumerate(two_policies())
    ]
    rows.append(a_row("evit keep_rate=0.5 layers=[4,8] 2026-12-01_10-00-00/best", 80.0, 2.5))
    table = latex(by_data(read_runs([write_run(tmp_path / "A", rows)])))
    head = r"\documentclass[twocolumn]{article}\usepackage{array,booktabs}\begin{document}"
    (tmp_path / "paper.tex").write_text(f"{head}\n{table}\n\\end{{document}}\n")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert said.returncode == 0, said.stdout
    assert "Overfull" not in said.stdout


def test_figures_are_whole_and_the_same_each_time() -> None:
    rows = [{**row, "run": "A"} for row in two_policies()]
    made = figures(rows)
    names = ("accuracy_gmacs", "accuracy_speed", "deviation_gmacs", "tokens_by_block")
    assert [*made] == [f"{name}.{kind}" for name in names for kind in ("pdf", "svg")]
    assert made == figures(rows)
    for name in names:
        assert made[f"{name}.pdf"].startswith(b"%PDF")
        assert ET.fromstring(made[f"{name}.svg"]).tag.endswith("svg")
    words = "".join(ET.fromstring(made["accuracy_speed.svg"]).itertext())
    assert all(word in words for word in ("evit", "tome", "unpruned", "Pareto front", "not representative"))


def test_figures_of_odd_names_and_of_shares_at_their_end() -> None:
    rows = [{**row, "run": "A", "name": f"日本 $x_$ {row['name']}"} for row in two_policies()]
    rows[0] |= {"top1": 100.0, "top1_high": 99.99999999999999}  # as rounding left it in earlier results
    assert "日本" in "".join(ET.fromstring(figures(rows)["tokens_by_block.svg"]).itertext())


def test_the_files_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "A", two_policies())
    assert main(["report", str(folder)]) == 0
    assert str(folder / "report.html") in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == {"results.json", "report.html", "table.tex", "figures"}
    other = write_run(tmp_path / "B", [a_row("ats", 60, 2.0, data=OTHER_DATA)])
    page = tmp_path / "both" / "page.html"
    assert main(["report", str(folder), str(other), f"output={page}", "metric=agreement"]) == 0
    assert sorted(path.name for path in (page.parent / "figures").iterdir()) == ["data1", "data2"]
    assert content(page.read_text())[0]["charts"][0]["data"][1]["y"] == [82.0, 87.0]


def _half_written(folder: Path) -> None:
    folder.mkdir()
    (folder / "config.yaml").write_text("seed: 0\n")


def _cut_off(folder: Path) -> None:
    path = write_run(folder, two_policies()) / "results.json"
    path.write_text(path.read_text()[:-40])


def _without_a_column(folder: Path) -> None:
    write_run(folder, [{key: value for key, value in a_row("a", 80, 2.0).items() if key != "gmacs"}])


def _with(**entries: Any) -> Callable[[Path], object]:
    return lambda folder: write_run(folder, [{**a_row("a", 80.0, 2.0), **entries}])


BROKEN: dict[str, Callable[[Path], object]] = {
    "got 'x' as top1 of row 1": _with(top1="x"),
    "got None as gmacs of row 1": _with(gmacs=None),
    "got 'none' as kind of row 1": _with(kind="none"),
    "got 3 as tokens_by_block of row 1": _with(tokens_by_block=3),
    "got {'images_per_s': 3} as timing of row 1": _with(timing={"images_per_s": 3}),
    "got [] as images_per_s of row 1": _with(images_per_s=[]),
    "got something else as seeds": lambda folder: write_run(folder, two_policies(), seeds=[{"rows": None}]),
    "got something else as pairs": lambda folder: write_run(folder, two_policies(), pairs="x"),
    "must hold results, got an empty folder": Path.mkdir,
    "must hold results.json, which is written last": _half_written,
    "must be whole, got half a file or no JSON": _cut_off,
    "must be of schema 1, got 2": lambda folder: write_run(folder, two_policies(), schema=2),
    "must be of schema 1, got None": lambda folder: write_run(folder, two_policies(), schema=None),
    "must hold environment, config and at least one row": lambda folder: write_run(folder, []),
    "must have all columns in each row, got none named gmacs": _without_a_column,
    "must be a folder of results, got a file": lambda folder: folder.write_text("x"),
    "must be a folder of results, got none": lambda folder: None,
    "at least one row must have succeeded": lambda folder: write_run(
        folder, [{"name": "bad", "error": "x", "policy": "p", "kind": "policy"}]
    ),
}


@pytest.mark.parametrize("line", BROKEN)
def test_a_folder_that_is_not_one_of_results(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    BROKEN[line](tmp_path / "A")
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", str(tmp_path / "A"), f"output={tmp_path}/page.html"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert line in said[0]
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], ["runs: must name at least one folder of results, got none"]),
        (["A", "A"], ["runs: each folder must be given once, got A again"]),
        (["A", "B", "C"], ["runs: B must be a folder of results", "runs: C must be a folder of results"]),
        (["A", "output=page.pdf"], ["output: must end in .html, got page.pdf"]),
        (["A", "metric=top2"], ["metric: must be one of top1, top5, real_top1, agreement, got top2"]),
        (["A", "metric=real_top1"], ["metric: no row has real_top1; choose another"]),
        (
            ["A", "deviation=kl"],
            ["deviation: must be one of logit_kl, logit_mean_abs, logit_max_abs, got kl"],
        ),
        (["A", "output=A/results.json/page.html"], ["output: must be a file that can be written"]),
        (
            ["A", "output=/proc/page.html"],
            ["output: must be a file that can be written, got /proc/page.html"],
        ),
    ],
)
def test_wrong_words(
    words: list[str],
    lines: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("A"), two_policies())
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *words]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == len(lines)
    assert all(line in each for line, each in zip(lines, said))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_broken_picture_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "A", two_policies())
    (folder / "pictures").mkdir()
    (folder / "pictures" / "1.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"1\.png must be a whole picture"):
        render_page(read_runs([folder]))


def test_pairs_and_seeds_are_told(tmp_path: Path) -> None:
    rows = [a_row(f"random seed={seed}", 80 + seed, 2.0) for seed in range(3)]
    group = {"rows": [row["name"] for row in rows], "top1_mean": 81.0, "top1_std": 1.0}
    page = render_page(read_runs([write_run(tmp_path / "A", rows, seeds=[group])]))
    assert "random seed=0, random seed=1, random seed=2: top-1 81.00 &plusmn; 1.00 %" in page
    pairs = content(page)[0]["pairs"]
    assert [(pair["a"], pair["b"]) for pair in pairs[:3]] == [(row["name"], UNPRUNED) for row in rows]
    assert [pair["difference"] for pair in pairs[:3]] == [-11, -10, -9]
    assert pairs[3] == a_pair(rows[0], rows[1])
    assert content(page)[0]["reference"] == UNPRUNED
    assert "no difference shown" not in " ".join(
        re.findall("<td[^>]*>([^<]*)</td>", page[: page.index("<details>")])
    )


def test_the_table_says_where_no_difference_is_shown(tmp_path: Path) -> None:
    page = render_page(read_runs([write_run(tmp_path / "A", [a_row("a", 89, 2.0), a_row("b", 79, 1.0)])]))
    cells = re.findall(r"<td[^>]*>([+-][\d.]+(?:, .*?)?)</td>", page[: page.index("<details>")])
    assert cells == ["-2.00, no difference shown", "-12.00"]
