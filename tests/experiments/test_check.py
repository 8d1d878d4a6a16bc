"""`prunevit check`: its report and exit codes, words without a key, and policies that live in a file."""

import sys
from pathlib import Path

import pytest

from prunevit.experiments import checking
from prunevit.experiments.cli import main
from prunevit.experiments.verbs import VERBS, Verb, with_keys
from prunevit.policies import EViT, ToMe, resolve

SOUND = """
import prunevit

class Largest(prunevit.PruningPolicy):
    knob = "keep_rate"
    knob_range = (0.0, 1.0)

    def __init__(self, keep_rate: float = 0.5, layers: tuple[int, ...] = (1,)) -> None:
        super().__init__(keep_rate, layers)

    def forward(self, tokens, attention, layer):
        return prunevit.top_k(tokens, tokens.x.norm(dim=-1), self.rate(layer))
"""
DICE = SOUND.replace("tokens.x.norm(dim=-1)", "tokens.x.norm(dim=-1) * torch.rand(len(tokens.x))")
EXIT = SOUND.replace("return prunevit.top_k", "raise SystemExit('enough')\n        return prunevit.top_k")
CRASH = SOUND.replace("return prunevit.top_k", "self.nothing\n        return prunevit.top_k")


def policy_file(folder: Path, code: str, name: str = "mine.py") -> str:
    (folder / name).write_text(code.replace("import prunevit", "import prunevit\nimport torch"))
    return f"{folder / name}:Largest"


def test_a_sound_policy_of_a_file_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", policy_file(tmp_path, SOUND), "policy.keep_rate=0.25", "accelerator=cpu"]) == 0
    text = capsys.readouterr().out
    assert "25 passed, 1 not applicable" in text
    assert "12 rows" in text  # ceil(0.25 * 42) patches and CLS
    assert "one patch stays" in text


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (DICE, "two forward passes of the same images"),
        (CRASH, "(mine.py:13)"),
        (EXIT, "SystemExit: enough (mine.py:13)"),
    ],
)
def test_a_failure_is_named_and_the_exit_code_is_1(
    code: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["check", policy_file(tmp_path, code), "accelerator=cpu"]) == 1
    text = capsys.readouterr().out
    assert line in text
    assert "1 failed" in text
    assert "not reached" in text


def test_a_policy_that_exits_ends_a_plan_with_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = EXIT.replace("super().__init__(keep_rate, layers)", "raise SystemExit(0)")
    for name, code, line in (
        ("a.py", EXIT, "SystemExit: enough (a.py:13)"),
        ("b.py", made, "SystemExit: 0 (b.py:10)"),
    ):
        policy = policy_file(tmp_path, code, name)
        assert main(["plan", "model=deit_tiny_patch16_224", f'policy="{policy}"']) == 2
        assert capsys.readouterr().err == f"prunevit: policy {policy}: {line}\n"


def test_all_shipped_policies_have_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checking, "POLICIES", {"evit": EViT, "tome": ToMe})
    assert main(["check", "--all", "accelerator=cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("evit          passed  24 passed, 2 not applicable, ")
    assert lines[1].startswith("tome          passed  24 passed, 2 not applicable, ")
    assert lines[-1] == "2 of 2 policies pass"


def test_one_that_fails_among_all_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    results = [checking.Result("mask", "passed"), checking.Result("dead_rows", "failed", "they change all")]
    assert checking.summarise("mine", results, 1.0) == 1
    assert capsys.readouterr().out.splitlines() == [
        "mine          failed  1 passed, 1 failed, 1.0 s",
        "  dead rows: they change all",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "policy: name one policy, as in prunevit check evit, or all of them: --all"),
        (["check", "evit", "--all"], "policy: name one policy"),
        (["check", "evti"], "policy: unknown name, got evti; the nearest is evit"),
        (["check", "evit", "tome"], "policy: must be given once"),
        (["check", "evit", "policy.keep_rate=2"], "EViT: keep_rate must be in (0, 1], got 2"),
        (["check", "evit", "accelerator=gpu"], 'accelerator: "gpu" needs a CUDA device'),
        (["check", "--every"], "--every: an argument must be key=value"),
        (["check", "/nowhere.py:Mine"], "got no file /nowhere.py"),
        (["check", "/nowhere.py"], '"file.py:Class", got "/nowhere.py"'),
        (["evaluate", "policy=/nowhere.py:Mine"], "got no file /nowhere.py"),
    ],
)
def test_wrong_words_are_answered_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_bare_words_and_switches_get_their_keys() -> None:
    assert with_keys(VERBS["check"], ["evit", "policy.layers=[1]"]) == ['policy="evit"', "policy.layers=[1]"]
    assert with_keys(VERBS["check"], ["--all"]) == ["all=true"]
    assert with_keys(VERBS["evaluate"], ["evit", "policy=topk"]) == ["evit", "policy=topk"]
    several = Verb("", "comparison.report_run:ReportConfig", "", "runs")
    assert with_keys(several, ["a b", "3", "output=x"]) == ['runs=["a b","3"]', "output=x"]
    assert with_keys(several, ["runs/lr=0.1", "../a=b"]) == ['runs=["runs/lr=0.1","../a=b"]']
    assert with_keys(several, []) == []


def test_a_file_is_loaded_once_and_its_policies_are_named(tmp_path: Path) -> None:
    name = policy_file(tmp_path, SOUND, "random.py")  # the name of a module of Python itself
    cls = resolve(name)
    assert resolve(str(tmp_path / ".." / tmp_path.name / "random.py:Largest")) is cls
    assert cls is sys.modules[cls.__module__].Largest  # as pickle finds it
    assert sys.modules.get("random") is not sys.modules[cls.__module__]
    with pytest.raises(ValueError, match=r"no 'Small' in .*random.py; policies there: Largest"):
        resolve(name.replace("Largest", "Small"))
    broken = policy_file(tmp_path, "import nothing_of_that_name", "broken.py")
    for _ in range(2):  # a module that failed is not taken for a loaded one
        with pytest.raises(ValueError, match="No module named 'nothing_of_that_name'"):
            resolve(broken)
