"""Order and arithmetic of the timing; no test asserts a time."""

import pytest
import torch

from prunevit.experiments import timing
from prunevit.experiments.timing import Spread, captured, interleaved, launch_times, peak_mb

CPU = torch.device("cpu")


def test_spread_of_known_times() -> None:
    spread = Spread.of([float(value) for value in range(11)])
    assert (spread.p20, spread.median, spread.p80) == (2.0, 5.0, 8.0)


def test_images_a_second_swap_the_percentiles() -> None:
    assert Spread(median=100.0, p20=50.0, p80=200.0).per_second(10) == Spread(
        median=100.0, p20=50.0, p80=200.0
    )
    assert Spread(median=10.0, p20=10.0, p80=20.0).per_second(1) == Spread(median=100.0, p20=50.0, p80=100.0)


def test_calls_take_turns() -> None:
    order: list[str] = []
    spreads = interleaved([lambda: order.append("a"), lambda: order.append("b")], seconds=0.0, device=CPU)
    assert order == ["a", "b"] * (1 + timing.LEAST_ROUNDS)
    assert all(0 <= spread.p20 <= spread.median <= spread.p80 for spread in spreads)


def test_rounds_fill_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(
        timing.time, "perf_counter", lambda: float(next(clock))
    )  # each look is a second later
    calls: list[int] = []
    (spread,) = interleaved([lambda: calls.append(1)], seconds=7.0, device=CPU)
    assert len(calls) == 1 + 7
    assert spread == Spread(1000.0, 1000.0, 1000.0)


def test_no_peak_memory_on_a_cpu() -> None:
    assert peak_mb(lambda: None, CPU) is None


@pytest.mark.gpu
def test_peak_memory_and_events_on_a_gpu() -> None:
    device = torch.device("cuda")
    peak = peak_mb(lambda: torch.empty(250_000_000, dtype=torch.uint8, device=device), device)
    assert peak is not None
    assert peak >= 250
    (spread,) = interleaved([lambda: torch.ones(1 << 20, device=device) * 2], 0.01, device)
    assert spread.median > 0


def test_launches_are_timed_in_bursts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    spreads = launch_times(calls, CPU, bursts=3, burst=4)
    assert order == [*"aaaabbbb"] * 4
    assert spreads == [Spread(250.0, 250.0, 250.0)] * 2  # a second for four calls


def test_another_unit() -> None:
    assert Spread(2.0, 1.0, 4.0).times(1000) == Spread(2000.0, 1000.0, 4000.0)


@pytest.mark.gpu
def test_a_captured_graph_replays_its_calls() -> None:
    total = torch.zeros((), device="cuda")
    replay = captured([lambda: total.add_(1)] * 5)
    total.zero_()
    for _ in range(2):
        replay()
    assert total.item() == 10
