"""The study of what fine-tuning wins back: its commands compose, its report says what the rows say."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from finetuning_runs import photos
from PIL import Image

from prunevit.experiments.compose import compose
from prunevit.experiments.finetuning import photo_pack
from prunevit.experiments.finetuning.study import Task, commands, run_task, tasks
from prunevit.experiments.finetuning.study_report import JOURNAL, cell, read_journal, won_back, write_report
from prunevit.experiments.images import read_image
from prunevit.experiments.metrics import wilson
from prunevit.experiments.sample_model import CLASSES
from prunevit.experiments.verbs import VERBS


def test_every_command_composes() -> None:
    rows = tasks()
    assert len({task.name for task in rows}) == len(rows) == 1 + 3 * (1 + 1 + 3 + 3) + 36 + 3
    for task in (each for each in rows if each.seed == 2 or each.policy == "evit"):
        for verb, *words in commands(task, Path("photos"), Path("work"), ["max_epochs=2"]):
            # A weights file is there once the first command has run.
            config = compose(
                verb, VERBS[verb].schema, [word for word in words if not word.startswith("weights=")]
            )
            assert config.seed == task.seed
            if verb == "finetune" or not task.tuned:
                assert (config.policy["name"], config.policy.get("keep_rate")) == (
                    task.policy,
                    task.keep_rate,
                )
            if verb == "finetune":
                assert (config.recipe.name, config.max_epochs) == ("clothing10", 2)
    learnable = next(task for task in rows if task.policy == "dynamicvit" and task.tuned)
    (train, evaluate) = commands(learnable, Path("photos"), Path("work"), [])
    assert {"lr=1e-3", "backbone_lr_scale=0.1"} <= {*train}
    assert f"weights=work/{learnable.name}/last.safetensors" in evaluate  # not chosen on the held-out photos


@pytest.mark.parametrize("tuned", [False, True])
def test_a_row_is_what_its_commands_give(tuned: bool, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for split, folder in product(("train", "val"), CLASSES):
        (root / split / folder).mkdir(parents=True)
        Image.new("RGB", (40, 40), "navy").save(root / split / folder / "0.png")
    quiet = ("progress=false", "data.num_workers=0", "accelerator=cpu")
    small = ("max_epochs=1", "precision=32-true", "batch_size=5")
    found = run_task(Task("evit", 0.3, 1, tuned), root, tmp_path / "work", small, quiet)
    row = found["row"]
    assert (row["policy"], row["keep_rate"], row["seed"], row["images"]) == ("evit", 0.3, 1, 10)
    assert row["trained"] == ("fine-tuned" if tuned else "off-the-shelf")
    assert row["top1"] == 10.0  # one photo in each of ten classes
    assert [line.split()[1] for line in found["commands"]] == ["finetune"] * tuned + ["evaluate"]
    assert [path.suffix for path in (tmp_path / "work").iterdir()] == [".log"]


def entry(policy: str, rate: float | None, seed: int, tuned: bool, top1: float) -> dict[str, Any]:
    row = {
        "policy": policy,
        "keep_rate": rate,
        "seed": seed,
        "images": 985,
        "top1": top1,
        "dense_top1": 95.0 if tuned else 94.0,  # of the weights that the row has
        "gmacs": 2.3,
    }
    environment = {"gpus": ["a GPU"], "torch": "2", "commit": f"{seed}abcdef0123"}
    name = f"{policy}_{rate}_{seed}_{tuned}"
    return {
        "name": name,
        "tuned": tuned,
        "commands": [f"prunevit {name}"],
        "environment": environment,
        "row": row,
    }


def test_the_report(tmp_path: Path) -> None:
    entries = [entry("evit", 0.5, 0, False, 88.0), entry("none", None, 0, True, 94.5)]
    entries += [entry("evit", 0.5, seed, True, top1) for seed, top1 in enumerate((91.0, 92.0, 93.0))]
    lines = [json.dumps(each) for each in entries]
    (tmp_path / JOURNAL).write_text("\n".join(lines) + '\n{"name": "half a')
    assert read_journal(tmp_path / JOURNAL) == entries
    write_report(tmp_path)
    table = (tmp_path / "finetuning.md").read_text()
    low, high = (100 * end for end in wilson(round(0.92 * 985), 985))
    assert (
        f"| evit | 0.5 | 2.30 | 88.00 (85.8 to 89.9) | 92.00 ± 1.00 ({low:.1f} to {high:.1f}) | 67% |"
        in table
    )
    assert "Unpruned, off the shelf: 94.00 %" in table
    assert "a GPU, torch 2, commit 0abcdef, 1abcdef, 2abcdef." in table
    shown = [each for each in entries if each["row"]["seed"] == 0]
    assert table.split("```")[1].split("\n")[1:-1] == [
        each["commands"][0] for each in shown[:1] + shown[2:] + shown[1:2]
    ]
    assert [
        each["name"] for each in json.loads((tmp_path / "finetuning.json").read_text())["rows"]
    ] == sorted(each["name"] for each in entries)
    with Image.open(tmp_path / "finetuning.png") as picture:
        assert picture.size[0] > 500
    tuned = cell(entries, "evit", 0.5, True)
    assert (tuned.mean, tuned.deviation) == (92.0, 1.0)
    assert won_back(88.0, 92.0, 94.0) == pytest.approx(4 / 6)


def test_photos_travel(tmp_path: Path) -> None:
    root = photos(tmp_path / "photos", train=2, val=2)
    photo_pack.main(["pack", str(root), str(tmp_path / "pack"), "--side", "36"])
    photo_pack.main(["unpack", str(tmp_path / "pack"), str(tmp_path / "back")])
    before, after = (
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (root, tmp_path / "back")
    )
    assert after == {name.replace(".png", ".ppm") if name.startswith("train") else name for name in before}
    held_out = "val/red/0.png"
    assert (tmp_path / "back" / held_out).read_bytes() == (root / held_out).read_bytes()
    small, original = (
        read_image(str(path), "photo")
        for path in (tmp_path / "back" / "train" / "red" / "0.ppm", root / "train" / "red" / "0.png")
    )
    assert small.size == (36, 36)
    assert np.abs(np.asarray(small).mean((0, 1)) - np.asarray(original).mean((0, 1))).max() < 4
