"""The parts of fine-tuning against formulas written out, and against timm on the bare model."""

import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from finetuning_runs import config, photos
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

from prunevit import prune
from prunevit.experiments.finetuning.objective import Objective
from prunevit.experiments.finetuning.optimisation import (
    Schedule,
    freeze,
    make_optimizer,
    parameter_groups,
    set_drop_path,
)
from prunevit.experiments.finetuning.plan import BatchPlan, Length
from prunevit.experiments.finetuning.seeding import Purpose, seed_draws
from prunevit.policies import DynamicViT, EViT, TopK, TopP


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("data") / "photos", train=1, val=1)


def model(**settings: Any) -> Any:
    return timm.create_model("test_vit", num_classes=3, img_size=64, **settings)


def by_name(module: torch.nn.Module, groups: list[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("layer_decay", [None, 0.65])
def test_groups_are_those_of_the_bare_model(root: Path, layer_decay: float | None) -> None:
    bare = model()
    common = {"weight_decay": 0.3, "no_weight_decay_list": bare.no_weight_decay()}
    expected = by_name(
        bare,
        param_groups_weight_decay(bare, **common)
        if layer_decay is None
        else param_groups_layer_decay(bare, **common, layer_decay=layer_decay),
    )
    assert len(set(expected.values())) == (2 if layer_decay is None else 16)  # 6 blocks, embedding and head
    words = [f"layer_decay={layer_decay or 'null'}", "weight_decay=0.3", "backbone_lr_scale=0.5"]
    pruned = prune(bare, DynamicViT(layers=(1, 3)))
    found = by_name(pruned, parameter_groups(pruned, config(root, *words)))
    assert set(found) == {name for name, _ in pruned.named_parameters()}
    for name, (decay, scale) in found.items():
        if name.startswith("model."):
            assert (decay, scale) == (expected[name[6:]][0], 0.5 * expected[name[6:]][1]), name
        else:
            assert (decay, scale) == (
                0.3 if name.endswith("weight") and "features.0" not in name else 0.0,
                1.0,
            ), name


def test_learning_rates_by_step(root: Path) -> None:
    words = [
        "lr=1e-2",
        "lr_base_size=8",
        "batch_size=4",
        "min_lr=1e-4",
        "warmup_lr=1e-3",
        "warmup_steps=null",
        "warmup_epochs=1",
    ]
    words += ["frozen_epochs=0.5", "backbone_lr_scale=0.1"]
    pruned = prune(model(), DynamicViT(layers=(1, 3)))
    made = config(root, *words)
    optimizer = make_optimizer(pruned, made)
    schedule = Schedule(optimizer, pruned, made, Length(images=41, batch_size=4, steps=50))
    peak = 5e-3
    for step in (0, 4, 5, 9, 10, 30, 49):
        schedule.set(step)
        wanted = 1e-3 + step * (peak - 1e-3) / 10
        if step >= 10:
            wanted = 1e-4 + (peak - 1e-4) * (1 + math.cos(math.pi * step / 50)) / 2
        rates = {group["backbone"]: group["lr"] for group in optimizer.param_groups}
        assert rates[False] == pytest.approx(wanted)
        assert rates[True] == pytest.approx(0.0 if step < 5 else 0.1 * wanted)
        assert schedule.lr == rates[False]


def test_keep_rate_falls_by_a_cosine(root: Path) -> None:
    policy = EViT(keep_rate=0.7, layers=(1, 3))
    made = config(root, "keep_rate_start_epochs=1", "keep_rate_warmup_steps=4")
    pruned = prune(model(), policy)
    schedule = Schedule(make_optimizer(pruned, made), pruned, made, Length(8, 4, 20))
    rates = []
    for step in range(8):
        schedule.set(step)
        rates.append(policy.rate(1))
    half = (1 - math.sqrt(0.5)) / 2
    expected = [1, 1, 1, 1 - 0.3 * half, 0.85, 0.7 + 0.3 * half, 0.7, 0.7]
    assert rates == pytest.approx(expected)
    assert rates[-1] == 0.7  # not a rounding step beside it: counts would change


def test_warming_up_multiplies_out_and_reaches_each_stage() -> None:
    policy = TopK(keep_rate=0.5, layers=(1, 3), compound=True, of="initial")
    policy.warm(0.5)
    assert [policy.rate(1), policy.rate(3)] == pytest.approx([0.75, 0.75**2])
    by_layer = DynamicViT(keep_rate=(0.8, 0.6), layers=(1, 3))
    by_layer.warm(0.5)
    assert [by_layer.rate(1), by_layer.rate(3)] == pytest.approx([0.9, 0.9 * 0.8])
    by_layer.warm(1.0)
    assert [by_layer.rate(1), by_layer.rate(3)] == pytest.approx([0.8, 0.8 * 0.6])
    with pytest.raises(ValueError, match="only a keep_rate can be warmed up"):
        TopP(0.5, layers=(1,)).warm(0.5)


def test_no_rows_leave_before_the_warm_up() -> None:
    pruned = prune(model().eval(), EViT(keep_rate=0.3, layers=(1, 3)))
    images = torch.randn(2, 3, 64, 64)
    pruned.policies[0].warm(0.0)  # type: ignore[operator]
    with torch.no_grad():
        assert pruned.trace(images).mlp_rows.unique().tolist() == [17]
        assert torch.allclose(pruned(images), pruned.model(images), atol=1e-6)


@pytest.mark.parametrize(("parts", "world"), [(1, 2), (2, 1), (2, 2)])
def test_processes_and_parts_share_the_images_of_a_step(parts: int, world: int) -> None:
    length = Length(images=21, batch_size=8, steps=7)
    whole = list(BatchPlan(length, seed=5))
    shares = [list(BatchPlan(length, 5, parts, rank, world)) for rank in range(world)]
    for step in range(7):
        together = [
            draw
            for part in range(parts)
            for rank in range(world)
            for draw in shares[rank][step * parts + part]
        ]
        assert together == whole[step]
        assert len({*map(tuple, together)}) == 8
    first_epoch = [position for batch in whole[:2] for _, position in batch]
    assert len(set(first_epoch)) == 16
    assert {epoch for batch in whole[2:4] for epoch, _ in batch} == {1}
    assert [position for _, position in whole[0]] != [position for _, position in whole[2]]
    assert len(BatchPlan(length, 5, parts, 0, world, start=3)) == 7 * parts
    assert list(BatchPlan(length, 5, parts, 0, world, start=3)) == shares[0][3 * parts :]


def test_draws_depend_on_the_key_alone() -> None:
    def draw(*key: int) -> list[float]:
        seed_draws(*key)  # type: ignore[arg-type]
        import random

        import numpy as np

        return [random.random(), np.random.rand(), torch.rand(1).item()]

    first = draw(0, Purpose.STEP, 3, 0)
    draw(0, Purpose.PHOTO, 3, 0)
    assert draw(0, Purpose.STEP, 3, 0) == first
    others = [draw(1, Purpose.STEP, 3, 0), draw(0, Purpose.PHOTO, 3, 0), draw(0, Purpose.STEP, 3, 1)]
    assert all(a != b for other in others for a, b in zip(other, first))


def test_losses_by_hand(root: Path) -> None:
    torch.manual_seed(1)
    words = ["label_smoothing=0.2", "distillation_weight=0.5", "distillation_temperature=3"]
    pruned = prune(model(), EViT(keep_rate=0.5, layers=(1, 3))).train()
    teacher = model().eval()
    images, targets = torch.randn(4, 3, 64, 64), torch.tensor([0, 2, 1, 1])
    trace = pruned.trace(images)
    parts = Objective(pruned, teacher, config(root, *words)).parts(trace, images, targets)
    p = trace.logits.softmax(1)
    smooth = 0.8 * torch.nn.functional.one_hot(targets, 3) + 0.2 / 3
    assert parts["class"].item() == pytest.approx(-(smooth * p.log()).sum(1).mean().item(), rel=1e-5)
    q, r = (teacher(images) / 3).softmax(1), (trace.logits / 3).softmax(1)
    by_hand = 0.5 * 9 * (q * (q / r).log()).sum(1).mean()
    assert parts["distillation"].item() == pytest.approx(by_hand.item(), rel=1e-4)
    assert set(parts) == {"class", "distillation"}


def test_the_teacher_runs_only_if_something_asks(root: Path) -> None:
    calls = []

    class Teacher:
        def forward_features(self, images: torch.Tensor) -> torch.Tensor:
            calls.append(len(images))
            return torch.zeros(len(images), 17, 64)

        def forward_head(self, features: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(features), 3)

    images, targets = torch.randn(2, 3, 64, 64), torch.tensor([0, 2])
    for policy, runs in ((EViT(0.5, layers=(1, 3)), []), (DynamicViT(0.5, layers=(1, 3)), [2])):
        pruned = prune(model(), policy).train()
        objective = Objective(pruned, Teacher(), config(root))  # type: ignore[arg-type]
        parts = objective.parts(pruned.trace(images), images, targets)
        assert calls == runs
    assert set(parts) == {"class", "ratio", "logits", "features"}


def test_mixed_targets_are_probabilities(root: Path) -> None:
    pruned = prune(model(), EViT(0.5, layers=(1, 3))).train()
    objective = Objective(pruned, model(), config(root, "mixup=0.8", "label_smoothing=0.1"))
    seed_draws(0, Purpose.STEP, 0)
    images = torch.randn(4, 3, 64, 64)
    before, indices = images.clone(), torch.tensor([0, 2, 1, 1])
    mixed, targets = objective.mix(images, indices)
    assert targets.shape == (4, 3)
    assert torch.allclose(targets.sum(1), torch.ones(4))
    share = ((mixed - before.flip(0)) / (before - before.flip(0))).mean().item()
    off = 0.1 / 3
    assert targets[0].tolist() == pytest.approx([off + 0.9 * share, off + 0.9 * (1 - share), off], abs=1e-3)
    trace = pruned.trace(mixed)
    by_hand = -(targets * trace.logits.log_softmax(1)).sum(1).mean()
    assert objective.parts(trace, mixed, targets)["class"].item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_frozen_parameters_and_stochastic_depth() -> None:
    made = model()
    set_drop_path(made, 0.5)
    rates = [block.drop_path2.drop_prob for block in made.blocks]
    reference = timm.create_model("test_vit", drop_path_rate=0.5)
    assert rates == pytest.approx([getattr(block.drop_path2, "drop_prob", 0.0) for block in reference.blocks])  # type: ignore[union-attr]
    pruned = prune(made, EViT(0.5, layers=(1, 3)))
    freeze(pruned, ["cls_token", "pos_embed"])
    fixed = [name for name, parameter in made.named_parameters() if not parameter.requires_grad]
    assert fixed == ["cls_token", "pos_embed"]
