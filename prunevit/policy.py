"""The base class of all pruning policies, and what a policy is told about the model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from prunevit.keepmask import KeepMask
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import Site, Trace

Layers: TypeAlias = int | Sequence[int] | str
"""Where a policy acts: a 0-based block number, several, or a slice as text: "3:" (from block 3 on), ":" (all)."""

NEEDS = ("prefix_attention", "received_attention", "qkv")
"""What a policy may ask of the attention before it; "qkv" stands for the queries, keys and values themselves."""


@dataclass(frozen=True)
class ModelInfo:
    """What a policy may know of the model that it prunes.

    Attributes:
        width: Channels `C`.
        depth: Number of blocks.
        num_heads: Attention heads `H`.
        grid: Height and width of the patch grid at the model's own input size.
        num_prefix_tokens: CLS, distillation and register tokens.
        has_class_token: Whether the first prefix token is a CLS token.
    """

    width: int
    depth: int
    num_heads: int
    grid: tuple[int, int]
    num_prefix_tokens: int
    has_class_token: bool


class PruningPolicy(nn.Module):
    """Decides, at some blocks, which tokens of each image stay.

    A subclass says in class attributes what it is, takes its settings as named arguments of `__init__`, and implements
    `forward`. It never moves a token: it returns a `KeepMask`, and `pack` does the rest.

    Attributes:
        knob: Name of the one setting that trades accuracy for cost (`keep_rate`, `threshold`, `p`, `r`, ...).
        knob_range: Bounds of the knob, the lower one excluded, or None.
        site: Where it acts: "before_block" of its layers, or "after_attention", between the attention and the MLP.
        needs: Parts of `AttentionState` that it reads, out of `NEEDS`.
        exempt_self: In training, whether a soft-masked row still attends fully to itself.
        softmax_eps: Constant of the training softmax of some authors; 0 is the plain softmax.
        stochastic: Whether it draws at random.
        layers: Blocks (0-based) where it acts.
    """

    knob: ClassVar[str] = ""
    knob_range: ClassVar[tuple[float, float] | None] = None
    site: Site = "after_attention"
    needs: frozenset[str] = frozenset()
    exempt_self: bool = False
    softmax_eps: float = 0.0
    stochastic: ClassVar[bool] = False
    layers: tuple[int, ...]

    def __init__(
        self,
        value: float | Sequence[float] | None,
        layers: Layers | None,
        compound: bool = False,
    ) -> None:
        """Set the schedule.

        Args:
            value: The knob: one value, or one for each of `layers`.
            layers: See `Layers`; None for a policy that acts nowhere.
            compound: Whether `rate` multiplies the values of all stages up to a layer.

        Raises:
            ValueError: If a value is no number or lies outside `knob_range`, if there is not one for each layer, or if
                `layers` names no block.
        """
        super().__init__()
        self._warmth = 1.0  # share of the pruning that `rate` asks for now
        several = isinstance(value, Sequence) and not isinstance(value, str)
        self.knob_value: float | tuple[float, ...] | None = tuple(value) if several else value  # type: ignore
        self.compound = compound
        self._layers_given = self._given(layers)
        if not isinstance(self._layers_given, str):
            self.layers = self._layers_given
            self._check_layers()
        for each in self.knob_values:
            self._check_knob(each)

    @property
    def knob_values(self) -> tuple[float, ...]:
        """The values of the knob: none, one, or one for each layer."""
        if isinstance(self.knob_value, tuple):
            return self.knob_value
        return () if self.knob_value is None else (self.knob_value,)

    def setup(self, info: ModelInfo) -> None:
        """Meet the model: resolve `layers`, check what the policy needs. Learnable policies build their layers here.

        Raises:
            ValueError: If a layer lies beyond the depth, or the model lacks a token that the policy looks at.
        """
        if isinstance(self._layers_given, str):
            first, last = self._slice(self._layers_given)
            layers = tuple(range(info.depth)[first:last])
            if not layers or (last or 0) > info.depth:
                raise ValueError(self._beyond(f'"{self._layers_given}"', info.depth))
            if getattr(self, "layers", layers) != layers:
                raise ValueError(
                    f'{type(self).__name__}: layers="{self._layers_given}" already stands for those of a model of '
                    f"another depth, got {info.depth} blocks; make a new policy"
                )
            self.layers = layers
        beyond = [layer for layer in self.layers if not 0 <= layer < info.depth]
        if beyond:
            raise ValueError(self._beyond(str(beyond[0]), info.depth))
        self._check_layers()
        if "prefix_attention" in self.needs and not info.has_class_token:
            from prunevit.settings import settings_of  # it imports this class

            choice = 'choose score_source="received"'
            if "score_source" not in settings_of(type(self)):
                choice = 'let it read "received_attention", which every model has'
            raise ValueError(
                f"{type(self).__name__}: the attention of a CLS token is needed, the model has none; {choice}"
            )

    def rate(self, layer: int) -> float:
        """The knob's value at a layer: the schedule's one owner.

        Args:
            layer: One of `layers`.
        """
        stage = self.layers.index(layer)
        if isinstance(self.knob_value, tuple):
            values = self.knob_value[: stage + 1] if self.compound else self.knob_value[stage : stage + 1]
            product = self._warm(values[0])
            for each in values[1:]:
                product = product * self._warm(each)
            return product
        if self.knob_value is None:
            raise ValueError(f"{type(self).__name__}: rate needs a knob; hand its value to super().__init__")
        value = self._warm(self.knob_value)
        return value ** (stage + 1) if self.compound else value

    def warm(self, progress: float) -> None:
        """Begin with no pruning and come to the schedule's, as training goes on.

        Until it is told otherwise, `rate` takes each value `v` of the knob as
        `1 - (1 - v) * (1 - cos(pi * progress)) / 2`.

        Args:
            progress: From 0 (nothing is pruned) to 1 (the schedule, as without a warm-up).

        Raises:
            ValueError: If the knob is no `keep_rate`: of another one it is not known at what value nothing is pruned.
        """
        if progress < 1 and self.knob != "keep_rate":
            raise ValueError(
                f"{type(self).__name__}: only a keep_rate can be warmed up, the knob is {self.knob!r}"
            )
        self._warmth = 1.0 if progress >= 1 else (1 - math.cos(math.pi * max(progress, 0.0))) / 2

    def _warm(self, value: float) -> float:
        # At full warmth the value itself: a rounding step would change counts.
        return value if self._warmth == 1.0 else 1 - (1 - value) * self._warmth

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """How much each patch deserves to stay, `[T]` or `[T, H]` (a mean over heads is meant).

        A policy that ranks patches says here by what.

        Args:
            tokens: The batch at this site.
            attention: The attention that ran last on these rows; None where there is none.
            layer: The block.
        """
        raise TypeError(
            f"{type(self).__name__}: score(tokens, attention, layer) must be implemented to rank by"
        )

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Decide.

        Args:
            tokens: The batch at this site.
            attention: The attention that ran last on these rows; None where there is none.
            layer: The block.
        """
        raise TypeError(f"{type(self).__name__}: forward(tokens, attention, layer) must be implemented")

    def losses(self, trace: Trace, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """The policy's own training losses.

        Args:
            trace: The forward pass just made.
            teacher: `logits [B, K]` and `features [B, N, C]` of the unpruned model.
        """
        return {}

    def constrain(self) -> None:
        """Bring parameters that must stay within bounds back to them; called after each step of an optimiser."""

    def macs(self, counts: Tensor) -> Tensor:
        """Multiply-accumulates that the policy itself spends at one stage, float64 `[B]`.

        Args:
            counts: Rows of each image before the stage, prefix included, `[B]`.
        """
        return torch.zeros_like(counts, dtype=torch.float64)

    def extra_repr(self) -> str:
        """Name the schedule in `repr`."""
        knob = f"{self.knob}={self.knob_value}, " if self.knob else ""
        return f"{knob}layers={self._layers_given}"

    def _given(self, layers: Layers | None) -> tuple[int, ...] | str:
        """The block numbers, or the text of a slice."""
        name = type(self).__name__
        if isinstance(layers, str):
            first, last = self._slice(layers)
            if last is not None and last <= (first or 0):
                raise ValueError(f'{name}: layers must leave at least one block, got "{layers}"')
            return layers
        if layers is None:
            return ()
        given = tuple(layers) if isinstance(layers, Iterable) else (layers,)
        wrong = [each for each in given if isinstance(each, bool) or not isinstance(each, Integral)]
        if wrong:
            raise ValueError(f"{name}: layers must be whole block numbers, got {wrong[0]!r}")
        if not given:
            raise ValueError(
                f"{name}: layers must name at least one block, got none; to prune nowhere use NoPruning"
            )
        return tuple(map(int, given))

    def _slice(self, text: str) -> tuple[int | None, int | None]:
        match = re.fullmatch(r"(\d*):(\d*)", text)
        if match is None:
            raise ValueError(
                f'{type(self).__name__}: layers must be block numbers or a slice like "3:", got "{text}"'
            )
        first, last = match.groups()
        return int(first) if first else None, int(last) if last else None

    def _beyond(self, got: str, depth: int) -> str:
        name = type(self).__name__
        return f"{name}: layers must lie in 0..{depth - 1} (the model has {depth} blocks), got {got}"

    def _check_knob(self, value: object) -> None:
        name = f"{type(self).__name__}: {self.knob or 'value'}"
        if isinstance(value, bool) or not isinstance(value, Real) or math.isnan(value):
            raise ValueError(f"{name} must be a number, got {value!r}")
        if self.knob_range is None:
            return
        (low, high), number = self.knob_range, float(value)
        if not low < number <= high or math.isinf(number):
            bounds = f"({low:g}, {high:g}" + (")" if math.isinf(high) else "]")
            raise ValueError(f"{name} must be in {bounds}, got {number:g}")

    def _check_layers(self) -> None:
        name = type(self).__name__
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"{name}: layers must rise and not repeat, got {list(self.layers)}")
        if isinstance(self.knob_value, tuple) and len(self.knob_value) != len(self.layers):
            raise ValueError(
                f"{name}: {self.knob} must be one value or one for each of the {len(self.layers)} layers, "
                f"got {len(self.knob_value)}"
            )


def check_made(policy: object) -> None:
    """Refuse what is no policy, and a policy whose constructor left out that of the base class.

    Args:
        policy: What was given as one.

    Raises:
        TypeError: Says which of the two.
    """
    name = type(policy).__name__
    if not isinstance(policy, PruningPolicy):
        raise TypeError(
            f"RaggedViT: policies must be objects of a subclass of PruningPolicy, got {policy!r:.60}"
        )
    if "_layers_given" not in vars(policy):
        raise TypeError(
            f"{name}: __init__ must call super().__init__(value, layers), and before it assigns modules"
        )
