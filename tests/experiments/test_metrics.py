"""Metrics against closed forms and numpy, in one process and in two."""

import json
import math
import subprocess
import sys
from pathlib import Path

import gloo_metrics
import numpy as np
import pytest
import torch

from prunevit.experiments.metrics import (
    Accuracy,
    Average,
    Count,
    LogitDeviation,
    RealAccuracy,
    RowCounts,
    wilson,
)

Z = 1.959963984540054


@pytest.mark.parametrize(
    ("successes", "low", "high"),
    [
        (0, 0.0, Z**2 / (10 + Z**2)),
        (5, 0.5 - Z / 2 / math.sqrt(10 + Z**2), 0.5 + Z / 2 / math.sqrt(10 + Z**2)),
        (10, 10 / (10 + Z**2), 1.0),
    ],
)
def test_wilson_where_it_is_simple(successes: int, low: float, high: float) -> None:
    assert wilson(successes, 10) == pytest.approx((low, high), abs=1e-12)


@pytest.mark.parametrize("total", [1, 10, 200, 300, 985, 50_000])
def test_wilson_holds_a_share_of_all_or_none_exactly(total: int) -> None:
    assert wilson(total, total)[1] == 1
    assert wilson(0, total)[0] == 0


def test_wilson_bounds_solve_the_score_equation() -> None:
    successes, total = 281, 300
    for bound in wilson(successes, total):
        score = (successes / total - bound) / math.sqrt(bound * (1 - bound) / total)
        assert abs(score) == pytest.approx(Z, rel=1e-9)


def test_accuracy_counts_first_and_first_five() -> None:
    logits = torch.arange(10.0).expand(4, 10)  # the best class is 9, the best five are 5 to 9
    metric = Accuracy()
    metric.update(logits[:2], torch.tensor([9, 5]))
    metric.update(logits[2:], torch.tensor([4, 0]))
    result = metric.compute()
    assert (result["images"], result["top1"], result["top5"]) == (4, 25.0, 50.0)
    assert result["top1_low"] == pytest.approx(100 * wilson(1, 4)[0])
    assert result["top5_high"] == pytest.approx(100 * wilson(2, 4)[1])


def test_top5_of_a_head_with_three_classes() -> None:
    metric = Accuracy()
    metric.update(torch.eye(3), torch.tensor([0, 0, 2]))
    result = metric.compute()
    assert result["top1"] == pytest.approx(200 / 3)
    assert result["top5"] == 100.0


def test_real_accuracy_leaves_out_images_without_labels() -> None:
    metric = RealAccuracy()
    metric.update(torch.eye(4), [[0, 3], [2], [], [3]])
    assert metric.compute() == pytest.approx(200 / 3)


def test_logit_deviation_equals_numpy() -> None:
    generator = torch.Generator().manual_seed(1)
    given, base = (torch.randn(7, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    metric = LogitDeviation()
    for rows in (slice(0, 3), slice(3, 7)):
        metric.update(given[rows], base[rows])
    result, a, b = metric.compute(), given.numpy(), base.numpy()
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (b, a))
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert result["max_abs"] == pytest.approx(np.abs(a - b).max(), rel=1e-12)
    assert result["mean_abs"] == pytest.approx(np.abs(a - b).mean(), rel=1e-12)
    assert result["kl"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-10)
    assert result["cosine"] == pytest.approx(cosine.mean(), rel=1e-12)
    assert result["agreement"] == pytest.approx(100 * (a.argmax(1) == b.argmax(1)).mean())


def test_logit_deviation_sums_half_precision_in_double() -> None:
    metric = LogitDeviation()
    base = torch.full((1000, 4), 1000.0, dtype=torch.float16)
    metric.update(base + 1, base)
    assert metric.compute()["mean_abs"] == 1.0


@pytest.mark.parametrize("images", [1, 19, 20, 21, 100, 333])
def test_row_counts_equal_numpy_percentiles(images: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(images).integers(1, 50, (3, images)))
    metric = RowCounts(depth=3, most_rows=49)
    for part in rows.split(7, dim=1):
        metric.update(part.int())
    result = metric.compute()
    for block, found in zip(rows.numpy(), result["by_block"]):
        assert found["mean"] == pytest.approx(block.mean())
        assert [found["p5"], found["p95"]] == list(np.percentile(block, [5, 95], method="inverted_cdf"))
    average = rows.numpy().mean(0)
    assert result["mean"] == pytest.approx(average.mean())
    expected = np.percentile(average, [5, 95], method="inverted_cdf")
    assert [result["p5"], result["p95"]] == pytest.approx(list(expected))


def test_average_and_count() -> None:
    average, count = Average(), Count()
    average.update(torch.tensor([1e9, 2e9], dtype=torch.float64))
    average.update(torch.tensor([6e9], dtype=torch.float64))
    count.update(3)
    count.update(0)
    assert (average.compute(), count.compute()) == (3e9, 3)


def test_two_processes_count_as_one(tmp_path: Path) -> None:
    def start(rank: int) -> subprocess.Popen[str]:
        words = [sys.executable, gloo_metrics.__file__, str(rank), "2", str(tmp_path)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    processes = [start(0), start(1)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    one = gloo_metrics.measure(0, 1)
    assert one["accuracy"]["images"] == 21
    for two in map(json.loads, outputs):
        assert two["accuracy"] == one["accuracy"]
        assert two["rows"] == one["rows"]
        assert two["deviation"] == pytest.approx(one["deviation"], rel=1e-6)
        assert two["average"] == pytest.approx(one["average"], rel=1e-6)
        assert two["everyone"] == ["process 0", "process 1"]
