"""What every policy owes: one test for all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.func import functional_call

import prunevit
from prunevit import PruningPolicy
from prunevit.policies import (
    ATS,
    DPCKNN,
    LTMP,
    POLICIES,
    Cross,
    DiffRate,
    DynamicViT,
    EViT,
    FixedRate,
    KMedoids,
    NoPruning,
    PatchDropout,
    RandomPruning,
    Replay,
    ThresholdL2,
    ToMe,
    TopK,
    TopP,
    replay,
    resolve,
)
from prunevit.testing import check_policy

# What prunes over several stages, the same policy keeping everything, and whether the host knows the counts.
CASES: dict[str, tuple[Callable[[], PruningPolicy], Callable[[], PruningPolicy], bool]] = {
    "none": (NoPruning, NoPruning, True),
    "topk": (lambda: TopK(0.6, (1, 2)), lambda: TopK(1.0, (1, 2)), True),
    "topk-received": (lambda: TopK(0.6, (0, 3), "received"), lambda: TopK(1.0, (1,), "received"), True),
    "evit": (lambda: EViT(0.6, (1, 2)), lambda: EViT(1.0, (1, 2)), True),
    "random": (lambda: RandomPruning(0.6, (1, 2)), lambda: RandomPruning(1.0, (1, 2)), True),
    "fixed_rate": (lambda: FixedRate(0.6, (1, 2)), lambda: FixedRate(1.0, (1, 2)), True),
    "fixed_rate-center": (
        lambda: FixedRate(0.6, (1,), "center"),
        lambda: FixedRate(1.0, (1,), "center"),
        True,
    ),
    "threshold_l2": (lambda: ThresholdL2(0.0, (1, 2)), lambda: ThresholdL2(-99.0, (1, 2)), False),
    "threshold_l2-maximum": (
        lambda: ThresholdL2(0.9, (1,), "maximum"),
        lambda: ThresholdL2(0.0, (1,), "maximum"),
        False,
    ),
    "threshold_l2-share": (
        lambda: ThresholdL2(0.4, (1,), "share"),
        lambda: ThresholdL2(1.0, (1,), "share"),
        True,
    ),
    "threshold_l2-published": (
        lambda: ThresholdL2(0.4, (1,), "published"),
        lambda: ThresholdL2(1.0, (1,), "published"),
        False,
    ),
    "top_p": (lambda: TopP(0.6, (1, 2)), lambda: TopP(1.0, (1, 2)), False),
    "tome": (lambda: ToMe(6), lambda: ToMe(0), True),
    # Sampling never takes the patch of the lowest score: it has no setting that keeps everything.
    "ats": (lambda: ATS(layers=(1, 2)), NoPruning, False),
    "ats-fraction": (lambda: ATS(0.5, (1, 2)), NoPruning, False),
    "ats-token_reduction": (
        lambda: ATS(0.6, (1, 2), "token_reduction"),
        NoPruning,
        False,
    ),
    "dynamicvit": (lambda: DynamicViT(0.6, (1, 2)), lambda: DynamicViT(1.0, (1, 2)), True),
    "dynamicvit-threshold": (
        lambda: DynamicViT(layers=(1, 2), rule="threshold"),
        lambda: DynamicViT(layers=(1, 2), rule="threshold", threshold=0.0),
        False,
    ),
    "kmedoids": (lambda: KMedoids(0.6, (1, 2)), lambda: KMedoids(1.0, (1, 2)), True),
    "diffrate": (
        lambda: DiffRate((37, 30, 30, 9), (30, 25, 20, 5)),
        lambda: DiffRate((99,) * 4, (99,) * 4),
        True,
    ),
    "ltmp": (lambda: LTMP(0.97, 0.01), lambda: LTMP(2.0, 0.0), False),
    "dpc_knn": (lambda: DPCKNN(0.6, (1, 2)), lambda: DPCKNN(1.0, (1, 2)), True),
    "dpc_knn-learned": (
        lambda: DPCKNN(0.6, (1, 2), learned_weight=True),
        lambda: DPCKNN(1.0, (1, 2), learned_weight=True),
        True,
    ),
    "patch_dropout": (PatchDropout, PatchDropout, True),
    "cross": (lambda: Cross("evit", "ats", (1, 2)), NoPruning, False),
    "cross-known": (
        lambda: Cross("threshold_l2", {"name": "topk", "keep_rate": 0.6}, (1, 2)),
        lambda: Cross("threshold_l2", {"name": "topk", "keep_rate": 1.0}, (1, 2)),
        True,
    ),
}
MODELS = {
    "cls": {},
    "registers": {"reg_tokens": 4},
    "distilled": {"name": "deit_tiny_distilled_patch16_224"},
    "one patch": {"img_size": 16},
    "two patches": {"img_size": (16, 32)},
}


def images_for(model: Any, batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, *model.patch_embed.img_size, dtype=torch.float64)


def test_every_policy_of_the_table_is_here() -> None:
    tested = {type(make()) for make, _, _ in CASES.values()}
    assert tested == set(POLICIES.values()) - {Replay}


@pytest.mark.parametrize("name", CASES)
def test_it_owes_nothing(name: str) -> None:
    make, _, known = CASES[name]
    results = {each.name: each for each in check_policy(make, device="cpu")}
    assert name == "none" or (results["known_count"].status == "passed") == known


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("name", CASES)
def test_keeping_everything_is_the_plain_model(name: str, architecture: str) -> None:
    model = small_vit(**MODELS[architecture])  # type: ignore[arg-type]
    images = images_for(model, 2)
    pruned = prunevit.prune(model, CASES[name][1]())
    torch.testing.assert_close(pruned(images), model(images), rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"none", "patch_dropout"}))
def test_it_prunes(name: str) -> None:
    model = small_vit()
    trace = prunevit.prune(model, CASES[name][0]()).trace(images_for(model, 2))
    assert (trace.mlp_rows[-1] < 37).all()


@pytest.mark.parametrize("name", CASES)
def test_it_waits_for_the_device_only_where_counts_depend_on_the_data(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fake tensors know no values: whoever asks for one raises. The fake device is a GPU, so that checks are
    deferred; kernels, which would be launched on it, are left out."""
    make, _, known = CASES[name]
    monkeypatch.setattr("prunevit.kernels.select.takes_triton", lambda values: False)
    monkeypatch.setattr("prunevit.kernels.gather.takes_triton", lambda values: False)
    monkeypatch.setattr("prunevit.kernels.plan.takes_triton", lambda rows: False)
    monkeypatch.setattr("prunevit.kernels.turns.takes_triton", lambda rows: False)
    monkeypatch.setattr("prunevit.kernels.draws.takes_triton", lambda keys: False)
    pruned = prunevit.prune(small_vit(), make(), backend="padded")
    with FakeTensorMode(allow_non_fake_inputs=True):
        images = torch.empty(2, 3, 96, 96, device="cuda", dtype=torch.float64)
        weights = {name: torch.empty_like(p, device="cuda") for name, p in pruned.state_dict().items()}
        if not known:
            with pytest.raises(DataDependentOutputException):
                functional_call(pruned, weights, (images,))
            monkeypatch.setattr(pruned, "forward", lambda images: at_full_capacity(pruned, images))
        assert functional_call(pruned, weights, (images,)).shape == (2, 10)


