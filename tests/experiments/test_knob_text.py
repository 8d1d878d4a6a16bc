"""What a knob was set to stands in the label of its row: on the screen, on the page."""

import re

import pytest
from result_folders import a_row
from rich.console import Console

from prunevit.experiments.comparison.charts import charts
from prunevit.experiments.comparison.screen import print_comparison
from prunevit.experiments.knob_text import row_label


def test_a_row_at_a_cost_tells_its_knob(capsys: pytest.CaptureFixture[str]) -> None:
    asked = a_row("tome", 80.0, 2.7, knob="r", knob_value=[13] * 6 + [14] * 6) | {
        "name": "tome gmacs=2.7 seed=1"
    }
    assert row_label(asked) == "tome r=[13x6, 14x6] (gmacs=2.7) seed=1"
    mixed = {**asked, "knob_value": [13, 14] * 6}
    assert row_label(mixed) == "tome r=13 to 14 (gmacs=2.7) seed=1"
    asked |= {"name": "evit gmacs=2.7", "knob": "keep_rate", "knob_value": 0.659874, "run": "A"}
    assert row_label(asked) == "evit keep_rate=0.6599 (gmacs=2.7)"
    assert row_label({**asked, "name": "mine"}) == "mine"
    assert row_label({**asked, "knob_value": None}) == "evit gmacs=2.7"
    shown = {}
    for width in (80, 130):
        print_comparison(
            [{**asked, "skipped": 0, "passed_over": 0, "empty_folders": 0}], [], Console(width=width)
        )
        shown[width] = capsys.readouterr().out
    assert max(map(len, shown[80].splitlines()[1:])) <= 80
    assert re.search(r"^evit keep_rate=0.6599 +80.00", shown[80], re.M)
    assert re.search(r"^evit keep_rate=0.6599 \(gmacs=2.7\) +80.00", shown[130], re.M)
    (chart, *_) = charts([asked], "top1", "logit_kl")
    assert chart["data"][-2]["text"][0].startswith("<b>evit keep_rate=0.6599 (gmacs=2.7)</b>")
