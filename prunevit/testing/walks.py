"""Checks of whole forward passes: each image by itself, all kinds of models, rows that were pruned before."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from prunevit.folding import merge
from prunevit.keepmask import KeepMask
from prunevit.packing import pack
from prunevit.policies.replay import replay
from prunevit.testing.candidate import Candidate, CheckFailure, NotApplicable, images, index, tiny_vit
from prunevit.tokens import RaggedTokens
from prunevit.trace import Trace
from prunevit.vit import RaggedViT, prune

TOLERANCE = 1e-6
"""Of the largest logit: in double precision all is exact but for what a policy computes in fp32."""


def check_independence(candidate: Candidate, kind: str = "plain") -> None:
    """What an image gets depends neither on its neighbours in the batch nor on its place among them."""
    pruned = candidate.pruned(kind)
    batch, number = images(kind, torch.float64), index()
    with torch.no_grad():
        together = pruned.trace(batch, number)
        for order in ([2, 0], [1]):
            apart = pruned.trace(batch[order], number[order])
            _expect_same_decisions(together, apart, order)
            _expect_equal(apart.logits, together.logits[order], f"images {order} alone have other logits")


def check_keep_all(candidate: Candidate) -> str:
    """Where every row is kept, as it is or at some value of the knob, the logits are the plain model's."""
    knob = candidate.make().knob
    for value in (None, *_knob_values(candidate)) if knob else (None,):
        trace = _trace_at(candidate, value)
        if trace is not None and _drops_nothing(trace):
            at = "as it is" if value is None else f"{knob}={value:g}"
            with torch.no_grad():
                plain = tiny_vit("plain", candidate.depth, torch.float64)(images())
            _expect_equal(trace.logits, plain, f"{at} it keeps every row, but not the plain logits")
            return at
    if knob == "keep_rate" and _counts(_trace_at(candidate, 1)) != _counts(_trace_at(candidate, None)):
        raise CheckFailure("keep_rate=1 must keep every row")
    raise NotApplicable(f"no value of {knob} that was tried keeps every row" if knob else "it has no knob")


def check_registers(candidate: Candidate) -> None:
    """It works on a model with register tokens."""
    _check_kind(candidate, "registers")


def check_distilled(candidate: Candidate) -> None:
    """It works on a model with a distillation token."""
    _check_kind(candidate, "distilled")


def check_no_cls(candidate: Candidate) -> None:
    """It works on a model without a CLS token, or refuses it in a clear line."""
    _check_kind(candidate, "no CLS")


def check_one_patch(candidate: Candidate) -> None:
    """It works on images of one patch."""
    _check_kind(candidate, "one patch")


def check_two_patches(candidate: Candidate) -> None:
    """It works on images of two patches."""
    _check_kind(candidate, "two patches")


def check_pruned_rows(candidate: Candidate) -> None:
    """It works on rows that were pruned, merged and weighted before, a different number in each image."""
    pruned = candidate.pruned()
    with torch.no_grad():
        together = pruned.forward_head(pruned.walk(uneven(pruned, [0, 1, 2])))
        for image in range(3):
            alone = pruned.forward_head(pruned.walk(uneven(pruned, [image])))
            _expect_equal(
                alone, together[[image]], "on rows pruned before, an image depends on its neighbours"
            )


def check_dead_rows(candidate: Candidate) -> None:
    """Rows behind the last image, which a CUDA graph makes room for, change nothing."""
    pruned = candidate.pruned()
    with torch.no_grad():
        tokens = uneven(pruned, [0, 1, 2])
        plain = pruned.forward_head(pruned.walk(tokens))
        room = uneven(pruned, [0, 1, 2], dead=20)
        logits = pruned.forward_head(pruned.walk(room, capacity=room.x.shape[0]))
    _expect_equal(logits, plain, "dead rows (image_id equal to the batch size) change the logits")


def check_replay(candidate: Candidate) -> None:
    """A replay of its recorded decisions gives the same logits: it has done nothing that the mask does not say."""
    pruned = candidate.pruned()
    with torch.no_grad():
        trace = pruned.trace(images(), index())
        again = prune(pruned.model, replay(trace), backend="reference")(images(), index())
    _expect_equal(again, trace.logits, "the decisions alone do not give its logits; does it change tokens?")


def uneven(pruned: RaggedViT, chosen: list[int], dead: int = 0) -> RaggedTokens:
    """Rows of some of `images` as an earlier policy would leave them: pruned and merged, more in some than in others.

    Args:
        pruned: The model that embeds them.
        chosen: Which images.
        dead: Dead rows behind them, of large values.
    """
    tokens = pruned.embed(images()[chosen], index()[chosen])
    stride = tokens.image_index[tokens.image_id] - 3
    leaves = tokens.is_patch & (tokens.position % stride == 0)
    merges = leaves & (tokens.position % 2 == 0)
    rows = torch.arange(len(leaves))
    mask = merge(tokens, KeepMask(~leaves), torch.where(merges, rows - 1, -1), tokens.sizes)
    mask = replace(mask, size=tokens.sizes, key_weight=tokens.sizes)
    left = pack(tokens, mask)
    if not dead:
        return left
    left = pack(tokens, mask, capacity=left.x.shape[0] + dead)
    return replace(left, x=torch.where(left.live[:, None], left.x, 1e3))


def _check_kind(candidate: Candidate, kind: str) -> None:
    trace = candidate.pruned(kind).trace(images(kind), index())
    if not bool(trace.logits.isfinite().all()):
        raise CheckFailure(f"the logits of the model with {kind} are not finite")
    check_independence(candidate, kind)


def _knob_values(candidate: Candidate) -> list[float]:
    low, high = candidate.make().knob_range or (-torch.inf, torch.inf)
    return [
        value for value in (1, 0, high, low, -1000000, 1000000) if low <= value <= high and abs(value) < 1e9
    ]


def _trace_at(candidate: Candidate, value: float | None) -> Trace | None:
    torch.manual_seed(0)  # the same random weights at each value
    policy = candidate.make()
    policy.knob_value = policy.knob_value if value is None else value
    try:
        with torch.no_grad():
            return candidate.pruned(policy=policy).trace(images(), index())
    except (
        Exception,
        SystemExit,
    ):  # a value that the policy refuses, in whatever way, does not keep everything
        return None


def _counts(trace: Trace | None) -> list[list[int]] | None:
    return None if trace is None else trace.mlp_rows.tolist()


def _drops_nothing(trace: Trace) -> bool:
    return all(torch.equal(stage.tokens.seqlens, stage.counts) for stage in trace.stages)


def _expect_same_decisions(together: Trace, apart: Trace, order: list[int]) -> None:
    for number, stage in enumerate(together.stages):
        if not torch.equal(together.heirs(number)[order], apart.heirs(number)):
            raise CheckFailure(f"images {order} alone keep other patches at layer {stage.layer}")


def _expect_equal(got: Tensor, expected: Tensor, what: str) -> None:
    error = (got - expected).abs().max().item()
    if not error <= TOLERANCE * expected.abs().max().item():
        raise CheckFailure(f"{what} (largest difference {error:.2g})")
