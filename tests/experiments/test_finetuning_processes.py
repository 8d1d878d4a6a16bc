"""Two processes on a CPU compute what one computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from finetuning_processes import STEADY
from finetuning_runs import curve, finetune, losses, photos


def test_two_processes(tmp_path: Path) -> None:
    """Of 18 photos 2 are left over in each epoch, and 9 held-out ones do not divide evenly."""
    root, script = photos(tmp_path / "photos"), Path(__file__).with_name("finetuning_processes.py")
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(script),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(root), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("recipe sample") == 2  # one process speaks for both

    assert finetune(root, tmp_path / "one", *STEADY) == 0
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    one, two = ([row for row in curve(tmp_path / name) if "val/top1" in row] for name in ("one", "two"))
    assert [row["val/top1"] for row in one] == [row["val/top1"] for row in two]
    assert [row["val/loss"] for row in one] == pytest.approx([row["val/loss"] for row in two], abs=1e-5)

    # DDP stops at a parameter that a step leaves out: the predictors are always there.
    assert len(losses(tmp_path / "learnable")) == 3
    assert (tmp_path / "learnable" / "best.safetensors").is_file()
