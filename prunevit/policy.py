"""The base class of all pruning policies, and what a policy is told about the model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from prunevit.keepmask import KeepMask
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import Site, Trace

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
        layers: Sequence[int] | str,
        compound: bool = False,
    ) -> None:
        """Set the schedule.

        Args:
            value: The knob: one value, or one for each of `layers`.
            layers: 0-based block numbers, or a slice of all blocks as text: "3:" (from block 3 on), ":" (all).
            compound: Whether `rate` multiplies the values of all stages up to a layer.

        Raises:
            ValueError: If a value lies outside `knob_range`, or there is not one for each layer.
        """
        super().__init__()
        self.knob_value = tuple(value) if isinstance(value, Sequence) else value
        self.compound = compound
        self._layers_given = layers if isinstance(layers, str) else tuple(layers)
        if isinstance(layers, str):
            self._slice(layers)
        else:
            self.layers = tuple(layers)
            self._check_layers()
        for each in self.knob_value if isinstance(self.knob_value, tuple) else (self.knob_value,):
            if each is not None and self.knob_range is not None:
                low, high = self.knob_range
                if not low < each <= high:
                    raise ValueError(
                        f"{type(self).__name__}: {self.knob} must be in ({low:g}, {high:g}], got {each:g}"
                    )

    def setup(self, info: ModelInfo) -> None:
        """Meet the model: resolve `layers`, check what the policy needs. Learnable policies build their layers here.

        Raises:
            ValueError: If a layer lies beyond the depth, or the model lacks a token that the policy looks at.
        """
        if isinstance(self._layers_given, str):
            first, last = self._slice(self._layers_given)
            layers = tuple(range(info.depth)[first:last])
            if getattr(self, "layers", layers) != layers:
                raise ValueError(
                    f'{type(self).__name__}: layers="{self._layers_given}" already stands for those of a model of '
                    f"another depth, got {info.depth} blocks; make a new policy"
                )
            self.layers = layers
        beyond = [layer for layer in self.layers if not 0 <= layer < info.depth]
        if beyond:
            raise ValueError(
                f"{type(self).__name__}: layers must lie in 0..{info.depth - 1} (the model has {info.depth} blocks), "
                f"got {beyond[0]}"
            )
        self._check_layers()
        if "prefix_attention" in self.needs and not info.has_class_token:
            raise ValueError(
                f"{type(self).__name__}: the attention of a CLS token is needed, the model has none; "
                'choose score_source="received"'
            )

    def rate(self, layer: int) -> float:
        """The knob's value at a layer: the schedule's one owner.

        Args:
            layer: One of `layers`.
        """
        stage = self.layers.index(layer)
        if isinstance(self.knob_value, tuple):
            values = self.knob_value[: stage + 1] if self.compound else self.knob_value[stage : stage + 1]
            product = values[0]
            for each in values[1:]:
                product = product * each
            return product
        assert self.knob_value is not None
        return self.knob_value ** (stage + 1) if self.compound else self.knob_value

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

    def _slice(self, text: str) -> tuple[int | None, int | None]:
        match = re.fullmatch(r"(\d*):(\d*)", text)
        if match is None:
            raise ValueError(
                f'{type(self).__name__}: layers must be block numbers or a slice like "3:", got "{text}"'
            )
        first, last = match.groups()
        return int(first) if first else None, int(last) if last else None

    def _check_layers(self) -> None:
        name = type(self).__name__
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"{name}: layers must rise and not repeat, got {list(self.layers)}")
        if isinstance(self.knob_value, tuple) and len(self.knob_value) != len(self.layers):
            raise ValueError(
                f"{name}: {self.knob} must be one value or one for each of the {len(self.layers)} layers, "
                f"got {len(self.knob_value)}"
            )
