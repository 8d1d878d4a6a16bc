"""Which models, policies and batches `prunevit bench suite=model` runs, and what is to be reached there."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.compose import group_names, nearest, read_yaml
from prunevit.experiments.config import InputError
from prunevit.experiments.policy_spec import build_policy

Spec = dict[str, Any]
RIVALS = ("free", "gather", "given", "ltmp", "masked", "padded", "static")
OF_EACH = ("given", "static")
"""Rivals of every policy of a case; the others are those of the first."""


@dataclass(frozen=True)
class Case:
    """Policies on one model at several batch sizes.

    Attributes:
        model: timm architecture with random weights, or "sample" (trained, on its photos).
        policies: By the name under which they are reported.
        batch_sizes: Images a batch, rising: batch 1 is compiled once more in any case.
        img_size: Input size, px; None: the model's own.
        rivals: From `RIVALS`.
        dense_first: What the first policy must reach against the best dense model, by batch size.
        masked: What it must reach against the padded SDPA at full length, by batch size.
        none_first: Whether the walk without pruning must not be slower than the best dense model.
    """

    model: str
    policies: dict[str, Spec]
    batch_sizes: tuple[int, ...]
    img_size: int | None = None
    rivals: tuple[str, ...] = ()
    dense_first: dict[int, float] = field(default_factory=dict)
    masked: dict[int, float] = field(default_factory=dict)
    none_first: bool = False

    def place(self, batch_size: int, dtype: str) -> str:
        """Name a configuration.

        Args:
            batch_size: Images.
            dtype: Number format.
        """
        size = f" at {self.img_size} px" if self.img_size else ""
        return f"{self.model}{size}, batch {batch_size}, {dtype}"


HALF_BY_NORM: dict[str, Spec] = {
    f"L2 {rule}": {"name": "threshold_l2", "threshold": 0.5, "layers": [4], "rule": rule}
    for rule in ("share", "published")
}
EVIT: dict[str, Spec] = {"EViT 0.7": {"name": "evit", "keep_rate": 0.7, "layers": [3, 6, 9]}}
DATA_DEPENDENT: dict[str, Spec] = {
    "top-p 0.8": {"name": "top_p", "p": 0.8, "layers": [3, 6, 9]},
    "threshold": {"name": "threshold_l2", "threshold": -0.5, "layers": [3, 6, 9], "rule": "deviation"},
}
MUST_REACH = (
    Case(
        "deit_small_patch16_224",
        EVIT,
        (1, 16, 256),
        rivals=("free", "gather"),
        dense_first={1: 1.05, 16: 1.18, 256: 1.32},
        none_first=True,
    ),
    Case(
        "deit_base_patch16_224",
        HALF_BY_NORM,
        (1, 8, 128),
        rivals=("free", "masked", "padded"),
        dense_first={1: 1.06, 8: 1.29, 128: 1.42},
        masked={128: 1.65},
    ),
    Case(
        "deit_base_patch16_384",
        HALF_BY_NORM,
        (1, 64),
        rivals=("free", "masked", "padded"),
        dense_first={1: 1.11, 64: 1.44},
        masked={64: 1.75},
    ),
    Case("sample", DATA_DEPENDENT, (1, 16, 256), rivals=("static",)),
)


def cases(config: BenchConfig) -> list[Case]:
    """The cases of a run.

    Args:
        config: `rows`, and what narrows or spans them.

    Raises:
        InputError: If a policy or model of a sweep is not known.
    """
    if config.rows == "sweep":
        return _sweep(config)
    chosen = []
    for case in MUST_REACH:
        batches = tuple(b for b in case.batch_sizes if b in (config.batch_sizes or case.batch_sizes))
        size_fits = not config.img_sizes or (case.img_size or _size(case.model)) in config.img_sizes
        if batches and size_fits and case.model in (config.models or [case.model]):
            chosen.append(_with(case, batches))
    if not chosen:
        names = ", ".join(case.model for case in MUST_REACH)
        raise InputError(
            f"bench: no row has these models, sizes and batches; rows are of {names}; or rows=sweep"
        )
    return chosen


def _with(case: Case, batches: tuple[int, ...]) -> Case:
    return Case(**{**vars(case), "batch_sizes": batches})


def _sweep(config: BenchConfig) -> list[Case]:
    return spanned(config, {}, (1, 4, 16, 64, 256, 1024))


def spanned(
    config: BenchConfig, policies: dict[str, Spec], batches: Sequence[int], rivals: tuple[str, ...] = ()
) -> list[Case]:
    """A case with all policies for each model and input size.

    Args:
        config: `rows`, `models`, `img_sizes`, `batch_sizes`, and for a sweep `policies` and `ratios`.
        policies: Those of the rows with a target.
        batches: Batch sizes, unless the configuration names some.
        rivals: Of each case.

    Raises:
        InputError: If a policy of a sweep is not known.
    """
    if config.rows == "sweep":
        policies = _swept(config)
    batches = tuple(sorted(config.batch_sizes or batches))
    shapes = product(config.models or ["deit_small_patch16_224"], config.img_sizes or (None,))
    return [Case(model, policies, batches, size, rivals) for model, size in shapes]


def _swept(config: BenchConfig) -> dict[str, Spec]:
    policies = {}
    for name, ratio in product(config.policies, config.ratios):
        if name not in (*group_names("policy"), "drawn"):
            raise InputError(f"policies: unknown name, got {name}; {nearest(name, group_names('policy'))}")
        policies[f"{name}, {ratio:.0%} pruned"] = pruning(name, ratio)
    return policies


def pruning(name: str, ratio: float) -> Spec:
    """A policy that prunes a share of the patches: at each of its stages, as papers count.

    Args:
        name: A file of `configs/policy`, or drawn.
        ratio: The share.

    Raises:
        InputError: If the policy has no knob that is a share.
    """
    if name == "drawn":
        return {"name": "prunevit.experiments.benchmark.drawn:Drawn", "keep_rate": 1 - ratio}
    spec = read_yaml(f"policy/{name}.yaml")
    if name == "threshold_l2":
        return {**spec, "rule": "share", "threshold": 1 - ratio}
    policy = build_policy(spec)
    if policy.knob_range != (0.0, 1.0):
        raise InputError(
            f"policies: must have a knob that is a share, got {name} with {policy.knob or 'none'}"
        )
    return {**spec, policy.knob: 1 - ratio}


def _size(model: str) -> int:
    return 196 if model == "sample" else int(model.rsplit("_", 1)[-1])
