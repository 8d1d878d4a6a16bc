"""CUDA graphs: captured once for each key, then replayed; and numbers that a graph sends to the host on its way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor


class Runner(Protocol):
    """What runs a function of tensors; `GraphCache` does so by replaying."""

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        """Run `function(*inputs)`; equal keys stand for equal functions and input shapes."""
        ...


class GraphCache:
    """Captures a function once for each key, then replays it.

    All graphs share one memory pool, and those of like inputs share these: they never replay at the same time, and what
    one of them returns must be used up or copied before the next one runs.

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
        captured = self._graphs.pop(key, None)
        own = captured[1] if captured else self._own(inputs)
        for mine, given in zip(own, inputs):
            mine.copy_(given)
        graph, own, outputs = captured or self._capture(function, own)
        self._graphs[key] = graph, own, outputs
        if len(self._graphs) > self.max_graphs:
            self._graphs.popitem(last=False)
        graph.replay()
        return outputs

    def clear(self) -> None:
        """Drop all graphs, and their memory with them."""
        self._graphs.clear()
        self._pool = None

    def _own(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that a graph can read: those of another graph of like inputs, or new ones."""
        like = [(each.shape, each.dtype, each.device) for each in inputs]
        for _, own, _ in self._graphs.values():
            if [(each.shape, each.dtype, each.device) for each in own] == like:
                return own
        return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in inputs]

    def _capture(
        self, function: Callable[..., tuple[Tensor, ...]], own: list[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, list[Tensor], tuple[Tensor, ...]]:
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


class Report:
    """Small numbers on their way from a graph to the host, sent beside what the graph goes on to compute.

    Args:
        shape: Of the numbers, int32 `[rows, columns]`, none of them negative.
        device: Where they are computed.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.numbers = torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # External: a graph that is captured records it at each replay.
        self.sent = torch.cuda.Event(external=True) if self.side else None

    def clear(self) -> None:
        """Forget what came before."""
        self.numbers.fill_(-1)

    def send(self, rows: list[Tensor]) -> None:
        """Send rows of numbers, which must live until `join`."""
        self.clear()  # while a graph is captured, what the runs before left
        if self.side is None or self.sent is None:
            self.numbers.copy_(torch.stack(rows))
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            self._sending = torch.stack(rows)
            self.numbers.copy_(self._sending, non_blocking=True)
            self.sent.record(self.side)

    def join(self) -> None:
        """Let the current stream go on once all is sent."""
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            del self._sending

    def receive(self) -> list[list[int]]:
        """Wait for what was sent since `clear`, and for nothing that was launched after it."""
        if self.sent is not None:
            self.sent.synchronize()
        numbers = self.numbers.tolist()
        if self.sent is not None and min(map(min, numbers)) < 0:  # the event was that of an earlier replay
            torch.cuda.current_stream().synchronize()
            numbers = self.numbers.tolist()
        return numbers
