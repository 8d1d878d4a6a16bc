"""Which patches survive: scores taken from timm's own modules, and rules worked out by hand."""

from typing import Any, NamedTuple

import pytest
import torch
from dense_ats import ats, points, sample
from dense_kmedoids import kmedoids, medoids
from dense_models import build, photos
from dense_threshold import norm_threshold, top_p
from dense_topk import topk
from dense_walk import embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor


class Seen(NamedTuple):
    """What timm's own unfused attention did in one block of the unpruned model."""

    probability: Tensor  # [B, H, N, N]
    k: Tensor  # [B, N, C]
    v: Tensor  # [B, N, C]


def watch(model: VisionTransformer, images: Tensor, layer: int) -> Seen:
    block: Any = model.blocks[layer]
    attn = block.attn
    caught: dict[str, Tensor] = {}
    hooks = [
        attn.attn_drop.register_forward_hook(lambda m, i, o: caught.update(probability=o)),
        attn.qkv.register_forward_hook(lambda m, i, o: caught.update(qkv=o)),
    ]
    fused, attn.fused_attn = attn.fused_attn, False
    with torch.no_grad():
        model(images)
    attn.fused_attn = fused
    for hook in hooks:
        hook.remove()
    return Seen(caught["probability"], *caught["qkv"].chunk(3, -1)[1:])


def block_output(model: VisionTransformer, images: Tensor, layer: int) -> Tensor:
    """Residual stream [B, N, C] after a block of the unpruned model."""
    caught: list[Tensor] = []
    hook = model.blocks[layer].register_forward_hook(lambda m, i, o: caught.append(o))
    with torch.no_grad():
        model(images)
    hook.remove()
    return caught[0]


@pytest.mark.parametrize("name", ["plain", "distilled", "registers", "normed"])
def test_topk_keeps_what_cls_attends_to_in_order_of_score(name: str) -> None:
    model = build(name)
    images = photos(model)
    score = watch(model, images, 1).probability[:, :, 0, model.num_prefix_tokens :].mean(1)
    with torch.no_grad():
        _, record = topk(model, images, 0.5, (1,))
    assert torch.equal(torch.stack(record.stages[0].kept), score.topk(8).indices)


@pytest.mark.parametrize("name", ["plain", "distilled"])
def test_top_p_keeps_the_smallest_set_with_its_crossing_patch(name: str) -> None:
    model = build(name)
    images = photos(model)
    score = watch(model, images, 1).probability[:, :, 0, model.num_prefix_tokens :].mean(1)
    with torch.no_grad():
        _, record = top_p(model, images, 0.8, (1,))
        _, bounded = top_p(model, images, 0.8, (1,), min_keep=3, max_keep=3)
        _, least = top_p(model, images, 1e-9, (1,))
    for row, kept, best in zip(score, record.stages[0].kept, least.stages[0].kept):
        share = row[kept].sum() / row.sum()
        weakest = row[kept].min() / row.sum()
        assert share - weakest < 0.8 <= share
        assert row[kept].min() > row[[i for i in range(16) if i not in kept]].max()
        assert kept.tolist() == sorted(kept.tolist())
        assert best.tolist() == [int(row.argmax())]
    assert bounded.stages[0].counts == [3, 3]


def test_norm_thresholds_on_the_output_of_the_block_before() -> None:
    model = build("registers")
    images = photos(model, batch=3)
    norms = block_output(model, images, 1)[:, 5:].norm(dim=-1)
    mean, largest = norms.sum(1, keepdim=True) / 16, norms.amax(1, keepdim=True)
    deviation = (((norms - mean) ** 2).sum(1, keepdim=True) / 16).sqrt()
    cuts = [("absolute", t, torch.full((3, 1), t)) for t in (norms[:, 3] + 1e-6).tolist()]
    cuts += [("mean_std", a, mean + a * deviation) for a in torch.arange(-1, 1, 0.1).tolist()]
    cuts += [("max", f, f * largest) for f in (0.7, 0.8, 0.9)]
    for relative, threshold, cut in cuts:
        with torch.no_grad():
            _, record = norm_threshold(model, images, threshold, (2,), relative)
        for kept, norm, least in zip(record.stages[0].kept, norms, cut):
            expected = (norm >= least).nonzero()[:, 0].tolist() or [int(norm.argmax())]
            assert kept.tolist() == expected, (relative, threshold)


