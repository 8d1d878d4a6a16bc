"""`prunevit finetune` on a small model (timm's test_vit at 64 px: 6 blocks, 17 tokens) and photos of three colours."""

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prunevit.experiments.cli import main
from prunevit.experiments.compose import compose
from prunevit.experiments.finetuning.config import FinetuneConfig

MODEL = [
    "model=test_vit",
    "model.pretrained=false",
    "model.num_classes=3",
    "model.img_size=64",
    "accelerator=cpu",
]
NUMBERS = [
    "policy.layers=[1,3]",
    "batch_size=4",
    "lr=1e-3",
    "warmup_steps=0",
    "scale_min=0.9",
    "layer_decay=null",
]
NUMBERS += [
    "label_smoothing=0",
    "distillation_weight=0",
    "ema_decay=0",
    "color_jitter=0",
]  # what the recipe adds
QUIET = ["progress=false", "data.num_workers=0"]


def photos(root: Path, train: int = 6, val: int = 3) -> Path:
    """`root/train` and `root/val` with noisy photos of the classes red, green and blue."""
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for channel, name in enumerate(("red", "green", "blue")):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = draw.integers(0, 100, (72, 72, 3), dtype=np.uint8)
                pixels[..., channel] += 150
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    return root


def words(root: Path, output: Path, *given: str) -> list[str]:
    """Words of a short run; those given win."""
    said = {word.partition("=")[0] for word in given}
    defaults = ["data=folder", f"data.root={root}", f"output_dir={output}", *MODEL, *NUMBERS, *QUIET]
    return [*(word for word in defaults if word.partition("=")[0] not in said), *given]


def finetune(root: Path, output: Path, *given: str) -> int:
    """Run in this process; the exit code."""
    return main(["finetune", *words(root, output, *given)])


def config(root: Path, *given: str) -> FinetuneConfig:
    """The configuration of such a run."""
    return compose("finetune", FinetuneConfig, words(root, root / "unused", *given))


def in_process(
    root: Path, output: Path, *given: str, launcher: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """Start a run in a process of its own."""
    command = [
        sys.executable,
        *launcher,
        "-m",
        "prunevit.experiments.cli",
        "finetune",
        *words(root, output, *given),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def curve(output: Path) -> list[dict[str, Any]]:
    """The rows of metrics.csv, numbers as numbers."""
    with (output / "metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def losses(output: Path) -> list[float]:
    """`train/loss` of each step."""
    return [row["train/loss"] for row in curve(output) if "train/loss" in row]
