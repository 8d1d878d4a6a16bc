"""The rivals of a benchmark compute what the pruned walk computes: fp64, on a CPU."""

import pytest
import torch
from tests_support import small_vit
from torch import Tensor

from prunevit import KeepMask, PruningPolicy, RaggedTokens, prune, top_k
from prunevit.experiments.benchmark.drawn import Drawn
from prunevit.experiments.benchmark.rivals import DenseGather, FreePruning, Padded, cuts_of
from prunevit.policies import EViT, ThresholdL2, TopK, TopP
from prunevit.tokens import AttentionState


class FirstPatches(PruningPolicy):
    """Keep the first patches of each image: what free pruning slices."""

    knob = "keep_rate"

    def __init__(self, keep_rate: float, layers: tuple[int, ...], site: str = "after_attention") -> None:
        super().__init__(keep_rate, layers)
        self.site = site  # type: ignore[assignment]

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        return top_k(tokens, -tokens.position.double(), self.rate(layer))


def photos(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("site", ["before_block", "after_attention"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_free_pruning_is_the_walk_that_keeps_the_first_patches(name: str, site: str) -> None:
    model = small_vit(name)
    trace = prune(model, FirstPatches(0.6, (1, 2), site)).trace(photos())
    cuts = cuts_of(trace)
    assert len(cuts) == 2
    free = FreePruning(model, cuts, batch_size=3)(photos())
    torch.testing.assert_close(free, trace.logits, rtol=0, atol=1e-11)
    more = FreePruning(model, {half: rows + 1 for half, rows in cuts.items()}, batch_size=3)(photos())
    assert (more - free).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "policy", [EViT(0.6, (1, 2)), TopK(0.5, (0, 2)), ThresholdL2(0.5, (1, 2), rule="share"), EViT(1.0, (1,))]
)
def test_the_dense_gather_is_the_walk(policy: PruningPolicy) -> None:
    model = small_vit(num_classes=7)
    trace = prune(model, policy).trace(photos())
    gathered = DenseGather(model, policy, cuts_of(trace))(photos())
    torch.testing.assert_close(gathered, trace.logits, rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["token", "avg"])
@pytest.mark.parametrize("rule", ["share", "published", "deviation"])
def test_padded_rows_under_a_mask_are_the_walk(rule: str, pooling: str) -> None:
    model = small_vit(global_pool=pooling)
    policy = ThresholdL2(0.5, (2,), rule=rule)
    trace = prune(model, policy).trace(photos())
    (longest,) = cuts_of(trace).values()
    for length in (None, longest, longest + 3):
        padded = Padded(model, policy, length)(photos())
        torch.testing.assert_close(padded, trace.logits, rtol=0, atol=1e-11)


def test_what_the_rivals_cannot_do_is_refused() -> None:
    model = small_vit()
    with pytest.raises(ValueError, match="must be TopK, EViT or the L2 share"):
        DenseGather(model, TopP(0.5, (1,)), {3: 10})
    with pytest.raises(ValueError, match="must act before one block"):
        Padded(model, ThresholdL2(0.5, (1, 2), rule="share"))


@torch.no_grad()
def test_drawn_counts_have_the_spread_that_was_asked_for() -> None:
    model = small_vit(depth=1)
    trace = prune(model, Drawn(0.5, (0,), variation=0.25)).trace(photos(64))
    counts = trace.stages[0].counts.double() - 1
    assert counts.mean().item() == pytest.approx(18, rel=0.1)
    assert (counts.std() / counts.mean()).item() == pytest.approx(0.25, rel=0.3)
    again = prune(model, Drawn(0.5, (0,), variation=0.25)).trace(photos(64)[:5])
    assert torch.equal(again.stages[0].counts, trace.stages[0].counts[:5])
