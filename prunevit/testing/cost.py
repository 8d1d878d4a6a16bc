"""What a policy costs beside a block of DeiT-S: counted, and measured."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from prunevit.block import attend, feed_forward
from prunevit.macs import dense_macs, model_macs
from prunevit.packing import pack
from prunevit.testing.candidate import Candidate, CheckFailure, randomise
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.vit import RaggedViT, prune

WIDTH, HEADS, IMAGE, PATCH = 384, 6, 224, 16
BATCH = {"cpu": 1, "cuda": 256}
REPEATS = {"cpu": 3, "cuda": 20}
CALLS = {"cpu": 1, "cuda": 10}  # timed at once: what replaying a CUDA graph takes by itself counts for little
MOST = 0.15
"""Share of the dense model's time that all stages together may take on a GPU."""

Call = tuple[RaggedTokens, AttentionState | None, int]


def check_cost(candidate: Candidate) -> str:
    """Its MACs are counted for each image; MACs and time beside a block's are reported.

    On a GPU (batch 256, fp16, each stage and the blocks as CUDA graphs) all stages together must stay below 15 % of
    the dense model's time; elsewhere time is not judged.
    """
    device = candidate.device
    on_gpu = device.type == "cuda"
    dtype = torch.float16 if on_gpu else torch.float32
    model = copy.deepcopy(deit_small(candidate.deit_depth)).to(device, dtype)
    pruned = prune(model, candidate.make())
    with torch.no_grad():
        batch = torch.randn(BATCH[device.type], 3, IMAGE, IMAGE).to(device, dtype)
        calls = _calls(pruned, batch)
        if not calls:
            return "it acts nowhere"
        macs = [_macs(pruned, call) / _block_macs(model) for call in calls]
        stages = [_seconds(partial(_stage, pruned, call), device) for call in calls]
        block = _seconds(partial(_block, pruned, pruned.embed(batch)), device)
    share = sum(stages) / (block * candidate.deit_depth)
    if on_gpu and share > MOST:
        raise CheckFailure(
            f"its stages take {share:.1%} of the dense model's time; at most {MOST:.0%} is wanted"
        )
    mean = sum(stages) / len(stages)
    return (
        f"a stage: {sum(macs) / len(macs):.2%} of a block's MACs, {mean * 1e6:.0f} us, {mean / block:.0%} of its time"
        + ("" if on_gpu else " (CPU: not representative)")
    )


@cache
def deit_small(depth: int) -> Any:
    """DeiT-S at 224 px with so many blocks, random weights, in evaluation mode; shared by all checks."""
    with torch.random.fork_rng(devices=[]):
        model = VisionTransformer(
            img_size=IMAGE,
            patch_size=PATCH,
            embed_dim=WIDTH,
            num_heads=HEADS,
            depth=depth,
            weight_init="skip",
        ).eval()
        randomise(model)
    return model


def _calls(pruned: RaggedViT, batch: Tensor) -> list[Call]:
    """What the policy is given at each stage of a forward pass."""
    calls: list[Call] = []
    handle = pruned.policies[0].register_forward_pre_hook(lambda _, given: calls.append(given))
    pruned(batch)
    handle.remove()
    return calls


def _stage(pruned: RaggedViT, call: Call) -> RaggedTokens:
    """Decide and pack; with room for every row where the host does not know the counts."""
    mask = pruned.policies[0](*call)
    return pack(call[0], mask, call[0].x.shape[0] if mask.rows_per_image is None else None)


def _block(pruned: RaggedViT, tokens: RaggedTokens) -> Tensor:
    attend(pruned.model.blocks[0], tokens, backend=pruned.backend)
    return feed_forward(pruned.model.blocks[0], tokens)


def _block_macs(model: Any) -> float:
    nothing = torch.zeros(len(model.blocks), 1)
    return (dense_macs(model) - model_macs(model, nothing, nothing).item()) / len(model.blocks)


def _macs(pruned: RaggedViT, call: Call) -> float:
    counts = call[0].seqlens
    macs = pruned.policies[0].macs(counts)  # type: ignore[operator]
    if not isinstance(macs, Tensor) or macs.shape != counts.shape or not bool((macs >= 0).all()):
        raise CheckFailure(f"macs(counts) must be a number >= 0 for each image, got {macs}")
    return macs.double().mean().item()


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median time of a call after one that warms up; on a GPU in a CUDA graph of some."""
    call()
    calls = CALLS[device.type]
    if device.type == "cuda":
        call = _captured(call, calls)
    times = []
    for _ in range(REPEATS[device.type]):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] / calls


def _captured(call: Callable[[], object], calls: int) -> Callable[[], object]:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay
