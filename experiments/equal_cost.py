"""The knob at which a policy costs what was asked for: `policy.gmacs`."""

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, get_args, get_type_hints

from rich.console import Console

from prunevit import prune
from prunevit.experiments.calibration import Calibration
from prunevit.experiments.config import InputError
from prunevit.experiments.cost import cost_of, known_cost
from prunevit.experiments.knob_text import in_short
from prunevit.experiments.policy_spec import Spec, build_policy, policy_errors
from prunevit.experiments.ranks import is_first_process
from prunevit.experiments.weights import Weights
from prunevit.policies import ATS, LTMP, NoPruning, PatchDropout, ThresholdL2
from prunevit.policy import PruningPolicy

NEAR = 0.01  # how near a cost must come to what was asked for, where the host knows all counts
NEAR_ON_PHOTOS = 0.02  # where they depend on the data; on unseen photos
CLOSE_ENOUGH = (1e-4, 3e-3)  # where the two searches stop
LARGEST = 2.0**20  # of a knob without an upper bound


def solve(
    spec: Spec, model: Any, calibration: Calibration, seed: int = 0, weights: Weights | None = None
) -> Spec:
    """Set the knob of a policy so that it costs `spec["gmacs"]` on a model; without that, change nothing.

    Where the cost depends on the data, a few photos lead to a value, and all of them have the last word.

    Args:
        spec: `name` of the policy, its arguments, and `gmacs`: GMACs an image, the policy's own included.
        model: As in `cost_of`, and so are the others.
        calibration: As there.
        seed: As there.
        weights: As there.

    Returns:
        The same without `gmacs` and with the knob.

    Raises:
        InputError: If there is no such value of the knob; says what can be reached.

    Cost:
        Some 20 to 30 costs by counts, or about eight passes over 64 photos and two over all of them.
    """
    if spec.get("gmacs") is None:
        return spec
    task = _Task.of(spec, model, calibration, seed, weights)
    search, knob = task.search, task.knob
    if not search.on_photos:
        value, gmacs = search.between(*task.span)
    else:
        asked = f"{task.name}: {knob} for {search.target:g} GMACs"
        with _said(f"{asked} on up to {calibration.images} training photos") as found:
            value, gmacs = _confirmed(
                search,
                task.span,
                lambda value: task.cost(value, calibration),
                calibration.few is not calibration,
            )
            found.append(f"{knob}={in_short(value)}, {gmacs:.3f} GMACs")
    search.check(task.name, knob, gmacs)
    return {**task.rest, knob: value}


def check_reach(
    spec: Spec, model: Any, calibration: Calibration, seed: int = 0, weights: Weights | None = None
) -> None:
    """Refuse a cost that no value of the knob comes near, by the two ends alone; arguments as in `solve`.

    Raises:
        InputError: If the cost is out of reach; says what can be reached.

    Cost:
        Two costs by counts or passes over 64 photos, which `solve` does not repeat.
    """
    if spec.get("gmacs") is None:
        return
    task = _Task.of(spec, model, calibration, seed, weights)
    search, seen = task.search, len(calibration.few.costs)
    console, started = _console(), time.monotonic()
    with console.status(f"{task.name}: which costs it reaches"):
        search.ends(*task.span)
    if len(calibration.few.costs) > seen:
        low, high = search.reached()
        console.print(
            f"{task.name}: {task.knob} reaches {low:.4g} to {high:.4g} GMACs on up to "
            f"{calibration.few.images} training photos, seen in {time.monotonic() - started:.0f} s",
            markup=False,
        )
    if not search.holds_target():
        search.check(task.name, task.knob, search.nearest(search.target)[1])


