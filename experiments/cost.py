"""Cost of a pruned model before it is evaluated: by the counts alone where the host knows them, else on photos."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prunevit import AttentionState, RaggedTokens, RaggedViT, prune
from prunevit.experiments.calibration import Calibration
from prunevit.experiments.models import prune_model
from prunevit.experiments.policy_spec import Spec, build_policy, policy_errors
from prunevit.experiments.weights import Weights, load_policies
from prunevit.macs import model_macs, policy_macs
from prunevit.packing import pack
from prunevit.policies import NoPruning
from prunevit.policy import ModelInfo, PruningPolicy
from prunevit.trace import Stage, Trace


@dataclass(frozen=True)
class Cost:
    """What a pruned model spends on an image; means over images where these differ.

    Attributes:
        attention_rows: Rows in the attention of each block, prefix included.
        mlp_rows: Rows in the MLP of each block.
        gmacs: Of the model and the policy together.
        policy_gmacs: Of the policy.
        images: Photos that it was measured on; 0 where the host knows all counts.
    """

    attention_rows: tuple[float, ...]
    mlp_rows: tuple[float, ...]
    gmacs: float
    policy_gmacs: float
    images: int = 0


def known_cost(model: Any, policy: PruningPolicy) -> Cost | None:
    """Cost by the numbers of rows that the host knows ahead, or None if a stage leaves what the data says.

    The policy decides, stage after stage, on one image of stand-in features; no block is run, and the model may be on
    the meta device.

    Args:
        model: A timm model.
        policy: A fresh one; it is set up here.
    """
    info = prune(model, NoPruning()).info
    policy.setup(info)
    policy.eval()
    rows = info.num_prefix_tokens + info.grid[0] * info.grid[1]
    attention: list[int] = []
    mlp: list[int] = []
    spent = 0.0
    for layer in range(info.depth):
        for site, counts in (("before_block", attention), ("after_attention", mlp)):
            if policy.site == site and layer in policy.layers:
                spent += policy.macs(torch.tensor([rows])).item()
                left = _rows_left(policy, info, rows, layer)
                if left is None:
                    return None
                rows = left
            counts.append(rows)
    by_block = torch.tensor([attention, mlp])[..., None]
    total = model_macs(model, by_block[0], by_block[1]).item() + spent
    return Cost(tuple(map(float, attention)), tuple(map(float, mlp)), total / 1e9, spent / 1e9)


@torch.inference_mode()
def measured_cost(pruned: RaggedViT, photos: Calibration) -> Cost:
    """Mean cost over photos.

    Args:
        pruned: The pruned model.
        photos: On its device.

    Cost:
        A forward pass of all photos, the first time from the images, then from where rows first leave; and one
        read-back a batch.
    """
    images, rows, spent = 0, torch.zeros(2, pruned.info.depth, dtype=torch.float64), torch.zeros(2)
    spent, start = spent.double(), _untouched(pruned)
    for entering in photos.entering(pruned, start):
        trace = _trace(pruned, entering, start)
        own = policy_macs(pruned, trace)
        walk = model_macs(pruned.model, trace.attention_rows, trace.mlp_rows)
        rows += torch.stack([trace.attention_rows, trace.mlp_rows]).double().sum(2).cpu()
        spent += torch.stack([(walk + own).sum(), own.sum()]).cpu()
        images += entering.batch_size
    attention, mlp = (rows / images).tolist()
    gmacs, own_gmacs = (spent / images / 1e9).tolist()
    return Cost(tuple(attention), tuple(mlp), gmacs, own_gmacs, images)


def cost_of(
    spec: Spec, model: Any, calibration: Calibration, seed: int = 0, weights: Weights | None = None
) -> Cost:
    """Cost of a policy on a model: by the counts alone if the host knows them, else over training photos.

    Args:
        spec: `name` of the policy and its arguments.
        model: A timm model; it needs its weights only for the photos, and is on their device meanwhile.
        calibration: The photos; they are read when they are needed first.
        seed: Of a policy that draws.
        weights: File with the parameters of the policy, if there is one.

    Raises:
        InputError: If the policy does not fit the model, or photos are needed and there are none.
    """
    with policy_errors(spec["name"]):
        known = known_cost(model, build_policy(spec, seed))
        if known is not None:
            return _checked(known)
        home = next(model.parameters()).device
        pruned = prune_model(model.to(calibration.device), build_policy(spec, seed))
        load_policies(pruned, weights)
        try:
            return _checked(measured_cost(pruned, calibration))
        finally:
            model.to(home)


def _untouched(pruned: RaggedViT) -> int:
    """The last half-block up to which no policy acts, and from which on each finds the attention that it reads."""
    policies: list[PruningPolicy] = list(pruned.policies)  # type: ignore[arg-type]
    starts = [2 * (min(p.layers) - (p.site == "before_block")) for p in policies if p.layers]
    return max(0, min(starts, default=0))


def _trace(pruned: RaggedViT, tokens: RaggedTokens, start: int) -> Trace:
    """What a walk from some half-block on does, told as if it had come from the images."""
    rows, stages = [tokens.seqlens] * start, list[Stage]()

    def record(event: Stage | RaggedTokens) -> None:
        if isinstance(event, Stage):
            stages.append(event)
        else:
            rows.append(event.seqlens)

    end = pruned.walk(tokens, record, first=start)
    attention, mlp = torch.stack(rows[0::2]), torch.stack(rows[1::2])
    return Trace(tuple(stages), attention, mlp, end, pruned.forward_head(end))


def _checked(cost: Cost) -> Cost:
    """The cost, unless the policy's own is no number of operations; raises `ValueError`."""
    if not 0 <= cost.policy_gmacs < math.inf:
        raise ValueError(
            f"macs(counts) must be finite and at least 0, got {cost.policy_gmacs * 1e9:g} in all"
        )
    return cost


def _rows_left(policy: PruningPolicy, info: ModelInfo, rows: int, layer: int) -> int | None:
    """Rows that one stage leaves of one image, or None if that depends on the image."""
    heads, prefix = info.num_heads, info.num_prefix_tokens

    def features(*shape: int) -> Tensor:
        # No two alike, and no draw from the generator that the run was seeded with.
        return torch.arange(math.prod(shape), dtype=torch.float32).cos().view(shape)

    source = (torch.arange(rows, dtype=torch.int32) - prefix).clamp(min=-1)[None]
    tokens = RaggedTokens.from_padded(features(1, rows, info.width), prefix, info.grid, source=source)
    qkv = features(3, rows, heads, info.width // heads)
    attention = AttentionState(
        *(qkv[0], qkv[1], qkv[2]),
        prefix_attention=features(rows, prefix, heads).abs(),
        received_attention=features(rows, heads).abs(),
    )
    with torch.no_grad():
        mask = policy(tokens, attention, layer)
        if mask.rows_per_image is not None:
            pack(tokens, mask)  # refuses a number that is not what the mask keeps
        return mask.rows_per_image
