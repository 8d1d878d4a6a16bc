"""The speed part of a row: pruned and unpruned models in turn, on one warm batch and on one image."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from torch import Tensor, nn

from prunevit.execution import Accelerated, accelerate, signature
from prunevit.experiments.report import Row
from prunevit.experiments.timing import Spread, interleaved, peak_mb

Inputs = tuple[Tensor, ...]
PRUNED, DENSE = "", "dense_"  # how the columns of the two models begin
UNTIMED = "pruned eager, dense eager"  # what the accuracy pass ran


class Racer:
    """A model that is timed, in one execution mode, on a batch and on its first image."""

    def __init__(self, model: nn.Module, inputs: Inputs, mode: str) -> None:
        """Take the model.

        Args:
            model: A pruned or an unpruned model.
            inputs: A batch: images, and for a pruned model their positions.
            mode: Of `accelerate`.
        """
        self.model, self.inputs, self.fast = model, inputs, accelerate(model, mode)
        self.one = tuple(each[:1] for each in inputs)

    def warm_up(self) -> None:
        """Compile, capture and choose what the mode wants; the first call of a shape runs without a graph."""
        if self.fast.mode == "eager":
            return
        for inputs in (self.inputs, self.one):
            for _ in range(2 if inputs[0].is_cuda else 1):
                self.fast(*inputs)

    def peak_mb(self) -> float | None:
        """Peak of a forward, weights and images included; a graph's is that of its capture."""
        fast, images = accelerate(self.model, mode_of(self.fast, self.inputs)), self.inputs[0]
        if images.is_cuda:
            fast(*self.inputs)  # compiles
        return peak_mb(partial(fast, *self.inputs), images.device, [*self.model.parameters(), images])


@dataclass(frozen=True)
class Pair:
    """A row's model and the unpruned one beside it."""

    pruned: Racer
    dense: Racer


def speeds(pairs: Sequence[Pair], mode: str, seconds: float) -> list[Row]:
    """Time the forward passes of all models in turn, in one mode or each in its best one.

    Where that is not eager, the eager figures stand beside, under `timing`.

    Args:
        pairs: A pair for each row; a model that several rows have is timed once.
        mode: Of `accelerate`, the one that the racers were made with.
        seconds: For each of throughput and latency.

    Returns:
        The speed columns of each row.
    """
    racers = list(dict.fromkeys(racer for pair in pairs for racer in (pair.dense, pair.pruned)))
    batch = _time(racers, lambda racer: partial(racer.fast, *racer.inputs), seconds)
    figures = {"images_per_s": {each: batch[each].per_second(len(each.inputs[0])) for each in racers}}
    figures["latency_ms"] = _time(racers, lambda racer: partial(racer.fast, *racer.one), seconds)
    if mode != "eager":
        figures["eager_ms"] = _time(racers, lambda racer: partial(racer.model, *racer.inputs), seconds)
    peaks = {racer: racer.peak_mb() for racer in racers}
    return [_row(pair, figures, peaks) for pair in pairs]


def mode_of(fast: Accelerated, inputs: Inputs) -> str:
    """The mode in which inputs of these shapes run.

    Args:
        fast: A model that has run them.
        inputs: They.
    """
    if fast.mode != "best":
        return fast.mode
    times = fast.chosen.get(signature(inputs), {"eager": 0.0})
    return min(times, key=times.__getitem__)


def _time(
    racers: Sequence[Racer], call: Callable[[Racer], Callable[[], object]], seconds: float
) -> dict[Racer, Spread]:
    return dict(zip(racers, interleaved([*map(call, racers)], seconds, racers[0].inputs[0].device)))


def _row(
    pair: Pair, figures: Mapping[str, Mapping[Racer, Spread]], peaks: Mapping[Racer, float | None]
) -> Row:
    sides = {DENSE: pair.dense, PRUNED: pair.pruned}
    spreads = {
        f"{side}{name}": spread[racer] for name, spread in figures.items() for side, racer in sides.items()
    }
    row = {name: each.median for name, each in spreads.items() if not name.endswith("eager_ms")}
    on_batch, on_one = (_said(sides, name) for name in ("inputs", "one"))
    return row | {
        **{f"{side}peak_mb": peaks[racer] for side, racer in sides.items()},
        "speedup": row["images_per_s"] / row["dense_images_per_s"],
        "batch_size": len(pair.pruned.inputs[0]),
        "mode": on_batch if on_batch == on_one else f"{on_batch}; at batch 1 {on_one}",
        "timing": {name: asdict(each) for name, each in spreads.items()},
    }


def _said(sides: Mapping[str, Racer], which: str) -> str:
    pruned, dense = (mode_of(sides[side].fast, getattr(sides[side], which)) for side in (PRUNED, DENSE))
    return f"pruned {pruned}, dense {dense}"
