"""`prunevit bench suite=stages`: where the time of a pruned model goes: front, policy, pack, attention, MLP, head.

Each piece is run many times in one CUDA graph on what it really gets: the rows that the pieces before it leave.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from prunevit import RaggedViT, prune
from prunevit.block import attend, feed_forward
from prunevit.experiments.benchmark.attention_suite import DTYPES
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.contestants import CHECKED, Check, check_batches, walk_of
from prunevit.experiments.benchmark.measurements import Measurement, Measurements, Target, within
from prunevit.experiments.benchmark.model_rows import Case, Spec, spanned
from prunevit.experiments.benchmark.model_suite import build, photos
from prunevit.experiments.timing import Call, captured, interleaved
from prunevit.packing import pack
from prunevit.policies import NoPruning

CALLS = 20
GPU = "us on the GPU"
SELECT_AND_PACK = "policy + pack"
POLICIES: dict[str, Spec] = {
    "topk": {"name": "topk"},
    "evit": {"name": "evit"},
    "threshold_l2 share": {"name": "threshold_l2", "rule": "share", "threshold": 0.5, "layers": [4]},
    "threshold_l2 deviation": {"name": "threshold_l2", "rule": "deviation", "threshold": 0.0, "layers": [4]},
    "top_p": {"name": "top_p", "p": 0.7},
    "tome": {"name": "tome", "r": 13, "layers": [3]},
}
HOST_KNOWN = ("topk", "evit", "threshold_l2 share")
BATCHES = (1, 16, 256)


def cases(config: BenchConfig) -> list[Case]:
    """A case for each model, with all policies.

    Args:
        config: As for `spanned`.
    """
    return spanned(config, POLICIES, BATCHES)


def run(config: BenchConfig, device: torch.device) -> Iterator[Measurement]:
    """Measure the pieces of every model at every batch size.

    Args:
        config: The configuration.
        device: A CUDA device.

    Yields:
        Times on the GPU, one for each piece.
    """
    for case, dtype in product(cases(config), config.dtypes):
        model = build(case).to(device, getattr(torch, DTYPES[dtype]))
        exact = copy.deepcopy(model).double()
        images = photos(case, model, max(case.batch_sizes) + CHECKED)
        images = images.to(device, next(model.parameters()).dtype)
        for batch_size in case.batch_sizes:
            place, batch = case.place(batch_size, dtype), images[:batch_size]
            with torch.no_grad():
                check = Check(model, exact, check_batches(batch, images[batch_size:]))
                for name, spec in case.policies.items():
                    builder = walk_of(spec)
                    wrong = check.walk(builder, pruned := builder(model))
                    calls = pieces(pruned, batch)
                    yield from _measure(place, name, calls, wrong, config.seconds, device)


def pieces(pruned: RaggedViT, images: Tensor) -> dict[str, Call]:
    """The parts of a forward around the first stage of a policy, as calls that can be repeated.

    Args:
        pruned: A model with one policy; one that acts before a block reads no attention.
        images: A batch.
    """
    policy: Any = pruned.policies[0]
    layer, model = policy.layers[0], pruned.model
    block, needs, backend = model.blocks[layer], pruned.needs[layer], pruned.backend
    whole = prune(model, NoPruning(), backend=backend).eval()
    entering = whole.walk(whole.embed(images), last=2 * layer)
    before, state = entering, None
    if policy.site == "after_attention":
        x, state = attend(block, entering, needs=needs, backend=backend)
        before = replace(entering, x=x)
    mask = policy(before, state, layer)
    capacity = before.x.shape[0] if mask.rows_per_image is None else None
    after, end = pack(before, mask, capacity), pruned.walk(pruned.embed(images), last=2 * pruned.info.depth)
    return {
        "front": partial(pruned.embed, images),
        "attention half": partial(attend, block, entering, backend=backend),
        "attention half with what the policy reads": partial(
            attend, block, entering, needs=needs, backend=backend
        ),
        "policy": partial(policy, before, state, layer),
        "pack": partial(pack, before, mask, capacity),
        SELECT_AND_PACK: lambda: pack(before, policy(before, state, layer), capacity),
        "attention half on what stays": partial(attend, block, after, backend=backend),
        "MLP half": partial(feed_forward, block, before),
        "MLP half on what stays": partial(feed_forward, block, after),
        "norm and head": lambda: pruned.forward_head(replace(end, x=model.norm(end.x))),
    }


def _measure(
    place: str, name: str, calls: dict[str, Call], wrong: str, seconds: float, device: torch.device
) -> Iterator[Measurement]:
    for call in calls.values():
        call()
    replays = [captured([call] * CALLS) for call in calls.values()]
    for piece, spread in zip(calls, interleaved(replays, seconds * len(replays), device)):
        value = None if wrong else spread.times(1000 / CALLS)
        yield Measurement(place, f"{name}: {piece}", "graph", GPU, value, wrong)


def targets(figures: Measurements, config: BenchConfig) -> list[Target]:
    """Compare with what is to be reached.

    Args:
        figures: The measurements.
        config: The configuration of the run.
    """
    found = []
    for batch_size in (1, 16):
        place = Case("deit_small_patch16_224", {}, ()).place(batch_size, "bf16")
        if place in figures.places():
            for name in HOST_KNOWN:
                ours = figures.find(place, f"{name}: {SELECT_AND_PACK}", GPU)
                found.append(within(f"{name}: select + pack, us on the GPU a stage", place, ours, 10.0))
    return found
