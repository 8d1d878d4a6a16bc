"""Speed and memory of models on one warm batch: the forward pass alone, without data loading.

The calls are timed in turn (A B A B ...), so that a machine that slows down slows all of them.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 3, 200


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of a time, in milliseconds."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, times_ms: Sequence[float]) -> "Spread":
        """Summarise.

        Args:
            times_ms: At least two times.
        """
        deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
        return cls(statistics.median(times_ms), deciles[1], deciles[7])

    def per_second(self, images: int) -> "Spread":
        """Turn times of a batch into images a second; slow times make the low percentile.

        Args:
            images: Images in the batch.
        """
        return Spread(*(1000 * images / value for value in (self.median, self.p80, self.p20)))


def interleaved(calls: Sequence[Call], seconds: float, device: torch.device) -> list[Spread]:
    """Time several calls in turn, after a warm-up.

    Args:
        calls: What to time; on a GPU they only launch work on the current stream.
        seconds: How long to go on; at least three rounds are made.
        device: A CUDA device is timed by its own events.

    Cost:
        One host synchronisation for each warm-up and one at the end.
    """
    started = time.perf_counter()
    for call in calls:
        call()
    if device.type == "cuda":  # the first calls may compile
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        for call in calls:
            call()
        torch.cuda.synchronize(device)
    round_s = max(time.perf_counter() - started, 1e-6)
    rounds = min(max(int(seconds / round_s), LEAST_ROUNDS), MOST_ROUNDS)
    measure = _cuda_times if device.type == "cuda" else _host_times
    times = [measure(calls) for _ in range(rounds)]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [Spread.of([each[number]() for each in times]) for number in range(len(calls))]


def peak_mb(call: Call, device: torch.device) -> float | None:
    """Peak memory that a call holds on a CUDA device, weights included, in 10^6 bytes; None elsewhere.

    Args:
        call: What to run.
        device: Where it runs.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) / 1e6


def _host_times(calls: Sequence[Call]) -> list[Callable[[], float]]:
    times = []
    for call in calls:
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1000)
    return [lambda value=value: value for value in times]  # type: ignore[misc]


def _cuda_times(calls: Sequence[Call]) -> list[Callable[[], float]]:
    """Times to be read once the device is done."""
    pairs = []
    for call in calls:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    return [lambda start=start, end=end: start.elapsed_time(end) for start, end in pairs]  # type: ignore[misc]
