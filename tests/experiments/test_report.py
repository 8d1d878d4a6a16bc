"""The files of a run: whole, valid, never half-written, never silently replaced."""

import csv
import io
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from prunevit.experiments import report
from prunevit.experiments.config import (
    DataConfig,
    EvaluateConfig,
    InputError,
    LoggerConfig,
    ModelConfig,
)
from prunevit.experiments.output_dir import take_back
from prunevit.experiments.ranks import NAMES
from prunevit.experiments.report import COLUMNS, choose_output_dir, finite, print_report, write_results


def config(**keys: Any) -> EvaluateConfig:
    return EvaluateConfig(
        model=ModelConfig("sample"),
        data=DataConfig("sample"),
        logger=LoggerConfig(),
        policy={"name": "evit", "keep_rate": 0.5},
        **keys,
    )


def row(**values: Any) -> dict[str, Any]:
    ends = [f"{name}_{end}" for name in ("top5", "dense_top1", "dense_top5") for end in ("low", "high")]
    numbers: dict[str, Any] = dict.fromkeys([*COLUMNS, *ends], 1.5)
    more = {
        "real_top1": None,
        "dense_real_top1": None,
        "skipped": 0,
        "passed_over": 0,
        "empty_folders": 0,
        "dense_tokens": 197,
        "tokens_by_block": [{"mean": 1.0}],
    }
    return {
        **numbers,
        **more,
        "layers": [3, 6],
        "accelerator": "cpu",
        "peak_mb": None,
        "dense_peak_mb": None,
        **values,
    }


def test_the_three_files(tmp_path: Path) -> None:
    write_results(tmp_path / "new" / "out", config(seed=3), [row(top1=float("nan"))])
    folder = tmp_path / "new" / "out"
    assert sorted(file.name for file in folder.iterdir()) == ["config.yaml", "results.csv", "results.json"]
    content = json.loads((folder / "results.json").read_text())
    assert content["schema"] == 1
    assert content["config"]["seed"] == 3
    assert content["rows"][0]["top1"] is None
    assert content["rows"][0]["tokens_by_block"] == [{"mean": 1.0}]
    assert set(COLUMNS) <= set(content["rows"][0])
    assert {"torch", "timm", "python", "commit", "command"} <= set(content["environment"])
    (read,) = csv.DictReader(io.StringIO((folder / "results.csv").read_text()))
    assert tuple(read) == COLUMNS
    assert (read["layers"], read["top1"], read["top5"]) == ("[3, 6]", "", "1.5")
    assert OmegaConf.load(folder / "config.yaml").policy.keep_rate == 0.5


def test_columns_are_those_of_the_schema() -> None:
    expected = (
        "policy keep_rate knob knob_value layers model weights trained seed img_size images top1 top1_low "
        "top1_high top5 dense_top1 dense_top5 agreement logit_max_abs logit_mean_abs logit_kl logit_cosine "
        "numeric_max_abs tokens_mean tokens_p5 tokens_p95 gmacs policy_gmacs dense_gmacs images_per_s "
        "dense_images_per_s speedup latency_ms dense_latency_ms peak_mb dense_peak_mb batch_size mode backend "
        "accelerator precision"
    )
    assert " ".join(COLUMNS) == expected


def test_a_failing_write_leaves_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(InputError, match=r"could not be written to .*out \(No space left on device\)"):
        write_results(tmp_path / "out", config(), [row()])
    assert list((tmp_path / "out").iterdir()) == []


def test_a_setting_that_is_not_finite_loses_nothing(tmp_path: Path) -> None:
    made = config()
    made.policy["threshold"] = float("nan")
    write_results(tmp_path, made, [row()])
    assert json.loads((tmp_path / "results.json").read_text())["config"]["policy"]["threshold"] is None
    assert OmegaConf.load(tmp_path / "config.yaml").policy.threshold != 0.0
    assert ".nan" in (tmp_path / "config.yaml").read_text()
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(report.FILES)


def test_what_cannot_be_said_in_a_file_touches_none(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write_results(tmp_path / "out", config(), [row(extra=object())])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_move_that_fails_takes_the_others_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    moved, replace = [], report.os.replace

    def move(source: str, target: Path) -> None:
        moved.append(target)
        if len(moved) == fails_at:
            raise OSError(5, "Input/output error")
        replace(source, target)

    monkeypatch.setattr(report.os, "replace", move)
    with pytest.raises(InputError, match="Input/output error"):
        write_results(tmp_path, config(), [row()])
    assert list(tmp_path.iterdir()) == []


def loop(folder: Path) -> str:
    (folder / "loop").symlink_to(folder / "loop")
    return str(folder / "loop")


def dangling(folder: Path) -> str:
    (folder / "link").symlink_to(folder / "nowhere")
    return str(folder / "link" / "out")


def taken(folder: Path) -> str:
    (folder / "results.json").mkdir()
    return str(folder)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (loop, "Too many levels of symbolic links"),
        (dangling, "link is a link to nothing"),
        (lambda folder: str(folder / ("a" * 256)), "a name is too long"),
        (lambda folder: str(folder / "new" / ("é" * 128)), "a name is too long"),
        (lambda folder: f"{folder}/a\0b", "null byte"),
        (taken, "results.json there is a folder"),
    ],
    ids=["loop", "dangling link", "long name", "long name below a new folder", "null byte", "folder"],
)
def test_a_place_where_nothing_can_be_written_is_one_line(
    tmp_path: Path, make: Callable[[Path], str], reason: str
) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        choose_output_dir(config(output_dir=make(tmp_path)))
    (line,) = caught.value.problems
    assert line.startswith("output_dir: must be a folder that can be written, got ")


