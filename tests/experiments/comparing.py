"""Comparisons on timm's test_vit (6 blocks, 101 tokens), for the tests of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from prunevit.experiments.cli import main

FAST = [
    "timing_s=0",
    "pictures=0",
    "numeric_images=2",
    "progress=false",
    "data.num_workers=0",
    "batch_size=4",
]
MODEL = ["model=test_vit", "model.num_classes=3", "accelerator=cpu"]
TOPK, EVIT = "policy: {name: topk, layers: [1, 3], keep_rate: 0.4}", "policy: {name: evit, layers: [2]}"
# A policy that fails, or ends its process, at a place in the data set.
FLAKY = """
import os, signal
from prunevit.policies import TopK

class Flaky(TopK):
    def __init__(self, keep_rate=0.5, layers=(1, 3), images=99, how="raise"):
        super().__init__(keep_rate, layers)
        self.images, self.how = images, how

    def forward(self, tokens, attention, layer):
        if int(tokens.image_index[0]) >= self.images:
            if self.how == "raise":
                raise RuntimeError("not this image")
            if self.how == "interrupt":
                raise KeyboardInterrupt
            if not os.path.exists("stopped"):
                open("stopped", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(tokens, attention, layer)
"""


def compare(root: Path, output: Path | None, *words: str) -> int:
    where = [f"output_dir={output}"] if output else []
    given = {word.partition("=")[0] for word in words}
    defaults = [word for word in (*MODEL, *FAST) if word.partition("=")[0] not in given]
    return main(["compare", "data=folder", f"data.root={root}", *where, *defaults, *words])


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """A list that grows by the arguments of each call."""
    calls, function = [], getattr(owner, name)

    def counted(*given: Any) -> Any:
        calls.append(given)
        return function(*given)

    monkeypatch.setattr(owner, name, counted)
    return calls


def read(output: Path) -> dict[str, Any]:
    return json.loads((output / "results.json").read_text())
