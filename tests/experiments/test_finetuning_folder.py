"""The folder of a fine-tuning run, given where results or weights belong: one line says what to give."""

from pathlib import Path

import pytest
import torch
from result_folders import two_policies, write_run

from prunevit.experiments.cli import main
from prunevit.experiments.comparison.saved import read_runs
from prunevit.experiments.config import InputError
from prunevit.experiments.weights import read_weights


def test_a_checkpoint_to_go_on_from_is_no_weights_file(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"pruned.model.cls_token": torch.zeros(1)}, "prunevit": {"val": {}}}, path)
    said = f"weights: must be a file of weights, got {path}, which is what prunevit finetune goes on from; "
    with pytest.raises(InputError) as none:
        read_weights(str(path))
    assert str(none.value) == f"{said}let it go on with ckpt_path={path}, it leaves best.safetensors"
    for name in ("last.safetensors", "best.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(InputError) as beside:
            read_weights(str(path))
        assert str(beside.value) == f"{said}use weights={tmp_path / name}"


@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (
            ["best.safetensors", "last.safetensors", "last.ckpt"],
            "got one of prunevit finetune; evaluate what it trained, prunevit evaluate weights=A/best.safetensors, and",
        ),
        (
            ["last.ckpt"],
            "which has not validated yet; let it go on with ckpt_path=A/last.ckpt, then evaluate A/best",
        ),
        (["metrics.csv"], "A must hold results.json, which is written last; finish the run by repeating its"),
    ],
)
def test_it_holds_no_results(
    names: list[str],
    advice: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("A").mkdir()
    for name in names:
        Path("A", name).touch()
    assert main(["report", "A", "output=page.html"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert advice in line
    assert not Path("page.html").exists()


def test_a_folder_of_folders_is_told_apart(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_run(tmp_path / name, two_policies())
    with pytest.raises(InputError) as told:
        read_runs([tmp_path])
    assert str(told.value) == (
        f"runs: {tmp_path} must be a folder of results, got one with 2 of them inside; give {tmp_path}/*"
    )
