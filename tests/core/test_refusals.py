"""What the walk cannot honour is refused when it is built, and what it can it honours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch import nn
from torch.utils.checkpoint import checkpoint

import prunevit
from prunevit import AttentionState, KeepMask, PruningPolicy
from prunevit.policies import EViT, NoPruning, TopK

Hang = Callable[[nn.Module], Any]
HOOKS: dict[str, Hang] = {
    "forward": lambda part: part.register_forward_hook(lambda *args: None),
    "pre": lambda part: part.register_forward_pre_hook(lambda *args: None),
    "backward": lambda part: part.register_full_backward_hook(lambda *args: None),
    "backward pre": lambda part: part.register_full_backward_pre_hook(lambda *args: None),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("place", ["blocks", "blocks.2", "blocks.1.attn", "blocks.0.attn.attn_drop"])
def test_hooks_that_would_never_run_are_refused(place: str, hook: str) -> None:
    model = small_vit()
    handle = HOOKS[hook](model.get_submodule(place))
    with pytest.raises(TypeError, match=rf"^RaggedViT: {place} must be as timm made it, got hooks on it; "):
        prunevit.prune(model, TopK(0.5, (1,)))
    handle.remove()
    prunevit.prune(model, TopK(0.5, (1,)))


def test_a_forward_of_its_own_is_refused() -> None:
    model = small_vit()
    model.blocks[3].forward = lambda x: x
    with pytest.raises(
        TypeError, match=r"^RaggedViT: blocks\.3 must be as timm made it, got a forward of its own"
    ):
        prunevit.prune(model, TopK(0.5, (1,)))


def test_hooks_hung_later_run_on_the_parts_only() -> None:
    model, calls = small_vit(), list[str]()
    pruned = prunevit.prune(model, NoPruning())
    for place in ("blocks.1", "blocks.1.attn", "blocks.1.attn.qkv", "blocks.1.mlp"):
        model.get_submodule(place).register_forward_hook(lambda *_, place=place: calls.append(place))
    pruned(torch.zeros(1, 3, 96, 96, dtype=torch.float64))
    assert calls == ["blocks.1.attn.qkv", "blocks.1.mlp"]


@pytest.mark.parametrize(
    "place",
    [
        "norm",
        "blocks.1.norm1",
        "blocks.1.attn.qkv",
        "blocks.2.attn.proj",
        "blocks.3.mlp",
        "patch_embed",
        "head",
    ],
)
def test_hooks_on_the_parts_run(place: str) -> None:
    model, calls = small_vit(), []
    model.get_submodule(place).register_forward_hook(lambda *args: calls.append(place))
    prunevit.prune(model, TopK(0.5, (1,)))(torch.randn(1, 3, 96, 96, dtype=torch.float64))
    assert calls == [place]


def test_gradient_checkpointing_of_the_model_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, halves = small_vit(), []

    def spy(half: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
        halves.append(half)
        return checkpoint(half, *arguments, **settings)

    monkeypatch.setattr("prunevit.vit.checkpoint", spy)
    pruned = prunevit.prune(model.train(), TopK(0.5, (1,)))
    assert not pruned.grad_checkpointing
    model.set_grad_checkpointing()
    assert prunevit.prune(model, TopK(0.5, (1,))).grad_checkpointing
    assert pruned.grad_checkpointing
    pruned.set_grad_checkpointing(False)
    assert not model.grad_checkpointing
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        gradients.append(torch.autograd.grad(pruned(images).square().sum(), list(model.parameters())))
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    assert len(halves) == 8  # two for each of the four blocks, with checkpointing alone


def test_both_heads_of_a_distilled_model_in_training() -> None:
    model = small_vit("deit_tiny_distilled_patch16_224")
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    pruned = prunevit.prune(model, TopK(0.5, (1,)))
    mean = pruned(images)
    model.set_distilled_training()
    assert torch.equal(pruned(images), mean)  # in evaluation timm takes the mean
    pruned.train()
    both: Any = pruned(images)
    assert isinstance(both, tuple)
    assert not torch.equal(*both)
    # Nothing of this model draws at random, so training computes what evaluation does.
    torch.testing.assert_close((both[0] + both[1]) / 2, mean, rtol=0, atol=1e-12)
    trace = pruned.trace(images)
    torch.testing.assert_close(trace.logits, mean, rtol=0, atol=1e-12)
    assert trace.to("cpu").logits.shape == (2, 10)
    assert pruned.find_nan(images) is None
    with torch.no_grad():
        model.head_dist.bias[0] = torch.nan
    assert pruned.find_nan(images) == "the first values that are not finite come from the head"


class Forgets(PruningPolicy):
    def __init__(self) -> None:
        self.alpha = 1


class Unsettled(PruningPolicy):
    def __init__(self) -> None:
        super().__init__(None, "1:")

    def setup(self, info: prunevit.ModelInfo) -> None:
        self.width = info.width


class Answers(PruningPolicy):
    def __init__(self, answer: Any) -> None:
        super().__init__(None, (1,))
        self.answer = answer

    def forward(self, tokens: Any, attention: Any, layer: int) -> KeepMask:
        return self.answer


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (Forgets, r"^Forgets: __init__ must call super\(\).__init__\(value, layers\)"),
        (Unsettled, r"^Unsettled: setup must call super\(\).setup\(info\)"),
        (lambda: "evit", "^RaggedViT: policies must be objects of a subclass of PruningPolicy, got 'evit'"),
        (lambda: EViT, "^RaggedViT: policies must be objects of a subclass of PruningPolicy, got <class"),
        (lambda: [EViT], "^RaggedViT: policies must be objects of a subclass of PruningPolicy, got <class"),
        (lambda: [nn.Identity()], r"^RaggedViT: policies must be .*, got Identity\(\)"),
    ],
)
def test_what_is_no_policy_is_refused(policies: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        prunevit.prune(small_vit(), policies())


@pytest.mark.parametrize(("answer", "name"), [(None, "NoneType"), (torch.ones(2), "Tensor")])
def test_a_policy_that_returns_no_mask(answer: Any, name: str) -> None:
    pruned = prunevit.prune(small_vit(), Answers(answer))
    with pytest.raises(TypeError, match=f"^Answers: forward must return a KeepMask, got {name}$"):
        pruned(torch.zeros(1, 3, 96, 96, dtype=torch.float64))


@pytest.mark.parametrize("part", ["prefix_attention", "received_attention"])
def test_attention_that_nobody_asked_for_is_not_computed(part: str) -> None:
    state = AttentionState(*torch.ones(3, 2, 1, 4))
    with pytest.raises(
        ValueError, match=f"^AttentionState: {part} is not computed; name it in needs of the policy$"
    ):
        getattr(state, part)
    source = "cls" if part == "prefix_attention" else "received"
    with pytest.raises(ValueError, match=part):
        state.score(source)
    given = torch.ones(2, 1, 1) if source == "cls" else torch.ones(2, 1)
    assert AttentionState(*torch.ones(3, 2, 1, 4), **{part: given}).score(source).tolist() == [1, 1]
