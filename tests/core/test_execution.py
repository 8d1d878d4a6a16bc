"""Execution modes: what can be said without a GPU, and the same on one with graphs."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch._dynamo.testing import CompileCounterWithBackend

import prunevit
from prunevit.execution import accelerate, compiled, signature
from prunevit.graphs import GraphCache
from prunevit.policies import ATS, LTMP, EViT, NoPruning, RandomPruning, ThresholdL2, ToMe, TopK, TopP
from prunevit.policy import PruningPolicy

DYNAMIC: dict[str, Callable[[], list[PruningPolicy]]] = {
    "top_p": lambda: [TopP(0.7, (1, 2))],
    "norm": lambda: [ThresholdL2(0.0, (1, 3))],
    "static first, static last": lambda: [TopK(0.8, (0,)), ThresholdL2(0.0, (2,)), EViT(0.5, (3,))],
    "ragged merging": lambda: [TopP(0.8, (0,)), ToMe(4, layers=(1, 2, 3))],
    "ats": lambda: [ATS(0.7, (1, 2))],
    "ltmp": lambda: [LTMP(0.3, 0.01)],
}


@torch.no_grad()
@pytest.mark.parametrize("policy", [EViT(0.5, (1, 2)), ThresholdL2(0.5, (1,), rule="share"), ToMe(5)])
def test_one_compilation_serves_all_batch_sizes_but_one(policy: PruningPolicy) -> None:
    """Also where rows do not fill up what is aligned: 37 rows an image are a multiple of 16 in a batch of 16 alone."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    pruned = prunevit.prune(small_vit(), policy)
    code = compiled(pruned.forward, backend=counter, fullgraph=True)
    for batch in (1, 16, 8, 7, 1, 2):
        images = torch.randn(batch, 3, 96, 96, dtype=torch.float64)
        torch.testing.assert_close(code(images), pruned(images), rtol=0, atol=1e-11)
    assert counter.frame_count == 2


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
    code = torch.compile(pruned.forward, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(code(images), pruned(images), rtol=0, atol=1e-11)


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
    monkeypatch.setattr("prunevit.foresight.LAUNCH_BOUND_ROWS", 1024)
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
    monkeypatch.setattr("prunevit.foresight.LAUNCH_BOUND_ROWS", 1024)
    pruned = prunevit.prune(small_vit().cuda().float(), {**STATIC, **DYNAMIC}[name]())
    fast = accelerate(pruned, "graph")
    images = torch.randn(33, 3, 96, 96, device="cuda")
    for dtype in (torch.bfloat16, None, torch.float16, torch.bfloat16, None):
        for _ in range(3):
            with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype is not None):
                expected = pruned(images)
                got = fast(images)
                assert got.dtype == expected.dtype
                # A graph's room holds more rows than the eager walk: cuBLAS may then sum in another order, and a logit
                # near 0 rounds as its summands do.
                bound = 0 if dtype else 4e-6 * expected.abs().max().item()
                torch.testing.assert_close(got, expected, rtol=0, atol=bound)
                pruned.model.head.weight.mul_(1.1)
    assert len(fast._walks) == 3


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
@INDUCTOR
@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("mode", ["graph", "compile+graph"])
def test_batches_without_room_cost_time_alone(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches that keep little, then much, with the weights changed on the way; no output is overwritten."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr("prunevit.foresight.LAUNCH_BOUND_ROWS", 0)
    pruned = prunevit.prune(small_vit().cuda().float(), DYNAMIC[name]())
    fast = accelerate(pruned, mode)
    # Modes round otherwise, and a row on a policy's edge then goes another way: of these images none does under noise
    # of 1e-5, which moves no logit in fp64 by more than 1.1e-5.
    generator = torch.Generator().manual_seed(0)
    kept = []
    for number in range(12):
        images = torch.randn(33, 3, 96, 96, generator=generator).cuda()
        images[: 11 * (number % 4)] *= 0.01
        with torch.no_grad():
            pruned.model.head.bias.add_(1)
            kept.append((fast(images), pruned(images)))
    for got, expected in kept:
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-4)
    walk = next(iter(fast._walks.values()))
    assert walk is not None
    assert 1 <= len(fast._graphs) <= 1 + walk.misses


@pytest.mark.gpu
def test_graphs_of_like_inputs_share_them() -> None:
    cache = GraphCache(max_graphs=8)
    x, y = torch.ones(3, device="cuda"), torch.full((3,), 2.0, device="cuda")
    for _ in range(2):
        assert cache("one", lambda v: (v + 1,), [x])[0].tolist() == [2.0] * 3
        assert cache("two", lambda v: (v + 2,), [y])[0].tolist() == [4.0] * 3
        assert cache("other", lambda v: (v + 3,), [x.double()])[0].tolist() == [4.0] * 3
    own = [inputs[0].data_ptr() for _, inputs, _ in cache._graphs.values()]
    assert len(set(own)) == 2


@pytest.mark.gpu
def test_the_number_of_graphs_is_bounded() -> None:
    cache = GraphCache(max_graphs=2)
    x = torch.ones(3, device="cuda")
    for factor in (1.0, 2.0, 3.0, 1.0):
        assert cache(factor, lambda v, f=factor: (v * f,), [x])[0].tolist() == [factor] * 3  # type: ignore[misc]
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0
    assert cache(1.0, lambda v: (v + 4,), [x])[0].tolist() == [5.0] * 3
