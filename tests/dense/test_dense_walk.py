"""Keeping everything is timm's own forward, and a pruned forward is timm's with the pruned keys masked."""

from collections.abc import Callable

import pytest
import torch
from dense_ats import ats
from dense_diffrate import diffrate
from dense_dpcknn import dpcknn
from dense_dynamicvit import Predictor, dynamicvit, dynamicvit_training
from dense_evit import evit
from dense_kmedoids import kmedoids
from dense_ltmp import ltmp
from dense_models import MODELS, build, photos
from dense_threshold import norm_fixed_ratio, norm_threshold, top_p
from dense_tome import tome
from dense_topk import topk
from dense_walk import Record
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Method = Callable[[VisionTransformer, Tensor], tuple[Tensor, Record]]


def predictors(stages: int, channels: int = 48) -> list[Predictor]:
    generator = torch.Generator().manual_seed(5)
    pairs: list[Predictor] = []
    for _ in range(stages):
        features = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, channels), nn.GELU())
        last = nn.Linear(12, 2)
        classify = nn.Sequential(nn.Linear(channels, 12), nn.GELU(), last)
        pair = nn.ModuleList([features, classify]).double()
        with torch.no_grad():
            for parameter in pair.parameters():
                parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            # Most patches stay: in training an image that keeps none is undefined (a mean over no rows).
            last.bias.copy_(torch.tensor([2.0, -2.0]))
        pairs.append((features, classify))
    return pairs


def surely_keep(model: VisionTransformer, images: Tensor) -> tuple[Tensor, Record]:
    noise = torch.zeros(2, len(images), 64, 2, dtype=torch.float64)
    noise[..., 0] = 1e3
    noise = noise[:, :, : model.patch_embed.num_patches]
    return dynamicvit_training(model, images, predictors(2), noise, (1, 3), eps=0.0)


