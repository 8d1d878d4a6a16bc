"""Whole runs on a small model: every figure of the row against a plain computation."""

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from wandb_records import records, updates

from prunevit import prune
from prunevit.experiments.cli import main
from prunevit.experiments.config import DataConfig
from prunevit.experiments.data import load_data
from prunevit.experiments.metrics import wilson
from prunevit.experiments.report import COLUMNS, SPEED_COLUMNS
from prunevit.policies import TopP

Folders = Callable[..., Path]
Evaluate = Callable[..., int]


def read(output: Path) -> dict[str, Any]:
    (row,) = json.loads((output / "results.json").read_text())["rows"]
    return row


def test_every_figure_of_a_row(folders: Folders, evaluate: Evaluate, weights: Path, tmp_path: Path) -> None:
    root, out = folders(a=4, b=4, c=3), tmp_path / "out"
    words = ["policy=top_p", "policy.p=0.5", "policy.layers=[1,3]", f"weights={weights}", "numeric_images=6"]
    assert evaluate(root, out, *words) == 0
    row = read(out)

    model = timm.create_model("test_vit", num_classes=3, checkpoint_path=str(weights)).eval()
    data = load_data(DataConfig(name="folder", root=str(root)), model)
    (batch,) = data.loader(batch_size=99, num_workers=0)
    pruned = prune(model, TopP(0.5, layers=(1, 3))).eval()
    with torch.no_grad():
        dense, trace = model(batch.images), pruned.trace(batch.images, batch.positions)
    logits, rows = trace.logits, trace.mlp_rows.double()

    hits = int((logits.argmax(1) == batch.targets).sum())
    assert row["images"] == 11
    assert row["top1"] == pytest.approx(100 * hits / 11)
    assert (row["top1_low"], row["top1_high"]) == pytest.approx([100 * each for each in wilson(hits, 11)])
    assert row["top5"] == row["dense_top5"] == 100.0
    assert row["dense_top1"] == pytest.approx(100 * (dense.argmax(1) == batch.targets).double().mean().item())
    assert row["agreement"] == pytest.approx(
        100 * (dense.argmax(1) == logits.argmax(1)).double().mean().item()
    )
    difference = (logits - dense).abs().double()
    kl = torch.nn.functional.kl_div(
        logits.log_softmax(1), dense.log_softmax(1), log_target=True, reduction="batchmean"
    )
    cosine = torch.cosine_similarity(logits, dense).mean()
    assert row["logit_max_abs"] == pytest.approx(difference.max().item(), rel=1e-4)
    assert row["logit_mean_abs"] == pytest.approx(difference.mean().item(), rel=1e-4)
    assert row["logit_kl"] == pytest.approx(kl.item(), rel=1e-3)
    assert row["logit_cosine"] == pytest.approx(cosine.item(), rel=1e-5)
    assert row["logit_max_abs"] > 1e-3  # or the comparison shows nothing
    assert 0 < row["numeric_max_abs"] < 1e-4

    assert row["tokens_mean"] == pytest.approx(rows.mean().item())
    assert [each["mean"] for each in row["tokens_by_block"]] == pytest.approx(rows.mean(1).tolist())
    assert rows.std(1)[-1] > 0  # really ragged
    # By hand, C = 64: 4 C^2 for qkv and proj, 6 C^2 for an MLP of 3 C, 2 C N for the attention; 100 patches.
    attention = trace.attention_rows.double()
    by_hand = (attention * 4 * 64**2 + 2 * 64 * attention**2 + rows * 6 * 64**2).sum(0)
    by_hand += 100 * 3 * 16**2 * 64 + 64 * 3
    assert row["gmacs"] - row["policy_gmacs"] == pytest.approx(by_hand.mean().item() / 1e9, rel=1e-9)
    assert row["dense_gmacs"] > row["gmacs"]
    assert {key: row[key] for key in ("policy", "knob", "knob_value", "keep_rate", "layers", "img_size")} == {
        "policy": "top_p",
        "knob": "p",
        "knob_value": 0.5,
        "keep_rate": None,
        "layers": [1, 3],
        "img_size": 160,
    }
    assert row["backend"] == "padded"  # what "auto" takes on a CPU
    assert (row["predictors"], row["passed_over"], row["empty_folders"]) == (None, 0, 0)
    assert (row["weights"], row["trained"], row["accelerator"]) == (str(weights), None, "cpu")
    assert all(row[name] is None for name in SPEED_COLUMNS)


def test_no_policy_changes_nothing(
    folders: Folders, evaluate: Evaluate, weights: Path, tmp_path: Path
) -> None:
    root, out = folders(a=2, b=2, c=2), tmp_path / "out"
    assert evaluate(root, out, "policy=none", f"weights={weights}", "data.num_images=4") == 0
    row = read(out)
    assert (row["images"], row["agreement"], row["knob"]) == (4, 100.0, None)
    assert row["logit_max_abs"] < 1e-4
    assert row["gmacs"] == pytest.approx(row["dense_gmacs"])
    assert row["tokens_p5"] == row["tokens_p95"] == 101


