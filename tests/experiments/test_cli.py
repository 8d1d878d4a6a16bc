"""The command line: help, the table of policies, and one clear line for everything that can be wrong."""

import os
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from prunevit.experiments.cli import main
from prunevit.experiments.config import EvaluateConfig, leaves
from prunevit.experiments.help_text import columns
from prunevit.experiments.verbs import VERBS
from prunevit.policies import POLICIES

Folders = Callable[..., Path]
Evaluate = Callable[..., int]


def test_overview_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name} " in text for name in VERBS)


def test_no_verb_is_answered_with_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: prunevit VERB" in capsys.readouterr().out


def test_help_lists_every_key_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name}=" in text for name in leaves(EvaluateConfig) if name != "policy")
    assert "batch_size=16 " in text
    assert "policy.keep_rate=0.7" in text


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], ["batch_size=8", "max_epochs=4", "ema_decay=0.9", "policy.keep_rate=0.5", "recipe=sample"]),
        (["recipe=evit"], ["batch_size=2048", "max_epochs=30", "mixup=0.8", "ema_decay=0.0", "recipe=evit"]),
        (["recipe=dynamicvit"], ["policy=dynamicvit", "policy.keep_rate=0.7"]),
        (["recipe=evit", "lr=3e-4", "data=imagenet"], ["lr=0.0003", "data=imagenet", "min_lr=2e-06"]),
    ],
)
def test_help_shows_the_values_that_would_apply(
    words: list[str], values: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", *words, "--help"]) == 0
    shown = {line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    assert {*values} <= shown


def test_help_shows_no_knob_that_a_cost_decides(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "policy=tome", "policy.gmacs=3", "--help"]) == 0
    keys = capsys.readouterr().out.partition("as shipped")[0]
    assert "policy.gmacs=3 " in keys
    assert "policy.r=" not in keys


def test_help_beside_a_word_that_names_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "recipe=evti", "--help"]) == 2
    assert capsys.readouterr().err == "prunevit: recipe: unknown name, got evti; the nearest is evit\n"
    assert main(["bench", "policy=evit", "--help"]) == 0  # a key that the verb has not is no value to show
    assert "policy=evit" not in capsys.readouterr().out


