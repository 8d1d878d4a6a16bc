"""The command line: `prunevit VERB key=value ...`.

Exit codes: 0 done; 2 wrong input, with a line for each problem on stderr; 130 interrupted.
What takes its time to import is imported once an interruption is heard.
"""

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Args:
        arguments: Words after the program's name; those of the process by default.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _run(words)
    except KeyboardInterrupt:
        print("prunevit: interrupted, nothing was written", file=sys.stderr)
        return 130


def _run(words: list[str]) -> int:
    from prunevit.experiments.config import InputError
    from prunevit.experiments.verbs import dispatch

    try:
        return dispatch(words)
    except InputError as error:
        # Every process of a distributed run meets the same problem; one of them says so.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            for problem in error.problems:
                print(f"prunevit: {' '.join(problem.split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
