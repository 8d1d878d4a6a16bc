"""The models that take part in one benchmark, built alike in the number format measured and, for the check, in fp64."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from prunevit import RaggedViT, Trace, prune
from prunevit.experiments.benchmark.measurements import WRONG
from prunevit.experiments.benchmark.model_rows import OF_EACH, Case, Spec
from prunevit.experiments.benchmark.rivals import DenseGather, FreePruning, Padded, counts_of, cuts_of
from prunevit.experiments.policy_spec import build_policy
from prunevit.policies import LTMP, NoPruning, ThresholdL2, TopK, replay
from prunevit.policy import PruningPolicy

Build = Callable[[Any], nn.Module]
CHECKED = 16  # images, at least: one image's logits say little about rounding


def contestants(case: Case, model: Any, images: Tensor) -> dict[str, Build]:
    """How each contestant is built from a timm model: dense, our walk without pruning, the policies, the rivals.

    Args:
        case: The policies and rivals.
        model: The model, in the format measured.
        images: The batch that is timed; rivals get the counts that the policies give on it.
    """
    found: dict[str, Build] = {
        "dense": lambda m: m,
        "none": lambda m: prune(m, NoPruning()).eval(),
    }
    found |= {name: walk_of(spec) for name, spec in case.policies.items()}
    for number, (name, spec) in enumerate(case.policies.items()):
        rivals = case.rivals if number == 0 else [each for each in case.rivals if each in OF_EACH]
        if rivals:
            trace = walk_of(spec)(model).trace(images)
            found |= {f"{rival} {name}": _rival(rival, spec, trace, model, images) for rival in rivals}
    return found


def walk_of(spec: Spec) -> Callable[[Any], RaggedViT]:
    """How the walk with one policy is built.

    Args:
        spec: The policy.
    """
    return lambda m: prune(m, build_policy(spec)).eval()


def _rival(rival: str, spec: Spec, trace: Trace, model: Any, images: Tensor) -> Build:
    cuts = cuts_of(trace)
    if rival in ("free", "given"):
        counts = cuts if rival == "free" else counts_of(trace)
        return lambda m: FreePruning(m, counts, len(images)).eval()
    if rival == "ltmp":
        return walk_of(ltmp_twin(model, trace, images))
    if rival == "gather":
        return lambda m: DenseGather(m, build_policy(spec), cuts).eval()
    if rival == "static":
        return lambda m: prune(m, static_twin(spec, trace)).eval()
    longest = None if rival == "masked" else max(cuts.values())
    policy = build_policy(spec)
    assert isinstance(policy, ThresholdL2)
    return lambda m: Padded(m, policy, longest).eval()


def static_twin(spec: Spec, trace: Trace) -> PruningPolicy:
    """The policy of the same score and sites that keeps, in every image, the mean count of a data-dependent one.

    Args:
        spec: The data-dependent policy: by norm, or by the attention of CLS.
        trace: What it did.
    """
    layers = [stage.layer for stage in trace.stages]
    prefix = trace.stages[0].tokens.num_prefix_tokens
    patches = trace.tokens.grid[0] * trace.tokens.grid[1]
    counts = [patches, *(round(stage.counts.double().mean().item()) - prefix for stage in trace.stages)]
    # Half a patch more, so that rounding down gives the count whatever the division does.
    rates = [min(1.0, (after + 0.5) / before) for before, after in pairwise(counts)]
    if spec["name"] == "threshold_l2":
        return ThresholdL2(rates, layers, rule="share")
    return TopK(rates, layers, rounding="floor")


@torch.no_grad()
def ltmp_twin(model: Any, trace: Trace, images: Tensor, near: float = 0.01) -> Spec:
    """LTMP with the thresholds that leave, behind each block, as many rows on average as another policy did.

    Args:
        model: The timm model that was traced.
        trace: What the other policy did, after the attention of its blocks.
        images: The batch that was traced.
        near: How near the numbers must come, as a share.

    Raises:
        ValueError: If merging alone cannot leave such a number.

    Cost:
        Some 24 times a forward pass, with as many read-backs a stage.
    """
    layers = [stage.layer for stage in trace.stages]
    pruned = prune(model, LTMP(1.0, layers=layers)).eval()
    tokens, done = pruned.embed(images), 0
    thresholds: Tensor = pruned.policies[0].merge_thresholds  # type: ignore[assignment]
    for number, stage in enumerate(trace.stages):
        wanted, half = int(stage.counts.sum()), 2 * stage.layer + 1
        low, high, found = -1.0, 1.0, list[tuple[int, float]]()
        for _ in range(24):
            thresholds[number] = (low + high) / 2
            rows = pruned.walk(tokens, first=done, last=half).x.shape[0]
            found.append((abs(rows - wanted), thresholds[number].item()))
            low, high = (low, (low + high) / 2) if rows > wanted else ((low + high) / 2, high)
        off, thresholds[number] = min(found)
        if off > near * wanted:
            raise ValueError(
                f"ltmp_twin: no threshold leaves {wanted} rows at layer {stage.layer}, off by {off}"
            )
        tokens, done = pruned.walk(tokens, first=done, last=half), half
    return {"name": "ltmp", "merge_threshold": thresholds.tolist(), "layers": layers}


class Check:
    """Whether a contestant computes what it should, in every mode.

    Two questions, each over at least `CHECKED` images, with the rounding of the number format as the measure.
    The walk: its logits deviate from an fp64 walk that repeats its decisions by at most twice as much, in
    proportion, as the dense model's from fp64. A mode: its logits deviate from the fp64 model by at most twice as
    much as eager's do (root mean squares: decisions on the edge fall otherwise in eager and in compiled code, alike
    often). A rival that decides for itself may deviate twice as much as the walks of the policies do.
    """

    def __init__(self, model: Any, exact: Any, batches: list[Tensor]) -> None:
        """Take the dense models.

        Args:
            model: In the format measured.
            exact: The same in fp64.
            batches: Images; the first batch is the one that is timed.
        """
        self.exact, self.batches = exact, batches
        truth = _logits(exact, batches, torch.float64)
        self.allowed = 2 * _rms(_logits(model, batches) - truth) / _rms(truth)
        self.decided = 0.0

    def walk(self, build: Build, module: nn.Module) -> str:
        """Check the eager module; "" if it is right.

        Args:
            build: How it is built.
            module: The module.
        """
        logits = _logits(module, self.batches)
        twin = build(self.exact)
        self.truth = _logits(twin, self.batches, torch.float64)
        self.budget = 2 * _rms(logits - self.truth)
        if isinstance(module, RaggedViT) and module.policies[0].layers:
            self.decided = max(self.decided, self.budget / _rms(self.truth))
            repeated = self._repeated(module)
            return "" if _rms(logits - repeated) <= self.allowed * _rms(repeated) else WRONG
        decides = isinstance(module, DenseGather | Padded)
        allowed = max(self.allowed, self.decided) if decides else self.allowed
        return "" if _rms(logits - self.truth) <= allowed * _rms(self.truth) else WRONG

    def mode(self, run: Callable[[Tensor], Tensor]) -> str:
        """Check a mode of the module whose walk was checked last; "" if it is right.

        Args:
            run: The module in that mode.
        """
        return "" if _rms(_logits(run, self.batches) - self.truth) <= self.budget else WRONG

    def _repeated(self, module: RaggedViT) -> Tensor:
        """Fp64 logits under the decisions that the module takes in its own format."""
        found = []
        for images in self.batches:
            again = prune(self.exact, replay(module.trace(images))).eval()
            found.append(again(images.double()))
        return torch.cat(found)


def check_batches(images: Tensor, more: Tensor) -> list[Tensor]:
    """The batch that is timed, and others of its shape until `CHECKED` images are together.

    Args:
        images: The batch.
        more: Other images, at least `CHECKED`.
    """
    number = -(-CHECKED // len(images)) - 1
    # Nothing splits into one empty batch, for which cuDNN's attention returns None.
    return [images, *(more[: number * len(images)].split(len(images)) if number else ())]


def _logits(
    run: Callable[[Tensor], Tensor], batches: list[Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    return torch.cat([run(images if dtype is None else images.to(dtype)).double() for images in batches])


def _rms(values: Tensor) -> float:
    """Root mean square; NaN if a value is, so that no comparison holds."""
    return values.square().mean().sqrt().item()
