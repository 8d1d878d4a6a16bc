"""Runs `interpreted_cases.py` where TRITON_INTERPRET=1 stands before the first import of triton."""

import os
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton")
NUMPY = tuple(int(part) for part in numpy.__version__.split(".")[:2])


@pytest.mark.skipif(
    triton.__version__.startswith("3.6.") and NUMPY >= (2, 4),
    reason="the interpreter of triton 3.6 cannot take a loop bound under numpy 2.4 and newer",
)
def test_kernels_through_the_interpreter() -> None:
    cases = Path(__file__).with_name("interpreted_cases.py")
    command = [sys.executable, "-m", "pytest", str(cases), "-q", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        command, env=environment, cwd=cases.parent, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
