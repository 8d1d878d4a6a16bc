"""Execution modes: what can be said without a GPU, and the same on one with graphs."""

import copy
import pickle
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch import Tensor

import prunevit
from prunevit.accelerate import accelerate
from prunevit.graphs import GraphCache, SegmentedWalk, bucket
from prunevit.policies import EViT, NoPruning, RandomPruning, ThresholdL2, ToMe, TopK, TopP
from prunevit.policy import PruningPolicy


class PlainRunner:
    """Runs each function as it is, and remembers the keys: a graph cache without graphs."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self.keys.append(key)
        return function(*inputs)


def test_buckets_hold_what_is_put_into_them_and_are_few() -> None:
    seen = set()
    for total in range(1, 64 * 197 + 1, 7):
        rows, longest = bucket(total, max(1, min(197, total)), 64 * 197, 197)
        assert rows >= total
        assert rows <= 64 * 197
        assert 197 >= longest >= min(197, total)
        seen.add(rows)
    assert len(seen) <= 33


DYNAMIC: dict[str, Callable[[], list[PruningPolicy]]] = {
    "top_p": lambda: [TopP(0.7, (1, 2))],
    "norm": lambda: [ThresholdL2(0.0, (1, 3))],
    "static first, static last": lambda: [TopK(0.8, (0,)), ThresholdL2(0.0, (2,)), EViT(0.5, (3,))],
    "ragged merging": lambda: [TopP(0.8, (0,)), ToMe(4, layers=(1, 2, 3))],
}


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("batch", [3, 40])
def test_the_cut_walk_equals_the_walk(name: str, batch: int) -> None:
    """Every segment at a capacity, through buffers, with other boundaries at each call."""
    pruned = prunevit.prune(small_vit(), DYNAMIC[name]())
    runner = PlainRunner()
    walk = SegmentedWalk(pruned, runner, pruned.walk, "key")
    with torch.no_grad():
        for seed in range(3):
            images = torch.randn(
                batch, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            torch.testing.assert_close(walk(images), pruned(images), rtol=0, atol=1e-11)
    if batch * 37 <= 1024:
        assert set(runner.keys) == {("key", "whole")}
    else:
        assert {key[1] for key in runner.keys} == set(range(len(walk.cuts) + 1))  # type: ignore[index]


def test_best_is_eager_without_a_gpu_and_graphs_are_refused() -> None:
    pruned = prunevit.prune(small_vit(), EViT(0.5, (1,)))
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    torch.testing.assert_close(accelerate(pruned)(images), pruned(images))
    with pytest.raises(ValueError, match='mode="graph" needs a model on a CUDA device, got cpu'):
        accelerate(pruned, "graph")
    with pytest.raises(
        ValueError, match="mode must be one of eager, compile, graph, compile\\+graph, best, got 'fast'"
    ):
        accelerate(pruned, "fast")
    with pytest.raises(ValueError, match="must be in evaluation mode"):
        accelerate(pruned).train()(images)


@pytest.mark.parametrize("policy", [NoPruning(), EViT(0.5, (1, 2)), ToMe(5), RandomPruning(0.5, (1,))])
def test_a_walk_of_known_counts_is_one_compiled_graph(policy: PruningPolicy) -> None:
    """`fullgraph` raises at the first thing that the compiler cannot trace."""
    pruned = prunevit.prune(small_vit(), policy)
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    compiled = torch.compile(pruned.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images), pruned(images), rtol=0, atol=1e-11)


def test_copies_and_pickles_start_without_graphs() -> None:
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    model: Any = accelerate(prunevit.prune(small_vit(), EViT(0.5, (1,))))
    expected = model(images)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(images), expected)
        assert len(other._graphs) == 0
    with torch.no_grad():
        model.model.model.head.bias.add_(1.0)
    torch.testing.assert_close(model(images), expected + 1)
    assert set(model.state_dict()) == {f"model.{name}" for name in model.model.state_dict()}


STATIC: dict[str, Callable[[], list[PruningPolicy]]] = {
    "none": lambda: [NoPruning()],
    "evit": lambda: [EViT(0.6, (1, 2, 3))],
    "tome": lambda: [ToMe(5)],
    "random": lambda: [RandomPruning(0.5, (1, 3))],
}


# What inductor and torch's own modules say about themselves is no fault of the code under test.
INDUCTOR = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:TensorFloat32:UserWarning")


@pytest.mark.gpu
@INDUCTOR
@pytest.mark.parametrize("name", [*STATIC, *DYNAMIC])
@pytest.mark.parametrize("mode", ["graph", "compile+graph"])
def test_modes_agree_on_a_gpu(name: str, mode: str) -> None:
    pruned = prunevit.prune(small_vit().cuda().float(), {**STATIC, **DYNAMIC}[name]())
    fast = accelerate(pruned, mode)
    for batch in (2, 33, 33, 2, 33, 1, 1, 33):
        images = torch.randn(batch, 3, 96, 96, device="cuda")
        index = torch.randint(1000, (batch,), device="cuda")
        with torch.no_grad():
            expected = pruned(images, index)
        kept = fast(images, index)
        torch.testing.assert_close(kept, expected, rtol=0, atol=2e-4)
        fast(images + 1, index)
        torch.testing.assert_close(kept, expected, rtol=0, atol=2e-4, msg="an output was overwritten")
    assert len(fast._graphs) > 0


@pytest.mark.gpu
def test_graphs_see_new_weights_and_survive_moves() -> None:
    pruned = prunevit.prune(small_vit().cuda().float(), EViT(0.5, (1,)))
    fast = accelerate(pruned, "graph")
    images = torch.randn(2, 3, 96, 96, device="cuda")
    first = [fast(images) for _ in range(3)][-1]
    with torch.no_grad():
        pruned.model.head.bias.add_(1.0)
    torch.testing.assert_close(fast(images), first + 1)
    fast.half()
    for _ in range(3):
        assert fast(images.half()).dtype == torch.float16
    fast.float()
    other: dict[str, Any] = {name: value.clone() for name, value in pruned.state_dict().items()}
    other["model.head.bias"] -= 1
    pruned.load_state_dict(other, assign=True)
    for _ in range(3):
        torch.testing.assert_close(fast(images), first, rtol=0, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_known_counts_never_wait_for_the_gpu(name: str, mode: str) -> None:
    fast = accelerate(prunevit.prune(small_vit().cuda().float(), STATIC[name]()), mode)
    images, index = torch.randn(4, 3, 96, 96, device="cuda"), torch.arange(4, device="cuda")
    for _ in range(3):
        fast(images, index)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fast(images, index)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_number_of_graphs_is_bounded() -> None:
    cache = GraphCache(max_graphs=2)
    x = torch.ones(3, device="cuda")
    for factor in (1.0, 2.0, 3.0, 1.0):
        assert cache(factor, lambda v, f=factor: (v * f,), [x])[0].tolist() == [factor] * 3  # type: ignore[misc]
    assert len(cache) == 2
