"""The policies that need more than a line beside their dense twins, and what each refuses."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from dense_ats import points, sample
from dense_dpcknn import dpcknn
from dense_walk import Attended, Record, Tokens, walk
from test_dense_twins import ARCHITECTURES, assert_equal
from tests_support import dense_tokens, randomise, rows_of, small_vit
from torch import Tensor

import prunevit
from prunevit import PruningPolicy, RaggedTokens
from prunevit.block import attend
from prunevit.draws import keyed_uniform
from prunevit.macs import model_macs
from prunevit.policies import (
    ATS,
    DPCKNN,
    LTMP,
    Cross,
    DiffRate,
    DynamicViT,
    EViT,
    KMedoids,
    NoPruning,
    PatchDropout,
    TopK,
)

INDEX = torch.tensor([4, 9, 2])


def images_for(model: Any) -> Tensor:
    return torch.randn(3, 3, *model.patch_embed.img_size, dtype=torch.float64)


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_dpcknn_equals_its_dense_twin(architecture: str, learned: bool) -> None:
    model, layers = small_vit(**ARCHITECTURES[architecture]), (0, 1, 3)
    images, policy = images_for(model), DPCKNN(0.7, layers, learned_weight=learned, seed=5)
    pruned = prunevit.prune(model, policy)
    randomise(policy)
    scorers = list(policy.scorers) if learned else None
    noise: list[Tensor] = []
    for stage, layer in enumerate(layers):
        # The twin takes noise by row, ours is keyed by patch: the rows of a stage are those that the last one left.
        before = dpcknn(model, images, 0.7, noise, layers[:stage], scorers=scorers)[1].stages
        patches = torch.stack(before[-1].kept) if before else torch.arange(36).expand(3, -1)
        noise.append(keyed_uniform(5 * 1009 + layer, INDEX[:, None], patches).double())
    expected, record = dpcknn(model, images, 0.7, noise, layers, scorers=scorers)
    trace = pruned.trace(images, INDEX)
    for ours, theirs in zip(*(learned_gradients(policy, logits) for logits in (trace.logits, expected))):
        # A bias cancels in the mean: its gradient is 0.
        scale = theirs.abs().max().clamp(min=1e-4).item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10 * scale)
    assert_equal(model, trace, expected, record)


def learned_gradients(policy: PruningPolicy, logits: Tensor) -> tuple[Tensor, ...]:
    parameters = list(policy.parameters())
    return torch.autograd.grad(logits.square().sum(), parameters, retain_graph=True) if parameters else ()


def test_dpcknn_breaks_ties_by_image_and_seed() -> None:
    """All patches are equally far from each other: noise alone decides."""

    def kept(policy: DPCKNN, index: list[int]) -> list[list[bool]]:
        x = torch.eye(17).expand(2, -1, -1)
        tokens = RaggedTokens.from_padded(x, 1, (4, 4), torch.tensor(index))
        return policy(tokens, None, 0).keep.view(2, 17).tolist()

    first = kept(DPCKNN(0.5, (0,)), [3, 7])
    assert [sum(row) for row in first] == [9, 9]
    assert first == kept(DPCKNN(0.5, (0,)), [7, 3])[::-1]
    assert first[0] != first[1]
    assert first != kept(DPCKNN(0.5, (0,), seed=1), [3, 7])


def test_kmedoids_keeps_its_count_where_features_are_equal() -> None:
    tokens = RaggedTokens.from_padded(torch.ones(2, 17, 8), 1, (4, 4))
    q, k, v = torch.zeros(3, 34, 3, 2)
    state = prunevit.AttentionState(q, k, v, received_attention=torch.rand(34, 3))
    mask = KMedoids(0.5, (1,))(tokens, state, 1)
    assert mask.keep.view(2, 17).sum(1).tolist() == [9, 9]
    assert mask.rows_per_image == 9


def ats_of_token_reduction(model: Any, images: Tensor, keep_rate: float, layers: tuple[int, ...]) -> Any:
    """Running share of (attention x value norm, head by head) in row order; midpoints of K intervals but the last."""

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        score = (attended.probability[:, 0] * attended.v.norm(dim=-1)).sum(0)[tokens.num_prefix :].detach()
        running = (score / (score.sum() + 1e-6)).cumsum(0)
        k = int(keep_rate ** (stage + 1) * tokens.num_patches) + 1
        levels = torch.arange(1, 2 * k - 2, 2).double() / (2 * k)
        return tokens.keep((levels[:, None] - running).abs().argmin(1).unique())

    return walk(model, images, layers, rule)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_ats_of_token_reduction(architecture: str) -> None:
    model = small_vit(**ARCHITECTURES[architecture])
    images = images_for(model)
    pruned = prunevit.prune(model, ATS(0.7, (0, 2), "token_reduction"))
    expected, record = ats_of_token_reduction(model, images, 0.7, (0, 2))
    assert all(n <= 25 for n in record.stages[0].counts)
    assert_equal(model, pruned.trace(images), expected, record)


def test_ats_budget_has_its_floor() -> None:
    model = small_vit()
    trace = prunevit.prune(model, ATS(3, (0,))).trace(images_for(model))
    assert (trace.mlp_rows[-1] <= 8).all()
    assert (trace.mlp_rows[-1] > 3).any()


def evit_by_ats(model: Any, images: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Record]:
    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        assert attended is not None
        value = attended.v.transpose(0, 1).flatten(1).norm(dim=-1)
        significance = (attended.probability[:, 0].sum(0) * value)[tokens.num_prefix :]
        count = len(sample(significance, points(tokens, None)))
        return tokens.keep(attended.cls_score(tokens).argsort(descending=True)[:count])

    return walk(model, images, layers, rule)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_cross_takes_which_from_one_and_how_many_from_the_other(architecture: str) -> None:
    model = small_vit(**ARCHITECTURES[architecture])
    images = images_for(model)
    pruned = prunevit.prune(model, Cross("evit", "ats", (1, 2)))
    expected, record = evit_by_ats(model, images, (1, 2))
    assert_equal(model, pruned.trace(images), expected, record)


def test_cross_with_itself_is_itself() -> None:
    model = small_vit()
    images = images_for(model)
    for policy in (TopK(0.6, (1, 2)), ATS(20, (1, 3)), DynamicViT(0.6, (1, 2)), KMedoids(0.6, (1, 2))):
        ranked = "topk" if isinstance(policy, KMedoids) else policy
        crossed = prunevit.prune(model, Cross(ranked, policy, policy.layers))
        alone = prunevit.prune(model, policy)
        assert torch.equal(crossed.trace(images).mlp_rows, alone.trace(images).mlp_rows)
        assert crossed.policies[0].site == policy.site
        if isinstance(policy, TopK | DynamicViT):
            assert torch.equal(crossed(images), alone(images))


def test_cross_counts_the_fused_row_and_sets_up_what_it_names() -> None:
    model = small_vit()
    images = images_for(model)
    crossed = Cross({"name": "random", "keep_rate": 0.1}, {"name": "evit", "keep_rate": 0.5}, (1,), seed=3)
    assert isinstance(crossed.number, EViT)
    trace = prunevit.prune(model, crossed).trace(images)
    assert trace.stages[0].mask.rows_per_image == 1 + 18 + 1
    assert getattr(crossed.which, "seed") == 3  # noqa: B009
    model.train()
    with pytest.raises(ValueError, match="count must remove rows"):
        prunevit.prune(model, Cross("topk", "dynamicvit", (1,)))(images)


def test_patch_dropout_trains_on_a_part_and_evaluates_on_all() -> None:
    model = small_vit()
    images = images_for(model)
    pruned = prunevit.prune(model, PatchDropout(0.4))
    torch.testing.assert_close(pruned(images), model(images), rtol=0, atol=1e-11)
    pruned.train()
    trace, again = pruned.trace(images), pruned.trace(images)
    assert trace.attention_rows.unique().tolist() == [1 + int(36 * (1.0 - 0.4))]
    assert trace.heirs().tolist() != again.heirs().tolist()
    for image, logits in zip(range(3), trace.logits):
        rows = torch.tensor([0, *(patch + 1 for patch in trace.survivors(0, image))])
        x = model._pos_embed(model.patch_embed(images[image : image + 1]))[:, rows]
        expected = model.forward_head(model.norm(model.blocks(x)))[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-11)


def test_patch_dropout_drops_every_patch_equally_often() -> None:
    tokens = RaggedTokens.from_padded(torch.zeros(2000, 17, 1), 1, (4, 4))
    keep = PatchDropout(0.5)(tokens, None, 0).keep.view(2000, 17)[:, 1:].double()
    # A fair coin over 2,000 images strays from 1/2 by more than 5 standard deviations once in a million.
    assert (keep.mean(0) - 0.5).abs().max() < 5 * 0.5 / 2000**0.5


def test_to_rows_undoes_to_padded() -> None:
    tokens = dense_tokens(3, 6, 1)
    keep = torch.rand(21) < 0.6
    mask = prunevit.KeepMask(keep | (tokens.source == 0))
    for packed in (tokens, prunevit.pack(tokens, mask), prunevit.pack(tokens, mask, capacity=30)):
        live = packed.live
        assert torch.equal(packed.to_rows(packed.to_padded())[live], packed.x[live])
        assert packed.to_rows(packed.to_padded()).shape == packed.x.shape
        assert (packed.to_rows(packed.to_padded())[~live] == 0).all()


def test_a_number_of_points_for_each_image() -> None:
    tokens = dense_tokens(3, 12, 2)
    score = torch.rand(42, dtype=torch.float64) ** 4
    together = prunevit.sample(tokens, score, torch.tensor([1, 12, 5])).keep
    for image, number in enumerate((1, 12, 5)):
        alone = prunevit.sample(tokens, score, number).keep
        assert torch.equal(together[rows_of(tokens, image)], alone[rows_of(tokens, image)])


def test_dynamicvit_costs_what_is_published() -> None:
    """DeiT-S at 0.7: 137, 96 and 67 patches, 2.88 GMACs, 2.98 with the predictors."""
    policy = DynamicViT()
    policy.setup(prunevit.ModelInfo(384, 12, 6, (14, 14), 1, True))
    rows = torch.tensor([197] * 3 + [138] * 3 + [97] * 3 + [68] * 3)[:, None]
    macs = model_macs(timm.create_model("deit_small_patch16_224"), rows, rows).item()
    predictors = policy.macs(torch.tensor([197, 138, 97])).sum().item()
    assert [round(each / 1e9, 2) for each in (macs, macs + predictors)] == [2.88, 2.98]
    linear = [module for module in policy.predictors[0].modules() if isinstance(module, torch.nn.Linear)]
    assert policy.macs(torch.tensor([1])) == sum(module.weight.numel() for module in linear)


RAGGED: dict[str, Callable[[], PruningPolicy]] = {
    "ats": lambda: ATS(0.5, (2,), min_rows=3),
    "ats-token_reduction": lambda: ATS(0.3, (2,), "token_reduction"),
    "dynamicvit": lambda: DynamicViT(0.3, (2,)),
    "dynamicvit-threshold": lambda: DynamicViT(0.3, (2,), rule="threshold"),
    "kmedoids": lambda: KMedoids(0.3, (2,)),
    "dpc_knn": lambda: DPCKNN(0.3, (2,)),
    "diffrate": lambda: DiffRate((16,), (12,), (2,)),
    "ltmp": lambda: LTMP(0.95, 0.05, (2,)),
    "patch_dropout": lambda: PatchDropout(0.3, (2,)),
    "cross": lambda: Cross("evit", "ltmp", (2,)),
}


@pytest.mark.parametrize("name", RAGGED)
def test_neither_neighbours_nor_dead_rows_change_a_ragged_image(name: str) -> None:
    model, policy = small_vit(), RAGGED[name]()
    policy.setup(prunevit.prune(model, NoPruning()).info)
    policy.double().eval()
    x = torch.randn(3, 37, 48, dtype=torch.float64) * torch.rand(3, 37, 1, dtype=torch.float64)
    tokens = RaggedTokens.from_padded(x, 1, (6, 6), INDEX)
    # 37, 31 and 8 rows.
    keep = tokens.is_patch & (tokens.source < torch.tensor([36, 30, 7]).repeat_interleave(37))

    def after(tokens: RaggedTokens) -> RaggedTokens:
        _, state = attend(model.blocks[2], tokens, backend="padded", needs=policy.needs)
        return prunevit.pack(tokens, policy(tokens, state, 2))

    expected = after(prunevit.pack(tokens, prunevit.KeepMask(keep)))
    dead = after(prunevit.pack(tokens, prunevit.KeepMask(keep), capacity=90))
    assert torch.equal(dead.x[dead.live], expected.x)
    assert torch.equal(dead.cu_seqlens, expected.cu_seqlens)
    assert name == "patch_dropout" or (expected.seqlens < torch.tensor([37, 31, 9])).all()
    for image in range(3):
        alone = RaggedTokens.from_padded(x[image : image + 1], 1, (6, 6), INDEX[image : image + 1])
        alone = after(prunevit.pack(alone, prunevit.KeepMask(keep.view(3, -1)[image])))
        torch.testing.assert_close(alone.x, expected.x[rows_of(expected, image)], rtol=0, atol=1e-11)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "budget": (lambda: ATS(-1), r"ATS: budget must be in \(0, inf\), got -1"),
    "variant": (lambda: ATS(variant="x"), "ATS: variant must be one of official, token_reduction, got 'x'"),
    "no share": (lambda: ATS(variant="token_reduction"), r"budget must be in \(0, 1\]"),
    "no rows": (lambda: ATS(20, variant="token_reduction"), r"budget must be in \(0, 1\]"),
    "prob": (lambda: PatchDropout(1.0), r"PatchDropout: prob must be in \[0, 1\), got 1"),
    "rule": (lambda: DynamicViT(rule="x"), "DynamicViT: rule must be one of count, threshold, got 'x'"),
    "no ranking": (lambda: Cross("tome"), "score must be a policy that ranks patches, got ToMe"),
    "no layers": (lambda: Cross("topk", "none"), "count must be a policy with layers"),
    "unknown setting": (lambda: Cross({"name": "topk", "rate": 1}), r"got \['rate'\]"),
    "no name": (lambda: Cross({"keep_rate": 1}), "score must have a name"),
    "unknown name": (lambda: Cross("evti"), 'try "evit"'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_settings_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_what_does_not_fit_the_model_is_refused() -> None:
    small, wide, deep = small_vit(), small_vit(embed_dim=96), small_vit(depth=5)
    with pytest.raises(ValueError, match="one count for each of the 4 layers, got 12"):
        prunevit.prune(small, DiffRate())
    with pytest.raises(ValueError, match=r"score must act at layers \(1, 2\), got \(1,\)"):
        prunevit.prune(small, Cross(TopK(0.5, (1,)), "ats", (1, 2)))
    thresholds = LTMP()
    prunevit.prune(small, thresholds)
    prunevit.prune(wide, thresholds)
    with pytest.raises(ValueError, match="of another depth, got 5 blocks"):
        prunevit.prune(deep, thresholds)
    with pytest.raises(ValueError, match="one threshold for each of the 4 layers, got 2"):
        prunevit.prune(small, LTMP(0.9, (0.0, 0.0)))
    for policy in (DynamicViT(0.5, (1, 2)), DPCKNN(0.5, (1, 2), learned_weight=True)):
        prunevit.prune(small, policy)
        before = [parameter.clone() for parameter in policy.parameters()]
        prunevit.prune(deep, policy)
        assert all(torch.equal(one, other) for one, other in zip(before, policy.parameters()))
        with pytest.raises(ValueError, match="layers of width 96"):
            prunevit.prune(wide, policy)
