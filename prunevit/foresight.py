"""Walks whose counts depend on the data, each as one CUDA graph made for a foreseen room.

Where the host does not know how many rows a stage keeps, the whole forward is one graph that packs into rooms foreseen
from earlier batches. What the stages needed goes to the host while the rest of the graph still runs. If a stage had too
little room, the forward runs again without a graph, and later batches get more room: a wrong guess costs time, never a
result.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from prunevit.graphs import Report, Runner
from prunevit.packing import Foreseen, Room
from prunevit.tokens import RaggedTokens
from prunevit.trace import Stage
from prunevit.vit import RaggedViT

LAUNCH_BOUND_ROWS = 512
"""Up to so many rows in a batch a graph with room for all of them and no read-back is as fast as a tighter one."""

MEMORY = 64
"""Batches whose needs decide whether a room shrinks."""


def bucket(total: int, longest: int, capacity: int, bound: int) -> Room:
    """Round a batch's total and longest image up to one of about 64 x 8 rooms.

    Args:
        total: Rows of the batch.
        longest: Rows of its longest image.
        capacity: What the total never exceeds.
        bound: What the longest image never exceeds.
    """
    step = _step(capacity)
    return Room(min(-(-total // step) * step, capacity), min(-(-longest // _STRIDE) * _STRIDE, bound))


_STRIDE = 32


def _step(capacity: int) -> int:
    return max(64, -(-capacity // 64 // 64) * 64)


class Course(NamedTuple):
    """What a walk over images of one shape did to their number of rows.

    Attributes:
        whole: The rows at the start.
        needs: What each stage left, from the first one that left a number which the host does not know; none: the
            host knows all counts.
        cut: Half ahead of which the last of these stages acted, but at least 1: a walk that goes on from half 0 would
            prune ahead of it once more, and no stage lies between.
    """

    whole: Room
    needs: tuple[Room, ...]
    cut: int


def survey(model: RaggedViT, *inputs: Tensor) -> tuple[Tensor, Course]:
    """Classify without a graph, and see on the way what the walk does.

    Args:
        model: The model.
        *inputs: As `RaggedViT.forward`.

    Cost:
        Two read-backs for each stage from the first one whose counts depend on the data.
    """
    needs: list[Room] = []
    cut = 1

    def record(event: Stage | RaggedTokens) -> None:
        nonlocal cut
        if not isinstance(event, Stage) or event.mask.soft is not None:
            return
        if needs or event.mask.rows_per_image is None:
            counts = event.counts.tolist()
            needs.append(Room(sum(counts), max(counts, default=0)))
            cut = max(cut, 2 * event.layer + (event.site == "after_attention"))

    tokens = model.embed(*inputs)
    whole = Room(tokens.x.shape[0], tokens.max_seqlen)
    logits = model.forward_head(model.walk(tokens, record))
    return logits, Course(whole, tuple(needs), cut)


class Foresight:
    """How much room to make in each stage for the next batch, by what the last batches needed.

    A room grows as soon as a batch does not fit, and shrinks where none of the last `MEMORY` batches would have missed
    two steps of it: few rooms, and so few graphs, serve counts that vary a little all the time.

    Attributes:
        rooms: One for each stage.
    """

    def __init__(self, course: Course) -> None:
        """Start with what one batch needed."""
        self.whole = course.whole
        self.rooms = self._around(course.needs)
        self._most: list[Room] = []  # of the batches since rooms could shrink
        self._batches = 0

    def learn(self, needs: Sequence[Room]) -> None:
        """Take in what a batch needed, and make room for the next one.

        Args:
            needs: Of each stage.
        """
        self._most = [_either(max, *pair) for pair in zip(self._most, needs)] if self._most else list(needs)
        self._batches += 1
        if not all(room.holds(need) for room, need in zip(self.rooms, needs)):
            self.rooms = tuple(_either(max, *pair) for pair in zip(self.rooms, self._around(needs)))
        if self._batches == MEMORY:
            self.rooms = tuple(map(self._shrunk, self.rooms, self._around(self._most)))
            self._most, self._batches = [], 0

    def _around(self, needs: Sequence[Room]) -> tuple[Room, ...]:
        """Rooms for needs, and half a step more rows, so that the next batch does not miss by a few."""
        rows, longest = self.whole
        slack = _step(rows) // 2
        return tuple(bucket(need.rows + slack, need.longest, rows, longest) for need in needs)

    def _shrunk(self, room: Room, enough: Room) -> Room:
        spare = room.rows - enough.rows >= 2 * _step(self.whole.rows)
        return _either(min, room, enough) if spare or room.longest - enough.longest >= 2 * _STRIDE else room


def _either(choose: Callable[[int, int], int], one: Room, other: Room) -> Room:
    """The larger or the smaller of each of two numbers."""
    return Room(choose(one.rows, other.rows), choose(one.longest, other.longest))


class ForeseenWalk:
    """A pruned model whose counts depend on the data, as CUDA graphs for images of one shape.

    Args:
        model: The model.
        run: Runs the graphs.
        compiled: Compiles a function, or leaves it as it is.
        key: Tells this walk's graphs from others.
        course: What a first batch did.

    Attributes:
        misses: Batches that had too little room.
    """

    def __init__(
        self,
        model: RaggedViT,
        run: Runner,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
        key: Hashable,
        course: Course,
    ) -> None:
        self.model, self.run, self.key, self.course = model, run, key, course
        self.whole, self.front, self.back = compiled(_whole), compiled(_front), compiled(_back)
        self.foresight = Foresight(course)
        self.report = Report((len(course.needs), 3), next(model.parameters()).device)
        self.misses = 0

    def __call__(self, *inputs: Tensor) -> Tensor:
        """Classify, `[B, K]`; arguments as `RaggedViT.forward`.

        Cost:
            One read-back, of what the stages needed; the host goes on while the rest of the graph runs. A batch that
            does not fit also costs a forward without a graph. In a batch of at most `LAUNCH_BOUND_ROWS` rows neither.
        """
        if self.course.whole.rows <= LAUNCH_BOUND_ROWS:
            whole = partial(self.whole, self.model)
            return self.run((self.key, "whole"), lambda *each: (whole(*each),), inputs)[0].clone()
        rooms = self.foresight.rooms
        self.report.clear()
        logits = self.run((self.key, rooms), partial(self._forward, rooms), inputs)[0].clone()
        extents = self.report.receive()
        needs = [Room(rows, longest) for rows, longest, _ in extents]
        shortest = min(shortest for *_, shortest in extents)
        fits = all(room.holds(need) for room, need in zip(rooms, needs))
        if not fits or shortest <= self.model.info.num_prefix_tokens:
            # Behind the first stage that did not fit the needs are those of another batch. Where an image was left
            # without a patch, this raises.
            logits, course = survey(self.model, *inputs)
            needs, self.misses = list(course.needs), self.misses + 1
        self.foresight.learn(needs)
        return logits

    def _forward(self, rooms: tuple[Room, ...], *inputs: Tensor) -> tuple[Tensor]:
        tokens, needs = self.front(self.model, self.course.cut, rooms, *inputs)
        self.report.send(needs)
        logits = self.back(self.model, self.course.cut, tokens)
        self.report.join()
        return (logits,)


# What is compiled: functions of the model, so that walks over images of several shapes share the code.


def _whole(model: RaggedViT, *inputs: Tensor) -> Tensor:
    """The forward with room for every row in each stage."""
    tokens = model.embed(*inputs)
    return model.forward_head(model.walk(tokens, capacity=tokens.x.shape[0]))


def _front(
    model: RaggedViT, cut: int, rooms: tuple[Room, ...], *inputs: Tensor
) -> tuple[RaggedTokens, list[Tensor]]:
    """The walk through all stages with rooms, to half `cut`; and their needs."""
    foreseen = Foreseen(rooms)
    return model.walk(model.embed(*inputs), last=cut, capacity=foreseen), foreseen.needs


def _back(model: RaggedViT, cut: int, tokens: RaggedTokens) -> Tensor:
    """The rest of the walk, and the head."""
    return model.forward_head(model.walk(tokens, first=cut))
