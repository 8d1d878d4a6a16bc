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
from prunevit.execution import accelerate, signature
from prunevit.graphs import LAUNCH_BOUND_ROWS, Course, GraphCache, SegmentedWalk, bucket, survey
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
@pytest.mark.parametrize("batch", [3, 60])
def test_the_cut_walk_equals_the_walk(name: str, batch: int) -> None:
    """Every segment at a capacity, through buffers, with other boundaries at each call."""
    pruned = prunevit.prune(small_vit(), DYNAMIC[name]())
    runner = PlainRunner()
    with torch.no_grad():
        _, course = survey(pruned, torch.zeros(batch, 3, 96, 96, dtype=torch.float64))
        walk = SegmentedWalk(pruned, runner, pruned.walk, "key", course)
        for seed in range(3):
            images = torch.randn(
                batch, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            torch.testing.assert_close(walk(images), pruned(images), rtol=0, atol=1e-11)
    if batch * 37 <= LAUNCH_BOUND_ROWS:
        assert set(runner.keys) == {("key", "whole")}
    else:
        assert {key[1] for key in runner.keys} == set(range(len(walk.cuts) + 1))  # type: ignore[index]


def test_a_survey_tells_where_counts_are_unknown() -> None:
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    for policies, cuts in (
        ([EViT(0.5, (1, 2))], ()),
        ([TopK(0.8, (0,)), TopP(0.7, (1,)), EViT(0.5, (3,))], (3, 7)),
        ([ThresholdL2(0.0, (2,))], (4,)),
    ):
        pruned = prunevit.prune(small_vit(), policies)
        with torch.no_grad():
            logits, course = survey(pruned, images)
            torch.testing.assert_close(logits, pruned(images), rtol=0, atol=0)
        assert course == (cuts, 2 * 37, 37)


def test_a_precision_is_part_of_what_a_graph_is_for() -> None:
    images = torch.randn(2, 3, 96, 96)
    seen = [signature((images,)), signature((images[:1],)), signature((images.double(),))]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            seen.append(signature((images,)))
    assert len(set(seen)) == 5
    assert signature((images + 1,)) == seen[0]


def test_inference_mode_leaves_nothing_behind() -> None:
    model = accelerate(prunevit.prune(small_vit(), EViT(0.5, (1,))))
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    with torch.inference_mode():
        logits = model(images.clone())
    assert not logits.is_inference()
    torch.testing.assert_close(model(images), logits)


def test_the_package_names_the_function() -> None:
    """A module of that name would take the function's place once it is imported."""
    assert prunevit.accelerate is accelerate


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


def test_buffers_are_kept_for_a_bounded_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prunevit.execution.MAX_WALKS", 2)
    model = accelerate(prunevit.prune(small_vit(), TopP(0.7, (1,))))
    course = Course((3,), 37, 37)
    first = [model._cut_walk("eager", key, course) for key in "aba"]
    assert first[0] is first[2]
    later = [model._cut_walk("eager", key, course) for key in "cab"]  # "b" was unused for longest
    assert later[1] is first[0]
    assert later[2] is not first[1]
    assert len(model._walks) == 2
    assert len({walk.key for walk in (*first, *later)}) == 4


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
def test_modes_agree_on_a_gpu(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The patches are a convolution, which cuDNN rounds to TF32 unless told not to.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("prunevit.graphs.LAUNCH_BOUND_ROWS", 1024)
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
@pytest.mark.parametrize("name", ["evit", "top_p"])
def test_graphs_of_other_precisions_are_others(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast on, off and of another dtype, in turn, and with weights changed between calls under autocast."""
    monkeypatch.setattr("prunevit.graphs.LAUNCH_BOUND_ROWS", 1024)
    pruned = prunevit.prune(small_vit().cuda().float(), {**STATIC, **DYNAMIC}[name]())
    fast = accelerate(pruned, "graph")
    images = torch.randn(33, 3, 96, 96, device="cuda")
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        for _ in range(3):
            with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                expected = pruned(images)
                got = fast(images)
                assert got.dtype == expected.dtype
                torch.testing.assert_close(got, expected, rtol=0, atol=0)
                pruned.model.head.weight.mul_(1.1)
    assert len(fast._courses) == 3


@pytest.mark.gpu
def test_inference_mode_and_no_grad_share_a_graph() -> None:
    pruned = prunevit.prune(small_vit().cuda().float(), EViT(0.5, (1,)))
    fast = accelerate(pruned, "graph")
    images = torch.randn(2, 3, 96, 96, device="cuda")
    with torch.inference_mode():
        expected = pruned(images)
        for _ in range(3):
            torch.testing.assert_close(fast(images.clone()), expected)
    with torch.no_grad():
        torch.testing.assert_close(fast(images), expected.clone())
    assert len(fast._graphs) == 1


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