def test_the_files_say_the_same(folders: Folders, evaluate: Evaluate, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert evaluate(folders(a=2, b=2, c=2), out, "timing_s=0.01", "seed=4") == 0
    row = read(out)
    assert set(COLUMNS) <= set(row)
    assert row["weights"] == "random"
    assert row["trained"] is None
    assert row["keep_rate"] == row["knob_value"] == 0.7
    assert row["batch_size"] == 4
    assert row["speedup"] == pytest.approx(row["images_per_s"] / row["dense_images_per_s"])
    assert all(row[name] > 0 for name in ("images_per_s", "latency_ms", "dense_latency_ms"))
    assert row["peak_mb"] is None
    assert row["timing"]["latency_ms"]["p20"] <= row["latency_ms"] <= row["timing"]["latency_ms"]["p80"]
    (line,) = csv.DictReader((out / "results.csv").read_text().splitlines())
    assert float(line["top1"]) == row["top1"]
    assert json.loads(line["layers"]) == row["layers"] == [1, 3]
    # The written configuration repeats the run.
    again = tmp_path / "again"
    assert main(["evaluate", f"config={out / 'config.yaml'}", f"output_dir={again}", "timing_s=0"]) == 0
    changed = {"timing", *SPEED_COLUMNS}
    assert {k: v for k, v in read(again).items() if k not in changed} == {
        k: v for k, v in row.items() if k not in changed
    }


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "16-true", "64-true"])
def test_other_precisions(
    folders: Folders, evaluate: Evaluate, weights: Path, tmp_path: Path, precision: str
) -> None:
    out = tmp_path / "out"
    words = [f"weights={weights}", f"precision={precision}", "timing_s=0.01"]
    assert evaluate(folders(a=2, b=2, c=2), out, *words) == 0
    row = read(out)
    assert (row["images"], row["precision"]) == (6, precision)
    assert row["numeric_max_abs"] < (1e-10 if precision == "64-true" else 0.5)
    assert row["gmacs"] < row["dense_gmacs"]


def test_draws_do_not_depend_on_the_batches(
    folders: Folders, evaluate: Evaluate, weights: Path, tmp_path: Path
) -> None:
    root = folders(a=3, b=3, c=3)
    words = ["policy=random", "policy.layers=[1,3]", f"weights={weights}"]
    deviations = {}
    for name, more in {"2": ["batch_size=2"], "9": ["batch_size=9"], "seed": ["seed=1"]}.items():
        assert evaluate(root, tmp_path / name, *words, *more) == 0
        deviations[name] = read(tmp_path / name)["logit_mean_abs"]
    assert deviations["2"] == pytest.approx(deviations["9"], rel=1e-4)
    assert deviations["seed"] != pytest.approx(deviations["9"], rel=1e-4)


def test_real_labels(evaluate: Evaluate, tmp_path: Path, folders: Folders) -> None:
    root = folders(a=1, b=1, c=1)
    for number, folder in enumerate("abc", 1):
        (root / folder / "0.png").rename(root / folder / f"ILSVRC2012_val_{number:08d}.png")
    (tmp_path / "real.json").write_text(
        "[[0, 1, 2], [], [0, 1, 2]]"
    )  # right whatever is guessed, or not counted
    assert evaluate(root, tmp_path / "out", f"data.real_labels={tmp_path / 'real.json'}") == 0
    row = read(tmp_path / "out")
    assert (row["real_top1"], row["dense_real_top1"], row["images"]) == (100.0, 100.0, 3)


def test_wandb_offline_records_the_row(
    folders: Folders, evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    words = ["logger=wandb", "logger.mode=offline"]
    assert evaluate(folders(a=1, b=1, c=1), tmp_path / "out", *words) == 0
    wandb.teardown()
    summary, row = updates(records(tmp_path), "summary"), read(tmp_path / "out")
    assert {name: summary[name] for name in row} == row


def test_two_processes_give_the_row_of_one(
    folders: Folders, evaluate: Evaluate, weights: Path, tmp_path: Path
) -> None:
    root = folders(a=9, b=8, c=4)
    words = ["policy=top_p", "policy.p=0.5", "policy.layers=[1,3]", f"weights={weights}", "numeric_images=5"]
    assert evaluate(root, tmp_path / "one", *words) == 0
    command = [
        sys.executable,
        "-m",
        "prunevit.experiments.cli",
        "evaluate",
        "model=test_vit",
        "model.num_classes=3",
    ]
    command += [*words, "data=folder", f"data.root={root}", f"output_dir={tmp_path / 'two'}", "devices=2"]
    command += ["accelerator=cpu", "batch_size=4", "timing_s=0", "progress=false", "data.num_workers=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = read(tmp_path / "one"), read(tmp_path / "two")
    assert one["images"] == two["images"] == 21
    for name in ("top1", "top5", "dense_top1", "agreement", "tokens_p5", "tokens_p95", "tokens_by_block"):
        assert two[name] == one[name], name
    for name in ("logit_mean_abs", "logit_kl", "logit_cosine", "tokens_mean", "gmacs", "policy_gmacs"):
        assert two[name] == pytest.approx(one[name], rel=1e-6), name
    assert two["numeric_max_abs"] < 1e-4
