"""The walk equals timm's own forward; what timm's training code asks of a model is forwarded."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from tests_support import small_vit
from timm.models.vision_transformer import ParallelScalingBlock
from timm.optim import param_groups_layer_decay

import prunevit
from prunevit import KeepMask, PruningPolicy
from prunevit.policies import EViT, KMedoids, NoPruning, ToMe, TopK, TopP

VARIANTS = {
    "cls": {},
    "layer scale": {"init_values": 0.3},
    "q/k norm": {"qk_norm": True},
    "attention and mlp norm": {"scale_attn_norm": True, "scale_mlp_norm": True},
    "registers": {"reg_tokens": 4},
    "average": {"global_pool": "avg"},
    "average without cls": {"global_pool": "avg", "class_token": False},
    "average with prefix": {"global_pool": "avg", "reg_tokens": 2, "pool_include_prefix": True},
    "max": {"global_pool": "max"},
    "average and max": {"global_pool": "avgmax"},
    "map": {"global_pool": "map"},
    "map without cls": {"global_pool": "map", "class_token": False, "fc_norm": False},
    "pre-norm": {"pre_norm": True},
    "no embedded class": {"no_embed_class": True, "reg_tokens": 1},
    "no classes": {"num_classes": 0},
    "not square": {"img_size": (64, 128)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_without_pruning_the_logits_are_timms(variant: str) -> None:
    model = small_vit(**VARIANTS[variant])  # type: ignore[arg-type]
    images = torch.randn(2, 3, *model.patch_embed.img_size, dtype=torch.float64)
    torch.testing.assert_close(prunevit.prune(model, NoPruning())(images), model(images), rtol=0, atol=1e-10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_ragged_batch_equals_its_images_one_by_one(variant: str) -> None:
    """The poolings over rows that differ in number; a single image is uniform, a batch is not."""

    class HalfOfSome(PruningPolicy):
        """Keep all patches of even images, the first third of odd ones."""

        site = "before_block"

        def __init__(self) -> None:
            super().__init__(None, (2,))

        def forward(self, tokens, attention, layer):  # type: ignore[no-untyped-def]
            odd = torch.cat([tokens.image_index % 2, tokens.image_index.new_zeros(1)])[tokens.image_id] == 1
            return KeepMask(tokens.live & ~(odd & (tokens.source > 11)))

    model = small_vit(**VARIANTS[variant])  # type: ignore[arg-type]
    images = torch.randn(3, 3, *model.patch_embed.img_size, dtype=torch.float64)
    pruned = prunevit.prune(model, HalfOfSome())
    alone = torch.cat([pruned(images[i : i + 1], torch.tensor([i])) for i in range(3)])
    torch.testing.assert_close(pruned(images), alone, rtol=0, atol=1e-12)
    assert not pruned.forward_features(images).uniform


@pytest.mark.parametrize("size", [(96, 96), (64, 112), (160, 80)])
def test_dynamic_image_size(size: tuple[int, int]) -> None:
    model = small_vit(dynamic_img_size=True)
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(prunevit.prune(model, NoPruning())(images), model(images), rtol=0, atol=1e-10)
    assert prunevit.prune(model, EViT(0.5, (1,))).trace(images).tokens.grid == (size[0] // 16, size[1] // 16)


def test_distilled_model_in_evaluation_and_in_training() -> None:
    model = small_vit("deit_tiny_distilled_patch16_224")
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    pruned = prunevit.prune(model, NoPruning())
    torch.testing.assert_close(pruned(images), model(images), rtol=0, atol=1e-10)
    model.set_distilled_training()
    pruned.train()
    ours, theirs = pruned(images), model(images)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_stochastic_depth_draws_for_each_image() -> None:
    model = small_vit(drop_path_rate=0.9)
    pruned = prunevit.prune(model, TopK(0.5, (1,)))
    pruned.train()
    images = torch.randn(1, 3, 96, 96, dtype=torch.float64).expand(8, -1, -1, -1)
    tokens = pruned.forward_features(images)
    padded = tokens.to_padded()
    # Equal images with equal draws have equal rows: with few draws there are few kinds of images, and rows of one
    # image never mix two draws.
    kinds = padded.flatten(1).round(decimals=8).unique(dim=0)
    assert 1 < len(kinds) <= 8
    pruned.eval()
    assert len(pruned.forward_features(images).to_padded().flatten(1).round(decimals=8).unique(dim=0)) == 1


def test_attention_dropout_is_refused_in_training_alone() -> None:
    model = small_vit(attn_drop_rate=0.1)
    images = torch.randn(1, 3, 96, 96, dtype=torch.float64)
    pruned = prunevit.prune(model, NoPruning())
    torch.testing.assert_close(pruned(images), model(images), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match=r"attention dropout in training must be 0, got 0\.1"):
        pruned.train()(images)


def test_patch_dropout_keeps_track_of_the_patches() -> None:
    model = small_vit(patch_drop_rate=0.5)
    pruned = prunevit.prune(model, NoPruning())
    pruned.train()
    tokens = pruned.embed(torch.randn(2, 3, 96, 96, dtype=torch.float64))
    assert tokens.seqlens.tolist() == [19, 19]
    full = model._pos_embed(model.patch_embed(torch.zeros(2, 3, 96, 96, dtype=torch.float64)))
    tokens = pruned.embed(torch.zeros(2, 3, 96, 96, dtype=torch.float64))
    rows = tokens.source.long().view(2, 19) + 1
    torch.testing.assert_close(tokens.x.view(2, 19, -1), full.gather(1, rows[..., None].expand(-1, -1, 48)))


@pytest.mark.parametrize("policies", [[NoPruning()], [EViT(0.5, (1, 2))]])
def test_gradient_checkpointing_changes_nothing(policies: list[PruningPolicy]) -> None:
    model = small_vit()
    pruned = prunevit.prune(model, policies)
    pruned.train()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    plain = torch.autograd.grad(pruned(images).sum(), list(model.parameters()))
    pruned.set_grad_checkpointing()
    for one, other in zip(plain, torch.autograd.grad(pruned(images).sum(), list(model.parameters()))):
        torch.testing.assert_close(one, other)


def test_layer_decay_groups_are_those_of_the_bare_model() -> None:
    model = small_vit(reg_tokens=2)
    pruned = prunevit.prune(model, NoPruning())

    def groups(of: Any, prefix: str) -> list[tuple[float, float, list[str]]]:
        names = {id(p): n.removeprefix(prefix) for n, p in of.named_parameters()}
        found = param_groups_layer_decay(
            of, weight_decay=0.05, layer_decay=0.7, no_weight_decay_list=of.no_weight_decay()
        )
        return sorted(
            (g["lr_scale"], g["weight_decay"], sorted(names[id(p)] for p in g["params"])) for g in found
        )

    assert groups(pruned, "model.") == groups(model, "")
    assert len(groups(model, "")) > 8


def test_export_is_loaded_by_timm(tmp_path: Path) -> None:
    model = small_vit()
    target = tmp_path / "a new" / "folder" / "backbone.safetensors"
    prunevit.prune(model, EViT(0.5, (1,))).export_backbone(target)
    loaded = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=96,
        depth=4,
        embed_dim=48,
        num_heads=3,
        num_classes=10,
        checkpoint_path=str(target),
    )
    for name, value in loaded.double().state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name].float().double(), msg=name)


def test_state_dict_round_trip_and_shared_weights() -> None:
    model, other = small_vit(), small_vit(num_classes=10, init_values=None)
    pruned = prunevit.prune(model, EViT(0.5, (1,)))
    with torch.no_grad():
        other.head.weight.add_(1.0)
    copy = prunevit.prune(other, EViT(0.5, (1,)))
    copy.load_state_dict(pruned.state_dict())
    images = torch.randn(1, 3, 96, 96, dtype=torch.float64)
    torch.testing.assert_close(copy(images), pruned(images))
    assert set(pruned.state_dict()) == {f"model.{name}" for name in model.state_dict()}
    assert pruned.model.head.weight is model.head.weight


def test_the_first_broken_part_is_named() -> None:
    model = small_vit()
    pruned = prunevit.prune(model, EViT(0.5, (1,)))
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    assert pruned.find_nan(images) is None
    with torch.no_grad():
        model.blocks[2].mlp.fc2.bias[3] = torch.nan
    assert pruned.find_nan(images) == "the first values that are not finite come from block 2, mlp"
    with torch.no_grad():
        model.blocks[2].attn.proj.bias[3] = torch.inf
    assert pruned.find_nan(images) == "the first values that are not finite come from block 2, attention"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: timm.create_model("swin_tiny_patch4_window7_224"), "got SwinTransformer"),
        (lambda: small_vit(block_fn=ParallelScalingBlock), "got ParallelScalingBlock in block 0"),
        (lambda: small_vit(attn_layer="diff"), "got DiffAttention in block 0"),
        (lambda: small_vit(global_pool=""), "global_pool must pool"),
    ],
)
def test_unsupported_architectures_are_refused_by_name(build, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(TypeError, match=message):
        prunevit.prune(build(), NoPruning())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(1.3), r"TopK: keep_rate must be in \(0, 1\], got 1.3"),
        (lambda: TopK(0.0), r"TopK: keep_rate must be in \(0, 1\], got 0"),
        (lambda: EViT(0.5, (1, 4)), r"EViT: layers must lie in 0\.\.3 \(the model has 4 blocks\), got 4"),
        (lambda: EViT(0.5, (2, 1)), "EViT: layers must rise"),
        (lambda: EViT((0.5, 0.4), (1, 2, 3)), "one for each of the 3 layers, got 2"),
        (lambda: EViT((0.5, 0.4), ":"), "one for each of the 4 layers, got 2"),
        (lambda: EViT(0.5, "all"), 'layers must be block numbers or a slice like "3:", got "all"'),
        (
            lambda: EViT(0.5, score_source="head"),
            "score_source must be one of cls, prefix, received, got 'head'",
        ),
    ],
)
def test_bad_settings_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        prunevit.prune(small_vit(), make())


def test_models_without_cls_need_an_explicit_score() -> None:
    model = small_vit(global_pool="avg", class_token=False)
    with pytest.raises(ValueError, match='choose score_source="received"'):
        prunevit.prune(model, EViT(0.5, (1,)))

    class ByClass(prunevit.PruningPolicy):
        needs = frozenset({"prefix_attention"})

    with pytest.raises(
        ValueError, match=r'has none; let it read "received_attention", which every model has$'
    ):
        prunevit.prune(model, ByClass(None, (1,)))
    pruned = prunevit.prune(model, EViT(0.5, (1, 2), score_source="received"))
    assert pruned.trace(torch.randn(1, 3, 96, 96, dtype=torch.float64)).mlp_rows[:, 0].tolist() == [
        36,
        19,
        11,
        11,
    ]


def test_two_policies_act_in_one_forward_and_must_not_blind_each_other() -> None:
    model = small_vit()
    trace = prunevit.prune(model, [TopK(0.5, (1,)), TopP(0.5, (3,))]).trace(
        torch.randn(2, 3, 96, 96, dtype=torch.float64)
    )
    assert [(stage.layer, stage.policy) for stage in trace.stages] == [(1, 0), (3, 1)]
    with pytest.raises(ValueError, match="TopP: an attention on the present rows is needed at layer 1"):
        prunevit.prune(model, [TopK(0.5, (1,)), TopP(0.5, (1,))])


def test_what_blinds_a_policy_is_what_acts_before_it_in_the_walk_and_not_in_the_list() -> None:
    model, images = small_vit(), torch.randn(2, 3, 96, 96, dtype=torch.float64)
    blind = (
        r"^KMedoids: an attention on the present rows is needed at layer 2, but TopK moves rows just before"
    )
    for policies in ([KMedoids(0.5, (2,)), TopK(0.5, (1,))], [TopK(0.5, (1,)), KMedoids(0.5, (2,))]):
        with pytest.raises(ValueError, match=blind):
            prunevit.prune(model, policies)
    for policies in ([KMedoids(0.5, (1,)), TopK(0.5, (1,))], [TopK(0.5, (1,)), KMedoids(0.5, (1,))]):
        stages = prunevit.prune(model, policies).trace(images).stages
        assert [stage.site for stage in stages] == ["before_block", "after_attention"]


def test_an_empty_batch_has_empty_logits() -> None:
    model = small_vit()
    images = torch.zeros(0, 3, 96, 96, dtype=torch.float64)
    for policy in (NoPruning(), EViT(0.5, (1,)), TopP(0.5, (1, 2))):
        assert prunevit.prune(model, policy)(images).shape == (0, 10)


@pytest.mark.parametrize("policy", [EViT(0.7, layers=1), ToMe(3), KMedoids(0.5, layers=1)], ids=type)
def test_known_counts_need_no_data(policy: PruningPolicy) -> None:
    """Where timm's model runs on the meta device, so does the pruned one."""
    pruned = prunevit.prune(small_vit(), policy).to("meta")
    assert pruned(torch.empty(2, 3, 96, 96, dtype=torch.float64, device="meta")).shape == (2, 10)


