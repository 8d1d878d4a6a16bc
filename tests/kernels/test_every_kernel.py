"""The program that starts every kernel, for tools that watch a GPU: here through the interpreter, on a CPU."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")
from every_kernel import launched_kernels, report  # noqa: E402

NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])
PROGRAM = Path(__file__).with_name("every_kernel.py")
KERNELS = PROGRAM.parents[2] / "kernels"


@pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and NUMPY >= (2, 4),
    reason="the interpreter of triton 3.6 cannot take a loop bound under numpy 2.4 and newer",
)
def test_it_starts_all_that_is_bound() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--device", "cpu"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    bound = {
        name
        for file in KERNELS.glob("*.py")
        for name in re.findall(r"\b[Bb](?:ound|ind)\(\s*(\w+_kernel)\b", file.read_text())
    }
    assert len(bound) > 20
    assert {line.split(":")[0].split(".")[1] for line in lines} == bound
    assert re.fullmatch(rf"{len(lines)} kernels, \d+ starts", last)


def test_a_kernel_that_is_not_started_fails_it() -> None:
    started = Counter(launched_kernels())
    report(started)
    del started["triton_join.join_kernel"]
    with pytest.raises(SystemExit, match=r"triton_join\.join_kernel not"):
        report(started)