def test_a_table_alone_counts_as_results(tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text("")
    with pytest.raises(InputError, match="already holds results"):
        choose_output_dir(config(output_dir=str(tmp_path)))


def test_existing_results_are_refused_unless_overwritten(tmp_path: Path) -> None:
    write_results(tmp_path, config(), [row()])
    with pytest.raises(InputError, match="already holds results; choose another or set overwrite=true"):
        choose_output_dir(config(output_dir=str(tmp_path)))
    assert choose_output_dir(config(output_dir=str(tmp_path), overwrite=True)) == tmp_path


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"output_dir: must be a folder that can be written, got .*file/out"):
        choose_output_dir(config(output_dir=str(tmp_path / "file" / "out")))


def test_a_folder_that_was_named_is_not_made_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_output_dir(config(output_dir="a/b/c")) == Path("a/b/c")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock: all runs start in the same second."""

    class Noon(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Noon":
            return cls(2026, 1, 2, 12, 0, 0)

    monkeypatch.setattr(report, "datetime", Noon)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("noon")
def test_runs_of_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [str(choose_output_dir(config())) for _ in range(3)]
    assert found == [f"outputs/2026-01-02_12-00-00{end}" for end in ("", "-1", "-2")]
    (tmp_path / found[1] / "results.json").write_text("{}")
    take_back()
    assert [each.name for each in (tmp_path / "outputs").iterdir()] == ["2026-01-02_12-00-00-1"]
    take_back()
    assert (tmp_path / "outputs").is_dir()


@pytest.mark.usefixtures("noon")
def test_threads_that_race_for_a_folder_all_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: choose_output_dir(config()), range(24)))
    assert len(set(found)) == 24
    assert all(each.is_dir() for each in found)
    take_back()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("noon")
@pytest.mark.parametrize("name", NAMES)
def test_only_the_first_process_makes_the_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(name, "1")
    choose_output_dir(config())
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(name, "0")
    assert choose_output_dir(config()).is_dir()
    take_back()


def test_a_folder_that_was_there_is_left_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs").mkdir()
    choose_output_dir(config())
    take_back()
    assert [each.name for each in tmp_path.iterdir()] == ["outputs"]


def test_results_written_in_the_meantime_are_not_replaced(tmp_path: Path) -> None:
    asked = config(output_dir=str(tmp_path / "out"))
    first, second = choose_output_dir(asked), choose_output_dir(asked)
    write_results(first, asked, [row(top1=1.0)])
    with pytest.raises(InputError, match="already holds results; choose another or set overwrite=true"):
        write_results(second, asked, [row(top1=2.0)])
    assert json.loads((first / "results.json").read_text())["rows"][0]["top1"] == 1.0
    write_results(second, config(output_dir=str(second), overwrite=True), [row(top1=2.0)])
    assert json.loads((first / "results.json").read_text())["rows"][0]["top1"] == 2.0


def test_finite_at_any_depth() -> None:
    nan, inf = float("nan"), float("inf")
    assert finite({"a": nan, "b": [1.0, inf, {"c": -inf}], "d": (2, "x")}) == {
        "a": None,
        "b": [1.0, None, {"c": None}],
        "d": [2, "x"],
    }


def printed(**values: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=120)
    print_report(row(**values), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_first_line_is_the_unpruned_accuracy() -> None:
    lines = printed(dense_top1=93.0, images=300, model="sample", weights="sample")
    assert lines[0] == "unpruned top-1 93.00 % on 300 images (sample, weights sample)"


def test_the_table_says_what_a_cpu_speed_is_worth_and_what_was_left_out() -> None:
    text = "\n".join(
        printed(skipped=2, numeric_max_abs=None, latency_ms=None, real_top1=80.0, dense_real_top1=81.0)
    )
    assert "not representative" in text
    assert "unreadable images left out: 2" in text
    assert "passed over" not in text
    more = printed(passed_over=3, empty_folders=1)
    assert "files passed over, which no image format ends like: 3" in more
    assert "class folders without images: 1" in more
    assert "ReaL" in text
    assert "peak MB" not in text
    assert "not representative" not in "\n".join(printed(accelerator="gpu"))


def test_the_widest_row_fits_into_80_columns() -> None:
    ends = {
        f"{name}_{end}": 100.0
        for name in ("top1", "top5", "dense_top1", "dense_top5")
        for end in ("low", "high")
    }
    widest = {name: 100.0 for name in ("top1", "top5", "dense_top1", "dense_top5")}
    tokens = {f"tokens_{name}": 577.0 for name in ("mean", "p5", "p95")}
    speeds = {f"{side}{name}": 123456.7 for side in ("", "dense_") for name in ("images_per_s", "latency_ms")}
    timing = {
        name: {"median": speed, "p20": speed - 1e3, "p80": speed + 1e3} for name, speed in speeds.items()
    }
    effect = {"logit_max_abs": -1.234e-10, "logit_mean_abs": -1.234e-10}
    made = row(**widest, **ends, **tokens, **speeds, **effect, timing=timing)
    console = Console(file=io.StringIO(), width=80)
    print_report(made, console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert any("block tokens (p5 to p95)" in line and "577.0 (577.0 to 577.0)" in line for line in lines)
    assert not any("…" in line for line in lines)
    assert any("images/s (p20-p80)" in line and line.count("123457 (122457-124457)") == 2 for line in lines)
    labels = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert all(labels), "a label or a figure goes on in a second line"
