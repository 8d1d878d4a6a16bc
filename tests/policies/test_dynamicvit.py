"""DynamicViT against its dense re-statement: evaluation by both rules, the training forward, and the losses."""

from typing import Any

import pytest
import torch
from dense_dynamicvit import Predictor, decisions, dynamicvit, dynamicvit_training, losses
from test_dense_twins import ARCHITECTURES, assert_equal
from tests_support import randomise, small_vit
from torch import Tensor, nn

import prunevit
from prunevit import RaggedViT
from prunevit.policies import DynamicViT

LAYERS = (1, 2, 3)


def pruned_model(architecture: str, **settings: Any) -> tuple[RaggedViT, DynamicViT]:
    """A model whose random predictors keep about three quarters of what they see, so that no image loses all."""
    model = small_vit(**ARCHITECTURES[architecture])
    policy = DynamicViT(0.7, LAYERS, **settings)
    pruned = prunevit.prune(model, policy)
    randomise(policy)
    with torch.no_grad():
        for predictor in policy.predictors:
            odds: list[Tensor] = []
            hook = predictor.register_forward_hook(lambda m, i, o, odds=odds: odds.append(o[:, 0] - o[:, 1]))
            pruned(photos())
            hook.remove()
            # Between two of them: at one, rounding would decide.
            predictor.classify[-1].bias[0] -= odds[0].quantile(0.26)  # type: ignore[union-attr, index]
    return pruned, policy


def pairs(policy: DynamicViT) -> list[Predictor]:
    return [(each.features, each.classify) for each in policy.predictors]  # type: ignore[misc]


def photos() -> Tensor:
    return torch.randn(3, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rule", ["count", "threshold"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_evaluation(architecture: str, rule: str) -> None:
    pruned, policy = pruned_model(architecture, rule=rule)
    images = photos()
    expected, record = dynamicvit(
        pruned.model, images, pairs(policy), 0.7 if rule == "count" else None, LAYERS
    )
    if rule == "threshold":
        assert len(set(record.stages[0].counts)) > 1
    assert_equal(pruned.model, pruned.trace(images), expected, record)


def gumbel(rows: int, prefix: int) -> Tensor:
    """The noise that torch's `gumbel_softmax` will draw for rows of three images, of the patches [stages, B, P, 2]."""
    drawn = [-torch.empty(3 * rows, 2, dtype=torch.float64).exponential_().log() for _ in LAYERS]
    return torch.stack(drawn).view(len(LAYERS), 3, rows, 2)[:, :, prefix:]


def all_gradients(pruned: nn.Module, value: Tensor) -> dict[str, Tensor]:
    parameters = dict(pruned.named_parameters())
    found = torch.autograd.grad(value, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: gradient for name, gradient in zip(parameters, found) if gradient is not None}


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-2])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_forward_and_losses(architecture: str, eps: float) -> None:
    pruned, policy = pruned_model(architecture, softmax_eps=eps, ratio_weight=3.0)
    model, teacher = pruned.model, small_vit(**ARCHITECTURES[architecture])
    randomise(teacher)
    images, prefix, labels = photos(), model.num_prefix_tokens, torch.tensor([1, 4, 0])
    with torch.no_grad():
        features = teacher.forward_features(images)
        target = {"logits": teacher.forward_head(features), "features": features}

    pruned.train()
    torch.manual_seed(7)
    noise = gumbel(prefix + 36, prefix)
    expected, record = dynamicvit_training(model, images, pairs(policy), noise, LAYERS, eps)
    torch.manual_seed(7)
    trace = pruned.trace(images)
    torch.testing.assert_close(trace.logits, expected, rtol=0, atol=1e-11)
    kept = torch.stack([stage.mask.soft.view(3, -1)[:, prefix:] for stage in trace.stages])  # type: ignore[union-attr]
    torch.testing.assert_close(kept, decisions(record), rtol=0, atol=1e-12)
    assert 0 < kept[-1].mean() < kept[0].mean() < 1

    theirs = losses(expected, record, labels, 0.7, target["logits"], features[:, prefix:], ratio_weight=3.0)
    ours = policy.losses(trace, target)
    assert list(ours) == ["ratio", "logits", "features"]
    for name, value in ours.items():
        torch.testing.assert_close(value, getattr(theirs, name), rtol=0, atol=1e-11)
        compare(all_gradients(pruned, value), all_gradients(pruned, getattr(theirs, name)))
    compare(all_gradients(pruned, trace.logits.sin().sum()), all_gradients(pruned, expected.sin().sum()))


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(name.startswith("policies.0.predictors.2") for name in ours)
    for name, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=1e-6).item()
        torch.testing.assert_close(ours[name], gradient, rtol=0, atol=1e-10 * scale, msg=name)


def test_training_after_a_stage_that_keeps_nothing_stays_finite() -> None:
    pruned, policy = pruned_model("plain")
    with torch.no_grad():
        policy.predictors[0].classify[-1].bias.copy_(torch.tensor([-1e4, 1e4]))  # type: ignore[union-attr, index]
    pruned.train()
    images = photos()
    trace = pruned.trace(images)
    assert trace.tokens.soft is not None
    assert (trace.tokens.soft.view(3, -1)[:, 1:] == 0).all()
    features = pruned.model.forward_features(images).detach()
    parts = policy.losses(trace, {"logits": trace.logits.detach(), "features": features})
    parts["cls"] = trace.logits.square().sum()
    for gradient in all_gradients(pruned, torch.stack(list(parts.values())).sum()).values():
        assert gradient.isfinite().all()


def test_softmax_eps_acts_in_training_alone() -> None:
    pruned, _ = pruned_model("plain", softmax_eps=0.1)
    plain, _ = pruned_model("plain")
    plain.load_state_dict(pruned.state_dict())
    images = photos()
    assert torch.equal(pruned(images), plain(images))


def test_evaluation_has_no_losses() -> None:
    pruned, policy = pruned_model("plain")
    assert policy.losses(pruned.trace(photos()), {}) == {}
