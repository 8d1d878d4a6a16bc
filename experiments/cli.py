"""The command line: `prunevit VERB key=value ...`.

Exit codes: 0 done; 1 a check failed; 2 wrong input, with a line for each problem on stderr; 130 interrupted; 143
terminated. What takes its time to import is imported once an interruption is heard.
"""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from prunevit.experiments.ranks import is_first_process

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: Words after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _terminations() as terminated:
        try:
            return _run(words)
        except KeyboardInterrupt as stop:
            # Every process of a distributed run hears of it; one of them says so.
            if is_first_process():
                how = "terminated" if terminated else "interrupted"
                left = stop.args[0] if stop.args else "nothing was written"
                print(f"prunevit: {how}, {left}", file=sys.stderr)
            return TERMINATED if terminated else INTERRUPTED


@contextmanager
def _terminations() -> Iterator[list[int]]:
    """Let SIGTERM end the work as Ctrl-C does; gives a list that is not empty once it has."""
    heard: list[int] = []

    def end(number: int, frame: object) -> NoReturn:
        heard.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield heard
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(words: list[str]) -> int:
    from prunevit.experiments.config import InputError
    from prunevit.experiments.verbs import dispatch

    try:
        return dispatch(words)
    except InputError as error:
        # Every process of a distributed run meets the same problem; one of them says so.
        if is_first_process():
            for problem in error.problems:
                print(f"prunevit: {' '.join(problem.split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
