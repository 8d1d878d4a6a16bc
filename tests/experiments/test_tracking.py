"""wandb: what is on disk offline equals the row; online without a key is one line."""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from wandb_records import all_records, history, records, updates

from prunevit.experiments.cli import main
from prunevit.experiments.compose import compose, read_yaml
from prunevit.experiments.config import EvaluateConfig, InputError, LoggerConfig
from prunevit.experiments.tracking import tracked, tracked_comparison

SETTINGS = {"seed": 1, "policy": {"name": "evit", "keep_rate": 0.7}}
ROW = {
    "policy": "evit",
    "top1": 93.25,
    "layers": [3, 6],
    "peak_mb": None,
    "tokens_by_block": [{"mean": 140.0}],
}


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    return tmp_path


@pytest.fixture
def wandb(quiet: Path) -> Iterator[Any]:
    module = pytest.importorskip("wandb")
    yield module
    module.teardown()  # it reads the environment once a process


def test_offline_records_the_row_and_the_configuration(quiet: Path, wandb: Any) -> None:
    logger = LoggerConfig("wandb", mode="offline", project="pruning", group="table", run_name="evit 0.7")
    with tracked(logger, SETTINGS) as rows:
        rows.append(ROW)
    wandb.teardown()  # the file is complete only once wandb's own process has ended
    found = records(quiet)
    summary, config = updates(found, "summary"), updates(found, "config")
    assert {key: summary[key] for key in ROW} == ROW
    assert {key: config[key] for key in SETTINGS} == SETTINGS
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_group, run.display_name) == ("pruning", "table", "evit 0.7")
    (end,) = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
    assert end.exit_code == 0


def test_a_failed_run_is_finished_as_failed(quiet: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "from-environment")
    with pytest.raises(KeyboardInterrupt), tracked(LoggerConfig("wandb"), SETTINGS):
        raise KeyboardInterrupt
    wandb.teardown()  # the file is complete only once wandb's own process has ended
    found = records(quiet)
    (end,) = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (end.exit_code, run.project) == (1, "from-environment")


@pytest.mark.usefixtures("wandb")
def test_online_without_a_key_is_one_line(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(quiet))
    with (
        pytest.raises(InputError, match=r"logger: wandb could not start .*logger\.mode=offline"),
        tracked(LoggerConfig("wandb", mode="online"), SETTINGS),
    ):
        pass


@pytest.mark.usefixtures("wandb")
def test_online_without_a_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    with (
        pytest.raises(InputError, match=r"logger: wandb could not start .*logger\.mode=offline") as caught,
        tracked_comparison(LoggerConfig("wandb", mode="online"), SETTINGS, "table"),
    ):
        pass
    assert len(caught.value.problems) == 1


def test_a_comparison_is_a_run_for_each_row_and_one_for_all(
    quiet: Path, wandb: Any, folders: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(quiet)
    rows = "{policy: {name: top_p, p: 0.5, layers: [1, 3]}}, {policy: {name: random, layers: [2]}}"
    (quiet / "rows.yaml").write_text(f"rows: [{rows}]\n")
    words = ["model=test_vit", "model.pretrained=false", "model.num_classes=3", "accelerator=cpu"]
    words += ["data=folder", f"data.root={folders(a=2, b=2, c=2)}", "data.num_workers=0", "timing_s=0.01"]
    words += ["rows=rows.yaml", "output_dir=out", "progress=false", "pictures=1", "batch_size=4"]
    assert main(["compare", *words, "logger=wandb", "logger.mode=offline", "logger.project=pruning"]) == 0
    wandb.teardown()
    written = {row["name"]: row for row in json.loads((quiet / "out" / "results.json").read_text())["rows"]}
    runs = {
        run.run.display_name or "all": found
        for found in all_records(quiet)
        for run in found
        if run.run.run_id
    }
    assert set(runs) == {"top_p p=0.5 layers=[1,3]", "random keep_rate=0.7 layers=[2]", "all"}
    for found in runs.values():
        (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
        assert (run.project, run.run_group) == ("pruning", "out")
        (end,) = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
        assert end.exit_code == 0
    for name, row in written.items():
        _same_row(runs[name], row)
    assert updates(runs["all"], "config")["numeric_images"] == 4
    (line,) = history(runs["all"])
    assert line["rows.nrows"] == 2
    assert any(key.startswith("pareto") for key in line)


def _same_row(found: list[Any], row: dict[str, Any]) -> None:
    summary = updates(found, "summary")
    assert {key: summary[key] for key in row} == row
    assert updates(found, "config")["policy"] == row["config"]["policy"]
    tokens = [line for line in history(found) if "block" in line]
    assert [line["block"] for line in tokens] == [*range(6)]
    for line, block in zip(tokens, row["tokens_by_block"]):
        assert {name: line[f"tokens/{name}"] for name in block} == block
    assert any(key.startswith("kept") for line in history(found) for key in line)
    metrics = [record.metric for record in found if record.WhichOneof("record_type") == "metric"]
    assert {(metric.name or metric.glob_name, metric.step_metric) for metric in metrics} >= {
        ("tokens/*", "block")
    }
    artifacts = [record for record in found if "artifact" in str(record.WhichOneof("record_type") or "")]
    artifacts += [record.request.log_artifact for record in found if record.request.HasField("log_artifact")]
    assert artifacts


def _sweep_commands() -> list[list[str]]:
    made = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    sweep = read_yaml("sweep.yaml")
    names, choices = zip(*((name, each["values"]) for name, each in sweep["parameters"].items()))
    commands = []
    for values in itertools.product(*choices):
        settings = {name: {"value": value} for name, value in zip(names, values)}
        words = made.create_sweep_command_args({"args": settings})["args_no_hyphens"]
        *command, macro = sweep["command"]
        assert macro == "${args_no_hyphens}"
        commands.append([*command, *words])
    return commands


def test_every_command_of_the_sweep_composes() -> None:
    commands = _sweep_commands()
    assert len(commands) == 28
    for program, verb, *words in commands:
        assert (program, verb) == ("prunevit", "evaluate")
        made = compose("evaluate", EvaluateConfig, words)
        assert made.logger.name == "wandb"
        assert f"policy.keep_rate={made.policy['keep_rate']}" in words
        assert f"policy.layers={made.policy['layers']}".replace(" ", "") in words


def test_none_touches_nothing(quiet: Path) -> None:
    with tracked(LoggerConfig(), SETTINGS) as rows:
        rows.append(ROW)
    assert list(quiet.iterdir()) == []
