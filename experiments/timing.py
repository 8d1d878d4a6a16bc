"""Speed and memory of models on one warm batch: the forward pass alone, without data loading.

The calls are timed in turn (A B A B ...), so that a machine that slows down slows all of them.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def times(self, factor: float) -> "Spread":
        """The same in another unit.

        Args:
            factor: What each figure is multiplied by.
        """
        return Spread(self.median * factor, self.p20 * factor, self.p80 * factor)


def interleaved(
    calls: Sequence[Call], seconds: float, device: torch.device, wall: bool = False
) -> list[Spread]:
    """Time several calls in turn, after a warm-up.

    Args:
        calls: What to time; on a GPU they only launch work on the current stream.
        seconds: How long to go on; at least three rounds are made.
        device: A CUDA device is timed by its own events.
        wall: Time by the host's clock on a CUDA device too, from an idle device until it is idle again.

    Cost:
        One host synchronisation for each warm-up and one at the end; with `wall` two for each call.
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
    by_events = device.type == "cuda" and not wall
    times = [_cuda_times(calls) if by_events else _host_times(calls, device) for _ in range(rounds)]
    _wait(device)
    return [Spread.of([each[number]() for each in times]) for number in range(len(calls))]


def launch_times(
    calls: Sequence[Call], device: torch.device, bursts: int = 30, burst: int = 50
) -> list[Spread]:
    """Time for which the host is busy with one call, in milliseconds; the device's work is not waited for.

    Args:
        calls: What to time; what a burst launches must fit the device's queue (about 1000 launches).
        device: Where they run.
        bursts: Repetitions, in turn.
        burst: Calls that are timed together.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(bursts + 1):
        for call, own in zip(calls, times):
            _wait(device)
            started = time.perf_counter()
            for _ in range(burst):
                call()
            own.append((time.perf_counter() - started) * 1000 / burst)
    _wait(device)
    return [Spread.of(own[1:]) for own in times]  # the first burst warms up


def captured(calls: Iterable[Call], rotate: bool = False) -> Call:
    """Put calls into one CUDA graph, in order, and return its replay.

    Args:
        calls: What to capture; each has run before, so that nothing is compiled or allocated for good here.
        rotate: Give each call outputs of its own; else the memory of one serves the next, and lies in the cache.
    """
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            output = call()
            if rotate:
                kept.append(output)
    return graph.replay


def peak_mb(call: Call, device: torch.device, held: Iterable[Tensor] = ()) -> float | None:
    """Memory on a CUDA device that a call needs at its peak, in 10^6 bytes; None elsewhere.

    What else lies on the device does not count. Of a CUDA graph, time the call that captures it.

    Args:
        call: What to run.
        device: Where it runs.
        held: Tensors that it needs throughout (weights, images), and that count.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    used = torch.cuda.max_memory_allocated(device) - before
    return (used + sum(each.nbytes for each in held)) / 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_times(calls: Sequence[Call], device: torch.device) -> list[Callable[[], float]]:
    times = []
    for call in calls:
        _wait(device)
        started = time.perf_counter()
        call()
        _wait(device)
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
