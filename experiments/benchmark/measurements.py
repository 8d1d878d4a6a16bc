"""What a benchmark measured, and the comparisons that are made of it.

No comparison is made with a figure whose configuration failed its correctness check: there is none.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prunevit.experiments.timing import Spread

WRONG = "incorrect"


@dataclass(frozen=True)
class Measurement:
    """One figure.

    Attributes:
        place: Where it was taken: model, size, batch, number format, or the shape of an attention.
        contestant: Who: "dense", "none", a policy, a kernel.
        mode: How it was executed.
        quantity: What was measured, with its unit; the smaller the better.
        value: The figure; None where the check failed or the contestant cannot run here.
        note: Why there is no value, or what ran (a backend, a kernel).
        images: Images in the batch, where a rate makes sense.
    """

    place: str
    contestant: str
    mode: str
    quantity: str
    value: Spread | None
    note: str = ""
    images: int | None = None


@dataclass(frozen=True)
class Target:
    """A comparison with what is to be reached.

    Attributes:
        what: The comparison, in words.
        at: The place.
        reach: The bound.
        ratio: What was reached; None if a side is missing or incorrect.
        at_most: Whether the bound is an upper one.
        note: Modes and figures compared, or why there is no ratio.
    """

    what: str
    at: str
    reach: float
    ratio: float | None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None without a ratio."""
        if self.ratio is None:
            return None
        return self.ratio <= self.reach if self.at_most else self.ratio >= self.reach


class Measurements:
    """All figures of a run, in the order in which they were taken."""

    def __init__(self, entries: Iterable[Measurement] = ()) -> None:
        """Take what is there already.

        Args:
            entries: Measurements.
        """
        self.entries = list(entries)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self.entries)

    def places(self) -> list[str]:
        """Every place once, in order."""
        return list(dict.fromkeys(each.place for each in self.entries))

    def find(self, place: str, contestant: str, quantity: str, mode: str | None = None) -> Measurement | None:
        """The figure, or the smallest one over all modes if none is named; None if nothing was measured.

        Args:
            place: As in `Measurement`, and so the others.
            contestant: Who.
            quantity: What.
            mode: How, or None.
        """
        wanted = (place, contestant, quantity)
        found = [each for each in self.entries if (each.place, each.contestant, each.quantity) == wanted]
        found = [each for each in found if mode in (None, each.mode)]
        valid = [each for each in found if each.value is not None]
        return min(valid, key=_median) if valid else next(iter(found), None)

    def faster(
        self,
        what: str,
        place: str,
        ours: str,
        theirs: str,
        quantity: str,
        reach: float,
        mode: str | None = None,
    ) -> Target:
        """How many times smaller our figure is, each side in its best mode unless one is named.

        Args:
            what: The comparison, in words.
            place: Where.
            ours: Contestant.
            theirs: Contestant.
            quantity: What is compared.
            reach: How many times smaller it has to be.
            mode: The mode of both sides.
        """
        mine, other = (self.find(place, name, quantity, mode) for name in (ours, theirs))
        return compare(what, place, mine, other, reach)


def compare(
    what: str,
    at: str,
    ours: Measurement | None,
    theirs: Measurement | None,
    reach: float,
    at_most: bool = False,
) -> Target:
    """Compare two figures: theirs over ours, or ours over theirs if the bound is an upper one.

    Args:
        what: The comparison, in words.
        at: Where.
        ours: Our figure.
        theirs: The other.
        reach: The bound of the ratio.
        at_most: Whether it is an upper bound.
    """
    for name, side in (("ours", ours), ("theirs", theirs)):
        if side is None:
            return Target(what, at, reach, None, at_most, f"{name} was not measured")
        if side.value is None:
            return Target(what, at, reach, None, at_most, f"{side.contestant} ({side.mode}): {side.note}")
    assert ours is not None
    assert theirs is not None
    mine, other = _median(ours), _median(theirs)
    note = f"{_said(ours)} against {_said(theirs)}"
    return Target(what, at, reach, mine / other if at_most else other / mine, at_most, note)


def within(what: str, at: str, ours: Measurement | None, bound: float) -> Target:
    """Hold a figure against a bound in its own unit.

    Args:
        what: The figure, in words.
        at: Where.
        ours: The figure.
        bound: The largest allowed.
    """
    if ours is None or ours.value is None:
        return Target(what, at, bound, None, True, "was not measured" if ours is None else ours.note)
    return Target(what, at, bound, ours.value.median, True, _said(ours))


def overhead(
    what: str,
    at: str,
    ours: Measurement | None,
    free: Measurement | None,
    whole: Measurement | None,
    bound: float,
) -> Target:
    """What our figure has beyond one without the cost, as a share of a whole.

    Args:
        what: The comparison, in words.
        at: Where.
        ours: Our figure.
        free: The figure without the cost.
        whole: What the share is of.
        bound: The largest allowed.
    """
    for other in (free, whole):
        refused = compare(what, at, ours, other, bound, at_most=True)
        if refused.ratio is None:
            return refused
    assert ours is not None
    assert free is not None
    assert whole is not None
    share = (_median(ours) - _median(free)) / _median(whole)
    note = f"{_said(ours)} less {_said(free)}, of {_said(whole)}"
    return Target(what, at, bound, share, True, note)


def break_even(
    figures: Measurements, ours: str, theirs: str, quantity: str, places: dict[int, str]
) -> int | None:
    """The smallest measured batch from which on ours wins at every larger one; None if it loses at the largest.

    Args:
        figures: The measurements.
        ours: Contestant.
        theirs: Contestant.
        quantity: What is compared.
        places: Place of each batch size.
    """
    found = None
    for batch in sorted(places, reverse=True):
        ratio = figures.faster("", places[batch], ours, theirs, quantity, 1.0).ratio
        if ratio is None or ratio <= 1:
            return found
        found = batch
    return found


def _median(figure: Measurement) -> float:
    assert figure.value is not None
    return figure.value.median


def _said(figure: Measurement) -> str:
    return f"{figure.contestant} {_median(figure):.4g} ({figure.mode})"
