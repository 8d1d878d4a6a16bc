"""CUDA graphs of a forward: captured once for each key, and, where counts depend on the data, cut behind each stage.

Where the host does not know how many rows a stage keeps, a graph ends by packing into a fixed buffer; the host reads
the new total and the longest image; the next graph, made for a bucket of both, reads that buffer. The boundaries of the
images lie in the buffer, so equal totals with other boundaries need no other graph, and a bucket that was never seen
only costs the time of a capture.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from prunevit.tokens import RaggedTokens
from prunevit.vit import RaggedViT

LAUNCH_BOUND_ROWS = 1024
"""Up to so many rows in a batch one graph at full capacity, without any read-back, beats cutting the walk."""


class Runner(Protocol):
    """What runs a function of tensors; `GraphCache` does so by replaying."""

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run `function(*inputs)`; equal keys stand for equal functions and input shapes."""
        ...


class GraphCache:
    """Captures a function once for each key, then replays it.

    All graphs share one memory pool: they never replay at the same time, and what one of them returns must be used up
    or copied before the next one runs.

    Args:
        max_graphs: Graphs that are kept; the one unused for longest is dropped.
    """

    def __init__(self, max_graphs: int) -> None:
        self.max_graphs = max_graphs
        self._graphs: OrderedDict[Hashable, tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]]
        self._graphs = OrderedDict()
        self._pool: Any = None

    def __len__(self) -> int:
        return len(self._graphs)

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Replay, with these inputs.

        Args:
            key: What the graph is kept under.
            function: What it computes; run three times, then captured, if the key is new.
            inputs: Copied into the graph's own.

        Returns:
            The graph's own outputs, which the next call overwrites.
        """
        if key not in self._graphs:
            self._graphs[key] = self._capture(function, inputs)
            if len(self._graphs) > self.max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        graph, own, outputs = self._graphs[key]
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        graph.replay()
        return outputs

    def _capture(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        own = [each.clone() for each in inputs]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function(*own)
        torch.cuda.current_stream().wait_stream(stream)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = function(*own)
        return graph, own, outputs


def bucket(total: int, longest: int, capacity: int, bound: int) -> tuple[int, int]:
    """Round a batch's total and longest image up to one of about 32 x 8 pairs.

    Args:
        total: Rows of the batch.
        longest: Rows of its longest image.
        capacity: What the total never exceeds.
        bound: What the longest image never exceeds.
    """
    step = max(64, -(-capacity // 32 // 64) * 64)
    stride = 32
    return min(-(-total // step) * step, capacity), min(-(-longest // stride) * stride, bound)


class SegmentedWalk:
    """The walk of a pruned model whose counts depend on the data, one graph after the other.

    Args:
        model: The model.
        run: Runs each segment.
        walk: `model.walk`, or a compiled form of it.
        key: Tells this walk's graphs from others in the cache.
    """

    def __init__(
        self, model: RaggedViT, run: Runner, walk: Callable[..., RaggedTokens], key: Hashable
    ) -> None:
        self.model, self.run, self.walk, self.key = model, run, walk, key
        self.buffers: dict[int, RaggedTokens] = {}
        self.cuts: list[int] = []

    def __call__(self, images: Tensor, image_index: Tensor | None = None) -> Tensor:
        """Classify, `[B, K]`; arguments as `RaggedViT.forward`.

        Cost:
            One read-back for each stage from the first one whose counts depend on the data; none in a batch of at
            most `LAUNCH_BOUND_ROWS` rows.
        """
        inputs = (images,) if image_index is None else (images, image_index)
        if not self.cuts:
            self._find_cuts(inputs)
        if self.capacity <= LAUNCH_BOUND_ROWS:
            return self.run((self.key, "whole"), self._whole, inputs)[0]
        (sizes,) = self.run((self.key, 0), self._first, inputs)
        for number in range(1, len(self.cuts) + 1):
            total, longest = sizes.tolist()
            rows = bucket(total, longest, self.capacity, self.bound)
            (sizes,) = self.run((self.key, number, rows), self._segment(number, *rows), ())
        return sizes

    def _find_cuts(self, inputs: tuple[Tensor, ...]) -> None:
        """Look at one forward: from the first stage of unknown count on, the walk is cut ahead of each stage's half."""
        tokens = self.model.embed(*inputs)
        self.capacity, self.bound = tokens.x.shape[0], tokens.max_seqlen
        stages = self.model.trace(*inputs).stages
        unknown = next(n for n, stage in enumerate(stages) if stage.mask.rows_per_image is None)
        halves = {2 * stage.layer + (stage.site == "after_attention") for stage in stages[unknown:]}
        self.cuts = sorted(halves)

    def _whole(self, *inputs: Tensor) -> tuple[Tensor]:
        tokens = self.walk(self.model.embed(*inputs), capacity=self.capacity)
        return (self.model.forward_head(tokens),)

    def _first(self, *inputs: Tensor) -> tuple[Tensor]:
        tokens = self.walk(self.model.embed(*inputs), last=self.cuts[0], capacity=self.capacity)
        return (self._keep(1, tokens),)

    def _segment(self, number: int, rows: int, longest: int) -> Callable[[], tuple[Tensor]]:
        """From the rows that cut `number` left in its buffer to the next cut, or to the logits."""

        def segment() -> tuple[Tensor]:
            tokens = _head(self.buffers[number], rows, longest)
            first = self.cuts[number - 1]
            if number == len(self.cuts):
                return (self.model.forward_head(self.walk(tokens, first=first)),)
            last = self.cuts[number]
            return (
                self._keep(number + 1, self.walk(tokens, first=first, last=last, capacity=self.capacity)),
            )

        return segment

    def _keep(self, number: int, tokens: RaggedTokens) -> Tensor:
        """Copy rows into a cut's buffer, made at the first call; returns their total and the longest image's."""
        if number not in self.buffers:
            self.buffers[number] = _each(tokens, torch.clone)
        for name, buffer in _tensors(self.buffers[number]).items():
            buffer.copy_(getattr(tokens, name))
        return torch.stack([tokens.cu_seqlens[-1], tokens.seqlens.max()])


def _tensors(tokens: RaggedTokens) -> dict[str, Tensor]:
    values = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _each(tokens: RaggedTokens, function: Callable[[Tensor], Tensor]) -> RaggedTokens:
    return replace(tokens, **{name: function(value) for name, value in _tensors(tokens).items()})  # type: ignore[arg-type]


def _head(tokens: RaggedTokens, rows: int, longest: int) -> RaggedTokens:
    """The first `rows` rows, with a tighter bound on the longest image."""
    whole = ("cu_seqlens", "image_index")
    cut = {name: value[:rows] for name, value in _tensors(tokens).items() if name not in whole}
    return replace(tokens, max_seqlen=longest, **cut)  # type: ignore[arg-type]
