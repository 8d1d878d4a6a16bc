"""Each policy against a dense re-statement of its paper, over several stages: logits and gradients in fp64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_ats import ats
from dense_diffrate import diffrate
from dense_evit import evit
from dense_kmedoids import kmedoids
from dense_ltmp import ltmp
from dense_threshold import norm_fixed_ratio, norm_threshold
from dense_threshold import top_p as dense_top_p
from dense_tome import tome
from dense_topk import topk
from dense_walk import Record
from tests_support import small_vit
from torch import nn

import prunevit
from prunevit import Trace
from prunevit.policies import ATS, LTMP, DiffRate, EViT, KMedoids, ThresholdL2, ToMe, TopK, TopP
from prunevit.policy import PruningPolicy

Dense = Callable[[Any, torch.Tensor], tuple[torch.Tensor, Any]]

CASES: dict[str, tuple[PruningPolicy, Dense]] = {
    "topk": (TopK(0.7, (1, 2, 3)), lambda m, x: topk(m, x, 0.7, (1, 2, 3))),
    "topk-floor-initial": (
        TopK(0.7, (1, 2), rounding="floor", of="initial", compound=True),
        lambda m, x: topk(m, x, 0.7, (1, 2), "floor", "initial", True),
    ),
    "evit": (EViT(0.6, (0, 1, 3)), lambda m, x: evit(m, x, 0.6, (0, 1, 3))),
    "evit-every-block": (EViT(0.5, ":"), lambda m, x: evit(m, x, 0.5, (0, 1, 2, 3))),
    "tome": (ToMe(5), lambda m, x: tome(m, x, 5)),
    "tome-plain-attention": (ToMe(7, prop_attn=False), lambda m, x: tome(m, x, 7, prop_attn=False)),
    "tome-more-than-half": (ToMe(13), lambda m, x: tome(m, x, 13)),
    "tome-list": (ToMe((0, 9, 3, 1)), lambda m, x: tome(m, x, [0, 9, 3, 1])),
    "tome-inflection": (ToMe(6, inflection=-1.0), lambda m, x: tome(m, x, (6, -1.0))),
    "norm-absolute": (ThresholdL2(8.0, (1, 3), "absolute"), lambda m, x: norm_threshold(m, x, 8.0, (1, 3))),
    "norm-deviation": (
        ThresholdL2(-0.3, (1, 3), "deviation"),
        lambda m, x: norm_threshold(m, x, -0.3, (1, 3), "mean_std"),
    ),
    "norm-maximum": (
        ThresholdL2(0.8, (1, 3), "maximum"),
        lambda m, x: norm_threshold(m, x, 0.8, (1, 3), "max"),
    ),
    "norm-published": (ThresholdL2(0.5, (2,), "published"), lambda m, x: norm_fixed_ratio(m, x, 0.5, (2,))),
    "top-p": (TopP(0.8, (1, 2)), lambda m, x: dense_top_p(m, x, 0.8, (1, 2))),
    "ats": (ATS(layers=(1, 2, 3)), lambda m, x: ats(m, x, None, (1, 2, 3))),
    "ats-rows": (ATS(20, (1, 2)), lambda m, x: ats(m, x, 20, (1, 2))),
    "ats-fraction": (ATS(0.6, (0, 1, 2)), lambda m, x: ats(m, x, 0.6, (0, 1, 2))),
    "diffrate": (
        DiffRate((37, 30, 99, 9), (33, 25, 14, 1)),
        lambda m, x: diffrate(m, x, (37, 30, 99, 9), (33, 25, 14, 1)),
    ),
    "diffrate-prune-alone": (
        DiffRate((30, 20, 20, 9), (37, 20, 99, 9)),
        lambda m, x: diffrate(m, x, (30, 20, 20, 9), (37, 20, 99, 9)),
    ),
    "ltmp": (LTMP(31 / 32, 1 / 64), lambda m, x: ltmp(m, x, [31 / 32] * 4, [1 / 64] * 4)),
    "ltmp-block-by-block": (
        LTMP((63 / 64, 2, 255 / 256, 31 / 32), (0, 1 / 64, 1 / 32, 1)),
        lambda m, x: ltmp(m, x, (63 / 64, 2, 255 / 256, 31 / 32), (0, 1 / 64, 1 / 32, 1)),
    ),
    "kmedoids": (KMedoids(0.7, (1, 2, 3)), lambda m, x: kmedoids(m, x, 0.7, (1, 2, 3))),
    "kmedoids-one-turn": (
        KMedoids(0.4, (1, 3), iterations=1),
        lambda m, x: kmedoids(m, x, 0.4, (1, 3), iterations=1),
    ),
}


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "registers": {"reg_tokens": 3, "init_values": 0.5},
}


def gradients(model: nn.Module, logits: torch.Tensor) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((logits * torch.randn_like(logits)).sum(), list(parameters.values()))
    return dict(zip(parameters, found))


def assert_equal(model: Any, trace: Trace, expected: torch.Tensor, record: Record) -> None:
    """Decisions are the same, logits within 1e-11, gradients within 1e-10 of each parameter's largest."""
    counts = [(stage.counts - model.num_prefix_tokens).tolist() for stage in trace.stages]
    assert counts == [stage.counts for stage in record.stages]
    for number, twin in enumerate(record.stages):
        for image, kept in enumerate(twin.kept):
            assert trace.survivors(number, image) == sorted(kept.tolist())
    assert trace.attention_rows.tolist() == record.attention_rows.tolist()
    assert trace.mlp_rows.tolist() == record.mlp_rows.tolist()
    torch.testing.assert_close(trace.logits, expected, rtol=0, atol=1e-11)

    ours, theirs = gradients(model, trace.logits), gradients(model, expected)
    for parameter, gradient in theirs.items():
        scale = gradient.abs().max().clamp(min=1e-6).item()
        torch.testing.assert_close(ours[parameter], gradient, rtol=0, atol=1e-10 * scale, msg=parameter)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", CASES)
def test_policy_equals_its_dense_twin(name: str, architecture: str) -> None:
    model = small_vit(**ARCHITECTURES[architecture])
    policy, dense = CASES[name]
    policy = copy.deepcopy(policy)  # each case meets models of several shapes
    images = torch.randn(3, 3, 96, 96, dtype=torch.float64)
    pruned = prunevit.prune(model, policy)

    expected, record = dense(model, images)
    assert_equal(model, pruned.trace(images), expected, record)


def test_tome_of_thirteen_in_twelve_blocks() -> None:
    model = small_vit(depth=12, img_size=224)
    images = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    expected, _ = tome(model, images, 13)
    trace = prunevit.prune(model, ToMe(13)).trace(images)
    assert trace.mlp_rows[:, 0].tolist() == [197 - 13 * (block + 1) for block in range(12)]
    torch.testing.assert_close(trace.logits, expected, rtol=0, atol=1e-11)
