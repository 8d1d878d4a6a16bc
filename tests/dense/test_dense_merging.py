"""Fused and merged tokens against loops over rows; proportional attention against attention over copies."""

import math
from typing import Any

import pytest
import torch
from dense_diffrate import diffrate, fold_tail
from dense_dpcknn import cluster, dpcknn
from dense_evit import evit
from dense_ltmp import ltmp
from dense_models import build, photos
from dense_tome import tome
from dense_topk import topk
from dense_walk import Tokens, embed
from test_dense_scoring import block_output, watch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn


def residual_after_attention(model: VisionTransformer, image: Tensor, layer: int) -> Tensor:
    """Residual stream [N, C] between attention and MLP of a block of the unpruned model."""
    caught: list[Tensor] = []
    block: Any = model.blocks[layer]
    hook = block.norm2.register_forward_pre_hook(lambda m, inputs: caught.append(inputs[0]))
    model(image[None])
    hook.remove()
    return caught[0][0]


@pytest.mark.parametrize("name", ["plain", "distilled", "registers"])
def test_evit_fuses_the_losers_with_raw_weights(name: str) -> None:
    model = build(name)
    images = photos(model)
    prefix = model.num_prefix_tokens
    score = watch(model, images, 1).probability[:, :, 0, prefix:].mean(1)
    with torch.no_grad():
        _, record = evit(model, images, 0.5, (1, 2))
        for image, row, after in zip(images, score, record.stages[0].after):
            x = residual_after_attention(model, image, 1)
            losers = row.argsort()[:8]
            fused = sum(row[i] * x[prefix + i] for i in losers)
            torch.testing.assert_close(after.x[-1], fused, rtol=0, atol=1e-12)
            torch.testing.assert_close(after.x[:prefix], x[:prefix], rtol=0, atol=1e-12)
            assert after.source[:prefix].tolist() == [-1] * prefix
            assert after.source[-1] == losers[-1]
    assert record.stages[1].counts == [math.ceil(0.5 * 9) + 1] * 2


def test_evit_may_keep_or_lose_its_fused_token() -> None:
    model = build("plain")
    images = photos(model, batch=8)
    with torch.no_grad():
        _, record = evit(model, images, 0.5, (1, 2))
    heirs = [int(after.source[-1]) for after in record.stages[0].after]
    kept = [heir in later.tolist()[:-1] for heir, later in zip(heirs, record.stages[1].kept)]
    assert any(kept)
    assert not all(kept)


def tome_by_loops(
    model: VisionTransformer, image: Tensor, r: list[int], prop_attn: bool
) -> tuple[Tensor, list[int]]:
    """ToMe on one image by loops over rows; a row of size s is s copies of its key and value."""
    prefix = model.num_prefix_tokens
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    size, source = [1] * len(x), [-1] * prefix + list(range(len(x) - prefix))
    block: Any
    for layer, block in enumerate(model.blocks):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(1, 2, 0, 3)
        copies = torch.tensor(size if prop_attn else [1] * len(x))
        many_k, many_v = k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)
        mixed = nn.functional.scaled_dot_product_attention(q[None], many_k[None], many_v[None])[0]
        x = x + attn.proj(mixed.transpose(0, 1).flatten(1))
        key = k.mean(0)
        pairs = []
        for i in range(0, len(x), 2):
            partners = [j for j in range(1, len(x), 2) if j >= prefix]
            if i >= prefix and partners:
                cosines = [float(torch.cosine_similarity(key[i], key[j], 0)) for j in partners]
                pairs.append((max(cosines), i, partners[cosines.index(max(cosines))]))
        pairs = sorted(pairs, reverse=True)[: min(r[layer], (len(x) - prefix) // 2)]
        rows: dict[int, list[int]] = {i: [i] for i in range(len(x))}
        for _, i, j in pairs:
            rows[j] += rows.pop(i)
        order = list(range(prefix))
        order += [i for i in range(prefix, len(x)) if i in rows and i % 2 == 0]
        order += [i for i in range(prefix, len(x)) if i in rows and i % 2 == 1]
        if not pairs:
            order = list(range(len(x)))
        x = torch.stack(
            [sum(size[i] * x[i] for i in rows[o]) / sum(size[i] for i in rows[o]) for o in order]  # type: ignore
        )
        size, source = [sum(size[i] for i in rows[o]) for o in order], [source[o] for o in order]
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x[None]))[0], source[prefix:]


@pytest.mark.parametrize("name", ["plain", "distilled", "average"])
@pytest.mark.parametrize("prop_attn", [True, False])
@pytest.mark.parametrize("r", [[3] * 4, [99] * 4, [5, 0, 3, 2]])
def test_tome_equals_loops_over_rows(name: str, prop_attn: bool, r: list[int]) -> None:
    model = build(name)
    images = photos(model)
    with torch.no_grad():
        logits, record = tome(model, images, r, prop_attn)
        for position, image in enumerate(images):
            expected, source = tome_by_loops(model, image, r, prop_attn)
            torch.testing.assert_close(logits[position], expected, rtol=0, atol=1e-10)
            assert record.stages[-1].kept[position].tolist() == source


