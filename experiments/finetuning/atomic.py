"""Files that are whole or not there: written beside their target, moved into place once they lie on the disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from prunevit.experiments.config import InputError, first_line

SUFFIX = ".part"  # of what a run that was killed in the middle of writing leaves behind


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Give a path to write to; it takes the target's place when the block ends well.

    Args:
        path: The target.

    Raises:
        InputError: If the disk does not take it; the target stays as it was.
    """
    temporary = path.with_name(f".{path.name}{SUFFIX}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            os.fchmod(file.fileno(), 0o666 & ~_umask())  # safetensors leaves it to its owner alone
        os.replace(temporary, path)
    # torch's and safetensors' writers say a full disk in their own words.
    except (OSError, RuntimeError, SafetensorError) as error:
        kept = "; the last good one is kept" if path.exists() else ""
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        raise InputError(f"output_dir: {path} could not be written ({reason}){kept}") from error
    finally:
        temporary.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> None:
    """Remove what was being written when an earlier run was killed.

    Args:
        folder: Where it wrote.
    """
    for leftover in folder.glob(f".*{SUFFIX}"):
        leftover.unlink()


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