def policy_lines(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Text of each policy's cells, whatever lines it stands on, by the policy's name."""
    assert main(["policies"]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= int(os.environ["COLUMNS"])
    assert "…" not in table
    found = {}
    for part in re.split("[├└┡].*\n", table)[1:]:
        cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in part.splitlines()]
        if cells:
            name, *_ = [cell[0] for cell in cells]
            found[name] = "|".join(" ".join(column) for column in zip(*cells))
    return found


@pytest.mark.parametrize("width", ["80", "200"])
def test_policies_are_listed_with_what_running_them_shows(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    lines = policy_lines(capsys)
    assert set(POLICIES) == set(lines)
    assert lines["evit"].startswith("evit keep_rate")
    assert "|host" in lines["evit"]
    assert "CLS token, prefix attention" in lines["evit"]
    assert "ICLR 2022" in lines["evit"]
    assert "|device" in lines["top_p"]
    assert "CLS token" not in lines["random"]


@pytest.mark.parametrize("width", ["80", "120"])
def test_help_stands_in_columns_that_fit(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main(["evaluate", "--help"]) == 0
    text = capsys.readouterr().out
    broken = [line for line in text.splitlines() if "_counts=" not in line]  # no word is cut, however long
    assert max(map(len, broken)) <= int(width)
    assert "\n  patch_dropout  policy.prob=0.5 policy.layers=[0]\n" in text
    assert "policy.trace=(must be set)" in text
    assert "policy.layers=[3,6,9] " in text
    assert "policy.compound=false" in text


def test_columns_are_as_wide_as_their_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "46")
    rows = [
        ("a=1", "one"),
        ("long=2", "what takes more than the room that there is"),
        ("far_too_long=3", "three"),
    ]
    assert columns(rows, widest=8) == [
        "  a=1     one",
        "  long=2  what takes more than the room that",
        "          there is",
        "  far_too_long=3",
        "          three",
    ]


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"prunevit {version('prunevit')}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evalute"], "unknown verb, got evalute; the nearest is evaluate"),
        (["evaluate", "data.rot=/x"], "data.rot: unknown key; the nearest is data.root"),
        (["evaluate", "policy=evti"], "policy: unknown name, got evti; the nearest is evit"),
        (["evaluate", "model=deit_smal_patch16_224"], "model: unknown name, got deit_smal_patch16_224"),
        (["evaluate", "data=imagnet"], "data: unknown name, got imagnet"),
        (["evaluate", "policy.keep_rate=1.3"], "EViT: keep_rate must be in (0, 1], got 1.3"),
        (["evaluate", "policy.keep_rate=0"], "EViT: keep_rate must be in (0, 1], got 0"),
        (["evaluate", "policy.layers=[3,12]"], "EViT: layers must lie in 0..11"),
        (["evaluate", "data=folder", "data.root=/nowhere"], "data.root: must exist, got /nowhere"),
        (["evaluate", "model=swin_tiny_patch4_window7_224"], "got SwinTransformer"),
        (["evaluate", "model=resnet18", "model.img_size=64"], "got ResNet"),
        (
            ["plan", "policy=top_p", "data=folder", "data.root=/nowhere"],
            "data.root: must exist, got /nowhere",
        ),
        (["evaluate", "batch_size=0"], "batch_size: must be at least 1, got 0"),
        (["evaluate", "output_dir=/dev/null/x"], "output_dir: must be a folder that can be written"),
        (["evaluate", "weights=/nowhere.pth"], "weights: must be a file, got /nowhere.pth"),
        (["evaluate", "accelerator=gpu"], 'accelerator: "gpu" needs a CUDA device'),
        (["evaluate", "mode=graph"], 'mode: "graph" needs a CUDA device; use mode=eager'),
        (["evaluate", "mode=compile+graph"], 'mode: "compile+graph" needs a CUDA device'),
        (
            ["evaluate", "mode=fast"],
            "mode: must be one of eager, compile, graph, compile+graph, best, got fast",
        ),
        (["evaluate", "backend=triton"], 'backend: "triton" needs a CUDA device'),
        (["evaluate", "precision=16-mixed"], 'precision: "16-mixed" needs a CUDA device'),
        (
            ["evaluate", "policy.layers=20:"],
            'EViT: layers must lie in 0..11 (the model has 12 blocks), got "20:"',
        ),
        (
            ["evaluate", "policy.layers=3:20"],
            'EViT: layers must lie in 0..11 (the model has 12 blocks), got "3:20"',
        ),
        (["evaluate", "policy.layers=[]"], "EViT: layers must name at least one block, got none"),
        (["evaluate", "policy.layers=12"], "EViT: layers must lie in 0..11"),
        (["evaluate", "policy=tome", "policy.r=-1"], "ToMe: r must be a whole number of at least 0, got -1"),
        (["policies", "x=1"], "x: unknown key; there are none"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert line.startswith("prunevit: ")
    assert line.count("prunevit:") == 1
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_all_problems_have_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "batch_size=0", "policy.foo=1", "seed=x"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code was run",))


def spoil(kind: str, root: Path) -> list[str]:
    """Make one thing wrong about a good folder of three classes; return the words that go with it."""
    if kind in ("corrupt", "zero bytes"):
        (root / "b" / "0.png").write_bytes(b"" if kind == "zero bytes" else b"\x89PNG\r\n\x1a\nrubbish")
    elif kind == "empty":
        for file in root.glob("*/*.png"):
            file.unlink()
    elif kind == "unknown class":
        return ["model.num_classes=1000"]
    elif kind == "classes":
        return ["model.num_classes=4"]
    elif kind == "other architecture":
        import timm

        torch.save(timm.create_model("test_vit2", num_classes=3).state_dict(), root.parent / "w.pth")
        return [f"weights={root.parent / 'w.pth'}"]
    elif kind == "pickle":
        torch.save({"model": Planted()}, root.parent / "w.pth")
        return [f"weights={root.parent / 'w.pth'}"]
    return []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("corrupt", "b/0.png: not a readable image"),
        ("zero bytes", "b/0.png: not a readable image"),
        ("empty", "data: no images found in"),
        ("unknown class", 'data.root: class folders must be classes of the model, got "a"'),
        (
            "classes",
            "data.root: must have a class folder with images for each of the 4 classes of the head, got 3",
        ),
        ("other architecture", "w.pth must fit test_vit, got"),
        ("pickle", "w.pth"),
    ],
)
def test_bad_files_are_one_line_and_leave_nothing(
    kind: str,
    message: str,
    folders: Folders,
    evaluate: Evaluate,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    root = folders(a=2, b=2, c=1)
    words = spoil(kind, root)
    assert evaluate(root, tmp_path / "out", *words) == 2
    output = capsys.readouterr()
    (line,) = output.err.splitlines()
    assert message in line
    assert "code was run" not in output.out
    assert not (tmp_path / "out").exists()


def test_unreadable_images_can_be_counted(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = folders(a=2, b=2, c=1)
    for name in ("a/1.png", "c/0.png"):
        (root / name).write_bytes(b"")
    assert evaluate(root, tmp_path / "out", "data.on_error=skip") == 0
    assert "unreadable images left out: 2" in capsys.readouterr().out
    for file in root.glob("*/*.png"):
        file.write_bytes(b"")
    assert evaluate(root, tmp_path / "none", "data.on_error=skip") == 2
    assert "at least one image must be readable" in capsys.readouterr().err


def test_nan_logits_name_the_block(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import timm

    model: Any = timm.create_model("test_vit", num_classes=3)
    with torch.no_grad():
        model.blocks[2].mlp.fc2.bias[0] = torch.nan
    torch.save(model.state_dict(), tmp_path / "nan.pth")
    assert evaluate(folders(a=1, b=1, c=1), tmp_path / "out", f"weights={tmp_path / 'nan.pth'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "logits: must be finite" in line
    assert "block 2, mlp" in line
    assert not (tmp_path / "out").exists()


def test_results_are_not_replaced_unasked(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root, out = folders(a=1, b=1, c=1), tmp_path / "out"
    assert evaluate(root, out) == 0
    before = (out / "results.json").read_text()
    assert evaluate(root, out, "seed=9") == 2
    assert (out / "results.json").read_text() == before
    assert evaluate(root, out, "seed=9", "overwrite=true") == 0
    assert (out / "results.json").read_text() != before


def test_without_a_terminal_a_line_says_what_runs(
    folders: Folders, evaluate: Evaluate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    root = folders(a=1, b=1, c=1)
    assert evaluate(root, tmp_path / "quiet") == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert evaluate(root, tmp_path / "out", "progress=true") == 0
    shown = capsys.readouterr()
    assert shown.err.splitlines()[0] == "prunevit: evit on test_vit, 3 images"
    assert shown.out == told.out.replace("quiet", "out")
