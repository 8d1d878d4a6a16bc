"""Keep counts of the papers, on grids of 14x14 patches (DeiT's shape), and where floats decide a count."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from dense_diffrate import diffrate
from dense_dynamicvit import dynamicvit
from dense_evit import evit
from dense_kmedoids import kmedoids
from dense_models import build, photos
from dense_threshold import norm_fixed_ratio
from dense_tome import per_block, tome
from dense_topk import topk
from dense_walk import Record
from test_dense_scoring import block_output
from test_dense_walk import predictors
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


@pytest.fixture(scope="module")
def deit_shaped() -> VisionTransformer:
    return build("vit_tiny_patch16_224", img_size=56, patch_size=4, depth=10, embed_dim=24)


TOKEN_REDUCTION: dict[str, Any] = {"rounding": "floor", "of": "initial", "compound": True}
FLOOR_70, FLOOR_50 = [137, 96, 67], [98, 49, 24]
Run = Callable[[VisionTransformer, Tensor], tuple[Tensor, Record]]
COUNTS: dict[str, tuple[Run, list[int]]] = {
    "evit .7": (lambda m, x: evit(m, x, 0.7), [138 + 1, 98 + 1, 70 + 1]),
    "evit .5": (lambda m, x: evit(m, x, 0.5), [98 + 1, 50 + 1, 26 + 1]),
    "topk .7": (lambda m, x: topk(m, x, 0.7), [138, 97, 68]),
    "topk .5": (lambda m, x: topk(m, x, 0.5), [98, 49, 25]),
    "topk floor .7": (lambda m, x: topk(m, x, 0.7, **TOKEN_REDUCTION), FLOOR_70),
    "topk floor .5": (lambda m, x: topk(m, x, 0.5, **TOKEN_REDUCTION), FLOOR_50),
    "evit floor .7": (lambda m, x: evit(m, x, 0.7, **TOKEN_REDUCTION), [n + 1 for n in FLOOR_70]),
    "evit floor .5": (lambda m, x: evit(m, x, 0.5, **TOKEN_REDUCTION), [n + 1 for n in FLOOR_50]),
    "dynamicvit .7": (lambda m, x: dynamicvit(m, x, predictors(3, 24), 0.7), FLOOR_70),
    "dynamicvit .5": (lambda m, x: dynamicvit(m, x, predictors(3, 24), 0.5), FLOOR_50),
    "kmedoids .7": (lambda m, x: kmedoids(m, x, 0.7, iterations=1), FLOOR_70),
}


@pytest.mark.parametrize("label", COUNTS)
def test_published_counts(deit_shaped: VisionTransformer, label: str) -> None:
    run, expected = COUNTS[label]
    with torch.no_grad():
        _, record = run(deit_shaped, photos(deit_shaped, batch=1))
    assert [stage.counts for stage in record.stages] == [[n] for n in expected]


def test_rows_by_block_tell_the_site(deit_shaped: VisionTransformer) -> None:
    images = photos(deit_shaped, batch=1)
    with torch.no_grad():
        _, after = evit(deit_shaped, images, 0.7)
        _, before = dynamicvit(deit_shaped, images, predictors(3, 24), 0.7)
    assert after.attention_rows[:, 0].tolist() == [197] * 4 + [140] * 3 + [100] * 3
    assert after.mlp_rows[:, 0].tolist() == [197] * 3 + [140] * 3 + [100] * 3 + [72]
    assert before.attention_rows[:, 0].tolist() == [197] * 3 + [138] * 3 + [97] * 3 + [68]
    assert torch.equal(before.attention_rows, before.mlp_rows)


def test_tome_13_takes_13_rows_a_block(deit_shaped: VisionTransformer) -> None:
    with torch.no_grad():
        _, record = tome(deit_shaped, photos(deit_shaped, batch=1), 13)
    assert record.attention_rows[:, 0].tolist() == [197, 184, 171, 158, 145, 132, 119, 106, 93, 80]
    assert record.mlp_rows[:, 0].tolist() == [184, 171, 158, 145, 132, 119, 106, 93, 80, 67]


def test_tome_takes_half_of_the_patches_at_most() -> None:
    model = build("distilled")
    with torch.no_grad():
        _, record = tome(model, photos(model), 99)
    assert [stage.counts for stage in record.stages] == [[8, 8], [4, 4], [2, 2], [1, 1]]


def test_tome_schedules() -> None:
    assert per_block(13, 12) == [13] * 12
    assert per_block([5, 0, 3], 5) == [5, 0, 3, 0, 0]
    assert per_block((8, 0.0), 4) == [8] * 4
    assert per_block((8, -1.0), 5) == [16, 12, 8, 4, 0]
    assert per_block((8, 1.0), 5) == [0, 4, 8, 12, 16]
    assert per_block((13, 0.5), 12) == [6, 7, 8, 9, 11, 12, 13, 14, 16, 17, 18, 20]


def test_diffrate_counts_include_cls() -> None:
    for name in ("plain", "distilled"):
        model = build(name)
        with torch.no_grad():
            _, record = diffrate(model, photos(model), [17, 12, 99, 1], [15, 12, 4, 3])
        assert [stage.counts for stage in record.stages] == [[14, 14], [11, 11], [3, 3], [1, 1]]


def test_floats_decide_as_in_the_authors_expressions() -> None:
    assert math.ceil(0.28 * 25) == 8  # 7.000000000000001
    assert int(0.58 * 50) == 28  # 28.999999999999996
    square = build("vit_tiny_patch16_224", img_size=40, patch_size=8)
    wide = build("vit_tiny_patch16_224", img_size=(40, 80), patch_size=8)
    with torch.no_grad():
        _, up = topk(square, photos(square), 0.28, (1,))
        _, fused = evit(square, photos(square), 0.28, (1,))
        _, down = topk(wide, photos(wide), 0.58, (1,), rounding="floor")
        _, predicted = dynamicvit(wide, photos(wide), predictors(1), 0.58, (1,))
    assert up.stages[0].counts == [8, 8]
    assert fused.stages[0].counts == [9, 9]
    assert down.stages[0].counts == predicted.stages[0].counts == [28, 28]


def test_a_tiny_rate_leaves_one_patch() -> None:
    model = build("plain")
    with torch.no_grad():
        _, record = topk(model, photos(model), 0.01, (0, 1), rounding="floor")
    assert [stage.counts for stage in record.stages] == [[1, 1], [1, 1]]


def test_the_published_ratio_rule_counts_cls(deit_shaped: VisionTransformer) -> None:
    model = copy.deepcopy(deit_shaped)
    images = photos(model)
    counts = set()
    for scale in (0.0, 1e3):  # CLS of the smallest norm, then of the largest
        with torch.no_grad():
            model.get_parameter("cls_token").fill_(scale)
            _, record = norm_fixed_ratio(model, images, 0.5)
        norms = block_output(model, images, 3).norm(dim=-1)
        for kept, norm in zip(record.stages[0].kept, norms):
            winners = norm.topk(98).indices
            assert (kept + 1).tolist() == sorted(set(winners.tolist()) - {0})
            counts.add(len(kept))
    assert counts == {97, 98}
