"""The command line: `prunevit VERB key=value ...`.

Exit codes: 0 done; 1 a check failed; 2 wrong input, with a line for each problem on stderr; 130 interrupted; 141 nobody
reads on, as in `| head -1`; 143 terminated. What takes its time to import is imported once an interruption is heard.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prunevit.experiments.ranks import is_first_process

AGAIN_S = 1.0  # `timeout` sends SIGTERM to the process and then to its group: one termination


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: Words after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _interruptions() as heard:
        try:
            code = _run(words)
            sys.stdout.flush()
            return code
        except BaseException as error:
            # After a signal, whatever else comes out of the unwinding is that interruption.
            if heard or isinstance(error, KeyboardInterrupt):
                return _interrupted(error, (heard or [signal.SIGINT])[0])
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                return _unread()
            raise


@contextmanager
def _interruptions() -> Iterator[list[int]]:
    """Let SIGTERM end the work as Ctrl-C does; gives the signals that were heard."""
    heard: list[int] = []
    before: dict[int, Any] = {}
    last = 0.0

    def end(number: int, frame: object) -> None:
        nonlocal last
        since, last = time.monotonic() - last, time.monotonic()
        if heard and since < AGAIN_S:
            return
        heard.append(number)
        # A loader's processes end with this one; torch's handler would raise for each of them.
        before.setdefault(signal.SIGCHLD, signal.signal(signal.SIGCHLD, lambda *_: None))
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield heard
        return
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
        before[signal.SIGINT] = signal.signal(signal.SIGINT, end)
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupted(error: BaseException, number: int) -> int:
    """Say so; every process of a distributed run hears of it, and one of them speaks."""
    if is_first_process():
        how = "terminated" if number == signal.SIGTERM else "interrupted"
        left = error.args[0] if isinstance(error, KeyboardInterrupt) and error.args else "nothing was written"
        print(f"prunevit: {how}, {left}", file=sys.stderr)
    return 128 + number


def _unread() -> int:
    """End quietly where the reader of the output has gone; Python would flush the rest of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE


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
