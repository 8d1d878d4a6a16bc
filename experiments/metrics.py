"""What is measured on the logits and on the rows, as torchmetrics: sums and counts, so that processes add up.

Counts are int64 and sums float64. They live outside Lightning's half-precision conversion: make them once the
precision is set, or `.to(torch.half)` of their owner would round the sums.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

Z95 = 1.959963984540054  # 97.5 % quantile of the normal distribution


class Accuracy(Metric):
    """Share of images whose label is among the k classes of highest logit, for k = 1 and k = 5."""

    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.add_state("correct", torch.zeros(2, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Count a batch.

        Args:
            logits: `[B, K]`.
            targets: Class indices, int64 `[B]`.
        """
        best = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hit = best == targets[:, None]
        self.correct += torch.stack([hit[:, 0].sum(), hit.any(1).sum()])
        self.total += len(targets)

    def compute(self) -> dict[str, float]:
        """Return `images`, and `top1` and `top5` with the ends of their 95 % intervals, in percent."""
        total = int(self.total)
        result: dict[str, float] = {"images": total}
        for name, correct in zip(("top1", "top5"), self.correct.tolist()):
            low, high = wilson(correct, total)
            result |= {name: _percent(correct, total), f"{name}_low": 100 * low, f"{name}_high": 100 * high}
        return result


class RealAccuracy(Metric):
    """Share of images whose first class is among their ReaL labels; images without any do not count."""

    full_state_update = False
    correct: Tensor
    total: Tensor

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        for name in ("correct", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Sequence[Sequence[int]]) -> None:
        """Count a batch.

        Args:
            logits: `[B, K]`.
            labels: The right classes of each image, possibly none.
        """
        first = logits.argmax(1).tolist()
        self.correct += sum(guess in right for guess, right in zip(first, labels))
        self.total += sum(len(right) > 0 for right in labels)

    def compute(self) -> float:
        """Return the percentage; NaN without images."""
        return _percent(int(self.correct), int(self.total))


class LogitDeviation(Metric):
    """How far one model's logits are from another's on the same images.

    `max_abs` over everything; `mean_abs` over images and classes; `kl`, the mean over images of
    KL(softmax(reference) || softmax(logits)) in nats; `cosine`, its mean over images; `agreement`, the
    percentage of images with the same first class.
    """

    full_state_update = False
    largest: Tensor
    sums: Tensor
    agree: Tensor
    total: Tensor

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.add_state("largest", torch.zeros((), dtype=torch.float64), dist_reduce_fx="max")
        self.add_state("sums", torch.zeros(3, dtype=torch.float64), dist_reduce_fx="sum")
        for name in ("agree", "total"):
            self.add_state(name, torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, reference: Tensor) -> None:
        """Add a batch.

        Args:
            logits: `[B, K]`.
            reference: `[B, K]`.
        """
        given, base = logits.double(), reference.double()
        distance = (given - base).abs()
        log_given, log_base = given.log_softmax(1), base.log_softmax(1)
        kl = (log_base.exp() * (log_base - log_given)).sum(1)
        cosine = torch.cosine_similarity(given, base, dim=1)
        self.largest = torch.maximum(self.largest, distance.max())
        self.sums += torch.stack([distance.mean(1).sum(), kl.sum(), cosine.sum()])
        self.agree += (logits.argmax(1) == reference.argmax(1)).sum()
        self.total += len(logits)

    def compute(self) -> dict[str, float]:
        """Return the five figures; NaN means without images."""
        total = int(self.total)
        mean_abs, kl, cosine = (value / total if total else math.nan for value in self.sums.tolist())
        return {
            "max_abs": float(self.largest) if total else math.nan,
            "mean_abs": mean_abs,
            "kl": kl,
            "cosine": cosine,
            "agreement": _percent(int(self.agree), total),
        }


class RowCounts(Metric):
    """Rows of an image in each block, prefix included, and their average over the blocks: mean, p5, p95.

    A histogram holds every count, so the percentiles over the images are exact: the smallest value that at
    least that share of the images does not exceed.
    """

    full_state_update = False
    by_block: Tensor
    by_image: Tensor

    def __init__(self, depth: int, most_rows: int) -> None:
        """Start at zero.

        Args:
            depth: Number of blocks.
            most_rows: Largest row count of an image in a block.
        """
        super().__init__()
        self.depth = depth
        self.add_state("by_block", torch.zeros(depth, most_rows + 1, dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state(
            "by_image", torch.zeros(depth * most_rows + 1, dtype=torch.int64), dist_reduce_fx="sum"
        )

    def update(self, rows: Tensor) -> None:
        """Count a batch.

        Args:
            rows: Row counts, integers `[depth, B]`.
        """
        rows = rows.long()
        self.by_block.scatter_add_(1, rows, torch.ones_like(rows))
        self.by_image.scatter_add_(0, rows.sum(0), torch.ones_like(rows[0]))

    def compute(self) -> dict[str, Any]:
        """Return `mean`, `p5`, `p95` of the average over blocks, and `by_block`, a list of the same three."""
        overall = _summary(self.by_image.cpu())
        return {
            **{name: value / self.depth for name, value in overall.items()},
            "by_block": [_summary(histogram) for histogram in self.by_block.cpu()],
        }


class Average(Metric):
    """Mean of one number an image, summed in float64."""

    full_state_update = False
    sum: Tensor
    total: Tensor

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.add_state("sum", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, values: Tensor) -> None:
        """Add a batch.

        Args:
            values: `[B]`.
        """
        self.sum += values.double().sum()
        self.total += len(values)

    def compute(self) -> float:
        """Return the mean; NaN without images."""
        return float(self.sum) / int(self.total) if int(self.total) else math.nan


class Count(Metric):
    """A number of things."""

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, number: int) -> None:
        """Add.

        Args:
            number: How many more.
        """
        self.total += number

    def compute(self) -> int:
        """Return the number."""
        return int(self.total)


def wilson(successes: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % score interval of a proportion.

    `(p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`; NaN without trials.

    Args:
        successes: How many.
        total: Of how many.

    Reference:
        E. B. Wilson, Probable inference, the law of succession, and statistical inference, JASA 1927.
    """
    if total == 0:
        return math.nan, math.nan
    share, slack = successes / total, Z95**2 / total
    half = Z95 * math.sqrt(share * (1 - share) / total + slack / (4 * total))
    low, high = ((share + slack / 2 + sign * half) / (1 + slack) for sign in (-1, 1))
    # Rounding must not put a share of 0 or 1 outside its own interval.
    return max(min(low, share), 0.0), min(max(high, share), 1.0)


def _percent(part: int, total: int) -> float:
    return 100 * part / total if total else math.nan


def _summary(histogram: Tensor) -> dict[str, float]:
    """Mean, 5th and 95th percentile of the values 0, 1, 2, ... that occur so often."""
    total = int(histogram.sum())
    if total == 0:
        return {"mean": math.nan, "p5": math.nan, "p95": math.nan}
    mean = int((histogram * torch.arange(len(histogram))).sum()) / total
    upto = histogram.cumsum(0)
    # In integers: 100 * count >= share * total. As floats, 0.05 * 20 may miss its count by a rounding step.
    p5, p95 = (int((100 * upto < share * total).sum()) for share in (5, 95))
    return {"mean": mean, "p5": float(p5), "p95": float(p95)}
