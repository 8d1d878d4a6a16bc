"""wandb: what is on disk offline equals the row; online without a key is one line."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from wandb_records import records, updates

from prunevit.experiments.config import InputError, LoggerConfig
from prunevit.experiments.tracking import tracked

SETTINGS = {"seed": 1, "policy": {"name": "evit", "keep_rate": 0.7}}
ROW = {
    "policy": "evit",
    "top1": 93.25,
    "layers": [3, 6],
    "peak_mb": None,
    "tokens_by_block": [{"mean": 140.0}],
}


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    yield tmp_path
    wandb.teardown()  # it reads the environment once a process


def test_offline_records_the_row_and_the_configuration(quiet: Path) -> None:
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


def test_a_failed_run_is_finished_as_failed(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "from-environment")
    with pytest.raises(KeyboardInterrupt), tracked(LoggerConfig("wandb"), SETTINGS):
        raise KeyboardInterrupt
    wandb.teardown()  # the file is complete only once wandb's own process has ended
    found = records(quiet)
    (end,) = [record.exit for record in found if record.WhichOneof("record_type") == "exit"]
    (run,) = [record.run for record in found if record.WhichOneof("record_type") == "run"]
    assert (end.exit_code, run.project) == (1, "from-environment")


def test_online_without_a_key_is_one_line(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(quiet))
    with (
        pytest.raises(InputError, match=r"logger: wandb could not start .*logger\.mode=offline"),
        tracked(LoggerConfig("wandb", mode="online"), SETTINGS),
    ):
        pass


def test_none_touches_nothing(quiet: Path) -> None:
    with tracked(LoggerConfig(), SETTINGS) as rows:
        rows.append(ROW)
    assert list(quiet.iterdir()) == []
