"""A comparison that is interrupted, killed or spread over processes ends as one that was not."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
from comparing import EVIT, FAST, FLAKY, MODEL, TOPK, compare, count_calls, read

from prunevit.experiments import data, journal
from prunevit.experiments.cli import main
from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.rows import plan_rows
from prunevit.experiments.comparison.shared import build_contenders, set_keys
from prunevit.experiments.compose import compose
from prunevit.experiments.config import InputError

Folders = Callable[..., Path]
Rows = Callable[..., Path]


@pytest.fixture(autouse=True)
def _flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    monkeypatch.chdir(tmp_path)


def test_a_killed_comparison_goes_on_where_it_was(
    folders: Folders,
    weights: Path,
    rows_file: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    root = folders(a=7, b=7, c=7)
    kill = "policy: {name: 'flaky:Flaky', images: 12, how: kill}"  # in the fourth batch
    words = [*MODEL, *FAST, f"weights={weights}", f"rows={rows_file(TOPK, kill, EVIT)}"]
    words = ["compare", "data=folder", f"data.root={root}", *words]
    patched = "import sys; from prunevit.experiments import journal, cli; journal.EVERY_S = 0; "
    command = [sys.executable, "-c", f"{patched}sys.exit(cli.main(sys.argv[1:]))", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    died = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
    assert died.returncode == -9
    (begun,) = (tmp_path / "outputs").iterdir()
    assert not (begun / "results.json").exists()

    reads = count_calls(monkeypatch, data, "read_image")
    assert main(words) == 0  # the same command, which names no folder
    said = f"going on in outputs/{begun.name}, 9 of 18 batches done: 3 rows on test_vit, 21 images"
    assert f"prunevit: {said}\n" in capsys.readouterr().err
    assert len(reads) == 4 + 9  # what speed is measured on, and what was not done
    assert [*(tmp_path / "outputs").iterdir()] == [begun]
    assert main([*words, "output_dir=whole"]) == 0
    resumed, whole = read(begun), read(tmp_path / "whole")
    assert resumed["rows"] == whole["rows"]
    assert resumed["pairs"] == whole["pairs"]
    once, again = (np.load(folder / "predictions.npz") for folder in (begun, tmp_path / "whole"))
    assert all((once[name] == again[name]).all() for name in again)


def test_an_interrupted_comparison_says_how_it_goes_on(
    folders: Folders,
    rows_file: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(journal, "EVERY_S", 0)
    root, stop = (
        folders(a=4, b=4, c=4),
        "policy: {name: 'flaky:Flaky', images: 8, how: interrupt}, name: stop",
    )
    words = [f"rows={rows_file(EVIT, stop)}", "model.pretrained=false"]
    assert compare(root, tmp_path / "out", *words) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"prunevit: interrupted, the same command goes on where it was ({tmp_path}/out/unfinished)"
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"unfinished"}
    (tmp_path / "out" / "unfinished" / "0-of-1.pt").write_bytes(b"half a file")
    reads = count_calls(monkeypatch, data, "read_image")
    assert compare(root, tmp_path / "out", f"rows={rows_file(EVIT)}", "model.pretrained=false") == 0
    assert len(reads) == 12
    assert len(read(tmp_path / "out")["rows"]) == 1


def test_a_folder_in_which_a_run_works_is_left_to_it(tmp_path: Path) -> None:
    begun = journal.Journal(tmp_path / "outputs" / "begun", {"seed": 1})
    begun.keep([], at_once=True)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"), begun.interruptible():
        raise KeyboardInterrupt
    hold = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, str(begun.folder / journal.LOCK)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert journal.unfinished({"seed": 1}) is None
        with pytest.raises(InputError, match="output_dir: must be a folder that no other run works in, got"):
            journal.Journal(tmp_path / "outputs" / "begun", {"seed": 1})
        other.kill()
    assert journal.unfinished({"seed": 2}) is None
    assert journal.unfinished({"seed": 1}) == Path("outputs/begun")


def test_two_processes_give_the_rows_of_one(
    folders: Folders, weights: Path, rows_file: Rows, tmp_path: Path
) -> None:
    root = folders(a=9, b=8, c=4)
    broken = "policy: {name: 'flaky:Flaky', images: 17}, name: broken"  # on one process alone
    words = [f"weights={weights}", f"rows={rows_file(TOPK, broken, EVIT)}"]
    assert compare(root, tmp_path / "one", *words) == 0
    words = [*MODEL, *FAST, *words, "data=folder", f"data.root={root}", "devices=2", "output_dir=two"]
    command = [sys.executable, "-m", "prunevit.experiments.cli", "compare", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one["pairs"] == two["pairs"]
    for own, other in zip(one["rows"], two["rows"]):
        assert (own["error"] is None) == (other["error"] is None) == (own["name"] != "broken")
        for name in ("images", "top1", "top1_low", "top5", "dense_top1", "agreement", "tokens_by_block"):
            assert own.get(name) == other.get(name), name
        for name in ("logit_kl", "gmacs") if own["error"] is None else ():
            assert own[name] == pytest.approx(other[name], rel=1e-6), name
    once, again = (np.load(tmp_path / name / "predictions.npz") for name in ("one", "two"))
    assert sorted(once) == sorted(again)
    assert all((once[name] == again[name]).all() for name in once)


def test_a_row_is_measured_anew_once_a_base_class_of_its_policy_has_changed(
    rows_file: Rows, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "compared_base.py").write_text(FLAKY)
    (tmp_path / "compared.py").write_text(
        "from compared_base import Flaky\n\nclass Derived(Flaky):\n    pass\n"
    )
    row = "policy: {name: 'compared:Derived'}"
    words = [*MODEL, "data=sample200", f"weights={weights}", f"rows={rows_file(row, EVIT)}"]
    config = compose("compare", CompareConfig, words)
    contenders, _ = build_contenders(plan_rows(config), config)

    def keys() -> list[str]:
        set_keys(contenders, config, {"sha256": "x"})
        return [each.key for each in contenders]

    derived, evit = keys()
    (tmp_path / "compared_base.py").write_text(FLAKY + "# another line\n")
    changed, same = keys()
    assert changed != derived
    assert same == evit


def test_rows_of_the_same_weights_share_them_and_have_keys_of_their_own(
    rows_file: Rows, weights: Path
) -> None:
    def keys(
        *words: str, row: str = TOPK, alter: Callable[[Any], None] = lambda policy: None
    ) -> tuple[list[str], int]:
        words = (*MODEL, "data=sample200", f"weights={weights}", f"rows={rows_file(row, EVIT)}", *words)
        config = compose("compare", CompareConfig, list(words))
        contenders, views = build_contenders(plan_rows(config), config)
        alter(contenders[0].pruned.policies[0])
        set_keys(contenders, config, {"sha256": "x"})
        held = {parameter for each in contenders for parameter in each.pruned.parameters()}
        assert views == [each.pruned.model for each in contenders if each.view]
        return [each.key for each in contenders], sum(parameter.numel() for parameter in held)

    (topk, evit), parameters = keys()
    assert parameters == sum(
        each.numel() for each in timm.create_model("test_vit", num_classes=3).parameters()
    )
    assert topk != evit
    assert keys(row=f"{TOPK}, name: other")[0] == [topk, evit]
    assert keys(row=TOPK.replace("0.4", "0.3"))[0] != [topk, evit]
    # Where a cost is asked for, the photos decide the knob.
    assert keys(alter=lambda policy: setattr(policy, "knob_value", 0.35))[0][0] != topk
    for word in ("batch_size=3", "precision=64-true", "numeric_images=5"):
        assert not {*keys(word)[0]} & {topk, evit}, word
    (again, _, *smaller), parameters_with_smaller = keys("baselines=[resize]")
    assert again == topk
    assert len(smaller) == 3
    assert parameters_with_smaller - parameters == 64 * (82 + 50 + 37)  # position embeddings alone
