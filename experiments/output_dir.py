"""Folders of runs that nobody named: each run has one of its own, and takes it back if it leaves nothing there."""

from contextlib import suppress
from itertools import count
from pathlib import Path

from prunevit.experiments.ranks import is_first_process

_made: list[Path] = []


def reserve(path: Path) -> Path:
    """Make a folder that no other run has.

    Of the processes of one run only the first makes it; what the others get may be the name of another one.

    Args:
        path: The folder wished for; where it is taken, "-1", "-2", ... is put behind its name.

    Raises:
        OSError: If it cannot be made.
    """
    if not is_first_process():
        return path
    parents = [each for each in path.parents if not each.exists()]
    for number in count():
        folder = path.with_name(f"{path.name}-{number}") if number else path
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir()  # fails if it is there: of two runs one makes it
        except FileNotFoundError:  # another run took the parent back just now
            continue
        except FileExistsError:
            if folder.parent.is_dir():
                continue
            raise
        _made.extend([folder, *parents])
        return folder
    raise AssertionError


def take_back() -> None:
    """Remove the folders that `reserve` made, but for those that hold something."""
    for folder in sorted(_made, key=lambda each: len(each.parts), reverse=True):
        with suppress(OSError):
            folder.rmdir()
    _made.clear()
