"""`prunevit bench suite=attention`: one attention call, ours and others', on packed images."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from prunevit.experiments.benchmark.attention_rivals import (
    TRAINED,
    Attention,
    Inputs,
    Shape,
    Trained,
    available,
    packed_rows,
)
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.measurements import (
    WRONG,
    Measurement,
    Measurements,
    Target,
    compare,
    within,
)
from prunevit.experiments.config import first_line
from prunevit.experiments.timing import Call, Spread, captured, interleaved, launch_times
from prunevit.kernels.reference import reference_attention

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
EAGER = ("NestedTensor SDPA", "xFormers")  # read lengths on the host: no graph takes them
CALLS = 20  # in one graph: the time of its launch is shared among them
GPU, HOST = "us on the GPU", "us on the host"
BOTH_WAYS = "us on the GPU, forward and backward"
REFUSALS = (RuntimeError, ValueError, NotImplementedError, ImportError)
SDPA = ("dense SDPA flash", "dense SDPA cuDNN")
MUST_REACH = (
    *((images, 197, kept) for images in (1, 64, 256) for kept in (1.0, 0.5, 0.2)),
    *((64, 577, 0.3), (256, 577, 1.0)),
)
AGAINST_FA2 = {1.0: 1.3, 0.5: 1.7, 0.2: 3.8}
ROTATED = (256, 197, 0.2)
ROTATED_BYTES = 150e6
Where = tuple[int, int, float]
BOTH_WAYS_AGAINST_FA2: dict[Where, float] = {(256, 197, 1.0): 1.0, (256, 197, 0.5): 1.3, (256, 197, 0.2): 2.5}


def place_of(where: Where, dtype: str) -> str:
    """Name a shape: images, tokens before pruning, share kept.

    Args:
        where: The three.
        dtype: Number format.
    """
    images, tokens, kept = where
    return f"{images} x {tokens}, {kept:.0%} kept, {dtype}"


def lengths(where: Where) -> tuple[int, ...]:
    """Rows of each image: all alike if nothing is pruned, else within 10 % around the mean.

    Args:
        where: Images, tokens, share kept.
    """
    images, tokens, kept = where
    if kept == 1:
        return (tokens,) * images
    draws = torch.rand(images, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tuple(max(1, round(tokens * kept * (0.9 + 0.2 * draw))) for draw in draws.tolist())


def shapes(config: BenchConfig) -> list[tuple[Where, str]]:
    """The shapes of a run: those of the targets, or a sweep over batches and ratios at 197 and 577 tokens.

    Args:
        config: `rows`, `batch_sizes`, `ratios`, `dtypes`.
    """
    wheres: list[Where] = list(MUST_REACH)
    if config.rows == "sweep":
        batches = config.batch_sizes or [1, 8, 64, 256]
        wheres = [
            (b, n, 1 - r) for n in (197, 577) for b in batches for r in config.ratios or [0.0, 0.5, 0.8]
        ]
    elif config.batch_sizes:
        wheres = [where for where in wheres if where[0] in config.batch_sizes]
    return [(where, dtype) for dtype in config.dtypes for where in wheres]


def run(config: BenchConfig, device: torch.device) -> Iterator[Measurement]:
    """Measure every shape.

    Args:
        config: The configuration.
        device: A CUDA device.

    Yields:
        Times on the GPU and on the host.
    """
    for where, dtype in shapes(config):
        inputs = Inputs.make(Shape(lengths(where), 6, 64, getattr(torch, DTYPES[dtype])), device)
        place = place_of(where, dtype)
        with torch.no_grad():
            notes = {
                name: check(name, call, inputs) for name, call in available(inputs.shape.uniform).items()
            }
            yield from _on_the_gpu(place, inputs, notes, config.seconds)
            yield from _on_the_host(place, inputs, notes)
            if where in BOTH_WAYS_AGAINST_FA2:
                yield from _both_ways(place, inputs, config.seconds)
            if where == ROTATED:
                yield from _against_the_floor(place, inputs, config.seconds)


def check(name: str, call: Attention, inputs: Inputs) -> str:
    """Hold a contestant to twice the error of the formula in its own number format; "" if it passes.

    Args:
        name: The contestant.
        call: Runs it.
        inputs: The batch; some of its images are looked at.
    """
    try:
        out = packed_rows(name, inputs, call(inputs))
    except REFUSALS as problem:
        return f"cannot run: {first_line(problem)}"
    rows, part = _some_images(inputs)
    exact, eager = (_reference(part, part.qkv.to(dtype)) for dtype in (torch.float64, inputs.qkv.dtype))
    return "" if _within(2, out[rows], exact, eager) else WRONG


def check_gradients(call: Trained, inputs: Inputs) -> str:
    """Hold each gradient to three times the error of the formula in its own number format; "" if all pass.

    Args:
        call: Runs a contestant.
        inputs: The batch; some of its images are looked at.
    """
    try:
        found = call(inputs)
    except REFUSALS as problem:
        return f"cannot run: {first_line(problem)}"
    rows, part = _some_images(inputs)
    exact, eager = (_reference_gradients(part, dtype) for dtype in (torch.float64, inputs.qkv.dtype))
    right = all(_within(3, ours[rows], *each) for ours, *each in zip(found, exact, eager, strict=True))
    return "" if right else WRONG


def _within(times: int, found: Tensor, exact: Tensor, eager: Tensor) -> bool:
    """Whether the error is at most so many times that of the eager formula, and one rounding step."""
    step = torch.finfo(found.dtype).eps * exact.abs().max()
    budget = times * (eager.double() - exact).abs().max() + step
    return bool((found.double() - exact).abs().max() <= budget)  # a NaN is no less than anything


def _some_images(inputs: Inputs, most: int = 8) -> tuple[Tensor, Inputs]:
    """Rows of a few images, evenly strewn over the batch, and those images as a batch of their own."""
    lengths, cu = inputs.shape.lengths, inputs.cu_seqlens
    chosen = sorted({round(each) for each in torch.linspace(0, len(lengths) - 1, most).tolist()})
    rows = torch.cat([torch.arange(int(cu[n]), int(cu[n + 1]), device=cu.device) for n in chosen])
    shape = replace(inputs.shape, lengths=tuple(lengths[n] for n in chosen))
    bounds = torch.tensor([0, *shape.lengths], device=cu.device).cumsum(0).int()
    part = replace(inputs, shape=shape, qkv=inputs.qkv[rows], cu_seqlens=bounds, d_out=inputs.d_out[rows])
    return rows, part


@torch.enable_grad()
def _reference_gradients(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    qkv = inputs.qkv.to(dtype).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(_reference(inputs, qkv), qkv, inputs.d_out.to(dtype))
    return gradient.unbind(1)


def _reference(inputs: Inputs, qkv: Tensor) -> Tensor:
    q, k, v = qkv.unbind(1)
    settings = {"key_weight": None, "soft": None, "exempt_self": False, "softmax_eps": 0.0}
    return reference_attention(
        q,
        k,
        v,
        cu_seqlens=inputs.cu_seqlens,
        max_seqlen=inputs.shape.longest,
        softmax_scale=q.shape[-1] ** -0.5,
        prefix_rows=0,
        return_received=False,
        **settings,  # type: ignore[arg-type]
    )[0]


def _on_the_gpu(place: str, inputs: Inputs, notes: dict[str, str], seconds: float) -> Iterator[Measurement]:
    """Replays of graphs of many calls over one batch, which lies in the cache if it fits."""
    replays: dict[str, Call] = {}
    for name, call in available(inputs.shape.uniform).items():
        if notes[name]:
            yield Measurement(place, name, "graph", GPU, None, notes[name])
        elif name in EAGER:
            (spread,) = interleaved([partial(call, inputs)], seconds, inputs.qkv.device)
            yield Measurement(place, name, "eager", GPU, spread.times(1000), kernels(partial(call, inputs)))
        else:
            replays[name] = captured([partial(call, inputs)] * CALLS)
    spreads = interleaved(list(replays.values()), seconds * len(replays), inputs.qkv.device)
    for name, spread in zip(replays, spreads):
        ran = kernels(partial(available(inputs.shape.uniform)[name], inputs))
        yield Measurement(place, name, "graph", GPU, spread.times(1000 / CALLS), ran)


def _both_ways(place: str, inputs: Inputs, seconds: float) -> Iterator[Measurement]:
    """Replays of graphs of many calls, each from the rows to the gradients."""
    replays: dict[str, Call] = {}
    for name, call in TRAINED.items():
        note = check_gradients(call, inputs)
        if note:
            yield Measurement(place, name, "graph", BOTH_WAYS, None, note)
        else:
            replays[name] = captured([partial(call, inputs)] * CALLS)
    spreads = interleaved(list(replays.values()), seconds * len(replays), inputs.qkv.device)
    for name, spread in zip(replays, spreads):
        ran = kernels(partial(TRAINED[name], inputs))
        yield Measurement(place, name, "graph", BOTH_WAYS, spread.times(1000 / CALLS), ran)


def kernels(call: Call) -> str:
    """Name the kernels that a call runs, as the profiler sees them.

    Args:
        call: What to run once.
    """
    with profile(activities=supported_activities()) as seen:
        call()
        torch.cuda.synchronize()
    names = dict.fromkeys(each.key for each in seen.key_averages() if each.device_type == DeviceType.CUDA)
    return " + ".join(name.removeprefix("void ")[:60] for name in names)


def _on_the_host(place: str, inputs: Inputs, notes: dict[str, str]) -> Iterator[Measurement]:
    calls = {
        name: partial(call, inputs)
        for name, call in available(inputs.shape.uniform).items()
        if not notes[name] and name not in EAGER
    }
    for name, spread in zip(calls, launch_times(list(calls.values()), inputs.qkv.device)):
        yield Measurement(place, name, "eager", HOST, spread.times(1000))


def _against_the_floor(place: str, inputs: Inputs, seconds: float) -> Iterator[Measurement]:
    """Calls over batches that do not fit the cache together, and a copy of as many bytes."""
    number = int(ROTATED_BYTES / inputs.qkv.nbytes) + 2
    batches = [replace(inputs, qkv=inputs.qkv.clone()) for _ in range(number)]
    attend = available(inputs.shape.uniform)["triton"]
    large = torch.empty(1 << 30, dtype=torch.uint8, device=inputs.qkv.device)
    target = torch.empty_like(large)
    replay = captured([partial(attend, batch) for batch in batches], rotate=True)
    ours, copy = interleaved([replay, lambda: target.copy_(large)], seconds, inputs.qkv.device)
    moved = inputs.qkv.nbytes * 4 / 3  # q, k, v read, the result written
    floor = copy.times(moved / (2 * large.nbytes) * 1000)
    yield Measurement(place, "triton", "graph, rotated buffers", GPU, ours.times(1000 / number))
    yield Measurement(place, "memory floor", f"{moved / 1e6:.0f} MB at the speed of a copy", GPU, floor)


def targets(figures: Measurements, config: BenchConfig) -> list[Target]:
    """Compare with what is to be reached, in bf16.

    Args:
        figures: The measurements.
        config: The configuration of the run.
    """
    found = []
    for where in MUST_REACH:
        place = place_of(where, "bf16")
        if place not in figures.places():
            continue
        images, tokens, kept = where
        if images >= 64 and tokens == 197:
            what = "attention, GPU time against FA2 varlen"
            found.append(figures.faster(what, place, "triton", "FA2 aten", GPU, AGAINST_FA2[kept], "graph"))
        if images >= 64 and kept == 1:
            found += _against_dense(figures, place)
        if where in BOTH_WAYS_AGAINST_FA2:
            what, reach = "attention, forward and backward, against FA2 varlen", BOTH_WAYS_AGAINST_FA2[where]
            found.append(figures.faster(what, place, "triton", "FA2 aten", BOTH_WAYS, reach, "graph"))
        if where == ROTATED:
            found.append(_floor(figures, place))
        found += _host(figures, place)
    return found


def _against_dense(figures: Measurements, place: str) -> list[Target]:
    sides = [figures.find(place, name, GPU, "graph") for name in SDPA]
    valid = [each for each in sides if each is not None and each.value is not None]
    best = min(valid, key=lambda each: _median(each.value)) if valid else sides[0]
    what = "attention, GPU time against the best dense SDPA"
    return [
        compare(f"{what}: triton", place, figures.find(place, "triton", GPU, "graph"), best, 1 / 1.05),
        compare(f"{what}: auto (1 % noise)", place, figures.find(place, "auto", GPU, "graph"), best, 0.99),
    ]


def _floor(figures: Measurements, place: str) -> Target:
    ours = figures.find(place, "triton", GPU, "graph, rotated buffers")
    floor = figures.find(place, "memory floor", GPU)
    return compare("attention, rotated buffers, over the memory floor", place, ours, floor, 1.6, at_most=True)


def _host(figures: Measurements, place: str) -> list[Target]:
    ours = figures.find(place, "triton", HOST)
    what = "attention, host time of an eager call"
    return [
        within(f"{what}, us", place, ours, 10.0),
        compare(f"{what}, against FA2 aten", place, ours, figures.find(place, "FA2 aten", HOST), 2.0),
        compare(f"{what}, against varlen_attn", place, ours, figures.find(place, "varlen_attn", HOST), 6.0),
    ]


def _median(value: Spread | None) -> float:
    assert value is not None
    return value.median
