"""`prunevit reproduce`: the list, the row on stand-in photos and weights, ours minus theirs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
from safetensors.torch import save_file

from prunevit.experiments.cli import main
from prunevit.experiments.metrics import wilson
from prunevit.experiments.planning.published import REPRODUCIBLE
from prunevit.experiments.planning.reproduce import differences

Folders = Callable[..., Path]


def test_without_a_name_the_rows_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in REPRODUCIBLE)
    assert "78.83" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tome_r13_deit"], "name: unknown row, got tome_r13_deit; the nearest is tome_r13_deit_s"),
        (["tome_r13_deit_s"], "data.root: must be set"),
        (
            ["tome_r13_deit_s", "data.root=.", "policy.r=12"],
            "policy.r: is that of the published row tome_r13",
        ),
        (["tome_r13_deit_s", "data.root=.", "policy=evit"], "policy.name: is that of the published row"),
        (
            ["tome_r13_deit_s", "data.root=.", "model=deit_tiny_patch16_224"],
            "model: is that of the published",
        ),
        (
            ["tome_r13_deit_s", "data.root=.", "model.img_size=384"],
            "model.img_size: is that of the published",
        ),
        (["evit_0.5_off_the_shelf_deit_s", "data.root=.", "policy.gmacs=3"], "policy.gmacs: is that of the"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    err = capsys.readouterr().err
    assert line in err
    assert err.count("\n") == 1


def test_ours_minus_theirs() -> None:
    low, high = wilson(39_400, 50_000)
    row = {
        **{"top1": 78.8, "top1_low": 100 * low, "top1_high": 100 * high, "images": 50_000},
        **{"dense_top1": 79.0, "dense_top1_low": 78.6, "dense_top1_high": 79.4},
        **{"gmacs": 2.2937, "policy_gmacs": 0.0028},
    }
    lines = differences(row, REPRODUCIBLE["tome_r13_deit_s"])
    assert lines[1] == (
        "unpruned top-1: ours 79.00 - theirs 79.82 = -0.82 "
        "(95 % interval -1.22 to -0.42 on 50000 images: they differ)"
    )
    assert lines[2] == (
        "top-1: ours 78.80 - theirs 78.83 = -0.03 "
        "(95 % interval -0.39 to +0.33 on 50000 images: no difference shown)"
    )
    assert len(lines) == 3  # no cost was published
    assert (
        differences(row, REPRODUCIBLE["tome_r16_deit_s"])[3] == "GMACs: ours 2.294 (model 2.291), theirs 2.3"
    )


def test_a_row_on_stand_in_photos_and_weights(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = folders(n01440764=2, n01443537=2), tmp_path / "out"
    model: Any = timm.create_model("deit_tiny_patch16_224")
    save_file(model.state_dict(), tmp_path / "deit.safetensors")
    words = ["unpruned_deit_t", f"data.root={root}", f"weights={tmp_path / 'deit.safetensors'}"]
    fast = ["timing_s=0", "numeric_images=0", "progress=false", "data.num_workers=0", "accelerator=cpu"]
    assert main(["reproduce", *words, *fast, f"output_dir={out}"]) == 0
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert (row["policy"], row["model"], row["images"]) == ("none", "deit_tiny_patch16_224", 4)
    assert row["gmacs"] == pytest.approx(1.254, abs=5e-4)
    said = capsys.readouterr().out
    assert f"ours {row['top1']:.2f} - theirs 72.13 = {row['top1'] - 72.13:+.2f}" in said
    assert "on 4 images" in said
