"""Statistics of a comparison against enumerations and closed forms."""

import itertools
import math
import statistics

import numpy as np
import pytest

from prunevit.experiments.comparison.statistics import (
    NO_DIFFERENCE,
    all_pairs,
    compared,
    mcnemar,
    seed_groups,
)


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 1), (5, 5), (2, 9), (0, 10)])
def test_mcnemar_equals_the_enumeration_of_all_coin_tosses(better: int, worse: int) -> None:
    total = better + worse
    as_far = [
        abs(2 * sum(coins) - total) >= abs(better - worse)
        for coins in itertools.product((0, 1), repeat=total)
    ]
    assert mcnemar(better, worse) == pytest.approx(sum(as_far) / 2**total, rel=1e-12)


def test_mcnemar_of_many_images_equals_exact_integers() -> None:
    term, tail = 1, 0  # binomial coefficients of 5000
    for count in range(2401):
        tail, term = tail + term, term * (5000 - count) // (count + 1)
    assert mcnemar(2600, 2400) == pytest.approx(2 * tail / 2**5000, rel=1e-9)
    assert mcnemar(9000, 1000) == pytest.approx(0.0, abs=1e-300)


def hits(better: int, worse: int, both: int, neither: int) -> tuple[np.ndarray, np.ndarray]:
    own = [True] * better + [False] * worse + [True] * both + [False] * neither
    other = [False] * better + [True] * worse + [True] * both + [False] * neither
    order = np.random.default_rng(5).permutation(len(own))
    return np.array(own)[order], np.array(other)[order]


def law_of_sums(better: int, worse: int, images: int) -> dict[float, float]:
    """Share of the resamples whose difference is at most a value, by repeated convolution of +1, -1, 0."""
    one = np.array([worse, images - better - worse, better]) / images
    law = np.ones(1)
    for _ in range(images):
        law = np.convolve(law, one)
    return {round(100 * (n - images) / images, 6): upto for n, upto in enumerate(law.cumsum())}


@pytest.mark.parametrize(
    ("better", "worse", "both", "neither"), [(9, 2, 20, 9), (1, 13, 5, 21), (4, 4, 30, 2)]
)
def test_the_interval_is_that_of_resampled_images(better: int, worse: int, both: int, neither: int) -> None:
    own, other = hits(better, worse, both, neither)
    found, upto = compared(own, other, seed=3), law_of_sums(better, worse, 40)
    assert found.difference == pytest.approx(100 * (own.mean() - other.mean()))
    for end, share in ((found.low, 0.025), (found.high, 0.975)):
        chance = 4 * math.sqrt(0.025 * 0.975 / 10_000)  # of 10,000 draws
        assert upto[round(end - 2.5, 6)] - chance <= share <= upto[round(end, 6)] + chance
    assert found.p == mcnemar(better, worse)
    assert found == compared(own, other, seed=3)


def test_the_verdict_says_which_is_higher_or_that_nothing_is_shown() -> None:
    assert compared(*hits(20, 1, 10, 9)).verdict == "higher"
    assert compared(*hits(1, 20, 10, 9)).verdict == "lower"
    assert compared(*hits(3, 2, 20, 15)).verdict == NO_DIFFERENCE
    same = np.array([True, False, True])
    assert vars(compared(same, same)) == {
        "difference": 0.0,
        "low": 0.0,
        "high": 0.0,
        "p": 1.0,
        "verdict": NO_DIFFERENCE,
    }


def test_pairs_are_of_each_row_with_each_later_one() -> None:
    a, b = hits(5, 1, 10, 4)
    pairs = all_pairs({"a": a, "b": b, "c": a})
    assert [(pair["a"], pair["b"]) for pair in pairs] == [("a", "b"), ("a", "c"), ("b", "c")]
    assert [pair["difference"] for pair in pairs] == [20.0, 0.0, -20.0]
    assert set(pairs[0]) == {"a", "b", "difference", "low", "high", "p", "verdict"}


def row(name: str, top1: float, seed: int, rate: float = 0.5, error: str | None = None) -> dict[str, object]:
    config = {"name": name, "seed": seed, "policy": {"name": "random", "keep_rate": rate}}
    return {"name": name, "top1": top1, "error": error, "config": config}


def test_rows_that_differ_by_the_seed_become_mean_and_deviation() -> None:
    rows = [row("r0", 80.0, 0), row("r1", 83.0, 1), row("r2", 81.0, 2), row("other", 70.0, 0, rate=0.7)]
    (group,) = seed_groups([*rows, row("broken", 0.0, 3, error="no")])
    assert group["rows"] == ["r0", "r1", "r2"]
    assert group["top1_mean"] == pytest.approx(statistics.mean((80, 83, 81)))
    assert group["top1_std"] == pytest.approx(statistics.stdev((80, 83, 81)))