@dataclass(frozen=True)
class _Task:
    """A knob that is to be set.

    Attributes:
        name: Of the policy.
        rest: Of the policy's settings.
        knob: Name of the missing one.
        cost: By its value, on photos where it depends on them.
        search: On few photos.
        span: Where.
    """

    name: str
    rest: Spec
    knob: str
    cost: Callable[[Any, Calibration], float]
    search: "_Search"
    span: tuple[float, float]

    @classmethod
    def of(
        cls, spec: Spec, model: Any, calibration: Calibration, seed: int, weights: Weights | None
    ) -> "_Task":
        """The task of a policy with `gmacs`."""
        rest = {name: value for name, value in spec.items() if name != "gmacs"}
        with policy_errors(spec["name"]):
            policy = build_policy(rest, seed)
            known = known_cost(model, policy) is not None
        knob = policy.knob

        def cost(value: Any, photos: Calibration) -> float:
            chosen = {**rest, knob: value}
            if known:
                return cost_of(chosen, model, photos, seed, weights).gmacs
            key = json.dumps([chosen, seed, weights and weights.path], sort_keys=True, default=str)
            if key not in photos.costs:
                photos.costs[key] = cost_of(chosen, model, photos, seed, weights).gmacs
            return photos.costs[key]

        info = prune(model, NoPruning()).info
        values = _values(policy, info.grid[0] * info.grid[1])
        search = _Search(
            spec["gmacs"], lambda value: cost(value, calibration.few), values, on_photos=not known
        )
        span = (0, len(values) - 1) if values is not None else _span(policy)
        return cls(spec["name"], rest, knob, cost, search, span)


def _confirmed(
    search: "_Search", span: tuple[float, float], cost: Callable[[Any], float], few: bool
) -> tuple[Any, float]:
    """The value found on a few photos, corrected by what all of them cost; and that cost.

    Args:
        search: Looks at few photos.
        span: Where.
        cost: On all photos.
        few: Whether these are more.
    """
    target = search.target
    value, gmacs = search.between(*span)
    if not few:
        return value, gmacs
    found: list[tuple[Any, float]] = []
    for _ in range(3):
        found.append((value, cost(value)))
        if abs(found[-1][1] - target) <= CLOSE_ENOUGH[True] * target:
            break
        # The few cost that much more or less than all.
        value, _ = search.nearest(search.cost_seen(value) * target / found[-1][1])
        if value in [each for each, _ in found]:
            break
    search.target = target
    return min(found, key=lambda each: abs(each[1] - target))


@contextmanager
def _said(what: str) -> Iterator[list[str]]:
    """Say on stderr what takes its time, and how long it took; a terminal shows that it goes on.

    Gives a list for what was found.
    """
    found: list[str] = []
    console, started = _console(), time.monotonic()
    console.print(what, markup=False)
    with console.status("..."):
        yield found
    console.print(f"found {', '.join(found)}, in {time.monotonic() - started:.0f} s", markup=False)


def _console() -> Console:
    """Where the first process says what it does; the others say nothing."""
    return Console(stderr=True, soft_wrap=True, highlight=False, quiet=not is_first_process())


