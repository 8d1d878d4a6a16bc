"""`prunevit bench suite=model`: whole models in every execution mode, beside the strongest rivals."""

import copy
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import timm
import torch
from torch import Tensor

from prunevit.execution import Accelerated, accelerate
from prunevit.experiments.benchmark.attention_suite import DTYPES
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.contestants import CHECKED, Check, check_batches, contestants
from prunevit.experiments.benchmark.measurements import Measurement, Measurements, Target, compare
from prunevit.experiments.benchmark.model_rows import Case, cases
from prunevit.experiments.config import DataConfig, first_line
from prunevit.experiments.data import load_data
from prunevit.experiments.sample_model import load_sample_model
from prunevit.experiments.timing import Spread, interleaved, peak_mb

MS, WALL, PEAK = "ms a batch", "ms a batch by the host's clock", "peak MB"
GRAPHS = "CUDA graphs"
log = logging.getLogger("prunevit")


@dataclass(frozen=True)
class Entrant:
    """One contestant in one mode, or why it does not run."""

    name: str
    mode: str
    run: Accelerated
    note: str
    peak: float | None = None
    graphs: int = 0


def run(config: BenchConfig, device: torch.device) -> Iterator[Measurement]:
    """Measure every case at every batch size.

    Args:
        config: The configuration.
        device: A CUDA device.

    Yields:
        Times and peak memory.
    """
    for case, dtype in product(cases(config), config.dtypes):
        yield from measured(case, dtype, config.modes, config.seconds, device)


@torch.no_grad()
def measured(
    case: Case, dtype: str, modes: list[str], seconds: float, device: torch.device
) -> Iterator[Measurement]:
    """Measure one case at every batch size.

    Args:
        case: The case.
        dtype: Number format, a key of `DTYPES`.
        modes: How the models are executed.
        seconds: For each contestant in each mode.
        device: A CUDA device.

    Yields:
        Times, peak memory and the number of CUDA graphs.
    """
    model = build(case).to(device, getattr(torch, DTYPES[dtype]))
    images = photos(case, model, max(case.batch_sizes) + CHECKED).to(device, next(model.parameters()).dtype)
    exact = copy.deepcopy(model).double()
    kept: dict[tuple[str, str], Accelerated] = {}
    for batch_size in case.batch_sizes:
        place = case.place(batch_size, dtype)
        log.info("bench: %s", place)
        batch, more = images[:batch_size], images[batch_size:]
        check = Check(model, exact, check_batches(batch, more))
        entrants = list(_enter(case, model, batch, check, modes, kept))
        yield from _measure(place, entrants, batch, seconds)


def build(case: Case) -> Any:
    """Build the timm model of a case, in evaluation mode.

    Args:
        case: Random weights do for speed, except where counts depend on what is seen.
    """
    torch.manual_seed(0)
    if case.model == "sample":
        return load_sample_model()
    model = timm.create_model(case.model, pretrained=False).eval()
    if case.img_size:
        model.set_input_size(img_size=(case.img_size, case.img_size))  # type: ignore[operator]
    return model


