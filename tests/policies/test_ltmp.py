"""LTMP's training form against a dense re-statement: masks instead of removal, and the loss that aims at a cost."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from dense_tome import merge_pairs, survivors
from dense_walk import Attended, Record, Tokens, walk
from test_dense_twins import ARCHITECTURES
from tests_support import small_vit
from torch import Tensor

import prunevit
from prunevit import AttentionState, ModelInfo, RaggedTokens
from prunevit.policies import LTMP


@dataclass(frozen=True)
class Masked(Tokens):
    """Rows with a mask; `weight` is their size."""

    mask: Tensor


def mask_of(tokens: Tokens) -> Tensor:
    return tokens.mask if isinstance(tokens, Masked) else torch.ones_like(tokens.weight)


def step(value: Tensor, threshold: Tensor, tau: float) -> Tensor:
    soft = torch.sigmoid((value - threshold) / tau)
    return soft + ((soft > 0.5).double() - soft).detach()


def ltmp_training(model: Any, images: Tensor, policy: LTMP, eps: float) -> tuple[Tensor, Record]:
    """Every row stays; the mask of what is still there is replaced, of what is gone kept; rows go A, then B."""

    def probability(scores: Tensor, tokens: Tokens) -> Tensor:
        scores = scores + tokens.weight.log()
        p = (scores - scores.amax(-1, keepdim=True)).exp() * mask_of(tokens)
        return (p + eps / len(tokens.x)) / (p.sum(-1, keepdim=True) + eps)

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        prefix, mask, rows = tokens.num_prefix, mask_of(tokens), torch.arange(len(tokens.x))
        a, b = rows[::2], rows[1::2]
        metric = attended.k.mean(0)
        metric = metric / metric.norm(dim=-1, keepdim=True) * mask.detach()[:, None]
        cosine = (metric[a] @ metric[b].T).index_fill(0, (a < prefix).nonzero()[:, 0], -torch.inf)
        best, column = cosine.index_fill(1, (b < prefix).nonzero()[:, 0], -torch.inf).max(-1)
        merging = step(best, policy.merge_thresholds[stage], policy.tau)
        merges = merging.detach() > 0.5
        heirs = b[column]
        tokens = merge_pairs(tokens, a[merges], heirs[merges])
        after = mask.index_copy(0, a, torch.where(mask[a] > 0.5, 1 - merging, mask[a]))
        received = attended.probability.mean((0, 1))
        received = received.scatter_reduce(0, heirs[merges], received[a[merges]], "amax")
        staying = step(received, policy.prune_thresholds[stage], policy.tau)
        after = torch.where(after > 0.5, staying, after).index_fill(0, rows[:prefix], 1.0)
        order = survivors(a, b, prefix)
        t = tokens.take(order)
        return Masked(t.x, t.source, t.weight, t.num_prefix, t.num_patches, t.image, after[order])

    return walk(model, images, range(4), rule, probability=probability)


def flops_ratio(record: Record, width: int) -> Tensor:
    """The authors' expression: rows are n times the mean mask, 2nd^2 + n^2 d for attention, 4nd^2 for the MLP."""
    n = len(record.stages[0].after[0].x)
    kept = [torch.ones(()).double()] + [
        torch.stack([mask_of(tokens) for tokens in stage.after]).mean() for stage in record.stages
    ]
    dense = 6 * n * width**2 + n**2 * width
    blocks = [
        2 * before * n * width**2 + (before * n) ** 2 * width + 4 * after * n * width**2
        for before, after in pairwise(kept)
    ]
    return torch.stack(blocks).mean() / dense


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_forward_and_loss(architecture: str, eps: float) -> None:
    model = small_vit(**ARCHITECTURES[architecture])
    policy = LTMP(0.96, (0.005, 0.01, 0.01, 0.01), target=0.6, target_weight=5.0, softmax_eps=eps)
    pruned = prunevit.prune(model, policy).train()
    images = torch.randn(3, 3, 96, 96, dtype=torch.float64)
    expected, record = ltmp_training(model, images, policy, eps)
    trace = pruned.trace(images)
    torch.testing.assert_close(trace.logits, expected, rtol=0, atol=1e-11)
    for stage, twin in zip(trace.stages, record.stages):
        assert stage.mask.soft is not None
        order = stage.mask.order
        assert order is not None
        masks = [
            soft[rank.argsort(stable=True)]
            for soft, rank in zip(stage.mask.soft.view(3, -1), order.view(3, -1))
        ]
        torch.testing.assert_close(
            torch.stack(masks), torch.stack([mask_of(tokens) for tokens in twin.after]), rtol=0, atol=1e-11
        )
    shares = [stage.mask.soft.mean().item() for stage in trace.stages if stage.mask.soft is not None]
    assert 0.1 < shares[-1] < shares[0] < 1
    flops = policy.losses(trace, {})["flops"]
    wanted = 5.0 * (flops_ratio(record, 48) - 0.6) ** 2
    torch.testing.assert_close(flops, wanted, rtol=1e-11, atol=0)
    for ours, theirs in ((trace.logits.sin().sum(), expected.sin().sum()), (flops, wanted)):
        compare(pruned, ours, theirs)


def compare(pruned: Any, ours: Tensor, theirs: Tensor) -> None:
    parameters = dict(pruned.named_parameters())
    both = [
        torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
        for value in (ours, theirs)
    ]
    for name, one, other in zip(parameters, *both):
        assert (one is None) == (other is None), name
        if one is None or other is None:
            assert not name.startswith("policies"), name
            continue
        scale = other.abs().max().clamp(min=1e-6).item()
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10 * scale, msg=name)


def test_no_loss_without_a_target_or_in_evaluation() -> None:
    model = small_vit()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    for policy, training in ((LTMP(), True), (LTMP(target=0.5), False)):
        pruned = prunevit.prune(model, policy).train(training)
        assert policy.losses(pruned.trace(images), {}) == {}


def test_training_masks_what_evaluation_removes_in_the_first_block() -> None:
    model = small_vit()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    pruned = prunevit.prune(model, LTMP(0.97, 0.02, (0,)))
    removed = pruned.trace(images).stages[0].mask.keep
    soft = pruned.train().trace(images).stages[0].mask.soft
    assert soft is not None
    assert torch.equal(soft.detach() > 0.5, removed)
    assert 0.2 < removed.double().mean() < 0.8


def test_in_training_nobody_joins_a_masked_row() -> None:
    """Where rows that are unlike each other join too, so that one without any likeness would be the nearest."""
    tokens = RaggedTokens.from_padded(torch.rand(1, 9, 4), num_prefix_tokens=1, grid=(2, 4))
    present = torch.tensor([1.0, 1, 1, 0, 1, 0, 1, 0, 1])
    keys = torch.tensor([0.0, 1, -1, 1, -1, 1, -1, 1, -1])[:, None, None].expand(
        9, 1, 4
    )  # no two alike in a pair
    attention = AttentionState(keys, keys, keys, received_attention=torch.ones(9, 1))
    policy = LTMP(-1.5, layers=(0,)).train()
    policy.setup(ModelInfo(4, 1, 1, (2, 4), 1, True))
    mask = policy(replace(tokens, soft=present), attention, 0)
    assert mask.soft is not None
    assert mask.merge_into is not None
    assert mask.soft.tolist() == [1, 1, 0, 0, 0, 0, 0, 0, 0]
    assert mask.merge_into[[2, 4, 6, 8]].tolist() == [1, 1, 1, 1]
