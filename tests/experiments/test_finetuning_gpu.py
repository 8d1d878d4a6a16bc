"""Fine-tuning on a GPU: mixed precision, compiled code, and two GPUs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from finetuning_runs import finetune, losses, photos, words

from prunevit.experiments.finetuning import step_speed
from prunevit.experiments.finetuning.config import MODES
from prunevit.experiments.finetuning.module import FinetuneModule

pytestmark = [
    pytest.mark.gpu,
    # What inductor says about fp32 products, and about a step of which it captures a part without kernels.
    pytest.mark.filterwarnings(
        "ignore:TensorFloat32:UserWarning", "ignore:The CUDA Graph is empty:UserWarning"
    ),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("data") / "photos", train=16, val=4)


@pytest.mark.parametrize("policy", ["evit", "dynamicvit", "random", "topk"])
def test_mixed_precision_learns(root: Path, tmp_path: Path, policy: str) -> None:
    given = [
        "accelerator=gpu",
        "precision=bf16-mixed",
        "batch_size=16",
        "max_steps=30",
        "lr=3e-3",
        f"policy={policy}",
    ]
    assert finetune(root, tmp_path, *given, "policy.keep_rate=0.5") == 0
    curve = losses(tmp_path)
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5])


def test_mixed_precision_is_near_full_precision(root: Path, tmp_path: Path) -> None:
    """The first step's loss, before the weights drift apart, within the rounding of bf16."""
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        given = ["accelerator=gpu", f"precision={precision}", "batch_size=16", "max_steps=1"]
        assert finetune(root, tmp_path / precision, *given) == 0
    (full,), (half,), (sixteen,) = (losses(tmp_path / each) for each in ("32-true", "bf16-mixed", "16-mixed"))
    assert half == pytest.approx(full, rel=2**-6)
    assert sixteen == pytest.approx(full, rel=2**-9)


@pytest.mark.parametrize("policy", ["evit", "dynamicvit"])
def test_compiled_training_follows_the_same_curve(root: Path, tmp_path: Path, policy: str) -> None:
    given = ["accelerator=gpu", "batch_size=16", "max_steps=6", f"policy={policy}", "lr=1e-4"]
    for mode in MODES:
        assert finetune(root, tmp_path / mode, *given, f"mode={mode}") == 0
    # Compiled code draws other Gumbel noise than eager code.
    bound = 1e-3 if policy == "evit" else 0.5
    for mode in MODES[1:]:
        assert losses(tmp_path / mode) == pytest.approx(losses(tmp_path / "eager"), abs=bound)


def test_a_run_goes_on_as_it_would_have(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = [
        "accelerator=gpu",
        "batch_size=16",
        "max_steps=6",
        "policy=dynamicvit",
        "ema_decay=0.5",
        "mixup=0.5",
    ]
    assert finetune(root, tmp_path / "whole", *given) == 0
    original = FinetuneModule.training_step

    def break_off(self: FinetuneModule, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 5:
            raise ZeroDivisionError
        return original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(FinetuneModule, "training_step", break_off)
        with pytest.raises(ZeroDivisionError):
            finetune(root, tmp_path / "broken", *given, "checkpoint_every_n_steps=4")
    assert finetune(root, tmp_path / "broken", *given, "ckpt_path=last") == 0
    # Sums on a GPU may be taken in another order.
    assert losses(tmp_path / "broken") == pytest.approx(losses(tmp_path / "whole"), abs=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_give_the_curve_of_one(root: Path, tmp_path: Path) -> None:
    given = ["accelerator=gpu", "batch_size=16", "max_steps=6"]
    assert finetune(root, tmp_path / "one", *given) == 0
    command = [sys.executable, "-m", "prunevit.experiments.cli", "finetune"]
    line = [*command, *words(root, tmp_path / "two", *given, "devices=2")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


def test_the_training_step_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    step_speed.main(["--model", "vit_tiny_patch16_224", "--batch-size", "8", "--seconds", "0.1"])
    found = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["mode"]) for row in found["rows"]] == [
        (model, mode) for model in ("dense", "pruned") for mode in MODES
    ]
    assert all(row["step_ms"] > 0 and row["peak_mb"] > 0 for row in found["rows"])
    assert found["peak_memory"] > 0
