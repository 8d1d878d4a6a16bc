"""Short names of files and folders."""

from collections.abc import Sequence
from pathlib import Path


def told_apart(paths: Sequence[Path]) -> list[str]:
    """Their names, with as many of the folders above as tell them apart.

    Args:
        paths: Different ones; "x/best" and "y/best" are called that, "x/a" and "y/b" are called "a" and "b".
    """
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0) + 1):
        labels = ["/".join(each[-length:]) for each in parts]
        if len({*labels}) == len(labels):
            return labels
    return [*map(str, paths)]
