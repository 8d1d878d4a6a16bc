"""Whole runs of `prunevit finetune`: what they write, that they learn, what they refuse."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from finetuning_runs import config, curve, finetune, losses, photos
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from wandb_records import history, records, updates

from prunevit.experiments.cli import main
from prunevit.experiments.compose import compose, group_names, read_yaml
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.data import load_training_data
from prunevit.experiments.finetuning.student import build


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photos(tmp_path_factory.mktemp("data") / "photos")


def test_a_run_learns_and_its_file_evaluates(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["max_steps=24", "lr=3e-3", "policy.keep_rate=0.5", "log_every_n_steps=2", "progress=true"]
    assert finetune(root, out, *words) == 0
    said = capsys.readouterr().out
    assert "recipe sample, version 1; verified: " in said
    rows = curve(out)
    trained = [row for row in rows if "train/loss" in row]
    held_out = [row for row in rows if "val/top1" in row]
    assert [row["step"] for row in trained] == list(range(2, 25, 2))
    assert [row["step"] for row in held_out] == [0, 4, 8, 12, 16, 20, 24]  # 18 photos make 4 steps of 4
    assert sum(row["train/loss"] for row in trained[-3:]) < 0.5 * sum(
        row["train/loss"] for row in trained[:3]
    )
    assert all(row["train/kept"] == 6 / 16 for row in trained)  # ceil(16 / 2) + 1 = 9, ceil(9 / 2) + 1 = 6
    assert all(
        row["lr"] <= 3e-3 and row["images_per_s"] > 0 and 0 <= row["data_share"] <= 1 for row in trained
    )

    best = max(row["val/top1"] for row in held_out[1:])
    evaluated = tmp_path / "evaluated"
    words = [
        f"weights={out / 'best.safetensors'}",
        f"output_dir={evaluated}",
        "data=folder",
        f"data.root={root}",
    ]
    assert (
        main(["evaluate", *words, "accelerator=cpu", "timing_s=0", "progress=false", "data.num_workers=0"])
        == 0
    )
    (row,) = json.loads((evaluated / "results.json").read_text())["rows"]
    assert (row["policy"], row["keep_rate"], row["layers"], row["trained"]) == (
        "evit",
        0.5,
        [1, 3],
        "fine-tuned",
    )
    assert row["top1"] == pytest.approx(best)

    # The written configuration repeats the run.
    again = tmp_path / "again"
    assert main(["finetune", f"config={out / 'config.yaml'}", f"output_dir={again}"]) == 0
    assert losses(again) == losses(out)


def test_the_file_says_how_it_was_made(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["recipe=dynamicvit", "recipe.widths=[64]", "max_steps=2", "seed=3", "ema_decay=0.9999"]
    assert finetune(root, out, *words) == 0
    with safe_open(out / "best.safetensors", "pt") as file:
        said = json.loads(file.metadata()["prunevit"])
        names = set(file.keys())
    pruned = build(config(root, "policy=dynamicvit"))
    assert names == set(pruned.state_dict())
    assert {"model.cls_token", "policies.0.predictors.1.classify.4.weight"} <= names
    assert (said["schema"], said["trained"], said["seed"]) == (1, "fine-tuned", 3)
    assert said["model"] == {"name": "test_vit", "pretrained": False, "img_size": 64, "num_classes": 3}
    assert (said["policy"]["name"], said["policy"]["layers"]) == ("dynamicvit", [1, 3])
    recipe = said["recipe"]
    assert (recipe["name"], recipe["version"], recipe["ema_decay"], recipe["batch_size"]) == (
        "dynamicvit",
        1,
        0.9999,
        4,
    )
    assert said["environment"]["torch"] == version("torch")


def test_the_backbone_loads_into_plain_timm(root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert finetune(root, out, "max_steps=1") == 0
    pruned = build(config(root, f"weights={out / 'best.safetensors'}"))
    pruned.export_backbone(tmp_path / "backbone.safetensors")
    plain: Any = timm.create_model(
        "test_vit", num_classes=3, img_size=64, checkpoint_path=str(tmp_path / "backbone.safetensors")
    )
    tuned = load_file(out / "best.safetensors")
    assert all(torch.equal(value, tuned[f"model.{name}"]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("name", group_names("recipe"))
def test_each_recipe_composes_and_names_its_command(name: str) -> None:
    said = compose(
        "finetune",
        FinetuneConfig,
        [f"recipe={name}", "model=deit_small_patch16_224", "model.pretrained=false"],
    )
    written = read_yaml(f"recipe/{name}.yaml")
    assert said.recipe.name == name
    assert said.policy == written["policy"]
    assert {key: getattr(said, key) for key in written if key not in ("recipe", "policy")} == {
        key: value for key, value in written.items() if key not in ("recipe", "policy")
    }
    assert said.recipe.source


def test_what_the_user_says_wins_over_the_recipe() -> None:
    said = compose(
        "finetune", FinetuneConfig, ["recipe=evit", "policy.keep_rate=0.5", "lr=1e-3", "policy=topk"]
    )
    assert said.policy["name"] == "topk"
    assert (said.policy["keep_rate"], said.lr, said.cutmix) == (0.5, 1e-3, 1.0)


BAD = {
    "size": (
        ["recipe=evit", "batch_size=4"],
        "recipe: evit is for models of 192, 384, 768 channels, got test_vit with 64",
    ),
    "parameters": (
        ["recipe=dynamicvit", "recipe.widths=[64]", "policy=evit"],
        "of the policy, evit has none",
    ),
    "frozen": (["frozen_epochs=1"], "frozen_epochs: needs a policy with parameters, evit has none"),
    "processes": (["devices=2", "batch_size=1"], "batch_size: must be a multiple of processes"),
    "parts": (
        ["accumulate_grad_batches=3"],
        "batch_size: must be a multiple of processes x accumulate_grad_batches, 3",
    ),
    "odd": (
        ["batch_size=3", "mixup=0.2"],
        "batch_size: mixup and cutmix pair the images of a part, got parts of 3",
    ),
    "large": (["batch_size=19"], "batch_size: must be at most the 18 training images, got 19"),
    "the recipe's": (
        ["recipe=dynamicvit", "recipe.widths=[64]", "batch_size=1024", "policy.layers=[1,3]"],
        "training images, got 1024 from recipe dynamicvit, which is for larger data; set batch_size, lr is scaled "
        "with it; or take its policy alone: recipe=sample policy=dynamicvit",
    ),
    "split": (["train_split=nowhere"], "train_split: must be a folder inside data.root, got nowhere"),
    "warm-up": (
        ["policy=top_p", "keep_rate_warmup_steps=2"],
        "keep_rate_warmup_epochs: needs a policy with a keep_rate",
    ),
    "optimiser": (["opt=adamwx"], "opt: must be an optimiser of timm, got adamwx"),
    "parameter": (
        ["frozen_parameters=[no_such]"],
        "frozen_parameters: must be parameters of the model, got no_such",
    ),
    "half": (["precision=bf16-true"], "precision: must be one of 32-true"),
    "graph": (["mode=graph"], "mode: must be one of eager, compile"),
    "nothing to go on": (["ckpt_path=last"], "ckpt_path: must be a checkpoint of prunevit finetune"),
    "recipe": (["recipe=evitt"], "recipe: unknown name, got evitt; the nearest is evit"),
    "second order": (["opt=adahessian"], "opt: must need first derivatives alone, got adahessian"),
    "held out": (["train_split=validation"], "train_split: must be other images than those held out"),
    "augmentation": (["aa=garbage"], "aa: must be an automatic augmentation of timm, got garbage"),
    "nan": (["lr=.nan"], "lr: must be a finite number"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(
    case: str, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, line = BAD[case]
    assert finetune(root, tmp_path / "out", *given) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert line in said[0]
    assert not (tmp_path / "out").exists()


def test_graphs_take_a_batch_in_one_pass(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert finetune(root, tmp_path / "out", "mode=compile+graph", "accumulate_grad_batches=2") == 2
    assert "accumulate_grad_batches: must be 1 with mode=compile+graph" in capsys.readouterr().err


def test_a_class_of_one_split_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split, missing in (("train", "training"), ("val", "validation")):
        root = photos(tmp_path / split)
        for photo in (root / split / "green").iterdir():
            photo.unlink()
        map_file = tmp_path / "classes.txt"
        map_file.write_text("blue\ngreen\nred\n")
        assert finetune(root, tmp_path / "out", f"data.class_map={map_file}") == 2
        assert f"got none of class green in the {missing} split" in capsys.readouterr().err


def test_a_class_folder_without_images_names_the_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = photos(tmp_path / "photos")
    for photo in (root / "train" / "green").iterdir():
        photo.unlink()
    assert finetune(root, tmp_path / "out") == 2
    assert f"of the 3 classes of the head, got 2 in {root / 'train'};" in capsys.readouterr().err


def test_no_training_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    assert finetune(root / "val", tmp_path / "out") == 2
    assert "train_split: must be a folder inside data.root, got train" in capsys.readouterr().err


def test_weights_of_another_policy(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert finetune(root, out, "policy=dynamicvit", "max_steps=1") == 0
    assert finetune(root, tmp_path / "no", f"weights={out / 'best.safetensors'}", "policy=evit") == 2
    assert "holds parameters of a policy, which EViT would lose" in capsys.readouterr().err


def test_wandb_offline_records_the_curve(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    assert finetune(root, tmp_path / "out", "max_steps=3", "logger=wandb", "logger.mode=offline") == 0
    wandb.teardown()
    recorded = records(tmp_path)
    rows = curve(tmp_path / "out")
    logged = [{name: line[name] for name in row} for line, row in zip(history(recorded), rows)]
    assert logged == rows
    assert len(rows) == 5  # the first validation, three steps, the last validation
    assert updates(recorded, "summary")["val/top1"] == rows[-1]["val/top1"]


def test_parameters_with_bounds_keep_to_them(root: Path, tmp_path: Path) -> None:
    assert finetune(root, tmp_path, "policy=ltmp", "policy.layers=[1,3]", "lr=1", "max_steps=1") == 0
    tuned = load_file(tmp_path / "last.safetensors")
    thresholds = torch.cat([tuned[f"policies.0.{name}_thresholds"] for name in ("merge", "prune")])
    assert thresholds.min() >= 0
    assert thresholds.max() <= 1
    assert (thresholds == 0).any() or (thresholds == 1).any()  # a step of that size leaves the bounds


def test_a_broken_photo_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = photos(tmp_path / "photos")
    (root / "train" / "red" / "0.png").write_bytes(b"no photo")
    assert finetune(root, tmp_path / "out", "max_steps=4") == 2
    assert "red/0.png" in capsys.readouterr().err
    assert finetune(root, tmp_path / "skip", "max_steps=4", "data.on_error=skip") == 0


def test_a_loss_that_is_not_finite_names_block_and_step(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = build(config(root)).model.state_dict()
    state["blocks.4.mlp.fc2.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "broken.safetensors")
    assert finetune(root, tmp_path / "out", f"weights={tmp_path / 'broken.safetensors'}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "loss: must be finite, got nan at step 1" in line
    assert "come from block 4, mlp" in line
    # What was logged shows where it went wrong; of weights there are none.
    assert line.endswith(f"; {tmp_path / 'out' / 'metrics.csv'} holds the steps before")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.yaml", "metrics.csv"}
    assert [row["step"] for row in curve(tmp_path / "out")] == [0]


def test_photos_are_altered_alike_wherever_they_are_read(root: Path) -> None:
    made = config(root, "aa=rand-m9-mstd0.5-inc1", "reprob=0.5", "scale_min=0.1")
    training = load_training_data(made, build(made).model).training
    first = training[(0, 5)].image
    training[(0, 6)]
    assert first is not None
    assert torch.equal(first, training[(0, 5)].image)  # type: ignore[arg-type]
    assert not torch.equal(first, training[(1, 5)].image)  # type: ignore[arg-type]
