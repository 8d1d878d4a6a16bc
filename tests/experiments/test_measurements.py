"""Comparisons and tables from made-up figures."""

from pathlib import Path

import pytest

from prunevit.experiments.benchmark.measurements import (
    WRONG,
    Measurement,
    Measurements,
    break_even,
    compare,
    overhead,
    within,
)
from prunevit.experiments.benchmark.plots import draw
from prunevit.experiments.benchmark.summary import figure_table, summary, target_table
from prunevit.experiments.timing import Spread

MS = "ms a batch"


def figure(
    contestant: str, median: float | None, mode: str = "graph", place: str = "batch 4", note: str = ""
) -> Measurement:
    value = None if median is None else Spread(median, 0.9 * median, 1.1 * median)
    return Measurement(place, contestant, mode, MS, value, note, images=4)


FIGURES = Measurements(
    [
        figure("dense", 6.0, "eager"),
        figure("dense", 3.0),
        figure("ours", 2.0),
        figure("ours", 5.0, "eager"),
        figure("broken", None, note=WRONG),
        figure("half", 1.0, "eager"),
        figure("half", None, note=WRONG),
    ]
)


def test_each_side_is_taken_in_its_best_mode() -> None:
    target = FIGURES.faster("speed", "batch 4", "ours", "dense", MS, 1.5)
    assert (target.ratio, target.met) == (1.5, True)
    assert FIGURES.faster("speed", "batch 4", "ours", "dense", MS, 1.51).met is False
    assert FIGURES.faster("speed", "batch 4", "ours", "dense", MS, 1.0, mode="eager").ratio == 1.2


def test_a_failed_check_gives_no_ratio() -> None:
    for ours, theirs in (("broken", "dense"), ("dense", "broken")):
        target = FIGURES.faster("speed", "batch 4", ours, theirs, MS, 1.0)
        assert (target.ratio, target.met) == (None, None)
        assert WRONG in target.note
    assert FIGURES.faster("speed", "batch 4", "half", "dense", MS, 1.0).ratio == 3.0
    assert FIGURES.faster("speed", "batch 4", "half", "dense", MS, 1.0, mode="graph").ratio is None
    assert FIGURES.faster("speed", "batch 4", "nobody", "dense", MS, 1.0).note == "ours was not measured"


def test_upper_bounds() -> None:
    ours, dense = (FIGURES.find("batch 4", name, MS) for name in ("ours", "dense"))
    target = compare("memory", "batch 4", ours, dense, 0.7, at_most=True)
    assert (target.ratio, target.met) == (pytest.approx(2 / 3), True)
    assert within("time", "batch 4", ours, 1.9).met is False
    assert within("time", "batch 4", None, 1.9).met is None


def test_what_is_beyond_a_free_figure_is_a_share_of_the_whole() -> None:
    eager, free, whole, broken = (
        FIGURES.find("batch 4", *each)
        for each in (("ours", MS, "eager"), ("ours", MS), ("dense", MS, "eager"), ("broken", MS))
    )
    target = overhead("cost", "batch 4", eager, free, whole, 0.4)
    assert (target.ratio, target.met, target.at_most) == (0.5, False, True)
    assert target.note == "ours 5 (eager) less ours 2 (graph), of dense 6 (eager)"
    for sides in ((broken, free, whole), (eager, broken, whole), (eager, free, broken), (eager, None, whole)):
        assert overhead("cost", "batch 4", *sides, 0.4).met is None


@pytest.mark.parametrize(
    ("ours", "expected"),
    [((3.0, 1.0, 1.0), 8), ((1.0, 3.0, 1.0), 64), ((1.0, 1.0, 1.0), 1), ((1.0, 1.0, 3.0), None)],
)
def test_break_even_is_where_it_wins_from_there_on(ours: tuple[float, ...], expected: int | None) -> None:
    places = {batch: f"batch {batch}" for batch in (1, 8, 64)}
    figures = [figure("dense", 2.0, place=place) for place in places.values()]
    figures += [figure("ours", time, place=place) for place, time in zip(places.values(), ours)]
    assert break_even(Measurements(figures), "ours", "dense", MS, places) == expected


def test_tables() -> None:
    target = FIGURES.faster("speed", "batch 4", "ours", "dense", MS, 1.4)
    broken = FIGURES.faster("speed", "batch 4", "broken", "dense", MS, 1.4)
    lines = target_table([target, broken])
    assert lines[2] == "| speed | batch 4 | >= 1.4 | 1.500 | yes | ours 2 (graph) against dense 3 (graph) |"
    assert lines[3] == "| speed | batch 4 | >= 1.4 | - | - | broken (graph): incorrect |"
    rows = figure_table(FIGURES.entries)
    assert "| ours | graph | 2 (1.8 to 2.2) | 2000 |  |" in rows
    assert "| broken | graph | - | - | incorrect |" in rows
    text = summary({"suite": "model", "gpus": ["H"]}, FIGURES, [target], ["a note"])
    assert text.startswith("# prunevit bench suite=model\n")
    assert all(part in text for part in ("- gpus: ['H']", "### batch 4", "- a note"))


def test_pictures_leave_out_what_has_no_value(tmp_path: Path) -> None:
    (path,) = draw(FIGURES, tmp_path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw(Measurements([figure("broken", None, note=WRONG)]), tmp_path) == []
