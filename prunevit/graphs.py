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
from operator import sub
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prunevit.tokens import RaggedTokens
from prunevit.trace import Stage
from prunevit.vit import RaggedViT

LAUNCH_BOUND_ROWS = 2048
"""Up to so many rows in a batch one graph at full capacity, without any read-back, beats cutting the walk.

Measured on one H200, DeiT-S: 8 images of 197 rows take 663 us whole and 702 us cut, 16 take 912 us and 861 us.
"""


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
        self._graphs = OrderedDict()  # the one used last stands last
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
        captured = self._graphs.pop(key, None) or self._capture(function, inputs)
        self._graphs[key] = captured
        if len(self._graphs) > self.max_graphs:
            self._graphs.popitem(last=False)
        graph, own, outputs = captured
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        graph.replay()
        return outputs

    def _capture(
        self, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
        own = [each.clone() for each in inputs]
        with _own_casts():
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    function(*own)
            torch.cuda.current_stream().wait_stream(stream)
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                outputs = function(*own)
        return graph, own, outputs


def _own_casts() -> torch.autocast:
    """Autocast as it is, but without its cache: a graph would go on reading a cast of weights that is gone."""
    dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
    return torch.autocast("cuda", dtype=dtype, enabled=enabled, cache_enabled=False)


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


class Course(NamedTuple):
    """What a walk over images of one shape does to their number of rows.

    Attributes:
        cuts: Halves ahead of which rows leave in a number that the host does not know, and all later ones ahead of
            which any leave; none: the host knows all counts.
        rows: Rows of the batch at the start.
        longest: Rows of an image at the start.
    """

    cuts: tuple[int, ...]
    rows: int
    longest: int


def survey(model: RaggedViT, *inputs: Tensor) -> tuple[Tensor, Course]:
    """Classify without a graph, and see on the way what the walk does.

    Args:
        model: The model.
        *inputs: As `RaggedViT.forward`.
    """
    cuts: list[int] = []

    def record(event: Stage | RaggedTokens) -> None:
        if isinstance(event, Stage) and (cuts or event.mask.rows_per_image is None):
            half = 2 * event.layer + (event.site == "after_attention")
            cuts.extend([half] if half not in cuts else [])

    tokens = model.embed(*inputs)
    rows, longest = tokens.x.shape[0], tokens.max_seqlen
    logits = model.forward_head(model.walk(tokens, record))
    return logits, Course(tuple(cuts), rows, longest)


class SegmentedWalk:
    """The walk of a pruned model whose counts depend on the data, one graph after the other.

    Args:
        model: The model.
        run: Runs each segment.
        walk: `model.walk`, or a compiled form of it.
        key: Tells this walk's graphs from others in the cache; quickly hashed, since the GPU waits for it.
        course: Where to cut; at least once.
    """

    def __init__(
        self, model: RaggedViT, run: Runner, walk: Callable[..., RaggedTokens], key: Hashable, course: Course
    ) -> None:
        self.model, self.run, self.walk, self.key = model, run, walk, key
        self.cuts, self.capacity, self.bound = course
        self.buffers: dict[int, RaggedTokens] = {}
        self.boundaries: dict[int, Tensor] = {}  # on the host

    def __call__(self, images: Tensor, image_index: Tensor | None = None) -> Tensor:
        """Classify, `[B, K]`; arguments as `RaggedViT.forward`.

        Cost:
            One read-back for each stage from the first one whose counts depend on the data; none in a batch of at
            most `LAUNCH_BOUND_ROWS` rows.
        """
        inputs = (images,) if image_index is None else (images, image_index)
        if self.capacity <= LAUNCH_BOUND_ROWS:
            return self.run((self.key, "whole"), self._whole, inputs)[0]
        (output,) = self.run((self.key, 0), self._first, inputs)
        for number in range(1, len(self.cuts) + 1):
            if images.is_cuda:
                torch.cuda.current_stream(images.device).synchronize()
            ends = output.tolist()
            longest = max(map(sub, ends[1:], ends), default=0)
            rows = bucket(ends[-1], longest, self.capacity, self.bound)
            (output,) = self.run((self.key, number, rows), self._segment(number, *rows), ())
        return output

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
            tokens = self.walk(tokens, first=first, last=self.cuts[number], capacity=rows)
            return (self._keep(number + 1, tokens),)

        return segment

    def _keep(self, number: int, tokens: RaggedTokens) -> Tensor:
        """Copy rows into a cut's buffer, made at the first call; returns the boundaries, on their way to the host.

        A later segment takes no more rows from the buffer than this one puts there: rows never increase.
        """
        if number not in self.buffers:
            self._make_room(number, tokens)
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for name, buffer in _tensors(self.buffers[number]).items():
            value = getattr(tokens, name)
            if value is not buffer:
                by_dtype.setdefault(value.dtype, []).append((buffer[: value.shape[0]], value))
        for pairs in by_dtype.values():  # one launch each
            torch._foreach_copy_([buffer for buffer, _ in pairs], [value for _, value in pairs])
        return self.boundaries[number].copy_(tokens.cu_seqlens, non_blocking=True)

    def _make_room(self, number: int, tokens: RaggedTokens) -> None:
        """Make a cut's buffer for as many rows as there can be."""
        room = {
            name: value.clone() if name in _WHOLE else value.new_zeros(self.capacity, *value.shape[1:])
            for name, value in _tensors(tokens).items()
        }
        if number > 1 and tokens.image_index is self.buffers[number - 1].image_index:  # no stage changes it
            room["image_index"] = tokens.image_index
        self.buffers[number] = replace(tokens, **room)  # type: ignore[arg-type]
        ends = tokens.cu_seqlens
        self.boundaries[number] = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=ends.is_cuda)


_WHOLE = ("cu_seqlens", "image_index")
"""Fields of `RaggedTokens` that do not have one entry a row."""


def _tensors(tokens: RaggedTokens) -> dict[str, Tensor]:
    values = {each.name: getattr(tokens, each.name) for each in fields(tokens)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _head(tokens: RaggedTokens, rows: int, longest: int) -> RaggedTokens:
    """The first `rows` rows, with a tighter bound on the longest image."""
    cut = {name: value[:rows] for name, value in _tensors(tokens).items() if name not in _WHOLE}
    return replace(tokens, max_seqlen=longest, **cut)  # type: ignore[arg-type]
