"""Between which rows a speed shows no order, because it scatters."""

from collections.abc import Sequence
from string import ascii_lowercase

from prunevit.experiments.report import Row, spread

SHARED = "rows that share a letter: their img/s overlap (p20 to p80), no order shown"


def ties(rows: Sequence[Row]) -> list[str]:
    """Give each row letters (a compact letter display): two rows share one if their speeds overlap.

    A letter stands for a largest set of rows that all overlap; such a set meets where one of its intervals begins.

    Args:
        rows: Speeds of (1, 3), (2, 5), (4, 6) and (7, 8) give "a", "ab", "b" and "".
    """
    spreads = {number: found for number, row in enumerate(rows) if (found := spread(row))}
    meeting = {
        frozenset(number for number, (low, high) in spreads.items() if low <= start <= high)
        for start, _ in spreads.values()
    }
    largest = sorted(
        sorted(each) for each in meeting if len(each) > 1 and not any(each < other for other in meeting)
    )
    return [
        "".join(_letter(n) for n, each in enumerate(largest) if number in each) for number in range(len(rows))
    ]


def _letter(number: int) -> str:
    return f"{ascii_lowercase[number % 26]}{number // 26 or ''}"
