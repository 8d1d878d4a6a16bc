"""Ctrl-C, SIGTERM and a reader that has gone: one line or none, the exit code, and nothing half-written."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prunevit.experiments import verbs
from prunevit.experiments.cli import main

Folders = Callable[..., Path]


def test_ctrl_c_during_the_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "prunevit.experiments.verbs", Interrupted())
    assert main(["policies"]) == 130
    assert capsys.readouterr().err == "prunevit: interrupted, nothing was written\n"


def test_termination_during_the_imports(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminated:
        def __getattr__(self, name: str) -> Any:
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setitem(sys.modules, "prunevit.experiments.verbs", Terminated())
    assert main(["policies"]) == 143
    assert capsys.readouterr().err == "prunevit: terminated, nothing was written\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_the_first_process_says_that_it_was_interrupted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "dispatch", interrupt)
    monkeypatch.setenv("RANK", "1")
    assert main(["policies"]) == 130
    assert capsys.readouterr().err == ""


def interrupt(words: list[str]) -> int:
    raise KeyboardInterrupt


def test_what_an_interruption_breaks_is_the_interruption(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a second signal, and the end of a child, on which torch's handler of SIGCHLD raises."""

    def unwinding(words: list[str]) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGCHLD)
            raise OSError("half closed")

    def child_ended(number: int, frame: object) -> None:
        raise RuntimeError("DataLoader worker is killed")

    monkeypatch.setattr(verbs, "dispatch", unwinding)
    before = signal.signal(signal.SIGCHLD, child_ended)
    try:
        assert main(["policies"]) == 143
        assert signal.getsignal(signal.SIGCHLD) is child_ended
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert capsys.readouterr().err == "prunevit: terminated, nothing was written\n"


def test_output_that_nobody_reads_on_ends_quietly() -> None:
    command = [sys.executable, "-m", "prunevit.experiments.cli", "evaluate", "--help"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert (process.stderr.read(), process.wait()) == (b"", 141)
    process.stderr.close()


def test_ctrl_c_as_soon_as_the_program_starts(tmp_path: Path) -> None:
    """The first import of torch raises it: it must come from inside `main`."""
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    command = [
        sys.executable,
        "-c",
        "import sys; from prunevit.experiments.cli import main; sys.exit(main(['policies']))",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "prunevit: interrupted, nothing was written\n")


SLOW_POLICY = """
import time
from prunevit.policies import NoPruning, TopK

class Slow(TopK):
    def __init__(self):
        super().__init__(0.5, [1])

    def forward(self, tokens, attention, layer):
        open("started", "w").close()
        time.sleep(60)
        return super().forward(tokens, attention, layer)
"""


@pytest.mark.parametrize(
    ("number", "code", "how"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_signal_leaves_nothing(
    number: signal.Signals, code: int, how: str, folders: Folders, tmp_path: Path
) -> None:
    root = folders(a=2, b=2, c=1)
    (tmp_path / "slow_policy.py").write_text(SLOW_POLICY)
    words = ["evaluate", "model=test_vit", "model.pretrained=false", "model.num_classes=3", "data=folder"]
    words += [f"data.root={root}", "policy=slow_policy:Slow", "progress=false"]
    command = [
        sys.executable,
        "-m",
        "prunevit.experiments.cli",
        *words,
        "data.num_workers=2",
        "accelerator=cpu",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        # Where the tests themselves run in the background, Ctrl-C is ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "started").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list((tmp_path / "outputs").iterdir())) == 1
    os.killpg(process.pid, number)  # as a terminal and `timeout` do: the loader's processes end of it too
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.splitlines()[-1] == f"prunevit: {how}, nothing was written"
    assert "Traceback" not in errors
    assert not (tmp_path / "outputs").exists()
