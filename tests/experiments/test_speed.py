"""The speed part of an evaluation: what ran is said, for both models."""

from collections.abc import Sequence

import pytest
import torch
from tests_support import small_vit

from prunevit import RaggedViT, prune
from prunevit.execution import MODES, accelerate, signature
from prunevit.experiments import config, speed
from prunevit.experiments.speed import Pair, Racer, mode_of, speeds
from prunevit.experiments.timing import Call, Spread
from prunevit.policies import EViT


def pair(pruned: RaggedViT, images: torch.Tensor, mode: str) -> Pair:
    positions = torch.arange(len(images), device=images.device)
    return Pair(Racer(pruned, (images, positions), mode), Racer(pruned.model, (images,), mode))


def test_the_modes_of_the_configuration_are_those_of_accelerate() -> None:
    assert config.MODES == MODES


@pytest.mark.parametrize("mode", ["eager", "best"])
@torch.no_grad()
def test_on_a_cpu_eager_runs(mode: str) -> None:
    images = torch.randn(3, 3, 96, 96, dtype=torch.float64)
    (row,) = speeds([pair(prune(small_vit(), EViT(0.5, (1,))), images, mode)], mode, seconds=0.0)
    assert row["mode"] == "pruned eager, dense eager"
    assert row["speedup"] == row["images_per_s"] / row["dense_images_per_s"]
    assert row["peak_mb"] is None
    assert ("eager_ms" in row["timing"]) == (mode == "best")


@torch.no_grad()
def test_models_of_several_rows_are_timed_in_turn_and_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    def times(calls: Sequence[Call], seconds: float, device: torch.device) -> list[Spread]:
        rounds.append(len(calls))
        return [Spread(number + 1.0, number + 1.0, number + 1.0) for number in range(len(calls))]

    monkeypatch.setattr(speed, "interleaved", times)
    model, images = small_vit(), torch.randn(2, 3, 96, 96, dtype=torch.float64)
    one, two = (pair(prune(model, EViT(rate, (1,))), images, "eager") for rate in (0.5, 0.7))
    two = Pair(two.pruned, one.dense)
    first, second = speeds([one, two], "eager", seconds=1.0)
    assert rounds == [3, 3]  # dense and two pruned ones; throughput, latency
    assert first["dense_latency_ms"] == second["dense_latency_ms"] == 1.0
    assert (first["latency_ms"], second["latency_ms"]) == (2.0, 3.0)
    assert (first["images_per_s"], second["images_per_s"]) == (1000.0, pytest.approx(2000 / 3))


def test_the_mode_that_best_chose_depends_on_the_shape() -> None:
    fast = accelerate(small_vit())
    one, two = ((torch.zeros(batch, 3, 96, 96),) for batch in (1, 2))
    for inputs, times in (
        (one, {"eager": 3.0, "graph": 1.0}),
        (two, {"eager": 3.0, "compile": 2.0, "graph": 4.0}),
    ):
        fast.chosen[signature(inputs)] = times
    assert (mode_of(fast, one), mode_of(fast, two)) == ("graph", "compile")
    assert mode_of(accelerate(small_vit(), "compile"), one) == "compile"


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["graph", "best"])
@torch.no_grad()
def test_modes_on_a_gpu(mode: str) -> None:
    images = torch.randn(3, 3, 96, 96, device="cuda")
    pruned = prune(small_vit().float().cuda(), EViT(0.5, (1,)))
    (row,) = speeds([pair(pruned, images, mode)], mode, seconds=0.05)
    assert row["mode"].startswith("pruned graph, dense graph" if mode == "graph" else "pruned ")
    assert row["peak_mb"] > 0
    assert {"eager_ms", "dense_eager_ms"} <= set(row["timing"])