def test_tome_protects_every_prefix_row_and_loses_no_patch() -> None:
    for name, prefix in (("registers", 5), ("distilled", 2), ("no_cls", 0)):
        model = build(name)
        with torch.no_grad():
            _, record = tome(model, photos(model), [5, 0, 3, 2])
        for stage in record.stages:
            for after in stage.after:
                assert after.source[:prefix].tolist() == [-1] * prefix
                assert after.weight[:prefix].tolist() == [1.0] * prefix
                assert after.weight.sum() == 16 + prefix
        assert [stage.counts[0] for stage in record.stages] == [11, 11, 8, 6]


@pytest.mark.parametrize("name", ["plain", "distilled", "registers"])
def test_ltmp_with_a_low_threshold_is_tome_with_all_of_a(name: str) -> None:
    model = build(name)
    images = photos(model)
    with torch.no_grad():
        one_block = [-1.0, 1.0, 1.0, 1.0]
        ours, record = ltmp(model, images, one_block, [0.0] * 4)
        theirs, other = tome(model, images, [8, 0, 0, 0])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert torch.equal(torch.stack(record.stages[0].kept), torch.stack(other.stages[0].kept))


def test_ltmp_reorders_even_when_nothing_merges() -> None:
    model = build("plain")
    with torch.no_grad():
        _, record = ltmp(model, photos(model), [1.0] * 4, [0.0] * 4)
    # CLS is at position 0 of A, so patch p is at p + 1: odd patches are in A.
    assert record.stages[0].kept[0].tolist() == [*range(1, 16, 2), *range(0, 16, 2)]


def test_ltmp_merges_then_prunes_by_received_attention() -> None:
    model = build("registers")
    images = photos(model)
    seen = watch(model, images, 0)
    received = seen.probability.mean((1, 2))
    key = seen.k.unflatten(-1, (3, 16)).mean(-2)
    threshold = float(received[:, 5:].median())
    with torch.no_grad():
        _, record = ltmp(model, images, [0.3] + [1.0] * 3, [threshold, 0, 0, 0])
    for position, after in enumerate(record.stages[0].after):
        importance, group = received[position].tolist(), {i: [i] for i in range(21)}
        for i in range(6, 21, 2):
            cosines = {
                j: float(torch.cosine_similarity(key[position, i], key[position, j], 0))
                for j in range(5, 21, 2)
            }
            best = max(cosines, key=lambda j: cosines[j])
            if cosines[best] > 0.3:
                group[best] += group.pop(i)
        score = {row: max(importance[i] for i in members) for row, members in group.items()}
        order = [*range(6, 21, 2), *range(5, 21, 2)]
        expected = [row for row in order if row in score and score[row] > threshold]
        assert (after.source[5:] + 5).tolist() == expected
        assert after.weight[5:].tolist() == [len(group[row]) for row in expected]
        assert len(group) < 21
        assert len(expected) < len(group) - 5


def test_ltmp_keeps_the_best_patch_at_least() -> None:
    model = build("registers")
    images = photos(model)
    received = watch(model, images, 0).probability.mean((1, 2))[:, 5:]
    with torch.no_grad():
        _, record = ltmp(model, images, [1.0] * 4, [1.0, 0, 0, 0])
    assert [kept.tolist() for kept in record.stages[0].kept] == received.argmax(1, keepdim=True).tolist()


def test_diffrate_without_merging_is_topk() -> None:
    for name in ("plain", "distilled", "registers"):
        model = build(name)
        images = photos(model)
        with torch.no_grad():
            ours, _ = diffrate(model, images, [99, 9, 9, 5], [99] * 4)
            theirs, _ = topk(model, images, 0.5, (1, 3))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_diffrate_folds_by_plain_mean_and_discounts_the_weight() -> None:
    # CLS, two important patches along the axes, two others at known angles.
    x = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 2.0], [3.0, 4.0], [4.0, 3.0]], dtype=torch.float64)
    weight = torch.tensor([1.0, 2.0, 1.0, 3.0, 1.0], dtype=torch.float64)
    tokens = Tokens(x, torch.tensor([-1, 0, 1, 2, 3]), weight, 1, 4, 0)
    folded = fold_tail(tokens, 3)
    assert folded.x.tolist() == [[9.0, 9.0], [2.5, 1.5], [1.5, 3.0]]
    torch.testing.assert_close(folded.weight, torch.tensor([1.0, 2 + 1 * 0.8, 1 + 3 * 0.8]).double())
    assert folded.source.tolist() == [-1, 0, 1]


