"""What goes wrong once a run has begun: a line each, exit code 2, nothing written; and what is no failure."""

import csv
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from prunevit import Trace, prune
from prunevit.experiments import measures
from prunevit.experiments.config import EvaluateConfig, InputError
from prunevit.experiments.policy_spec import policy_errors, policy_problems
from prunevit.policies import FixedRate, ThresholdL2, TopK, resolve

Folders = Callable[..., Path]
Evaluate = Callable[..., int]

POLICY = """
from prunevit.policies import TopK

class Mine(TopK):
    def __init__(self):
        {construct}
        super().__init__(0.5, [1])

    def setup(self, info):
        {setup}
        super().setup(info)

    def forward(self, tokens, attention, layer):
        {forward}
        return super().forward(tokens, attention, layer)
"""


def user_policy(folder: Path, **bodies: str) -> str:
    """Write a policy in which the given bodies stand; return its name."""
    parts = {"construct": "pass", "setup": "pass", "forward": "pass", **bodies}
    (folder / "failing_policy.py").write_text(POLICY.format(**parts))
    sys.modules.pop("failing_policy", None)
    return "failing_policy:Mine"


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ({"construct": "raise ValueError('no luck')"}, "policy failing_policy:Mine: no luck"),
        ({"construct": "[][0]"}, "policy failing_policy:Mine: IndexError: list index out of range"),
        ({"setup": "info.nothing"}, "policy failing_policy:Mine: AttributeError: 'ModelInfo' object"),
        ({"forward": "return None"}, "policy failing_policy:Mine: "),
        ({"forward": "return tokens.x"}, "policy failing_policy:Mine: "),
        ({"forward": "raise ValueError('two\\nlines')"}, "policy failing_policy:Mine: two"),
        ({"forward": "1 / 0"}, "policy failing_policy:Mine: ZeroDivisionError: division by zero"),
    ],
)
def test_a_policy_that_fails_is_one_line(
    bodies: dict[str, str],
    message: str,
    folders: Folders,
    evaluate: Evaluate,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name = user_policy(tmp_path, **bodies)
    assert evaluate(folders(a=1, b=1, c=1), tmp_path / "out", f"policy={name}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"prunevit: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('later')", "RuntimeError: later"),
        ("raise SystemExit(0)", "SystemExit"),
        ("import nothing_of_the_kind", "No module named 'nothing_of_the_kind'"),
        ("", "no 'Mine' in unimportable"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(
    text: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unimportable.py").write_text(text)
    sys.modules.pop("unimportable", None)
    with pytest.raises(ValueError, match=r'policy: "unimportable:Mine" must name a class') as caught:
        resolve("unimportable:Mine")
    assert what in str(caught.value)
    assert len(policy_problems({"name": "unimportable:Mine"})) == 1


def test_a_shipped_policy_keeps_its_traceback_and_its_own_name() -> None:
    with pytest.raises(InputError, match=r"^TopK: no$"), policy_errors("topk"):
        raise ValueError("TopK: no")
    with pytest.raises(InputError, match=r"^policy topk: size 3$"), policy_errors("topk"):
        raise TypeError("size 3")
    with pytest.raises(IndexError), policy_errors("topk"):
        raise IndexError
    with pytest.raises(torch.OutOfMemoryError), policy_errors("my.module:Mine"):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("kind", ["missing", "empty", "junk", "folder", "other", "part", "null byte"])
def test_a_file_that_holds_no_trace_is_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.pt"
    if kind in ("empty", "junk"):
        file.write_bytes(b"" if kind == "empty" else b"nothing of the kind")
    elif kind == "folder":
        file.mkdir()
    elif kind in ("other", "part"):
        torch.save([1] if kind == "other" else {"prunevit_trace": 1, "stages": [{"layer": 1}]}, file)
    path = f"{file}\0" if kind == "null byte" else str(file)
    (line,) = policy_problems({"name": "replay", "trace": path})
    assert line.startswith(f"policy.trace: must be a file that Trace.save wrote, got {path} (")


def test_a_trace_of_other_images_is_one_line(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pruned = prune(timm.create_model("test_vit", num_classes=3), TopK(0.5, layers=(1,))).eval()
    with torch.no_grad():
        trace: Trace = pruned.trace(torch.randn(2, 3, 160, 160))
    trace.save(tmp_path / "trace.pt")
    words = ["policy=replay", f"policy.trace={tmp_path / 'trace.pt'}"]
    assert evaluate(folders(a=1, b=1, c=1), tmp_path / "out", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "prunevit: Replay: each image must be in the trace with as many rows as here"


def test_more_processes_than_images(
    folders: Folders,
    evaluate: Evaluate,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    root = folders(a=1, b=1, c=1)
    assert evaluate(root, tmp_path / "out", "devices=4") == 2
    assert capsys.readouterr().err == "prunevit: devices: must be at most the 3 images, got 4\n"
    assert evaluate(root, tmp_path / "out", "devices=9") == 2
    assert capsys.readouterr().err == "prunevit: devices: must be at most 8 processes on this CPU, got 9\n"


def test_a_broken_link_is_named_or_counted(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = folders(a=1, b=1, c=1, d=0)
    (root / "a" / "9.png").symlink_to(root / "nowhere")
    (root / "a" / "notes.txt").write_text("")
    assert evaluate(root, tmp_path / "out") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "a/9.png: cannot be opened (No such file or directory)" in line
    assert evaluate(root, tmp_path / "out", "data.on_error=skip") == 0
    said = capsys.readouterr().out
    assert "unreadable images left out: 1" in said
    assert "files passed over, which no image format ends like: 1" in said
    assert "class folders without images: 1" in said


def test_a_threshold_that_is_no_number_loses_nothing(
    folders: Folders, evaluate: Evaluate, tmp_path: Path
) -> None:
    words = ["policy=threshold_l2", "policy.layers=[1]", "policy.rule=absolute", "policy.threshold=-.inf"]
    assert evaluate(folders(a=1, b=1, c=1), tmp_path / "out", *words) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert content["config"]["policy"]["threshold"] is content["rows"][0]["knob_value"] is None
    assert "-.inf" in (tmp_path / "out" / "config.yaml").read_text()


def test_the_backend_is_asked_for_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, torch.dtype, int, int | None]] = []

    def choose(backend: str, q: torch.Tensor, dense_rows: int | None) -> str:
        asked.append((backend, q.dtype, q.shape[-1], dense_rows))
        return "triton" if dense_rows is None else "padded"

    monkeypatch.setattr(measures, "choose_backend", choose)
    pruned = prune(timm.create_model("test_vit", num_classes=3), FixedRate(0.5, layers=(2,))).eval()
    ragged = prune(timm.create_model("test_vit", num_classes=3), ThresholdL2(0.0, layers=(2,))).eval()
    torch.manual_seed(0)
    run = EvaluateConfig(precision="bf16-mixed")
    images = torch.randn(2, 3, 160, 160)
    with torch.no_grad():
        assert measures.backend_of(pruned, run, pruned.trace(images)) == "padded"
        # 100 patches and CLS; half of them and CLS after the attention of block 2.
        assert asked == [("auto", torch.bfloat16, 32, rows) for rows in (101, 101, 101, 51, 51, 51)]
        asked.clear()
        assert measures.backend_of(ragged, run, ragged.trace(images)) == "padded+triton"
        assert [rows for *_, rows in asked] == [101, 101, None, None, None, None]


def test_predictors_without_weights_are_told(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    save_file(timm.create_model("test_vit", num_classes=3).state_dict(), tmp_path / "w.safetensors")
    words = [f"weights={tmp_path / 'w.safetensors'}", "policy.layers=[1]"]
    for policy in ("dynamicvit", "topk"):
        assert (
            evaluate(
                folders(a=1, b=1, c=1) if policy == "dynamicvit" else tmp_path / "photos",
                tmp_path / policy,
                f"policy={policy}",
                *words,
            )
            == 0
        )
        errors = capsys.readouterr().err
        (line,) = csv.DictReader((tmp_path / policy / "results.csv").read_text().splitlines())
        (row,) = json.loads((tmp_path / policy / "results.json").read_text())["rows"]
        if policy == "dynamicvit":
            assert (
                "prunevit: policy dynamicvit has random predictors: there are no weights for them" in errors
            )
            assert (row["trained"], row["predictors"], line["trained"]) == (None, "random", "")
        else:
            assert "predictors" not in errors
            assert (row["trained"], row["predictors"]) == (None, None)  # the file does not say