class _Search:
    """Looks for the value of a knob whose cost comes nearest to a target; the cost rises or falls with the knob.

    A place is a value itself or, of a knob that takes some values only, the number of one in their order.
    """

    def __init__(
        self, target: float, cost: Callable[[Any], float], values: Sequence[Any] | None, on_photos: bool
    ) -> None:
        self.target, self.cost, self.values, self.on_photos = target, cost, values, on_photos
        self.seen: dict[float, float] = {}  # cost by place

    def between(self, low: float, high: float) -> tuple[Any, float]:
        """The best value between two places, and its cost."""
        self.ends(low, high)
        return self.nearest(self.target)

    def ends(self, low: float, high: float) -> None:
        """Look at two places; an infinite upper one is approached by doubling."""
        start = 1.0 if math.isinf(high) else high
        # The lower bound itself is excluded, as in `knob_range`.
        self._look(low if self.values is not None else low + 1e-6 * (start - low))
        self._look(start)
        while math.isinf(high) and self._bracket() is None and start < LARGEST:
            self._look(start := 2 * start)

    def nearest(self, target: float) -> tuple[Any, float]:
        """The best value for another target, and its cost, going on from what was seen.

        Halves where costs are steps; on photos, where a cost is dear, cuts where the chord meets the target.
        """
        self.target = target
        for turn in range(40):
            bracket = self._bracket()
            best = min(self.seen, key=lambda place: self._distance(self.seen[place]))
            if bracket is None or self._distance(self.seen[best]) <= CLOSE_ENOUGH[self.on_photos] * target:
                break
            a, b = bracket
            if b - a <= (1 if self.values is not None else 1e-7 * (max(self.seen) - min(self.seen))):
                break
            share = 0.5
            if self.on_photos and turn % 3 < 2:
                # Off the edges, so that a curved cost cannot hold one end still.
                at_a, at_b = self.seen[a], self.seen[b]
                share = min(max((target - at_a) / (at_b - at_a), 0.02), 0.98)
            middle = a + share * (b - a)
            if self.values is not None:
                self._look(min(max(round(middle), a + 1), b - 1))
            else:
                self._look(float(f"{middle:.6g}"))
        return self._value(best), self.seen[best]

    def cost_seen(self, value: Any) -> float:
        """What a value cost that was looked at."""
        return next(cost for place, cost in self.seen.items() if self._value(place) == value)

    def check(self, name: str, knob: str, gmacs: float) -> None:
        """Raise unless the best cost comes near enough."""
        allowed = NEAR_ON_PHOTOS if self.on_photos else NEAR
        if self._distance(gmacs) <= allowed * self.target:
            return
        if self._bracket() is not None:
            raise InputError(
                f"policy.gmacs: no {knob} of {name} costs within {allowed:.0%} of {self.target:g} GMACs here; "
                f"the nearest costs {gmacs:.4g}"
            )
        low, high = self.reached()
        raise InputError(
            f"policy.gmacs: {knob} of {name} reaches {low:.4g} to {high:.4g} GMACs here, "
            f"got {self.target:g}; ask for another cost"
        )

    def reached(self) -> tuple[float, float]:
        """The least and the largest cost that was seen."""
        return min(self.seen.values()), max(self.seen.values())

    def holds_target(self) -> bool:
        """Whether costs below and above the target were seen, or the target itself."""
        return self._bracket() is not None

    def _value(self, place: float) -> Any:
        return place if self.values is None else self.values[int(place)]

    def _look(self, place: float) -> None:
        if place not in self.seen:
            self.seen[place] = self.cost(self._value(place))

    def _bracket(self) -> tuple[float, float] | None:
        """The two neighbouring places whose costs hold the target between them."""
        for a, b in pairwise(sorted(self.seen)):
            if min(self.seen[a], self.seen[b]) <= self.target <= max(self.seen[a], self.seen[b]):
                return a, b
        return None

    def _distance(self, gmacs: float) -> float:
        return abs(gmacs - self.target)


def _values(policy: PruningPolicy, patches: int) -> Sequence[Any] | None:
    """The values that a knob takes, their costs in order; None: any number."""
    if isinstance(policy, ATS) and policy.variant == "official":
        return range(2, patches + 2)  # rows; up to 1 it would be a fraction of those present
    return _whole_values(policy, max(patches // 2, 1)) if _is_whole(policy) else None


def _is_whole(policy: PruningPolicy) -> bool:
    """Whether the knob is a whole number by the type of the constructor's argument."""
    hint = get_type_hints(type(policy).__init__).get(policy.knob)
    return int in (hint, *get_args(hint)) and float not in get_args(hint)


def _whole_values(policy: PruningPolicy, most: int) -> list[Any]:
    """One number for all layers, or two neighbours mixed evenly where the policy takes one a layer."""
    hint = get_type_hints(type(policy).__init__)[policy.knob]
    stages = len(policy.layers)
    if hint is int or not any(getattr(each, "__origin__", None) for each in get_args(hint)):
        return [*range(most + 1)]

    def mixed(total: int) -> int | list[int]:
        low, extra = divmod(total, stages)
        if extra == 0:
            return low
        return [low + ((n + 1) * extra // stages - n * extra // stages) for n in range(stages)]

    return [mixed(total) for total in range(most * stages + 1)]


def _span(policy: PruningPolicy) -> tuple[float, float]:
    """Where the knob is looked for."""
    if isinstance(policy, LTMP):
        return -1.0, 1.0  # a cosine
    if isinstance(policy, PatchDropout):
        return 0.0, 0.999
    if isinstance(policy, ThresholdL2):
        spans = {"absolute": (0.0, math.inf), "deviation": (-6.0, 6.0)}
        return spans.get(policy.rule, (0.0, 1.0))
    if isinstance(policy, ATS):
        return 0.0, 1.0
    if policy.knob_range is None:
        raise InputError(
            f"policy.gmacs: {type(policy).__name__} must declare knob_range, in which {policy.knob} is looked for"
        )
    return policy.knob_range
