"""Small image folders, and a command line that runs a small model on them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from prunevit.experiments.cli import main

Folders = Callable[..., Path]
Evaluate = Callable[..., int]


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """Make `root/<class>/<n>.png` photos of noise; `folders(cat=3, dog=2)` returns the root."""

    def make(name: str = "photos", size: int = 40, **counts: int) -> Path:
        root = tmp_path / name
        generator = np.random.default_rng(0)
        for folder, count in counts.items():
            (root / folder).mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(0, 256, (size, size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / folder / f"{number}.png")
        return root

    return make


@pytest.fixture
def evaluate() -> Evaluate:
    """Run `prunevit evaluate` on timm's test_vit (6 blocks, 101 tokens, random weights)."""
    fast = ["timing_s=0", "numeric_images=2", "progress=false", "data.num_workers=0", "batch_size=4"]
    model = ["model=test_vit", "model.pretrained=false", "model.num_classes=3", "accelerator=cpu"]

    def run(root: Path, output: Path, *overrides: str) -> int:
        where = ["data=folder", f"data.root={root}", f"output_dir={output}"]
        policy = [] if any(word.startswith("policy=") for word in overrides) else ["policy.layers=[1,3]"]
        given = {word.partition("=")[0] for word in overrides}
        defaults = [word for word in (*model, *where, *fast, *policy) if word.partition("=")[0] not in given]
        return main(["evaluate", *defaults, *overrides])

    return run


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Weights of test_vit with three classes whose logits and attention differ from image to image."""
    torch.manual_seed(3)
    model: Any = timm.create_model("test_vit", num_classes=3)
    with torch.no_grad():  # fresh weights attend evenly and give logits that hardly differ
        model.head.weight.mul_(30)
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a file of rows, given as YAML in one line each."""

    def write(*rows: str) -> Path:
        (tmp_path / "rows.yaml").write_text("rows:\n" + "".join(f"- {{{row}}}\n" for row in rows))
        return tmp_path / "rows.yaml"

    return write
