"""The speed part of an evaluation: what ran is said, for both models."""

import pytest
import torch
from tests_support import small_vit

from prunevit import prune
from prunevit.accelerate import MODES, accelerate
from prunevit.experiments import config
from prunevit.experiments.speed import mode_of, speed
from prunevit.policies import EViT


def test_the_modes_of_the_configuration_are_those_of_accelerate() -> None:
    assert config.MODES == MODES


@pytest.mark.parametrize("mode", ["eager", "best"])
@torch.no_grad()
def test_on_a_cpu_eager_runs(mode: str) -> None:
    images = torch.randn(3, 3, 96, 96, dtype=torch.float64)
    row = speed(prune(small_vit(), EViT(0.5, (1,))), images, torch.arange(3), mode, seconds=0.0)
    assert row["mode"] == "pruned eager, dense eager"
    assert row["speedup"] == row["images_per_s"] / row["dense_images_per_s"]
    assert row["peak_mb"] is None
    assert ("eager_ms" in row["timing"]) == (mode == "best")


def test_the_mode_that_best_chose_depends_on_the_shape() -> None:
    fast = accelerate(small_vit())
    one, two = ((torch.zeros(batch, 3, 96, 96),) for batch in (1, 2))
    for inputs, times in (
        (one, {"eager": 3.0, "graph": 1.0}),
        (two, {"eager": 3.0, "compile": 2.0, "graph": 4.0}),
    ):
        fast.chosen[tuple((each.shape, each.dtype) for each in inputs)] = times
    assert (mode_of(fast, one), mode_of(fast, two)) == ("graph", "compile")
    assert mode_of(accelerate(small_vit(), "compile"), one) == "compile"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "best"])
@torch.no_grad()
def test_modes_on_a_gpu(mode: str) -> None:
    images = torch.randn(3, 3, 96, 96, device="cuda")
    pruned = prune(small_vit().float().cuda(), EViT(0.5, (1,)))
    row = speed(pruned, images, torch.arange(3, device="cuda"), mode, seconds=0.05)
    assert row["mode"].startswith("pruned graph, dense graph" if mode == "graph" else "pruned ")
    assert row["peak_mb"] > 0
    assert {"eager_ms", "dense_eager_ms"} <= set(row["timing"])
