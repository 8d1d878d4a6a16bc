"""The analytic counter against published figures and against torch's own counter."""

import pytest
import timm
import torch
from tests_support import small_vit
from torch.utils.flop_counter import FlopCounterMode

import prunevit
from prunevit.macs import dense_macs, model_macs, policy_macs
from prunevit.policies import EViT, ThresholdL2, ToMe


@pytest.mark.parametrize(
    ("name", "gmacs"),
    [("deit_tiny_patch16_224", 1.254), ("deit_small_patch16_224", 4.599), ("deit_base_patch16_224", 17.564)],
)
def test_unpruned_deit(name: str, gmacs: float) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    assert dense_macs(model) / 1e9 == pytest.approx(gmacs, abs=5e-4)


@pytest.mark.parametrize(
    ("policy", "gmacs", "counts"),
    [
        (EViT(0.7), 3.03, [139, 99, 71]),
        (EViT(0.5), 2.31, [99, 51, 27]),
        (ToMe(13), 2.70, None),
    ],
)
def test_published_pruned_deit_small(policy, gmacs: float, counts: list[int] | None) -> None:  # type: ignore[no-untyped-def]
    model = timm.create_model("deit_small_patch16_224").eval()
    pruned = prunevit.prune(model, policy)
    with torch.inference_mode():
        trace = pruned.trace(torch.randn(1, 3, 224, 224))
    macs = model_macs(model, trace.attention_rows, trace.mlp_rows)
    assert macs.item() / 1e9 == pytest.approx(gmacs, abs=5e-3)
    if counts is not None:
        assert [int(stage.counts[0]) - 1 for stage in trace.stages] == counts


def flops(model: torch.nn.Module, images: torch.Tensor) -> int:
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]  # torch's counter knows the written-out product only, on a CPU
    with FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reg_tokens": 2, "global_pool": "avg"},
        {"global_pool": "map", "class_token": False},
        {"img_size": (64, 128)},
    ],
)
def test_dense_count_equals_torchs_flop_counter(settings: dict) -> None:  # type: ignore[type-arg]
    model = small_vit(**settings)
    images = torch.randn(1, 3, *model.patch_embed.img_size, dtype=torch.float64)
    assert dense_macs(model) == flops(model, images) / 2


def test_a_convolutional_stem_is_counted() -> None:
    model = timm.create_model("vit_small_r26_s32_224", depth=2).eval()
    assert dense_macs(model) == flops(model, torch.randn(1, 3, 224, 224)) / 2


def test_policies_add_their_own() -> None:
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    for policy, expected in (
        (ThresholdL2(layers=(2,)), 37 * 48),
        (ToMe(4, layers=(0, 1)), (37 / 2) ** 2 * 16 + (33 / 2) ** 2 * 16),
        (EViT(0.5, (1,)), 0),
    ):
        pruned = prunevit.prune(small_vit(), policy)
        assert policy_macs(pruned, pruned.trace(images)).tolist() == [expected] * 2