def test_a_norm_equal_to_the_threshold_stays() -> None:
    model = build("plain")
    image = photos(model, batch=1)
    with torch.no_grad():
        _, everything = norm_threshold(model, image, -torch.inf, (2,))
        third = everything.stages[0].after[0].patches.norm(dim=-1).topk(3).values[-1]
        _, record = norm_threshold(model, image, float(third), (2,))
    assert record.stages[0].counts == [3]


def test_norm_threshold_after_attention_and_with_bounds() -> None:
    model = build("plain")
    images = photos(model)
    with torch.no_grad():
        _, after = norm_threshold(model, images, 0.0, (2,), "mean_std", "after_attention")
        _, least = norm_threshold(model, images, torch.inf, (2,), min_keep=5)
        _, most = norm_threshold(model, images, 0.0, (2,), max_keep=5)
    assert after.attention_rows[2].tolist() == [17, 17]
    assert after.mlp_rows[2].tolist() == [n + 1 for n in after.stages[0].counts]
    assert least.stages[0].counts == most.stages[0].counts == [5, 5]
    assert all(torch.equal(a, b) for a, b in zip(least.stages[0].kept, most.stages[0].kept))


def test_ats_samples_by_hand() -> None:
    # Sorted scores .01 .01 .01 .97 -> cumulative, scaled: 0, .0102, .0204, 1; the grid runs from .0102 to 1.
    score = torch.tensor([0.01, 0.97, 0.0100001, 0.0100002], dtype=torch.float64)
    assert sample(score, 4).tolist() == [2, 3, 1]
    # With two points only both ends of the grid are taken.
    assert sample(score, 2).tolist() == [2, 1]
    # Equal steps: every patch but the lowest, which is never sampled.
    assert sample(torch.tensor([5.0, 5.0, 4.999, 5.0, 5.0]).double(), 5).tolist().count(2) == 0
    assert sample(torch.tensor([0.3, 0.2]).double(), 2).tolist() == [0]
    assert sample(torch.tensor([0.3]).double(), 1).tolist() == [0]


def test_ats_scores_by_value_norm_with_heads_concatenated() -> None:
    model = build("plain")
    images = photos(model, batch=12)
    seen = watch(model, images, 1)
    significance = seen.probability[:, :, 0, 1:].sum(1) * seen.v[:, 1:].norm(dim=-1)
    with torch.no_grad():
        _, record = ats(model, images, None, (1,))
    for kept, row in zip(record.stages[0].kept, significance):
        ascending = row.sort()
        cumulative = ascending.values.cumsum(0)
        scaled = (cumulative - cumulative.min()) / (cumulative.max() - cumulative.min())
        picked = set()
        for k in range(16):
            y = scaled[1] + (1 - scaled[1]) * k / 15
            distances = [abs(float(y - value)) for value in scaled]
            picked.add(int(ascending.indices[distances.index(min(distances))]))
        assert kept.tolist() == sorted(picked, key=lambda i: float(row[i]))
        assert 1 < len(picked) < 16


def test_ats_budget() -> None:
    model = build("plain")
    tokens = embed(model, photos(model)[0], 0)
    assert points(tokens, None) == 16
    assert points(tokens, 197) == 16
    assert points(tokens, 12) == 11
    assert points(tokens, 3) == 7
    assert points(tokens, 0.7) == round(0.7 * 17) - 1


def test_medoids_by_hand() -> None:
    # Two groups on a line. Sums of distances to all: 0 -> 25, 1 -> 22, 2 -> 21, 10 -> 29, 12 -> 35.
    x = torch.tensor([[0.0], [1.0], [2.0], [10.0], [12.0]], dtype=torch.float64)
    even = torch.tensor([5.0, 1.0, 1.0, 1.0, 4.0], dtype=torch.float64)
    assert medoids(x, even, 2, 0).tolist() == [0, 4]
    # Clusters {0, 1, 2} and {3, 4}; costs 125, 22, 21 and 29, 140.
    assert medoids(x, even, 2, 1).tolist() == [2, 3]
    heavy = torch.tensor([5.0, 1.0, 1.2, 1.0, 4.0], dtype=torch.float64)
    assert medoids(x, heavy, 2, 1).tolist() == [1, 3]


def test_kmedoids_weighs_by_what_was_received_in_the_block_before() -> None:
    model = build("distilled")
    images = photos(model)
    weight = watch(model, images, 1).probability.sum((1, 2))[:, 2:]
    x = block_output(model, images, 1)[:, 2:]
    with torch.no_grad():
        _, record = kmedoids(model, images, 0.5, (2,))
    for kept, rows, received in zip(record.stages[0].kept, x, weight):
        assert torch.equal(kept, medoids(rows, received, 8, 3))
