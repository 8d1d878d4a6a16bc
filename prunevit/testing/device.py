"""Checks of what a GPU asks: that nothing waits for it, and that one CUDA graph holds the decision."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.func import functional_call

from prunevit.execution import accelerate
from prunevit.testing.candidate import Candidate, CheckFailure, NotApplicable, images
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.vit import RaggedViT


def check_no_wait(candidate: Candidate) -> str:
    """No decision reads a value back from the device: fake tensors, which know no values, go through it.

    On a GPU, torch is then told to refuse every synchronisation, with room for every row where the host does not know
    the counts, as in a CUDA graph.
    """
    policy = candidate.pruned().policies[0]
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    parts: dict[str, Tensor] = {
        name: fake.from_tensor(part) for name, part in (*policy.named_parameters(), *policy.named_buffers())
    }
    for decision in candidate.decisions[0]:
        given = _fake(decision.tokens, fake), _fake(decision.attention, fake), decision.layer
        try:
            with fake, torch.no_grad():
                functional_call(policy, parts, given)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CheckFailure(
                f"it waits for the device: {error.func} asks for values; work on tensors alone"
            ) from error
    if candidate.device.type != "cuda":
        return "with fake tensors"
    _forbid_synchronising(candidate)
    return "with fake tensors, and on the GPU"


def check_graph(candidate: Candidate) -> None:
    """A CUDA graph, made on some images, gives the logits of others."""
    if candidate.device.type != "cuda":
        raise NotApplicable("it needs a CUDA device, which is not here")
    pruned = copy.deepcopy(candidate.pruned(dtype=torch.float32)).to(candidate.device)
    batch = images(dtype=torch.float32).to(candidate.device)
    graph = accelerate(pruned, "graph")
    for _ in range(2):  # the second call captures
        graph(batch)
    with torch.no_grad():
        expected, got = pruned(batch.flip(0)), graph(batch.flip(0))
    error = (got - expected).abs().max().item()
    if not error <= 1e-4 * expected.abs().max().item():
        raise CheckFailure(f"the CUDA graph gives other logits (largest difference {error:.2g})")


class _AtFullCapacity(nn.Module):
    """A pruned model that makes room for every row at every stage and never reads a count back."""

    def __init__(self, pruned: RaggedViT) -> None:
        super().__init__()
        self.pruned = pruned

    def forward(self, batch: Tensor) -> Tensor:
        tokens = self.pruned.embed(batch)
        return self.pruned.forward_head(self.pruned.walk(tokens, capacity=tokens.x.shape[0]))


def _fake(values: RaggedTokens | AttentionState | None, mode: FakeTensorMode) -> Any:
    """Tokens or attention with fake tensors in place of their own."""
    if values is None:
        return None
    fake = copy.copy(values)
    own = vars(values).items()
    vars(fake).update({name: mode.from_tensor(each) for name, each in own if isinstance(each, Tensor)})
    return fake


def _forbid_synchronising(candidate: Candidate) -> None:
    pruned = copy.deepcopy(_AtFullCapacity(candidate.pruned(dtype=torch.float32))).to(candidate.device)
    batch = images(dtype=torch.float32).to(candidate.device)
    with torch.no_grad():
        pruned(batch)  # kernels are compiled, tables moved
        torch.cuda.synchronize(candidate.device)
        with warnings.catch_warnings():  # torch says that the mode does not find everything
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            pruned(batch)
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise CheckFailure("it synchronises with the GPU") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
