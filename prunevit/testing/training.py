"""Checks of what training, saving and half precision need."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import Tensor

from prunevit.testing.candidate import Candidate, CheckFailure, images, index
from prunevit.vit import RaggedViT


def check_gradients(candidate: Candidate) -> str:
    """In training the policy's losses and all gradients are finite, and a gradient reaches each of its parameters."""
    pruned = copy.deepcopy(candidate.pruned()).train()
    policy = pruned.policies[0]
    trace = pruned.trace(images(), index())
    losses = policy.losses(trace, _teacher(pruned))  # type: ignore[operator]
    for name, loss in losses.items():
        if loss.shape != () or not bool(loss.isfinite()):
            raise CheckFailure(f'losses["{name}"] must be one finite number, got {loss}')
    (trace.logits.square().mean() + sum(losses.values())).backward()
    for name, parameter in pruned.named_parameters():
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
            raise CheckFailure(f"the gradient of {name} is not finite")
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad and (parameter.grad is None or not bool(parameter.grad.any())):
            raise CheckFailure(f"no gradient reaches its parameter {name}")
    own = len(list(policy.parameters()))
    return f"{own} parameters, losses: {', '.join(losses) or 'none'}" if own or losses else "no parameters"


def check_state_dict(candidate: Candidate) -> None:
    """A fresh policy with the `state_dict` of another decides alike: nothing that matters is kept elsewhere."""
    torch.manual_seed(1)
    pruned = candidate.pruned()
    torch.manual_seed(2)
    fresh = candidate.pruned()
    fresh.load_state_dict(pruned.state_dict())
    _expect_alike(pruned, fresh, "a fresh policy with the same state_dict decides otherwise; use a buffer")


def check_copies(candidate: Candidate) -> None:
    """It can be copied and pickled, as data loaders and several processes do, and decides alike."""
    pruned = candidate.pruned()
    _expect_alike(pruned, copy.deepcopy(pruned), "its deep copy decides otherwise")
    try:
        pickled = pickle.dumps(pruned.policies[0])
    except Exception as error:  # whatever the policy holds
        raise CheckFailure(f"it cannot be pickled: {error}") from error
    revived = copy.deepcopy(pruned)
    revived.policies[0] = pickle.loads(pickled)
    _expect_alike(pruned, revived, "its pickled copy decides otherwise")


def check_half_precision(candidate: Candidate) -> None:
    """It runs in bf16, in fp16 and under autocast, and the logits are finite."""
    for dtype in (torch.bfloat16, torch.float16):
        _expect_finite(_logits(candidate.pruned(dtype=dtype), images(dtype=dtype)), str(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        pruned = candidate.pruned(dtype=torch.float32)
        _expect_finite(_logits(pruned, images(dtype=torch.float32)), "autocast to torch.bfloat16")


def _teacher(pruned: RaggedViT) -> dict[str, Tensor]:
    model = copy.deepcopy(pruned.model).eval()
    with torch.no_grad():
        return {"logits": model(images()), "features": model.forward_features(images())}


def _logits(pruned: RaggedViT, batch: Tensor) -> Tensor:
    with torch.no_grad():
        return pruned(batch, index())


def _expect_alike(one: RaggedViT, other: RaggedViT, what: str) -> None:
    if not torch.equal(_logits(one, images()), _logits(other, images())):
        raise CheckFailure(what)


def _expect_finite(logits: Tensor, where: str) -> None:
    if not bool(logits.isfinite().all()):
        raise CheckFailure(f"in {where} the logits are not finite")
