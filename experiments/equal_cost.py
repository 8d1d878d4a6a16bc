"""The knob at which a policy costs what was asked for: `policy.gmacs`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, get_args, get_type_hints

from prunevit import prune
from prunevit.experiments.calibration import Calibration
from prunevit.experiments.config import InputError
from prunevit.experiments.cost import Cost, cost_of
from prunevit.experiments.policy_spec import Spec, build_policy, policy_errors
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
        Some 20 to 30 costs by counts, or about ten passes over the photos.
    """
    target = spec.get("gmacs")
    if target is None:
        return spec
    rest = {name: value for name, value in spec.items() if name != "gmacs"}
    with policy_errors(spec["name"]):
        policy = build_policy(rest, seed)
        info = prune(model, NoPruning()).info
        policy.setup(info)
    search = _Search(
        target, lambda value: cost_of({**rest, policy.knob: value}, model, calibration, seed, weights)
    )
    patches = info.grid[0] * info.grid[1]
    if isinstance(policy, ATS) and policy.variant == "official":
        value = search.whole(range(2, patches + 2))  # rows; up to 1 it would be a fraction of those present
    elif _is_whole(policy):
        value = search.whole(_whole_values(policy, max(patches // 2, 1)))
    else:
        value = search.real(*_span(policy))
    search.check(spec["name"], policy.knob)
    return {**rest, policy.knob: value}


class _Search:
    """Looks for the value of a knob whose cost comes nearest to a target; the cost rises or falls with the knob."""

    def __init__(self, target: float, cost: Callable[[Any], Cost]) -> None:
        self.target, self.cost = target, cost
        self.seen: list[tuple[float, Any]] = []  # cost, value
        self.on_photos = False

    def real(self, low: float, high: float) -> float:
        """Between two values; an infinite upper one is approached by doubling."""
        start = 1.0 if math.isinf(high) else high
        # The lower bound itself is excluded, as in `knob_range`.
        a, b = low + 1e-6 * (start - low), start
        at_a, at_b = self._at(a), self._at(b)
        while math.isinf(high) and not self._between(at_a, at_b) and b < LARGEST:
            b *= 2
            at_b = self._at(b)
        if self._between(at_a, at_b):
            self._narrow(a, b, at_a, at_b)
        return self._best()

    def whole(self, values: Sequence[Any]) -> Any:
        """Among values whose costs are in order."""
        first, last = 0, len(values) - 1
        falls = self._at(values[first]) > self._at(values[last])
        while last - first > 1:
            middle = (first + last) // 2
            if (self._at(values[middle]) > self.target) == falls:
                first = middle
            else:
                last = middle
        return self._best()

    def check(self, name: str, knob: str) -> None:
        """Raise unless the best value comes near enough."""
        nearest = min((cost for cost, _ in self.seen), key=self._distance)
        allowed = NEAR_ON_PHOTOS if self.on_photos else NEAR
        if self._distance(nearest) <= allowed * self.target:
            return
        costs = [cost for cost, _ in self.seen]
        if self._between(min(costs), max(costs)):
            raise InputError(
                f"policy.gmacs: no {knob} of {name} costs within {allowed:.0%} of {self.target:g} GMACs here; "
                f"the nearest costs {nearest:.4g}"
            )
        raise InputError(
            f"policy.gmacs: {knob} of {name} reaches {min(costs):.4g} to {max(costs):.4g} GMACs here, "
            f"got {self.target:g}"
        )

    def _at(self, value: Any) -> float:
        cost = self.cost(value)
        self.on_photos = self.on_photos or cost.images > 0
        self.seen.append((cost.gmacs, value))
        return cost.gmacs

    def _narrow(self, a: float, b: float, at_a: float, at_b: float) -> None:
        """Halve where costs are steps; on photos, where a cost is dear, cut where the chord meets the target."""
        end = 1e-7 * (b - a)
        for turn in range(40):
            if min(map(self._distance, (at_a, at_b))) <= CLOSE_ENOUGH[self.on_photos] * self.target:
                return
            if b - a <= end:
                return
            share = 0.5
            if self.on_photos and turn % 3 < 2:
                # Off the edges, so that a curved cost cannot hold one end still.
                share = min(max((self.target - at_a) / (at_b - at_a), 0.02), 0.98)
            middle = float(f"{a + share * (b - a):.6g}")
            at = self._at(middle)
            if self._between(at_a, at):
                b, at_b = middle, at
            else:
                a, at_a = middle, at

    def _best(self) -> Any:
        return min(self.seen, key=lambda each: self._distance(each[0]))[1]

    def _between(self, one: float, other: float) -> bool:
        return min(one, other) <= self.target <= max(one, other)

    def _distance(self, gmacs: float) -> float:
        return abs(gmacs - self.target)


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
