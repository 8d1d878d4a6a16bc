"""A run that was killed ends as one that was not; files are whole or not there."""

import errno
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_runs import curve, finetune, in_process, losses, photos
from safetensors.torch import load_file

from prunevit.experiments.config import InputError
from prunevit.experiments.finetuning.atomic import atomically, remove_leftovers
from prunevit.experiments.finetuning.module import FinetuneModule

# Everything that draws or remembers: predictors and their Gumbel noise, mixing, erasing, stochastic depth, an average.
EVERYTHING = [
    *(
        "policy=dynamicvit",
        "mixup=0.8",
        "cutmix=1.0",
        "aa=rand-m9-mstd0.5-inc1",
        "reprob=0.5",
        "ema_decay=0.8",
    ),
    *(
        "drop_path=0.2",
        "accumulate_grad_batches=2",
        "keep_rate_warmup_steps=5",
        "frozen_epochs=0.5",
        "lr=1e-2",
    ),
    *("distillation_weight=0.5", "max_steps=9", "batch_size=4", "layer_decay=0.8", "warmup_steps=2"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def unbroken(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "out"
    assert finetune(root, out, *EVERYTHING) == 0
    return out


def same(one: Path, other: Path) -> bool:
    a, b = load_file(one / "best.safetensors"), load_file(other / "best.safetensors")
    return all(torch.equal(a[name], b[name]) for name in {*a, *b})


@pytest.mark.parametrize(("step", "every"), [(3, 2), (4, 4), (8, 1)])
def test_a_run_broken_at_any_step(
    root: Path, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, every: int
) -> None:
    """An epoch is 4 steps; validations follow steps 4, 8 and 9."""
    words = [*EVERYTHING, f"checkpoint_every_n_steps={every}"]
    original = FinetuneModule.training_step

    def break_off(self: FinetuneModule, batch: Any, batch_idx: int) -> Any:
        if self.global_step == step and batch_idx % 2:
            raise ZeroDivisionError
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneModule, "training_step", break_off)
        with pytest.raises(ZeroDivisionError):
            finetune(root, tmp_path, *words)
    assert finetune(root, tmp_path, *words, "ckpt_path=last") == 0
    assert losses(tmp_path) == losses(unbroken)
    figures = ("step", "val/top1", "val/loss", "lr", "keep_rate")
    assert [{name: row.get(name) for name in figures} for row in curve(tmp_path)] == [
        {name: row.get(name) for name in figures} for row in curve(unbroken)
    ]
    assert same(tmp_path, unbroken)


@pytest.mark.parametrize("first", [3, 4])
def test_a_finished_run_is_made_longer(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    """Where lr does not hang on the length, the longer run is the one that was so long from the beginning."""
    words = [word for word in EVERYTHING if not word.startswith("max_steps")] + ["min_lr=1e-2"]
    assert finetune(root, tmp_path / "whole", *words, "max_steps=9") == 0
    assert finetune(root, tmp_path / "longer", *words, f"max_steps={first}") == 0
    capsys.readouterr()
    assert finetune(root, tmp_path / "longer", *words, "max_steps=9", "ckpt_path=last") == 0
    assert f"9 steps where {first} were planned" in capsys.readouterr().out
    assert losses(tmp_path / "longer") == losses(tmp_path / "whole")
    a, b = (load_file(tmp_path / name / "last.safetensors") for name in ("longer", "whole"))
    assert all(torch.equal(a[name], b[name]) for name in {*a, *b})


def test_lr_of_a_longer_run_is_that_of_its_own_schedule(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a cosine over 4 steps, then over 12: an epoch is 4 steps."""
    assert finetune(root, tmp_path, "max_steps=null", "max_epochs=1") == 0
    assert finetune(root, tmp_path, "max_steps=null", "max_epochs=3", "ckpt_path=last") == 0
    cosine = [(step, 4) for step in range(4)] + [(step, 12) for step in range(4, 12)]
    expected = [1e-3 * (1 + math.cos(math.pi * step / steps)) / 2 for step, steps in cosine]
    assert [row["lr"] for row in curve(tmp_path) if "lr" in row] == pytest.approx(expected)
    assert [row["step"] for row in curve(tmp_path) if "val/top1" in row] == [0, 4, 8, 12]
    capsys.readouterr()
    assert finetune(root, tmp_path, "max_steps=11", "ckpt_path=last") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "max_steps: a run that goes on must have at least the 12 steps that it had, got 11; raise" in line


def test_killed_for_real(root: Path, unbroken: Path, tmp_path: Path) -> None:
    process = in_process(root, tmp_path, *EVERYTHING, "checkpoint_every_n_steps=1")
    while process.poll() is None and not (tmp_path / "last.ckpt").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL, "it ended before it could be killed"
    assert finetune(root, tmp_path, *EVERYTHING, "ckpt_path=last") == 0
    assert losses(tmp_path) == pytest.approx(losses(unbroken), abs=1e-5)


def test_parts_and_recomputed_activations_change_nothing(root: Path, tmp_path: Path) -> None:
    words = ["max_steps=4", "drop_path=0.3", "policy=random"]
    assert finetune(root, tmp_path / "plain", *words) == 0
    assert finetune(root, tmp_path / "again", *words, "grad_checkpointing=true") == 0
    assert losses(tmp_path / "again") == pytest.approx(losses(tmp_path / "plain"), abs=1e-6)
    steady = ["max_steps=4", "policy=evit"]
    assert finetune(root, tmp_path / "whole", *steady) == 0
    assert finetune(root, tmp_path / "parts", *steady, "accumulate_grad_batches=2", "data.num_workers=2") == 0
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), abs=1e-5)
    assert losses(tmp_path / "whole")[0] != losses(tmp_path / "plain")[0]


def test_only_the_same_run_goes_on(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert finetune(root, tmp_path, "max_steps=2") == 0
    capsys.readouterr()
    for word, line in (
        ("lr=2e-3", "lr was 0.001 there, got 0.002"),
        ("policy.keep_rate=0.6", "policy.keep_rate was 0.5 there, got 0.6"),
    ):
        assert finetune(root, tmp_path, "max_steps=2", "ckpt_path=last", word) == 2
        assert line in capsys.readouterr().err
    (tmp_path / "other.ckpt").write_bytes(b"no checkpoint")
    torch.save({"prunevit": {"computation": 3}, "global_step": 1}, tmp_path / "odd.ckpt")
    for name in ("other", "odd"):
        assert finetune(root, tmp_path, "max_steps=2", f"ckpt_path={tmp_path / name}.ckpt") == 2
        assert "must be a checkpoint of prunevit finetune" in capsys.readouterr().err
    # The same names must stand for the same files.
    photo = root / "train" / "red" / "0.png"
    photo.rename(photo.with_name("10.png"))
    assert finetune(root, tmp_path, "max_steps=2", "ckpt_path=last") == 2
    assert "the training images must be the ones that the run began with" in capsys.readouterr().err
    photo.with_name("10.png").rename(photo)
    # It may go on in another place.
    elsewhere = tmp_path / "elsewhere"
    assert finetune(root, elsewhere, "max_steps=2", f"ckpt_path={tmp_path / 'last.ckpt'}") == 0
    assert (elsewhere / "config.yaml").is_file()
    capsys.readouterr()
    # A finished run has nothing to do.
    before = curve(tmp_path)
    assert finetune(root, tmp_path, "max_steps=2", "ckpt_path=last") == 0
    assert curve(tmp_path) == before
    # Without ckpt_path nothing is replaced unasked.
    assert finetune(root, tmp_path, "max_steps=2") == 2
    assert "already holds results" in capsys.readouterr().err


BASE = """
from prunevit.policies import TopK

class Base(TopK):
    share = {share}
"""
DERIVED = """
from resumed_base import Base

class Derived(Base):
    pass
"""


def test_a_base_class_of_the_policy_in_another_file_counts(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "resumed_base.py").write_text(BASE.format(share=1))
    (tmp_path / "resumed_policy.py").write_text(DERIVED)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["policy=resumed_policy:Derived", "policy.keep_rate=0.5", "max_steps=2"]
    assert finetune(root, tmp_path / "out", *words) == 0
    assert finetune(root, tmp_path / "out", *words, "ckpt_path=last") == 0
    capsys.readouterr()
    (tmp_path / "resumed_base.py").write_text(BASE.format(share=2))
    assert finetune(root, tmp_path / "out", *words, "ckpt_path=last") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the policy's files must be the ones that the run began with" in line


def test_the_newest_of_several_runs_goes_on(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        assert finetune(root, tmp_path / "outputs" / f"run{seed}", "max_steps=1", f"seed={seed}") == 0
    capsys.readouterr()
    assert finetune(root, tmp_path, "output_dir=null", "max_steps=1", "seed=2", "ckpt_path=last") == 0
    assert "goes on from outputs/run2/last.ckpt at step 1" in capsys.readouterr().out


def test_a_full_disk_leaves_the_last_good_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    original, saved = torch.save, []

    def full(content: Any, path: Any, *rest: Any, **more: Any) -> None:
        saved.append(path)
        if len(saved) == 3:
            Path(path).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(content, path, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert finetune(root, tmp_path, "max_steps=6", "checkpoint_every_n_steps=1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "last.ckpt could not be written (No space left on device); the last good one is kept" in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "last.ckpt", "metrics.csv"]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2
    assert finetune(root, tmp_path, "max_steps=6", "checkpoint_every_n_steps=1", "ckpt_path=last") == 0


def test_two_runs_never_share_a_folder(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hold = "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.lockf(file, fcntl.LOCK_EX); print(); input()"
    command = [sys.executable, "-c", hold, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert finetune(root, tmp_path, "max_steps=1") == 2
        other.kill()
    assert "output_dir: must be a folder that no other run works in, got" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == [".lock"]
    assert finetune(root, tmp_path, "max_steps=1") == 0
    assert not (tmp_path / ".lock").exists()


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    target = tmp_path / "file"
    with atomically(target) as path:
        path.write_text("one")

    def fail(error: BaseException) -> None:
        with atomically(target) as path:
            path.write_text("tw")
            raise error

    for error in (KeyboardInterrupt(), OSError(errno.ENOSPC, "full")):
        with pytest.raises((KeyboardInterrupt, InputError)):
            fail(error)
        assert [each.name for each in tmp_path.iterdir()] == ["file"]
        assert target.read_text() == "one"
    # What a killed run leaves is not the target, and the next run removes it.
    (tmp_path / ".file.part").write_text("tw")
    remove_leftovers(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