def test_counts_that_depend_on_data_say_that_there_is_none() -> None:
    images = torch.empty(2, 3, 96, 96, dtype=torch.float64, device="meta")
    with pytest.raises(
        ValueError, match="pack: counts that depend on the data need tensors with data, got meta"
    ):
        prunevit.prune(small_vit(), TopP(0.5, layers=1)).to("meta")(images)
    with pytest.raises(ValueError, match='backend="reference" needs tensors with data, got meta tensors'):
        prunevit.prune(small_vit(), EViT(0.5, layers=1), backend="reference").to("meta")(images)


def test_a_policy_that_says_nothing_sensible_is_refused() -> None:
    model = small_vit()
    wrong_site, wrong_need, letters = TopK(0.5, (1,)), TopK(0.5, (1,)), TopK(0.5, (1,))
    wrong_site.site = "after_atention"  # type: ignore[assignment]
    wrong_need.needs = frozenset({"prefix_atention"})
    letters.needs = "prefix_attention"  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match="site must be one of before_block, after_attention, got 'after_atention'"
    ):
        prunevit.prune(model, wrong_site)
    for policy in (wrong_need, letters):
        with pytest.raises(ValueError, match="needs must be a set out of prefix_attention"):
            prunevit.prune(model, policy)


def test_the_layers_of_a_policy_object_do_not_change() -> None:
    policy = EViT(0.5, ":")
    prunevit.prune(small_vit(), policy)
    prunevit.prune(small_vit(), policy)
    with pytest.raises(ValueError, match="of another depth, got 3 blocks"):
        prunevit.prune(small_vit(depth=3), policy)


def test_merging_decides_alike_under_autocast() -> None:
    """In bf16 a few hundred similarities are tied; what is compared must not be rounded by autocast."""
    model = small_vit().float()
    images = torch.randn(2, 3, 96, 96)
    seen: list[torch.dtype] = []

    class Seen(ToMe):
        def forward(self, tokens, attention, layer):  # type: ignore[no-untyped-def]
            features = torch.nn.functional.normalize(attention.k.mean(1), dim=-1)
            seen.append(prunevit.nearest(tokens, features, tokens.is_patch, tokens.is_patch)[1].dtype)
            return super().forward(tokens, attention, layer)

    with torch.autocast("cpu", torch.bfloat16):
        prunevit.prune(model, Seen(3, layers=(1,)))(images)
    assert seen == [torch.float32]
