"""What two accuracies on the same images tell of each other, and what several seeds tell together.

The interval of one accuracy is Wilson's, as everywhere (`metrics.wilson`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prunevit.experiments.report import Row

DRAWS = 10_000  # of the bootstrap
NO_DIFFERENCE = "no difference shown"
Hits = NDArray[np.bool_]


@dataclass(frozen=True)
class Difference:
    """Top-1 of one row minus that of another on the same images, in percentage points.

    Attributes:
        difference: The difference.
        low: Lower end of its 95 % interval (paired bootstrap).
        high: Upper end.
        p: McNemar's exact p, two-sided.
        verdict: `NO_DIFFERENCE` where the interval contains 0, else "higher" or "lower".
    """

    difference: float
    low: float
    high: float
    p: float
    verdict: str


def compared(own: Hits, other: Hits, seed: int = 0) -> Difference:
    """Compare two rows image by image.

    An image counts +1 where only `own` is right, -1 where only `other` is, else 0. To draw n images with replacement
    is to draw how many of each kind there are from the multinomial distribution of their shares.

    Args:
        own: Whether each image was right, `[n]`.
        other: The same images, `[n]`.
        seed: Of the bootstrap.

    Reference:
        B. Efron and R. Tibshirani, An Introduction to the Bootstrap, 1993 (percentile interval).
    """
    images, better, worse = len(own), int((own & ~other).sum()), int((other & ~own).sum())
    shares = np.array([better, worse, images - better - worse]) / images
    drawn = np.random.default_rng(seed).multinomial(images, shares, DRAWS)
    low, high = np.percentile(100 * (drawn[:, 0] - drawn[:, 1]) / images, [2.5, 97.5])
    difference = 100 * (better - worse) / images
    verdict = NO_DIFFERENCE if low <= 0 <= high else "higher" if difference > 0 else "lower"
    return Difference(difference, float(low), float(high), mcnemar(better, worse), verdict)


def mcnemar(better: int, worse: int) -> float:
    """McNemar's exact test: the two-sided p of a fair coin for the images on which two rows differ.

    Args:
        better: Images that only one row has right.
        worse: Images that only the other has right.

    Reference:
        Q. McNemar, Note on the sampling error of the difference between correlated proportions, 1947.
    """
    total, fewer = better + worse, min(better, worse)
    # By logarithms: 2^n is beyond a float from n = 1024 on.
    whole = math.lgamma(total + 1) - total * math.log(2)
    logs = [whole - math.lgamma(count + 1) - math.lgamma(total - count + 1) for count in range(fewer + 1)]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def all_pairs(hits: dict[str, Hits], seed: int = 0) -> list[dict[str, Any]]:
    """Compare every row with every later one.

    Args:
        hits: Whether each image was right, by the name of the row.
        seed: Of the bootstrap.

    Returns:
        `a`, `b` and the fields of `Difference`, of a minus b.
    """
    return [{"a": a, "b": b, **vars(compared(hits[a], hits[b], seed))} for a, b in combinations(hits, 2)]


def seed_groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Mean and standard deviation (n - 1) of top-1 over rows that differ by nothing but the seed.

    Args:
        rows: Complete rows, with the `config` of each; one that failed does not count.

    Returns:
        `rows` (names), `top1_mean`, `top1_std` of each group of two or more.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["error"] is None:
            same = {key: value for key, value in row["config"].items() if key not in ("name", "seed")}
            groups.setdefault(repr(same), []).append(row)
    return [
        {
            "rows": [row["name"] for row in group],
            "top1_mean": float(np.mean([row["top1"] for row in group])),
            "top1_std": float(np.std([row["top1"] for row in group], ddof=1)),
        }
        for group in groups.values()
        if len(group) > 1
    ]
