"""Execution modes: eager, compiled, as CUDA graphs, or whichever is fastest, for pruned and dense models alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prunevit.foresight import ForeseenWalk, survey
from prunevit.graphs import GraphCache
from prunevit.vit import RaggedViT

MODES = ("eager", "compile", "graph", "compile+graph", "best")


def accelerate(model: nn.Module, mode: str = "best", max_graphs: int = 64) -> Accelerated:
    """Run a model for evaluation in another execution mode; the weights are shared.

    Args:
        model: A `RaggedViT`, or any module from images to logits.
        mode: One of `MODES`. "best" times the others once for each input shape and keeps the fastest; away from a GPU
            that is "eager".
        max_graphs: CUDA graphs that are kept; the one unused for longest is dropped.

    Raises:
        ValueError: If the mode is not known, or needs a GPU that the model is not on.
    """
    return Accelerated(model, mode, max_graphs)


class Accelerated(nn.Module):
    """A model in an execution mode, for evaluation: no gradients; the outputs are the caller's to keep.

    The first call of a shape runs without a graph (the odd last batch of a data set costs no capture), the second one
    captures. Weights that are changed in place are seen; graphs are dropped and made anew when parameters move
    (`.to()`, `load_state_dict(assign=True)`), and are not copied or pickled along. Settings of a policy are those
    of the first calls: accelerate anew after changing one.

    Attributes:
        model: The model.
        mode: The mode asked for.
        chosen: For the `signature` of each input that "best" met, the seconds of a call in each mode.
    """

    def __init__(self, model: nn.Module, mode: str = "best", max_graphs: int = 64) -> None:
        """See `accelerate`."""
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"accelerate: mode must be one of {', '.join(MODES)}, got {mode!r}")
        device = next(model.parameters()).device
        if "graph" in mode and device.type != "cuda":
            raise ValueError(
                f'accelerate: mode="{mode}" needs a model on a CUDA device, got {device}; use "eager"'
            )
        self.model, self.mode, self.max_graphs = model, mode, max_graphs
        self.train(model.training)
        self._drop()

    def forward(self, images: Tensor, image_index: Tensor | None = None) -> Tensor:
        """Classify.

        Args:
            images: `[B, 3, height, width]`.
            image_index: As for `RaggedViT`, and only for one.

        Returns:
            Logits `[B, K]`.

        Raises:
            ValueError: In training mode.

        Cost:
            In a graph a copy of the images and of the logits; where counts depend on the data, one read-back.
        """
        if self.training:
            raise ValueError("accelerate: the model must be in evaluation mode, got training; call .eval()")
        if self._places() != self._seen_places:
            self._drop()
        inputs = (images,) if image_index is None else (images, image_index)
        if self.mode == "eager":
            with torch.no_grad():
                return self.model(*inputs)
        # What is kept from call to call, as a graph's own input, must not be a tensor of inference mode.
        with torch.cuda.device_of(images), torch.inference_mode(False), torch.no_grad():
            lasting = tuple(each.clone() if each.is_inference() else each for each in inputs)
            return self._run(self._fastest(lasting) if self.mode == "best" else self.mode, lasting)

    def _run(self, mode: str, inputs: tuple[Tensor, ...]) -> Tensor:
        if mode in ("eager", "compile"):
            return self._forward(mode)(*inputs)
        key = (mode, *signature(inputs))
        if key not in self._walks:
            return self._first(mode, key, inputs)
        walk = self._walks[key]
        if walk is not None:
            return walk(*inputs)
        forward = self._forward(mode)
        return self._graphs(key, lambda *each: (forward(*each),), inputs)[0].clone()

    def _first(self, mode: str, key: Hashable, inputs: tuple[Tensor, ...]) -> Tensor:
        """The first call of its kind: without a graph, looking at what a graph must allow for."""
        walk = None
        if isinstance(self.model, RaggedViT):
            logits, course = survey(self.model, *inputs)
            if course.needs:
                walk = ForeseenWalk(self.model, self._graphs, partial(self._code, mode), key, course)
        else:
            logits = self.model(*inputs)
        self._walks[key] = walk
        return logits

    def _fastest(self, inputs: tuple[Tensor, ...]) -> str:
        if not inputs[0].is_cuda:
            return "eager"
        key = signature(inputs)
        if key not in self.chosen:
            self.chosen[key] = {mode: self._time(mode, inputs) for mode in MODES[:-1]}
        return min(self.chosen[key], key=self.chosen[key].__getitem__)

    def _time(self, mode: str, inputs: tuple[Tensor, ...], calls: int = 10) -> float:
        """Median seconds of a call, after three that warm up."""
        seconds = []
        for _ in range(calls + 3):
            torch.cuda.synchronize(inputs[0].device)
            start = time.perf_counter()
            self._run(mode, inputs)
            torch.cuda.synchronize(inputs[0].device)
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[3:])[calls // 2]

    def _forward(self, mode: str) -> Callable[..., Tensor]:
        return self._code(mode, self.model.forward) if mode.startswith("compile") else self.model

    def _code(self, mode: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled where the mode says so."""
        if not mode.startswith("compile"):
            return function
        if function not in self._compiled:
            self._compiled[function] = compiled(function)
        return self._compiled[function]

    def _places(self) -> tuple[int, int]:
        """Where the first and the last parameter lie: enough to see that a model has moved, and quickly asked."""
        first, last = ((owner._parameters[name]) for owner, name in self._ends)
        return first.data_ptr(), last.data_ptr()  # type: ignore[union-attr]

    def _drop(self) -> None:
        self._graphs = GraphCache(self.max_graphs)
        self._walks: dict[Hashable, ForeseenWalk | None] = {}  # None: the host knows all counts
        self._compiled: dict[Callable[..., Any], Callable[..., Any]] = {}
        self.chosen: dict[Hashable, dict[str, float]] = {}
        owned = [(owner, name) for owner in self.model.modules() for name in owner._parameters]
        present = [(owner, name) for owner, name in owned if owner._parameters[name] is not None]
        self._ends = present[0], present[-1]
        self._seen_places = self._places()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: graphs, compiled code, timings."""
        own = ("_graphs", "_walks", "_compiled", "chosen", "_ends", "_seen_places")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Start without graphs."""
        super().__setstate__(state)
        self._drop()


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compile a function of a model.

    Args:
        function: `RaggedViT.forward`, or a part of it in `foresight`.
        **settings: Of `torch.compile`.
    """
    code = torch.compile(function, **settings)

    def run(*inputs: Any) -> Any:
        # The compiler counts variants by function, not by model, and gives up in silence past a limit. Left to find
        # out by itself which rooms vary, it would compile anew for each number that is seen to vary for the first time.
        with (
            torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
            torch.compiler.config.patch(  # type: ignore[attr-defined]
                dynamic_sources=r"L\['rooms'\],L\['tokens'\]\.max_seqlen"
            ),
        ):
            return code(*inputs)

    return run


def signature(inputs: tuple[Tensor, ...]) -> tuple[Hashable, ...]:
    """What decides, besides the values of the inputs, how they run: shapes, dtypes and the precision of autocast.

    Args:
        inputs: Of a model.
    """
    kind = inputs[0].device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return autocast, *((each.shape, each.dtype) for each in inputs)
