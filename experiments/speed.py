"""The speed part of an evaluation: pruned and unpruned model on one warm batch and on one image."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial

from torch import Tensor, nn

from prunevit import RaggedViT
from prunevit.accelerate import Accelerated, accelerate
from prunevit.experiments.report import Row
from prunevit.experiments.timing import Spread, interleaved, peak_mb

Inputs = tuple[Tensor, ...]
PRUNED, DENSE = "", "dense_"  # how the columns of the two models begin
UNTIMED = "pruned eager, dense eager"  # what the accuracy pass ran


def speed(pruned: RaggedViT, images: Tensor, index: Tensor, mode: str, seconds: float) -> Row:
    """Time the forward pass of both models, in one mode or each in its best one.

    Where that is not eager, the eager figures stand beside, under `timing`.

    Args:
        pruned: The pruned model; the unpruned one is inside.
        images: A batch.
        index: Position of each image in its data set.
        mode: Of `accelerate`.
        seconds: For each of throughput and latency.
    """
    models: dict[str, nn.Module] = {DENSE: pruned.model, PRUNED: pruned}
    batch: dict[str, Inputs] = {DENSE: (images,), PRUNED: (images, index)}
    one: dict[str, Inputs] = {DENSE: (images[:1],), PRUNED: (images[:1], index[:1])}
    fast = {name: accelerate(model, mode) for name, model in models.items()}
    spreads = {
        f"{name}images_per_s": each.per_second(len(images))
        for name, each in _time(fast, batch, seconds).items()
    }
    spreads |= {f"{name}latency_ms": each for name, each in _time(fast, one, seconds).items()}
    ran, ran_one = _ran(fast, batch), _ran(fast, one)
    row = {name: each.median for name, each in spreads.items()}
    if mode != "eager":
        spreads |= {f"{name}eager_ms": each for name, each in _time(models, batch, seconds).items()}
    return row | {
        **{f"{name}peak_mb": _peak(models[name], ran[name], batch[name]) for name in models},
        "speedup": row["images_per_s"] / row["dense_images_per_s"],
        "batch_size": len(images),
        "mode": _said(ran) if ran == ran_one else f"{_said(ran)}; at batch 1 {_said(ran_one)}",
        "timing": {name: asdict(each) for name, each in spreads.items()},
    }


def mode_of(fast: Accelerated, inputs: Inputs) -> str:
    """The mode in which inputs of these shapes run.

    Args:
        fast: A model that has run them.
        inputs: They.
    """
    if fast.mode != "best":
        return fast.mode
    times = fast.chosen.get(tuple((each.shape, each.dtype) for each in inputs), {"eager": 0.0})
    return min(times, key=times.__getitem__)


def _time(models: Mapping[str, nn.Module], inputs: dict[str, Inputs], seconds: float) -> dict[str, Spread]:
    calls = [partial(model, *inputs[name]) for name, model in models.items()]
    return dict(zip(models, interleaved(calls, seconds, inputs[DENSE][0].device)))


def _ran(fast: dict[str, Accelerated], inputs: dict[str, Inputs]) -> dict[str, str]:
    return {name: mode_of(model, inputs[name]) for name, model in fast.items()}


def _said(ran: dict[str, str]) -> str:
    return f"pruned {ran[PRUNED]}, dense {ran[DENSE]}"


def _peak(model: nn.Module, mode: str, inputs: Inputs) -> float | None:
    """Peak of a forward in a mode, weights and images included; a graph's is that of its capture."""
    fast, images = accelerate(model, mode), inputs[0]
    if images.is_cuda:
        fast(*inputs)  # compiles
    return peak_mb(partial(fast, *inputs), images.device, [*model.parameters(), images])
