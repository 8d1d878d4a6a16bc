"""What an interrupted comparison goes on from: the state of each row, by process, beside the results to come."""

import fcntl
import json
import logging
import os
import pickle
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from prunevit.experiments.config import InputError
from prunevit.experiments.contender import Contender, State
from prunevit.experiments.ranks import is_first_process
from prunevit.experiments.report import Row, finite
from prunevit.experiments.trainer import gathered

OUTPUTS = Path("outputs")  # where runs go that name no folder
FOLDER = "unfinished"  # inside the output folder, until the results are written
SETTINGS = "settings.json"  # in it: the configuration of the run
LOCK = ".lock"  # in it: held by the run that works here
ROWS = "rows.jsonl"  # in it: the rows that are complete, a line each, but for their speed
EVERY_S = 2.0  # so much work at most is lost when the process is killed
UNREADABLE = (OSError, RuntimeError, EOFError, ValueError, KeyError, pickle.UnpicklingError)

log = logging.getLogger("prunevit")


class Journal:
    """The state of every row of this process, written whole every few seconds.

    Attributes:
        folder: Where it lies.
    """

    def __init__(self, output: Path, settings: Row) -> None:
        """Take the place; nothing is read or written yet.

        Args:
            output: The folder of the results.
            settings: The configuration of the run.

        Raises:
            InputError: If another run works there.
        """
        self.folder, self.settings = output / FOLDER, settings
        self.rank, self.world = 0, 1
        self.kept = time.monotonic()
        self._lock: int | None = None
        if self.folder.is_dir():
            self._claim()

    def restore(self, contenders: Sequence[Contender], rank: int, world: int) -> None:
        """Go on with every row that an earlier run began under the same key, with as many processes.

        Args:
            contenders: The rows; one without a state starts from nothing.
            rank: This process.
            world: Number of processes.
        """
        self.folder = gathered(self.folder)[0]  # that of the first process: the others may have named another
        self.rank, self.world = rank, world
        states = self._read()
        for each in contenders:
            if each.key in states:
                each.resume(states[each.key])

    def keep(self, contenders: Sequence[Contender], at_once: bool = False) -> None:
        """Write the state, if it is time.

        Args:
            contenders: The rows; one that failed is not kept, so that it is tried again.
            at_once: It is time.

        Raises:
            InputError: If the disk does not take it, or another run works there.
        """
        if not at_once and time.monotonic() - self.kept < EVERY_S:
            return
        states = {each.key: each.state() for each in contenders if each.error is None}
        target = self._file()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if self.rank == 0:
                self._claim()
                (self.folder / SETTINGS).write_text(json.dumps(self.settings), encoding="utf-8")
            torch.save(states, target.with_suffix(".new"))
            os.replace(target.with_suffix(".new"), target)
        except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
            raise InputError(f"output_dir: the state could not be written to {target} ({error})") from error
        self.kept = time.monotonic()

    def note(self, rows: Sequence[Row]) -> None:
        """Write the rows that are complete, for whoever looks before the results are there.

        Args:
            rows: They.
        """
        target = self.folder / ROWS
        text = "".join(json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
        target.with_suffix(".new").write_text(text, encoding="utf-8")
        os.replace(target.with_suffix(".new"), target)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Say how it goes on, when the work in this context is interrupted and something of it was kept.

        Behind it, other runs may work here.
        """
        try:
            yield
        except KeyboardInterrupt:
            if not self._file().is_file():
                raise
            raise KeyboardInterrupt(f"the same command goes on where it was ({self.folder})") from None
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def remove(self) -> None:
        """Throw it away, once the results are written."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _claim(self) -> None:
        """Show other runs that this one works here; the system forgets it when the process ends, however it ends."""
        if self._lock is None and is_first_process():
            self._lock = locked(self.folder)
            if self._lock is None:
                raise InputError(
                    f"output_dir: must be a folder that no other run works in, got {self.folder.parent}"
                )

    def _file(self) -> Path:
        return self.folder / f"{self.rank}-of-{self.world}.pt"

    def _read(self) -> dict[str, State]:
        if not self._file().is_file():
            return {}
        try:
            return torch.load(self._file(), map_location="cpu", weights_only=True)
        except UNREADABLE as error:
            log.warning("%s cannot be read, the comparison starts anew (%s)", self._file(), error)
            return {}


def unfinished(settings: Row) -> Path | None:
    """Find the output folder of the same run that was interrupted, among those that nobody named; the newest one.

    One that a run is at work in is left to it.

    Args:
        settings: The configuration of the run.
    """
    for folder in sorted(OUTPUTS.glob(f"*/{FOLDER}"), reverse=True):
        with suppress(OSError, ValueError):
            same = json.loads((folder / SETTINGS).read_text(encoding="utf-8")) == settings
            if same and (lock := locked(folder)) is not None:
                os.close(lock)
                return folder.parent
    return None


def locked(folder: Path) -> int | None:
    """Lock a folder, unless another process has, and give the file that frees it when it is closed.

    A loader's processes, which may outlive a killed run by seconds, do not hold a lock of this kind.

    Args:
        folder: It gets a file named `LOCK`.
    """
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
