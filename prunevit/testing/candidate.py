"""What the checks are made on: a policy that can be made anew, and tiny models that it is put into."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any
from unittest import SkipTest

import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from prunevit.policy import ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.vit import RaggedViT, prune

WIDTH, HEADS, PATCH, GRID = 64, 2, 8, (6, 7)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "registers": {"reg_tokens": 3},
    "distilled": {},
    "no CLS": {"class_token": False, "global_pool": "avg"},
    "one patch": {"img_size": PATCH},
    "two patches": {"img_size": (PATCH, 2 * PATCH)},
}
"""The models that a policy is put into: what sets each apart from a ViT with CLS on a 6 x 7 grid."""
IMAGE_INDEX = (7, 5, 6)


class CheckFailure(AssertionError):
    """A policy does not hold what every policy must: one line says what."""


class NotApplicable(SkipTest):
    """There is nothing to check, or not on this machine: one line says why. pytest shows it as skipped."""


@dataclass(frozen=True, eq=False)
class Decision:
    """One call of the policy: the block, what it was given, and what it answered, whatever that is."""

    layer: int
    tokens: RaggedTokens
    attention: AttentionState | None
    mask: Any

    @property
    def kept(self) -> Tensor:
        """Rows that stay after it, the prefix included, bool `[T]`."""
        return self.tokens.live & (self.mask.keep | ~self.tokens.is_patch)


class Candidate:
    """A policy under test.

    Attributes:
        make: Makes a fresh policy.
        device: Where what only a device can show is looked for; all else runs on the CPU, in double precision.
    """

    def __init__(
        self, policy: PruningPolicy | Callable[[], PruningPolicy], device: torch.device | str | None = None
    ) -> None:
        """Take the policy.

        Args:
            policy: A policy, which is copied and not changed; or better a class or function that makes one: only then
                can it be seen what a fresh policy does not get from a `state_dict`.
            device: Default: a GPU if there is one.
        """
        default = "cuda" if torch.cuda.is_available() else "cpu"
        self.make: Callable[[], PruningPolicy]
        self.make = (lambda: copy.deepcopy(policy)) if isinstance(policy, PruningPolicy) else policy
        self.device = torch.device(default if device is None else device)

    @cached_property
    def depth(self) -> int:
        """Blocks of the tiny models: the fewest that the policy's layers fit, at least six where they let us."""
        return self._first_fitting((*range(6, 65), *range(5, 0, -1)))

    @cached_property
    def deit_depth(self) -> int:
        """The 12 blocks of DeiT, where the policy's layers fit them; else `depth`."""
        return self._first_fitting((12, self.depth))

    def _first_fitting(self, depths: Sequence[int]) -> int:
        refusal = None
        for depth in depths:
            policy = self.make()
            if not isinstance(policy, PruningPolicy):
                raise CheckFailure(f"a prunevit.PruningPolicy is needed, got {type(policy).__name__}")
            try:
                policy.setup(ModelInfo(WIDTH, depth, HEADS, GRID, num_prefix_tokens=1, has_class_token=True))
            except ValueError as error:
                refusal = error
                continue
            return depth
        raise CheckFailure(f"its setup refuses every model of 1 to 64 blocks: {refusal}")

    def pruned(
        self,
        kind: str = "plain",
        dtype: torch.dtype = torch.float64,
        *,
        policy: PruningPolicy | None = None,
        backend: str = "auto",
    ) -> RaggedViT:
        """A tiny model with a policy, in evaluation mode.

        Args:
            kind: One of `KINDS`.
            dtype: Of the weights.
            policy: Default: a fresh one.
            backend: Attention backend.

        Raises:
            NotApplicable: If the policy refuses another kind than "plain" in clear words.
        """
        policy = self.make() if policy is None else policy
        try:
            return prune(tiny_vit(kind, self.depth, dtype), policy, backend)
        except ValueError as error:
            if kind == "plain":
                raise
            raise NotApplicable(f"refused: {error}") from error

    @cached_property
    def decisions(self) -> tuple[list[Decision], Exception | SystemExit | None]:
        """What the policy decides on the plain model, up to where the walk stops, and what stopped it."""
        pruned, seen = self.pruned(), list[Decision]()

        def look(_: object, given: tuple[RaggedTokens, AttentionState | None, int], mask: object) -> None:
            tokens, attention, layer = given
            seen.append(Decision(layer, tokens, attention, mask))

        pruned.policies[0].register_forward_hook(look)
        try:
            with torch.no_grad():
                pruned(images(), index())
        except (
            Exception,
            SystemExit,
        ) as error:  # the policy's own, or the walk's refusal: another check's matter
            return seen, error
        return seen, None


def images(kind: str = "plain", dtype: torch.dtype = torch.float64) -> Tensor:
    """Three images that differ in contrast: noise, strong noise, nothing; `[3, 3, height, width]`."""
    side = KINDS[kind].get("img_size", (GRID[0] * PATCH, GRID[1] * PATCH))
    height, width = side if isinstance(side, tuple) else (side, side)
    noise = torch.randn(3, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (noise * torch.tensor([1.0, 4.0, 0.0], dtype=torch.float64)[:, None, None, None]).to(dtype)


def index() -> Tensor:
    """Positions of `images` in their data set, int64 `[3]`."""
    return torch.tensor(IMAGE_INDEX)


@cache
def tiny_vit(kind: str, depth: int, dtype: torch.dtype) -> Any:
    """A narrow timm model, in evaluation mode, no parameter left where it would not matter; shared by all checks.

    Args:
        kind: One of `KINDS`.
        depth: Blocks.
        dtype: Of the weights.
    """
    cls = VisionTransformerDistilled if kind == "distilled" else VisionTransformer
    size = {"img_size": (GRID[0] * PATCH, GRID[1] * PATCH), "patch_size": PATCH, "num_classes": 10}
    width = {"embed_dim": WIDTH, "num_heads": HEADS, "mlp_ratio": 2, "depth": depth}
    with torch.random.fork_rng(devices=[]):
        model = cls(**{**size, **width, **KINDS[kind]}).double().eval()
        randomise(model)
    return model.to(dtype)


def randomise(model: torch.nn.Module) -> None:
    """Give every parameter values under which each part of a model matters, and scores differ; the same each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                tokens = "pos_embed" in name or "token" in name
                parameter.normal_(std=0.5 if tokens else parameter[0].numel() ** -0.5, generator=generator)
