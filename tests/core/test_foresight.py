"""Walks whose counts depend on the data, in foreseen rooms; graphs are stood in for by a runner that runs functions."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import prunevit
from prunevit.execution import compiled
from prunevit.foresight import MEMORY, Course, ForeseenWalk, Foresight, bucket, survey
from prunevit.keepmask import KeepMask
from prunevit.packing import Room
from prunevit.policies import ATS, LTMP, EViT, RandomPruning, ThresholdL2, ToMe, TopK, TopP
from prunevit.policy import PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class PlainRunner:
    """Runs each function as it is, and remembers the keys: a graph cache without graphs."""

    def __init__(self) -> None:
        self.keys: list[Hashable] = []

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor]
    ) -> tuple[Tensor, ...]:
        self.keys.append(key)
        return function(*inputs)


def as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def images_of(batch: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, 96, 96, dtype=torch.float64, generator=generator)


DYNAMIC: dict[str, Callable[[], list[PruningPolicy]]] = {
    "top_p": lambda: [TopP(0.7, (1, 2))],
    "ahead of the first block": lambda: [ThresholdL2(0.0, (0,))],
    "norm": lambda: [ThresholdL2(0.0, (1, 3))],
    "static first, static last": lambda: [TopK(0.8, (0,)), ThresholdL2(0.0, (2,)), EViT(0.5, (3,))],
    "two at one place": lambda: [TopP(0.8, (1,)), RandomPruning(0.5, (1,)), RandomPruning(0.7, (2,))],
    "ragged merging": lambda: [TopP(0.8, (0,)), ToMe(4, layers=(1, 2, 3))],
    "ats": lambda: [ATS(0.7, (1, 2))],
    "ltmp": lambda: [LTMP(0.3, 0.01)],
}


def foreseen(
    name: str, batch: int, compiled: Callable[..., Any] = as_it_is
) -> tuple[ForeseenWalk, PlainRunner]:
    """A walk that has seen one batch."""
    pruned, runner = prunevit.prune(small_vit(), DYNAMIC[name]()), PlainRunner()
    _, course = survey(pruned, images_of(batch, 100))
    return ForeseenWalk(pruned, runner, compiled, "key", course), runner


def adverse(batch: int) -> list[Tensor]:
    """Batches that keep little, much, and much in one image alone, in turn."""
    usual, flat = images_of(batch, 1), images_of(batch, 2) * 0.01
    one = usual.clone()
    one[1] = flat[1]
    return [usual, flat, one, usual, images_of(batch, 3), flat.flip(0)]


@pytest.fixture
def no_launch_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prunevit.foresight.LAUNCH_BOUND_ROWS", 0)


@torch.no_grad()
@pytest.mark.parametrize("name", DYNAMIC)
def test_a_foreseen_walk_equals_the_walk(name: str, no_launch_bound: None) -> None:
    """Whether batches fit or not, on boundaries that differ at each call."""
    walk, _ = foreseen(name, 12)
    for images in adverse(12):
        torch.testing.assert_close(walk(images), walk.model(images), rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("name", DYNAMIC)
def test_a_walk_without_room_stays_valid(name: str, no_launch_bound: None) -> None:
    """With the least room at every stage, at one stage, and at all but one: the logits are right all the same."""
    walk, runner = foreseen(name, 3)
    images, fewest = images_of(3, 1), Room(3 * 2, 2)
    expected, course = survey(walk.model, images)
    for tight in range(1, 2 ** len(course.needs)):
        rooms = [fewest if tight >> stage & 1 else course.whole for stage in range(len(course.needs))]
        misses, walk.foresight.rooms = walk.misses, tuple(rooms)
        logits, _ = raw = runner_output(walk, images)
        assert logits.isfinite().all(), raw
        torch.testing.assert_close(walk(images), expected, rtol=0, atol=1e-11)
        assert walk.misses == misses + (not all(map(Room.holds, rooms, course.needs)))
        if walk.misses > misses:
            assert all(map(Room.holds, walk.foresight.rooms, course.needs))
            torch.testing.assert_close(walk(images), expected, rtol=0, atol=1e-11)
            assert walk.misses == misses + 1
    assert all(key[0] == "key" for key in runner.keys)  # type: ignore[index]


def runner_output(walk: ForeseenWalk, images: Tensor) -> tuple[Tensor, list[list[int]]]:
    """What a graph leaves behind, fit or not."""
    (logits,) = walk._forward(walk.foresight.rooms, images)
    return logits, walk.report.receive()


@torch.no_grad()
def test_the_needs_are_true_up_to_the_first_miss(no_launch_bound: None) -> None:
    walk, _ = foreseen("ragged merging", 5)
    images = images_of(5, 4)
    needs = survey(walk.model, images)[1].needs
    for missed in range(len(needs)):
        walk.foresight.rooms = tuple(
            Room(10, 2) if stage == missed else Room(5 * 37, 37) for stage in range(len(needs))
        )
        told = [Room(*need[:2]) for need in runner_output(walk, images)[1]]
        assert tuple(told[: missed + 1]) == needs[: missed + 1]
        assert all(need == Room(10, 2) for need in told[missed + 1 :])


class Careless(PruningPolicy):
    """Keeps what is bright, though an image may have nothing of the kind."""

    limit = 0.0

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        return KeepMask(tokens.x.square().mean(1) > self.limit)


@torch.no_grad()
def test_an_image_without_a_patch_is_told_after_the_walk(no_launch_bound: None) -> None:
    policy, images = Careless(1.0, (1,)), images_of(3, 1)
    pruned = prunevit.prune(small_vit(), [policy])
    logits, course = survey(pruned, images)
    walk = ForeseenWalk(pruned, PlainRunner(), as_it_is, "key", course)
    torch.testing.assert_close(walk(images), logits, rtol=0, atol=1e-11)
    policy.limit = 1e9
    for model in (walk, pruned):
        with pytest.raises(ValueError, match="each image must keep at least one patch"):
            model(images)


@torch.no_grad()
def test_small_batches_have_room_for_all_and_tell_nothing() -> None:
    walk, runner = foreseen("top_p", 3)
    for images in adverse(3):
        torch.testing.assert_close(walk(images), walk.model(images), rtol=0, atol=1e-11)
    assert set(runner.keys) == {("key", "whole")}


@torch.no_grad()
def test_random_policies_go_by_the_image(no_launch_bound: None) -> None:
    walk, _ = foreseen("two at one place", 4)
    images = images_of(4, 5)
    for seed in range(3):
        index = torch.randint(1000, (4,), generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(walk(images, index), walk.model(images, index), rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("name", ["top_p", "ragged merging"])
def test_changing_rooms_are_compiled_few_times(name: str, no_launch_bound: None) -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    walk, _ = foreseen(name, 12, lambda function: compiled(function, backend=counter, fullgraph=True))
    images, stages = images_of(12, 1), len(walk.course.needs)
    expected = walk.model(images)
    for seed in range(8):
        rows = torch.randint(300, 444, (stages,), generator=torch.Generator().manual_seed(seed))
        rooms = [Room(int(each), 37 - seed % 3) for each in rows.sort(descending=True).values]
        walk.foresight.rooms = (Room(444, 37), *rooms[1:]) if seed == 5 else tuple(rooms)
        torch.testing.assert_close(walk(images), expected, rtol=0, atol=1e-11)
    assert counter.frame_count <= 4


def test_a_survey_tells_where_counts_are_unknown() -> None:
    images = images_of(2, 0)
    for policies, stages, cut in (
        ([EViT(0.5, (1, 2))], 0, 1),
        ([TopK(0.8, (0,)), TopP(0.7, (1,)), EViT(0.5, (3,))], 2, 7),
        ([ThresholdL2(0.0, (2,))], 1, 4),
        ([ThresholdL2(0.0, (0,))], 1, 1),
    ):
        pruned = prunevit.prune(small_vit(), policies)
        with torch.no_grad():
            logits, course = survey(pruned, images)
            torch.testing.assert_close(logits, pruned(images), rtol=0, atol=0)
        assert (course.whole, len(course.needs), course.cut) == (Room(2 * 37, 37), stages, cut)
        counts = [stage.counts for stage in pruned.trace(images).stages][-stages or 9 :]
        assert course.needs == tuple(Room(int(each.sum()), int(each.max())) for each in counts)


def test_buckets_hold_what_is_put_into_them_and_are_few() -> None:
    seen = set()
    for total in range(1, 64 * 197 + 1, 7):
        rows, longest = bucket(total, max(1, min(197, total)), 64 * 197, 197)
        assert rows >= total
        assert rows <= 64 * 197
        assert 197 >= longest >= min(197, total)
        seen.add(rows)
    assert len(seen) <= 65


WHOLE = Room(64 * 197, 197)  # steps of 256 rows


def test_noise_of_a_few_per_cent_costs_few_misses_and_few_rooms() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (1 + 0.02 * torch.randn(1000, generator=generator)).tolist()
    foresight = Foresight(Course(WHOLE, (Room(7000, 150),), 7))
    misses, seen = 0, set()
    for factor in noise:
        need = Room(int(7000 * factor), 150)
        misses += not foresight.rooms[0].holds(need)
        foresight.learn([need])
        seen.add(foresight.rooms)
    assert misses <= 5
    assert len(seen) <= 3
    assert foresight.rooms[0].rows <= 7000 * 1.15


def test_a_room_grows_at_once_and_shrinks_once_nothing_needs_it() -> None:
    foresight = Foresight(Course(WHOLE, (Room(7000, 150), Room(5000, 100)), 7))
    usual = foresight.rooms
    assert usual == (Room(256 * 28, 160), Room(256 * 21, 128))
    foresight.learn([WHOLE, Room(5000, 100)])
    assert foresight.rooms == (WHOLE, usual[1])
    for _ in range(MEMORY - 1):
        foresight.learn([Room(7000, 150), Room(5000, 100)])
        assert foresight.rooms == (WHOLE, usual[1])
    for _ in range(MEMORY):
        foresight.learn([Room(7000, 150), Room(5000, 100)])
    assert foresight.rooms == usual


def test_a_room_does_not_shrink_by_one_step() -> None:
    foresight = Foresight(Course(WHOLE, (Room(7000, 150),), 7))
    usual = foresight.rooms
    for _ in range(2 * MEMORY):
        foresight.learn([Room(6800, 128)])
    assert foresight.rooms == usual