def at_full_capacity(pruned: prunevit.RaggedViT, images: torch.Tensor) -> torch.Tensor:
    """Logits of a walk that makes room for every row at every stage and never reads a count back."""
    tokens = pruned.embed(images)
    return pruned.forward_head(pruned.walk(tokens, capacity=tokens.x.shape[0]))


def test_random_draws_depend_on_seed_image_and_layer_alone() -> None:
    model = small_vit()
    images = images_for(model, 1).expand(4, -1, -1, -1)

    def kept(policy: PruningPolicy, index: list[int]) -> list[list[int]]:
        trace = prunevit.prune(model, policy).trace(images, torch.tensor(index))
        return [trace.survivors(0, image) for image in range(4)]

    first = kept(RandomPruning(0.5, (1,)), [3, 4, 5, 6])
    assert kept(RandomPruning(0.5, (1,)), [6, 5, 4, 3]) == first[::-1]
    assert len({tuple(each) for each in first}) == 4
    assert kept(RandomPruning(0.5, (1,), seed=1), [3, 4, 5, 6]) != first
    assert kept(RandomPruning(0.5, (2,)), [3, 4, 5, 6]) != first
    shared = kept(RandomPruning(0.5, (1,), shared=True), [3, 4, 5, 6])
    assert len({tuple(each) for each in shared}) == 1
    training = prunevit.prune(model.train(), RandomPruning(0.5, (1,)))
    assert training.trace(images).heirs().tolist() != training.trace(images).heirs().tolist()


