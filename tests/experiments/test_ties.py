"""Nobody reads an order into speeds that overlap, nor a difference without knowing from what."""

from pathlib import Path
from typing import Any

import pytest
from result_folders import a_row, write_run
from rich.console import Console

from prunevit.experiments.comparison.page import render_page
from prunevit.experiments.comparison.saved import by_data, read_runs
from prunevit.experiments.comparison.screen import print_comparison
from prunevit.experiments.comparison.series import unpruned
from prunevit.experiments.comparison.tables import latex
from prunevit.experiments.comparison.ties import SHARED, ties

Row = dict[str, Any]
COUNTS = dict.fromkeys(("skipped", "passed_over", "empty_folders"), 0)


def timed(name: str, low: float, high: float, **more: Any) -> Row:
    """A row whose speed lies between two percentiles, beside an unpruned model at 9 to 11 images/s."""
    spreads = {"images_per_s": (low, high), "dense_images_per_s": (9.0, 11.0)}
    timing = {key: {"median": sum(ends) / 2, "p20": ends[0], "p80": ends[1]} for key, ends in spreads.items()}
    return a_row(name, 85.0, 3.0, images_per_s=(low + high) / 2, timing=timing, **COUNTS) | more


def test_rows_share_a_letter_where_their_speeds_overlap() -> None:
    assert ties([timed("a", *ends) for ends in ((1, 3), (2, 5), (4, 6), (7, 8))]) == ["a", "ab", "b", ""]
    assert ties([timed("a", 2, 5), a_row("b", 80, 2.0), timed("c", 5, 6), timed("d", 1, 9)]) == [
        *("a", "", "a", "a")
    ]
    assert ties([timed("a", 1, 2), timed("b", 3, 4)]) == ["", ""]
    apart = ties([timed("a", number, number + 0.5) for number in range(30) for _ in range(2)])
    assert apart[::2] == apart[1::2] == [*"abcdefghijklmnopqrstuvwxyz", "a1", "b1", "c1", "d1"]


@pytest.mark.parametrize("width", [80, 100])
def test_the_screen_shows_how_far_speeds_scatter(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [timed("evit keep_rate=0.7", 13, 15), timed("fixed_rate keep_rate=0.7", 14.5, 16)]
    rows += [timed("topk keep_rate=0.7", 10.5, 12, unpruned_verdict="no difference shown")]
    print_comparison(rows, [], Console(width=width))
    head, *lines = capsys.readouterr().out.splitlines()
    assert (
        head == "unpruned top-1 91.00 % on 200 images (vit, weights w), 4.50 GMACs, 10.0 img/s (9.00-11.0) a"
    )
    assert max(map(len, lines)) <= width
    words = {line.split()[0]: line.split()[3:] for line in lines if "keep_rate" in line}
    assert words == {
        "evit": ["81.0-88.0", "-6.00", "3.00", "14.0", "13.0-15.0", "b", "1.50"],
        "fixed_rate": ["81.0-88.0", "-6.00", "3.00", "15.2", "14.5-16.0", "b", "1.50"],
        "topk": ["81.0-88.0", "not", "shown", "3.00", "11.2", "10.5-12.0", "a", "1.50"],
    }
    assert lines[0].split() == ["gap", "to"]
    assert SHARED in lines


def test_without_overlap_there_are_no_letters(capsys: pytest.CaptureFixture[str]) -> None:
    print_comparison([timed("evit", 13, 15), timed("topk", 16, 17)], [], Console(width=80))
    said = capsys.readouterr().out
    assert SHARED not in said
    assert "13.0-15.0  1.50" in said


def test_each_unpruned_model_is_named_with_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = {"weights": "B/best.safetensors", "dense_top1": 88.0}
    # A smaller model stands beside the comparison's own, which no row prunes.
    beside = {"dense_model": "vit", "dense_weights": "plain", "dense_img_size": 196, "dense_top1": 80.0}
    rows = [timed("evit", 13, 15), timed("topk", 13, 15, **tuned), timed("ats", 13, 15)]
    rows += [timed("tiny", 20, 21, kind="model", model="vit_tiny", weights="sample", **beside)]
    print_comparison(rows, [], Console(width=100))
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("unpruned top-1")]
    assert [(line.split()[2], line.partition(" (")[2].partition(")")[0]) for line in heads] == [
        ("91.00", "vit, weights w"),
        ("88.00", "vit, weights B/best.safetensors"),
        ("80.00", "vit, weights plain"),
    ]
    assert [line.rpartition("beside it: ")[2] for line in heads] == ["evit, ats", "topk", "tiny"]
    assert [row["beside"] for row in unpruned(rows)] == [["evit", "ats"], ["topk"], ["tiny"]]
    page = render_page(read_runs([write_run(tmp_path / "A", rows)]))
    assert "(model vit, weights B/best.safetensors); beside it: topk" in page


def test_the_page_and_the_paper_mark_them_too(tmp_path: Path) -> None:
    runs = read_runs([write_run(tmp_path / "A", [timed("evit", 13, 15), timed("topk", 14.5, 16)])])
    page = render_page(runs)
    assert ">14.0 (13.0 to 15.0) a<" in page
    assert "4.500 GMACs, 10.0 images/s (9.00 to 11.0) (model vit" in page
    assert SHARED in page
    assert ">gap to unpruned, points<" in page
    text = latex(by_data(runs))
    assert r"3.000 & 15.2\textsuperscript{a}" in text
    assert f" R{SHARED[1:]}.}}" in text
