"""What the constructors of the policies refuse, and what is read from their signatures."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests_support import dense_tokens, small_vit

import prunevit
from prunevit import PruningPolicy
from prunevit.policies import (
    ATS,
    DPCKNN,
    LTMP,
    Cross,
    DiffRate,
    DynamicViT,
    EViT,
    FixedRate,
    KMedoids,
    PatchDropout,
    RandomPruning,
    Replay,
    ThresholdL2,
    ToMe,
    TopK,
    TopP,
)
from prunevit.settings import construct, settings_of

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "TopK: layers must name at least one block, got none"),
        ([1.0], "TopK: layers must be whole block numbers, got 1.0"),
        (1.5, "TopK: layers must be whole block numbers, got 1.5"),
        ([True], "TopK: layers must be whole block numbers, got True"),
        (True, "TopK: layers must be whole block numbers, got True"),
        (["1"], "TopK: layers must be whole block numbers, got '1'"),
        ([[1]], r"TopK: layers must be whole block numbers, got \[1\]"),
        ([2, 1], r"TopK: layers must rise and not repeat, got \[2, 1\]"),
        ([1, 1], r"TopK: layers must rise and not repeat, got \[1, 1\]"),
        ("", 'TopK: layers must be block numbers or a slice like "3:", got ""'),
        ("3", 'TopK: layers must be block numbers or a slice like "3:", got "3"'),
        ("-1:", "TopK: layers must be block numbers or a slice"),
        ("::2", "TopK: layers must be block numbers or a slice"),
        ("3:3", 'TopK: layers must leave at least one block, got "3:3"'),
        ("5:3", 'TopK: layers must leave at least one block, got "5:3"'),
        (":0", 'TopK: layers must leave at least one block, got ":0"'),
    ],
)
def test_layers_that_are_refused_at_once(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(0.5, layers)


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        ("4:", '"4:"'),
        ("20:", '"20:"'),
        ("3:20", '"3:20"'),
        (":5", '":5"'),
        ([4], "4"),
        ([-1], "-1"),
        (9, "9"),
    ],
)
def test_layers_beyond_the_depth(layers: Any, got: str) -> None:
    with pytest.raises(
        ValueError, match=rf"TopK: layers must lie in 0\.\.3 \(the model has 4 blocks\), got {got}"
    ):
        prunevit.prune(small_vit(), TopK(0.5, layers))


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (":", (0, 1, 2, 3)),
        ("2:", (2, 3)),
        (":2", (0, 1)),
        ("1:3", (1, 2)),
        ("0:4", (0, 1, 2, 3)),
        (3, (3,)),
        (range(1, 3), (1, 2)),
        (np.array([1, 2]), (1, 2)),
    ],
)
def test_layers_of_a_model_of_four_blocks(layers: Any, expected: tuple[int, ...]) -> None:
    (policy,) = prunevit.prune(small_vit(), TopK(0.5, layers)).policies
    assert policy.layers == expected
    assert all(type(layer) is int for layer in expected)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "rate bool": (lambda: TopK(True), "TopK: keep_rate must be a number, got True"),
    "rate text": (lambda: EViT("0.5"), "EViT: keep_rate must be a number, got '0.5'"),  # type: ignore[arg-type]
    "rate nan": (lambda: TopK(NAN), "TopK: keep_rate must be a number, got nan"),
    "rate nan in a list": (lambda: TopK([0.5, NAN, 0.5]), "TopK: keep_rate must be a number, got nan"),
    "rate inf": (lambda: TopK(INF), r"TopK: keep_rate must be in \(0, 1\], got inf"),
    "rate 0": (lambda: KMedoids(0), r"KMedoids: keep_rate must be in \(0, 1\], got 0"),
    "rates": (lambda: TopK([0.5, 0.4]), "one value or one for each of the 3 layers, got 2"),
    "rounding": (lambda: TopK(rounding="up"), "TopK: rounding must be one of ceil, floor, got 'up'"),
    "of": (lambda: FixedRate(of="x"), "FixedRate: of must be one of current, initial, got 'x'"),
    "pattern": (lambda: FixedRate(pattern="x"), "FixedRate: pattern must be one of grid, center, got 'x'"),
    "compound": (
        lambda: TopK(compound=True),
        'TopK: compound=True must go with of="initial", got of="current"',
    ),
    "compound of evit": (lambda: EViT(compound=True), "EViT: compound=True must go with"),
    "compound of random": (lambda: RandomPruning(compound=True), "RandomPruning: compound=True must"),
    "compound of fixed": (lambda: FixedRate(of="current"), "FixedRate: compound=True must go with"),
    "compound of kmedoids": (lambda: KMedoids(of="current"), "KMedoids: compound=True must go with"),
    "compound of dpc": (lambda: DPCKNN(of="current"), "DPCKNN: compound=True must go with"),
    "seed": (
        lambda: RandomPruning(seed=-1),
        r"RandomPruning: seed must be a whole number in \[0, 4294967295\], got -1",
    ),
    "seed bool": (lambda: DPCKNN(seed=True), "DPCKNN: seed must be a whole number"),
    "seed of cross": (lambda: Cross(seed=2**32), "Cross: seed must be a whole number"),
    "neighbours": (
        lambda: DPCKNN(neighbours=0),
        "DPCKNN: neighbours must be a whole number of at least 1, got 0",
    ),
    "iterations": (
        lambda: KMedoids(iterations=-1),
        "KMedoids: iterations must be a whole number of at least 0",
    ),
    "r negative": (lambda: ToMe(-1), "ToMe: r must be a whole number of at least 0, got -1"),
    "r float": (lambda: ToMe(1.5), r"ToMe: r must be a whole number of at least 0, got 1\.5"),  # type: ignore[arg-type]
    "r bool": (lambda: ToMe([True], (0,)), "ToMe: r must be a number, got True"),
    "inflection": (
        lambda: ToMe(3, inflection=1.5),
        r"ToMe: inflection must be a number in \[-1, 1\], got 1\.5",
    ),
    "inflection nan": (lambda: ToMe(3, inflection=NAN), "ToMe: inflection must be a number"),
    "min_keep": (lambda: TopP(min_keep=0), "TopP: min_keep must be a whole number of at least 1, got 0"),
    "max_keep": (lambda: TopP(max_keep=0), "TopP: max_keep must be a whole number of at least 1, got 0"),
    "max_keep float": (lambda: ThresholdL2(max_keep=2.5), "ThresholdL2: max_keep must be a whole"),  # type: ignore[arg-type]
    "crossed": (lambda: TopP(min_keep=5, max_keep=4), "TopP: max_keep must be at least min_keep=5, got 4"),
    "crossed norms": (lambda: ThresholdL2(min_keep=5, max_keep=4), "ThresholdL2: max_keep must be at least"),
    "unused": (lambda: ThresholdL2(0.5, rule="share", min_keep=2), 'must be left out with rule="share"'),
    "threshold nan": (lambda: ThresholdL2(NAN), "ThresholdL2: threshold must be a number, got nan"),
    "share": (lambda: ThresholdL2(1.5, rule="share"), r"ThresholdL2: threshold must be in \(0, 1\] for"),
    "norm rule": (lambda: ThresholdL2(rule="x"), "ThresholdL2: rule must be one of absolute, deviation"),
    "probability": (lambda: DynamicViT(threshold=1.5), r"DynamicViT: threshold must be a number in \[0, 1\]"),
    "weight": (
        lambda: DynamicViT(ratio_weight=-1),
        "DynamicViT: ratio_weight must be a number of at least 0",
    ),
    "eps": (lambda: DynamicViT(softmax_eps=NAN), "DynamicViT: softmax_eps must be a number of at least 0"),
    "budget": (lambda: ATS(INF), r"ATS: budget must be in \(0, inf\), got inf"),
    "min_rows": (lambda: ATS(min_rows=0), "ATS: min_rows must be a whole number of at least 1, got 0"),
    "merge": (lambda: LTMP(NAN), "LTMP: merge_threshold must be a number, got nan"),
    "prune": (lambda: LTMP(0.9, (0.1, NAN), (1, 2)), "LTMP: prune_threshold must be a number, got nan"),
    "tau": (lambda: LTMP(tau=0), "LTMP: tau must be a number of at least .*, got 0"),
    "target": (lambda: LTMP(target=1.5), r"LTMP: target must be a number in \[0, 1\], got 1\.5"),
    "prob": (lambda: PatchDropout(1.0), r"PatchDropout: prob must be in \[0, 1\), got 1"),
    "prob bool": (lambda: PatchDropout(False), "PatchDropout: prob must be a number, got False"),
    "counts": (
        lambda: DiffRate((9, 0), (9, 1), (0, 1)),
        "DiffRate: prune_counts must be a whole number of at least 1",
    ),
    "number": (lambda: Replay("x", -1), "Replay: policy must be a whole number of at least 0, got -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_nonsense_is_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        make()


def test_thresholds_may_be_infinite_and_a_huge_r_merges_half() -> None:
    ThresholdL2(-INF)
    model = small_vit()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    trace = prunevit.prune(model, ToMe(2**40)).trace(images)
    # 36 patches and CLS: half of the patches of each image, rounded down, merge in each block.
    assert trace.mlp_rows[:, 0].tolist() == [19, 10, 6, 4]
    ragged = prunevit.pack(
        dense_tokens(2, 8, 1), prunevit.KeepMask(torch.tensor([True] * 9 + [True] * 5 + [False] * 4))
    )
    number, _ = ToMe(2**40, (0,))._number(ragged, 0)
    assert isinstance(number, torch.Tensor)
    assert number.unique().tolist() == [2, 4]


class Handing(TopK):
    def __init__(self, alpha: float, **settings: Any) -> None:
        super().__init__(alpha, **settings)


class Counted(PruningPolicy):
    def __init__(self, alpha: float, beta: int = 2, /, layers: tuple[int, ...] = (1,), *rest: int) -> None:
        super().__init__(alpha, layers)
        self.beta = beta


def test_settings_reach_through_arguments_that_are_handed_on() -> None:
    found = settings_of(Handing)
    assert list(found)[:2] == ["alpha", "keep_rate"]
    assert {name for name, each in found.items() if each.required} == {"alpha"}
    assert found["layers"].hint == int | Sequence[int] | str
    policy: Any = construct(Handing, {"alpha": 0.5, "rounding": "floor", "layers": [2]})
    assert (policy.knob_value, policy.rounding, policy.layers) == (0.5, "floor", (2,))
    assert set(settings_of(TopK)) == {"keep_rate", "layers", "score_source", "rounding", "of", "compound"}


def test_positional_arguments_are_settings_too() -> None:
    assert [(name, each.required) for name, each in settings_of(Counted).items()] == [
        ("alpha", True),
        ("beta", False),
        ("layers", False),
    ]
    policy: Any = construct(Counted, {"layers": [3], "alpha": 0.5})
    assert (policy.knob_value, policy.beta, policy.layers) == (0.5, 2, (3,))
    assert construct(Counted, {"beta": 7, "alpha": 0.5}).beta == 7


def test_cross_takes_policies_that_hand_their_settings_on() -> None:
    policy: Any = Cross({"name": f"{__name__}:Handing", "alpha": 0.5}, "topk", (1, 2))
    assert policy.which.layers == (1, 2)
    with pytest.raises(ValueError, match="settings of Handing other than those, got"):
        Cross({"name": f"{__name__}:Handing", "alpha": 0.5, "layers": [1]}, "topk", (1, 2))