def diffrate_by_loops(model: VisionTransformer, image: Tensor, prune: list[int], merge: list[int]) -> Tensor:
    """DiffRate on one image of a model without further prefix tokens, by loops over rows."""
    x = model._pos_embed(model.patch_embed(image[None]))[0]
    weight = x.new_ones(len(x))
    block: Any
    for layer, block in enumerate(model.blocks):
        attn = block.attn
        q, k, v = attn.qkv(block.norm1(x)).unflatten(-1, (3, attn.num_heads, -1)).permute(1, 2, 0, 3)
        mass = weight * (q @ k.mT / k.shape[-1] ** 0.5).exp()
        share = mass / mass.sum(-1, keepdim=True)
        x = x + attn.proj((share @ v).transpose(0, 1).flatten(1))
        score = share[:, 0].mean(0).tolist()
        patches = sorted(range(1, len(x)), key=lambda i: -score[i])[: prune[layer] - 1]
        heads, tail = patches[: merge[layer] - 1], patches[merge[layer] - 1 :]
        rows, weights = {h: [x[h]] for h in [0, *heads]}, {h: weight[h] for h in [0, *heads]}
        for t in tail:
            cosine, heir = max((float(torch.cosine_similarity(x[t], x[h], 0)), h) for h in heads)
            rows[heir].append(x[t])
            weights[heir] = weights[heir] + weight[t] * cosine
        x = torch.stack([torch.stack(members).mean(0) for members in rows.values()])
        weight = torch.stack(list(weights.values()))
        x = x + block.mlp(block.norm2(x))
    return model.forward_head(model.norm(x[None]))[0]


def test_diffrate_equals_loops_over_rows() -> None:
    model = build("plain")
    images = photos(model, batch=3)
    prune, merge = [17, 14, 9, 6], [15, 10, 9, 4]
    with torch.no_grad():
        logits, record = diffrate(model, images, prune, merge)
        expected = torch.stack([diffrate_by_loops(model, image, prune, merge) for image in images])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    assert all(0 < after.weight.sum() < 17 for after in record.stages[0].after)


def test_cluster_by_loops() -> None:
    generator = torch.Generator().manual_seed(3)
    # Twins have one density but for the noise, which says who of them may be a centre.
    x = torch.randn(6, 6, generator=generator, dtype=torch.float64).repeat(2, 1)
    noise = torch.rand(12, generator=generator, dtype=torch.float64)
    d = [[math.dist(a, b) / math.sqrt(6) for b in x.tolist()] for a in x.tolist()]
    density = [
        math.exp(-sum(v * v for v in sorted(row)[:5]) / 5) + 1e-6 * float(n) for row, n in zip(d, noise)
    ]
    largest = max(max(row) for row in d)
    gap = [min([d[i][j] for j in range(12) if density[j] > density[i]] or [largest]) for i in range(12)]
    expected = sorted(range(12), key=lambda i: -gap[i] * density[i])[:4]
    centres, member = cluster(x, 4, 5, noise)
    assert centres.tolist() == expected
    assert member.tolist() == [min(range(4), key=lambda c: d[expected[c]][i]) for i in range(12)]


def test_dpcknn_means_with_learned_weights() -> None:
    model = build("distilled")
    images = photos(model)
    scorers = [nn.Linear(48, 1).double() for _ in range(2)]
    noise = [torch.rand(2, 16, dtype=torch.float64), torch.rand(2, 9, dtype=torch.float64)]
    with torch.no_grad():
        _, record = dpcknn(model, images, 0.6, noise, (1, 3), scorers=scorers)
        output = block_output(model, images, 0)[:, 2:]
        assert [stage.counts for stage in record.stages] == [[9, 9], [5, 5]]
        for position, (after, x) in enumerate(zip(record.stages[0].after, output)):
            centres, member = cluster(x, 9, 5, noise[0][position])
            assert after.source.tolist() == [-1, -1, *centres.tolist()]
            for row in range(9):
                weight = scorers[0](x[member == row]).exp()
                mean = (weight * x[member == row]).sum(0) / (weight.sum() + 1e-6)
                torch.testing.assert_close(after.patches[row], mean, rtol=0, atol=1e-12)


def test_embedding_keeps_the_grid_order() -> None:
    model = build("rectangle")
    tokens = embed(model, photos(model)[0], 0)
    assert tokens.source.tolist() == [-1, *range(12)]
    assert tokens.num_patches == tokens.count == 12


def test_a_centre_is_in_its_own_cluster_even_beside_a_twin() -> None:
    x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [4.0, 4.0]], dtype=torch.float64)
    centres, member = cluster(x, 3, 5, torch.tensor([0.2, 0.7, 0.1]).double())
    assert member[centres].tolist() == [0, 1, 2]