def test_random_keeps_every_patch_equally_often() -> None:
    tokens = prunevit.RaggedTokens.from_padded(torch.zeros(2000, 17, 1), 1, (4, 4))
    policy = RandomPruning(0.5, (0,))
    keep = policy(tokens, None, 0).keep.view(2000, 17)[:, 1:].double()
    # A fair coin over 2,000 images strays from 1/2 by more than 5 standard deviations once in a million.
    assert (keep.mean(0) - 0.5).abs().max() < 5 * 0.5 / 2000**0.5
    assert (keep.T.corrcoef() - torch.eye(16)).fill_diagonal_(0).abs().max() < 0.2


def test_the_grid_pattern_is_evenly_strewn() -> None:
    model = small_vit(img_size=128)
    images = images_for(model, 1)

    def kept(rate: float, pattern: str) -> torch.Tensor:
        trace = prunevit.prune(model, FixedRate(rate, (1,), pattern)).trace(images)
        return (trace.heirs()[0] >= 0).view(8, 8).int()

    checkerboard = (torch.arange(8)[:, None] + torch.arange(8)) % 2 == 0
    assert torch.equal(kept(0.5, "grid").bool(), checkerboard)
    assert kept(0.25, "grid")[::2, ::2].all()
    assert kept(0.25, "grid").sum() == 16
    assert kept(0.0625, "grid").nonzero().tolist() == [[0, 0], [0, 4], [4, 0], [4, 4]]
    assert kept(0.25, "center").nonzero().aminmax()[0] == 2


def test_published_norm_rule_lets_prefix_rows_compete() -> None:
    """98 or 99 of 197 rows: one patch fewer where CLS wins a place."""
    x = torch.ones(2, 197, 4) * torch.linspace(1, 2, 197)[None, :, None]
    x[0, 0], x[1, 0] = 100.0, 0.0
    tokens = prunevit.RaggedTokens.from_padded(x, 1, (14, 14))
    counts = prunevit.pack(tokens, ThresholdL2(0.5, (0,), "published")(tokens, None, 0)).seqlens
    assert counts.tolist() == [98, 99]


def test_names_are_resolved_or_the_nearest_is_offered() -> None:
    assert resolve("evit") is EViT
    assert resolve("prunevit.policies.topk:TopK") is TopK
    for name, message in (
        ("evti", 'try "evit"'),
        ("no.such.module:Policy", "must name a class that can be imported"),
        ("prunevit.policies:Nothing", "must name a class that can be imported"),
        ("torch.nn:Linear", "must be a subclass of prunevit.PruningPolicy"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve(name)


def test_replay_needs_a_stage() -> None:
    model = small_vit()
    trace = prunevit.prune(model, NoPruning()).trace(images_for(model, 1))
    assert replay(trace) == []
    with pytest.raises(ValueError, match="the trace must hold a stage of policy 0"):
        Replay(trace)