def photos(case: Case, model: Any, number: int) -> Tensor:
    """Images for a model: the bundled photos for the bundled model, noise for others.

    Args:
        case: Names the model.
        model: Its input size counts.
        number: How many; photos repeat if there are fewer.
    """
    if case.model != "sample":
        generator = torch.Generator().manual_seed(0)
        return torch.randn(number, 3, *model.patch_embed.img_size, generator=generator)
    data = load_data(DataConfig(name="sample", num_images=min(number, 300)), model)
    loaded = torch.cat(
        [batch.images for batch in data.loader(batch_size=64, num_workers=min(8, os.cpu_count() or 1))]
    )
    return loaded.repeat(-(-number // len(loaded)), 1, 1, 1)[:number]


def _enter(
    case: Case,
    model: Any,
    images: Tensor,
    check: Check,
    modes: list[str],
    kept: dict[tuple[str, str], Accelerated],
) -> Iterator[Entrant]:
    """Build, compile, capture and check every contestant.

    Args:
        case: The case.
        model: The timm model.
        images: The batch.
        check: The check at this batch size.
        modes: Modes to run.
        kept: Contestants that serve all batch sizes, so that each is compiled for few of them.
    """
    for name, builder in contestants(case, model, images).items():
        module = builder(model)
        wrong = check.walk(builder, module)
        for mode in modes:
            own = (name, mode)
            if name not in ("dense", "none", *case.policies):
                kept.pop(own, None)  # made for the counts of one batch
            fast = kept.setdefault(own, accelerate(module, mode))
            log.info("bench:   %s, %s", name, mode)
            yield _entrant(name, mode, fast, images, wrong, check)


def _entrant(name: str, mode: str, fast: Accelerated, images: Tensor, wrong: str, check: Check) -> Entrant:
    try:
        for _ in range(2):  # the first call may run without a graph, the second compiles and captures
            fast(images)
        fast._graphs.clear()
        held = [*fast.parameters(), images]
        # Captures again: what compiling takes, and the graphs of other batches, are no memory of this one.
        peak = peak_mb(partial(fast, images), images.device, held)
        captured = len(fast._graphs)
        note = wrong or check.mode(fast)
    except (RuntimeError, ValueError) as error:
        return Entrant(name, mode, fast, f"cannot run: {first_line(error)}")
    return Entrant(name, mode, fast, note, peak, captured)


def _measure(place: str, entrants: list[Entrant], images: Tensor, seconds: float) -> Iterator[Measurement]:
    right = [each for each in entrants if not each.note]
    calls = [partial(each.run, images) for each in right]
    spent = seconds * len(calls)
    device = interleaved(calls, spent, images.device)
    wall = interleaved(calls, spent / 2, images.device, wall=True)
    for each, by_device, by_host in zip(right, device, wall):
        yield Measurement(place, each.name, each.mode, MS, by_device, images=len(images))
        yield Measurement(place, each.name, each.mode, WALL, by_host, images=len(images))
        if each.peak is not None:
            yield Measurement(place, each.name, each.mode, PEAK, Spread(each.peak, each.peak, each.peak))
        if each.graphs:
            yield Measurement(place, each.name, each.mode, GRAPHS, Spread(*(each.graphs,) * 3))
    for each in entrants:
        if each.note:
            yield Measurement(place, each.name, each.mode, MS, None, each.note, images=len(images))


def targets(figures: Measurements, config: BenchConfig) -> list[Target]:
    """Compare with what is to be reached.

    Args:
        figures: The measurements.
        config: Says which cases ran.
    """
    found = []
    for case in cases(config):
        for dtype in config.dtypes:
            for batch_size in case.batch_sizes:
                found += _targets(figures, case, case.place(batch_size, dtype), batch_size)
    return found


def _targets(figures: Measurements, case: Case, place: str, batch_size: int) -> list[Target]:
    found = []
    for name in case.policies:
        if "static" in case.rivals:
            found.append(_against_static(figures, name, place, batch_size))
            continue
        reach = case.dense_first.get(batch_size, 1.0)
        found.append(figures.faster(f"{name}, best mode against dense best", place, name, "dense", MS, reach))
        found.append(figures.faster(f"{name} against policy none", place, name, "none", MS, 1.0))
        free = f"free {next(iter(case.policies))}"
        if "free" in case.rivals:
            mode = getattr(figures.find(place, name, MS), "mode", None)
            what = f"{name} against free pruning, same mode"
            found.append(figures.faster(what, place, name, free, MS, 0.97, mode))
        found.append(_memory(figures, name, place))
    if case.none_first:
        what = "policy none against dense best (1 % noise)"
        found.append(figures.faster(what, place, "none", "dense", MS, 0.99))
    if batch_size in case.masked:
        name = next(iter(case.policies))
        what = f"{name} against padded SDPA at full length, both best"
        found.append(figures.faster(what, place, name, f"masked {name}", MS, case.masked[batch_size]))
    return found


def _against_static(figures: Measurements, name: str, place: str, batch_size: int) -> Target:
    ours, static = (figures.find(place, each, MS) for each in (name, f"static {name}"))
    what = f"{name}: time over a static policy of equal mean count"
    return compare(what, place, ours, static, 1.15 if batch_size == 1 else 1.10, at_most=True)


def _memory(figures: Measurements, name: str, place: str) -> Target:
    """Peak memory of both sides, each in its fastest mode."""
    sides = [figures.find(place, each, MS) for each in (name, "dense")]
    ours, dense = (
        None if each is None else figures.find(place, each.contestant, PEAK, each.mode) for each in sides
    )
    return compare(f"{name}: peak memory over dense", place, ours, dense, 1.02, at_most=True)
