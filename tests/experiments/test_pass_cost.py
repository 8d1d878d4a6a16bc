"""The cost of a comparison beside its parts: which rows, which images, and that the figures belong together."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.pass_cost import WORDS, main
from prunevit.experiments.comparison.rows import plan_rows
from prunevit.experiments.compose import compose


def test_twenty_rows_are_timed_as_a_whole_and_in_parts(
    folders: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "model=vit_tiny_patch16_224",
        "model.pretrained=false",
        "model.num_classes=3",
        "model.img_size=32",
    ]
    words += ["data=folder", f"data.root={folders(a=2, b=2, c=1)}", "data.num_workers=0", "batch_size=4"]
    cost = main(["--output", str(tmp_path / "out"), "--repeats", "2", *words, "accelerator=cpu"])
    assert (cost.rows, cost.images, [*cost.ratios]) == (20, 10, ["eager"])
    assert min(cost.pass_s, cost.read_s, cost.forward_s["eager"]) > 0
    assert cost.ratios["eager"] == pytest.approx(cost.pass_s / (cost.read_s + cost.forward_s["eager"]))
    written = json.loads((tmp_path / "out" / "pass_cost.json").read_text())
    assert {name: written[name] for name in vars(cost)} == vars(cost)
    assert written["config"]["batch_size"] == 4
    line = (tmp_path / "out" / "pass_cost.md").read_text()
    assert line.startswith("| 20 rows | 10 images | ")
    assert capsys.readouterr().out == line


def test_the_default_is_five_policies_at_four_rates_on_the_bundled_photos() -> None:
    config = compose("compare", CompareConfig, [*WORDS])
    rows = [(row.policy["name"], row.policy["keep_rate"]) for row in plan_rows(config)]
    assert len({*rows}) == 20
    assert {rate for _, rate in rows} == {0.8, 0.7, 0.5, 0.3}
    assert (config.model.name, config.data.name, config.data.num_images) == ("sample", "sample", None)