KEEP_ALL_ANYWHERE: dict[str, Method] = {
    "tome": lambda m, x: tome(m, x, 0),
    "ltmp": lambda m, x: ltmp(m, x, [1.0] * 4, [0.0] * 4),
    "norm_absolute": lambda m, x: norm_threshold(m, x, -torch.inf, (1, 3)),
    "norm_mean_std": lambda m, x: norm_threshold(m, x, -torch.inf, (1, 3), "mean_std"),
    "norm_max": lambda m, x: norm_threshold(m, x, 0.0, (1, 3), "max", "after_attention"),
    "norm_fixed_ratio": lambda m, x: norm_fixed_ratio(m, x, 0.0, (1, 3)),
    "dynamicvit": lambda m, x: dynamicvit(m, x, predictors(2), 1.0, (1, 3)),
    "dynamicvit_training": surely_keep,
    "kmedoids": lambda m, x: kmedoids(m, x, 1.0, (1, 3)),
}
KEEP_ALL_BY_CLS: dict[str, Method] = {
    "topk": lambda m, x: topk(m, x, 1.0, (1, 3)),
    "evit": lambda m, x: evit(m, x, 1.0, (1, 3)),
    "top_p": lambda m, x: top_p(m, x, 1.0, (1, 3)),
    "diffrate": lambda m, x: diffrate(m, x, [99] * 4, [99] * 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_keeping_everything_is_timms_forward(name: str) -> None:
    model = build(name)
    images = photos(model)
    with torch.no_grad():
        expected = model(images)
        methods = KEEP_ALL_ANYWHERE | ({} if name == "no_cls" else KEEP_ALL_BY_CLS)
        for label, method in methods.items():
            logits, record = method(model, images)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10, msg=label)
            tokens = model.patch_embed.num_patches + model.num_prefix_tokens
            assert (record.attention_rows == tokens).all(), label
            assert (record.mlp_rows == tokens).all(), label


def test_clusters_of_one_differ_from_timm_by_the_eps_of_their_mean_only() -> None:
    model = build("plain")
    images = photos(model)
    noise = [torch.rand(2, 16, dtype=torch.float64) for _ in range(2)]
    with torch.no_grad():
        logits, _ = dpcknn(model, images, 1.0, noise, (1, 3))
        torch.testing.assert_close(logits, model(images), rtol=0, atol=1e-4)


PRUNING: dict[str, tuple[Method, str]] = {
    "topk": (lambda m, x: topk(m, x, 0.6, (0, 2)), "after_attention"),
    "top_p": (lambda m, x: top_p(m, x, 0.7, (0, 2)), "after_attention"),
    "ats": (lambda m, x: ats(m, x, None, (0, 1, 2, 3)), "after_attention"),
    "ats_budget": (lambda m, x: ats(m, x, 10, (1, 2)), "after_attention"),
    "norm_threshold": (lambda m, x: norm_threshold(m, x, 0.0, (1, 3), "mean_std"), "before_block"),
    "norm_fixed_ratio": (lambda m, x: norm_fixed_ratio(m, x, 0.4, (1, 3)), "before_block"),
    "dynamicvit": (lambda m, x: dynamicvit(m, x, predictors(2), 0.6, (1, 3)), "before_block"),
    "dynamicvit_ragged": (lambda m, x: dynamicvit(m, x, predictors(2), None, (1, 3)), "before_block"),
    "kmedoids": (lambda m, x: kmedoids(m, x, 0.6, (1, 3)), "before_block"),
    "diffrate_prune": (lambda m, x: diffrate(m, x, [13, 9, 9, 4], [99] * 4), "after_attention"),
}


def masked_logits(
    model: VisionTransformer, image: Tensor, record: Record, position: int, site: str
) -> Tensor:
    """Run timm's own blocks on all rows; pruned keys are masked, and pruned rows leave before the head."""
    prefix = model.num_prefix_tokens
    x = model.norm_pre(model._pos_embed(model.patch_embed(image[None])))
    alive = torch.ones(x.shape[1], dtype=torch.bool)
    stages = {stage.layer: stage.kept[position] for stage in record.stages}
    for layer, block in enumerate(model.blocks):
        now = alive.clone()
        if layer in stages:
            alive[prefix:] = False
            alive[prefix + stages[layer]] = True
        visible = alive if site == "before_block" else now
        x = block(x, attn_mask=visible.expand(1, 1, len(alive), -1))
    return model.forward_head(model.norm(x)[:, alive])[0]


@pytest.mark.parametrize("name", ["plain", "distilled", "registers", "average", "normed"])
@pytest.mark.parametrize("label", PRUNING)
def test_pruning_is_timms_forward_with_masked_keys(name: str, label: str) -> None:
    method, site = PRUNING[label]
    model = build(name)
    images = photos(model)
    with torch.no_grad():
        logits, record = method(model, images)
        assert sum(record.stages[-1].counts) < 2 * model.patch_embed.num_patches
        for position, image in enumerate(images):
            expected = masked_logits(model, image, record, position, site)
            torch.testing.assert_close(logits[position], expected, rtol=0, atol=1e-10)


DIFFERENTIABLE: dict[str, Method] = {
    "topk": lambda m, x: topk(m, x, 0.6, (0, 2)),
    "evit": lambda m, x: evit(m, x, 0.6, (0, 2)),
    "tome": lambda m, x: tome(m, x, 3),
    "ltmp": lambda m, x: ltmp(m, x, [0.3] * 4, [0.05] * 4),
    "ats": lambda m, x: ats(m, x, None, (1, 2), eps=1e-6),
    "norm_threshold": lambda m, x: norm_threshold(m, x, 0.0, (1, 3), "mean_std"),
    "dynamicvit": lambda m, x: dynamicvit(m, x, predictors(2), 0.6, (1, 3)),
    "dpcknn": lambda m, x: dpcknn(m, x, 0.6, [torch.zeros(1, 16), torch.zeros(1, 9)], (1, 3)),
}


@pytest.mark.parametrize("label", DIFFERENTIABLE)
def test_gradient_is_the_slope_of_the_logits(label: str) -> None:
    model = build("plain")
    images = photos(model, batch=1)
    parameters = [p for p in model.parameters() if p.dim() > 1]
    directions = [torch.randn_like(p) / p.numel() ** 0.5 for p in parameters]

    def value(step: float) -> Tensor:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions):
                parameter.add_(step * direction)
        return DIFFERENTIABLE[label](model, images)[0].sin().sum()

    gradients = torch.autograd.grad(value(0.0), parameters)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions))
    with torch.no_grad():
        above, below = value(1e-6), value(-2e-6)
    torch.testing.assert_close(slope, (above - below) / 2e-6, rtol=1e-6, atol=1e-7)


def test_images_do_not_see_each_other() -> None:
    model = build("plain")
    images = photos(model, batch=3)
    with torch.no_grad():
        together, _ = evit(model, images, 0.5, (0, 2))
        alone = [evit(model, image[None], 0.5, (0, 2))[0][0] for image in images]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=0)
