"""Whole comparisons on a small model: every row is what `evaluate` finds, in one pass over the images."""

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from comparing import EVIT, FLAKY, TOPK, compare, count_calls, read
from safetensors.torch import load_file, save_file
from timm.models import VisionTransformer

from prunevit.experiments import data, journal
from prunevit.experiments.comparison.baselines import smaller_models
from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.rows import plan_rows
from prunevit.experiments.comparison.shared import build_contenders
from prunevit.experiments.comparison.statistics import mcnemar
from prunevit.experiments.compose import compose
from prunevit.experiments.config import ModelConfig
from prunevit.experiments.report import SPEED_COLUMNS

Folders = Callable[..., Path]
Rows = Callable[..., Path]
Evaluate = Callable[..., int]


@pytest.fixture(autouse=True)
def _flaky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    monkeypatch.chdir(tmp_path)


def test_rows_are_those_of_evaluate_and_each_image_is_read_once(
    folders: Folders,
    evaluate: Evaluate,
    weights: Path,
    rows_file: Rows,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, reads = folders(a=4, b=4, c=3), count_calls(monkeypatch, data, "read_image")
    forwards = count_calls(monkeypatch, VisionTransformer, "forward")
    words = [f"rows={rows_file(TOPK, EVIT)}", f"weights={weights}"]
    assert compare(root, tmp_path / "out", *words) == 0
    assert (len(reads), len(forwards)) == (11, 3)  # batches of 4
    found = read(tmp_path / "out")
    topk, evit = found["rows"]
    assert [topk["name"], evit["name"]] == [
        "topk keep_rate=0.4 layers=[1,3]",
        "evit keep_rate=0.7 layers=[2]",
    ]
    more = [f"weights={weights}", "policy=topk", "policy.layers=[1,3]", "policy.keep_rate=0.4"]
    assert evaluate(root, tmp_path / "alone", *more) == 0
    (alone,) = read(tmp_path / "alone")["rows"]
    assert set(alone) < set(topk)
    assert {name: topk[name] for name in alone if name not in ("name", "config")} == {
        name: value for name, value in alone.items() if name not in ("name", "config")
    }
    assert topk["data"]["files"] == 11
    assert topk["top1"] != evit["top1"] or topk["logit_mean_abs"] != evit["logit_mean_abs"]

    arrays = np.load(tmp_path / "out" / "predictions.npz")
    assert arrays["index"].tolist() == [*range(11)]
    assert arrays["target"].tolist() == [0] * 4 + [1] * 4 + [2] * 3
    right = {row["name"]: arrays[row["name"]] == arrays["target"] for row in (topk, evit)}
    for row in (topk, evit):
        assert row["top1"] == pytest.approx(100 * right[row["name"]].mean())
        assert row["dense_top1"] == pytest.approx(100 * (arrays["dense"] == arrays["target"]).mean())
        assert row["unpruned_difference"] == pytest.approx(row["top1"] - row["dense_top1"])
    (pair,) = found["pairs"]
    assert (pair["a"], pair["b"]) == (topk["name"], evit["name"])
    assert pair["difference"] == pytest.approx(topk["top1"] - evit["top1"])
    a, b = right.values()
    assert pair["p"] == mcnemar(int((a & ~b).sum()), int((b & ~a).sum()))
    lines = [*csv.DictReader((tmp_path / "out" / "results.csv").read_text().splitlines())]
    assert [(line["name"], float(line["top1"])) for line in lines] == [
        (row["name"], row["top1"]) for row in (topk, evit)
    ]
    assert not (tmp_path / "out" / journal.FOLDER).exists()


def test_policies_times_rates_times_seeds(
    folders: Folders, weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["policies=[random,fixed_rate]", "keep_rates=[0.5,0.3]", "seeds=[0,1]", f"weights={weights}"]
    assert compare(folders(a=3, b=3, c=3), tmp_path / "out", *words, "model.img_size=192") == 2
    words += ["timing_s=0.01", "model=vit_tiny_patch16_224", "model.img_size=64", "model.pretrained=false"]
    words += ["pictures=1"]
    assert compare(tmp_path / "photos", tmp_path / "out", *words[:3], *words[4:]) == 0
    found = read(tmp_path / "out")
    assert [row["name"] for row in found["rows"]] == [
        *(f"random keep_rate={rate} seed={seed}" for rate in (0.5, 0.3) for seed in (0, 1)),
        *(f"fixed_rate keep_rate={rate}" for rate in (0.5, 0.3)),
    ]
    assert [group["rows"] for group in found["seeds"]] == [
        [f"random keep_rate={rate} seed={seed}" for seed in (0, 1)] for rate in (0.5, 0.3)
    ]
    assert len(found["pairs"]) == 15
    told = [line for line in capsys.readouterr().out.splitlines() if "seeds" in line]
    assert [line.partition(":")[0] for line in told] == [f"random keep_rate={rate}" for rate in (0.5, 0.3)]
    assert all(line.endswith(" % over 2 seeds") and len(line) < 80 for line in told)
    for row in found["rows"]:
        assert row["images_per_s"] > 0
        assert row["dense_latency_ms"] == found["rows"][0]["dense_latency_ms"]  # timed once
        assert row["speedup"] == pytest.approx(row["images_per_s"] / row["dense_images_per_s"])
    beside = {str(file.relative_to(tmp_path / "out")) for file in (tmp_path / "out").rglob("*.*")}
    assert {"report.html", "table.tex", "figures/accuracy_gmacs.pdf", "pictures/000000.png"} <= beside
    assert "unfinished" not in {file.split("/")[0] for file in beside}


def test_a_policy_that_fails_is_a_row_with_its_error(
    folders: Folders,
    rows_file: Rows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = rows_file(TOPK, "policy: {name: 'flaky:Flaky', images: 4}, name: broken", EVIT)
    assert compare(folders(a=2, b=2, c=2), tmp_path / "out", f"rows={rows}", "model.pretrained=false") == 0
    found = read(tmp_path / "out")
    assert [row["error"] is None for row in found["rows"]] == [True, False, True]
    assert "not this image" in found["rows"][1]["error"]
    assert "top1" not in found["rows"][1]
    assert [row.get("images") for row in found["rows"]] == [6, None, 6]
    assert [(pair["a"], pair["b"]) for pair in found["pairs"]] == [
        (found["rows"][0]["name"], found["rows"][2]["name"])
    ]
    assert "broken failed: " in capsys.readouterr().out
    assert "broken" not in np.load(tmp_path / "out" / "predictions.npz")


def test_fine_tuned_and_other_weights_in_one_table(
    folders: Folders, weights: Path, rows_file: Rows, tmp_path: Path
) -> None:
    state = load_file(weights)
    state["head.bias"] += torch.tensor([0.0, 0.0, 1e4])  # it says 2 whatever it sees
    said = {"schema": 1, "policy": {"name": "topk", "keep_rate": 0.4, "layers": [1]}, "trained": "fine-tuned"}
    save_file(state, tmp_path / "tuned.safetensors", {"prunevit": json.dumps(said)})
    rows = rows_file(
        "weights: tuned.safetensors", "weights: tuned.safetensors, policy: {name: evit, layers: [2]}", EVIT
    )
    words = [f"rows={rows}", f"weights={weights}"]
    assert compare(folders(a=2, b=2, c=1), tmp_path / "out", *words) == 0
    tuned, other, plain = read(tmp_path / "out")["rows"]
    assert [row["policy"] for row in (tuned, other, plain)] == ["topk", "evit", "evit"]
    assert (tuned["keep_rate"], tuned["layers"], other["layers"]) == (0.4, [1], [2])
    assert (tuned["trained"], other["trained"], plain["trained"]) == ("fine-tuned", "fine-tuned", None)
    assert tuned["top1"] == other["top1"] == tuned["dense_top1"] == 20.0  # beside its own unpruned model
    assert plain["logit_max_abs"] < 1e3
    arrays = np.load(tmp_path / "out" / "predictions.npz")
    assert set(arrays[tuned["name"]]) == {2}


def test_smaller_models_of_a_family() -> None:
    def names(name: str, pretrained: bool = True) -> list[str]:
        return smaller_models(ModelConfig(name, pretrained))

    assert names("deit_base_patch16_224.fb_in1k") == [
        "deit_small_patch16_224.fb_in1k",
        "deit_tiny_patch16_224.fb_in1k",
    ]
    assert names("vit_small_patch16_224") == ["vit_tiny_patch16_224"]
    assert names("deit3_base_patch16_224", pretrained=False) == [
        "deit3_medium_patch16_224",
        "deit3_small_patch16_224",
    ]
    words = [
        "model=vit_small_patch16_224",
        "model.num_classes=3",
        "model.pretrained=false",
        "policies=[evit]",
    ]
    config = compose("compare", CompareConfig, [*words, "keep_rates=[0.5]", "baselines=[model]"])
    contenders, views = build_contenders(plan_rows(config), config)
    assert [(each.spec.name, each.spec.kind) for each in contenders] == [
        ("evit keep_rate=0.5", "policy"),
        ("vit_tiny_patch16_224", "model"),
    ]
    evit, tiny = contenders
    assert tiny.dense is evit.pruned.model is not tiny.pruned.model
    assert (tiny.pruned.info.width, tiny.pruned.num_classes, tiny.view, views) == (192, 3, 0, [])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_rows_on_a_gpu_in_their_mode(
    mode: str, folders: Folders, weights: Path, rows_file: Rows, tmp_path: Path
) -> None:
    root, rows = folders(a=3, b=3, c=3), rows_file(TOPK, EVIT, "policy: {name: top_p, layers: [1]}")
    words = [f"rows={rows}", f"weights={weights}", "timing_s=0.05"]
    assert compare(root, tmp_path / "cpu", *words) == 0
    words += ["accelerator=gpu", f"mode={mode}", "baselines=[resize]", "pictures=1"]
    assert compare(root, tmp_path / "gpu", *words) == 0
    on_cpu, on_gpu = read(tmp_path / "cpu")["rows"], read(tmp_path / "gpu")["rows"]
    assert [row["error"] for row in on_gpu] == [None] * 6
    for one, other in zip(on_cpu, on_gpu):
        assert one["gmacs"] == pytest.approx(other["gmacs"], rel=0.02)
        assert other["mode"] == f"pruned {mode}, dense {mode}"
        assert other["images_per_s"] > 0
        assert other["peak_mb"] > 0


def test_the_unpruned_model_on_smaller_images(
    folders: Folders,
    evaluate: Evaluate,
    weights: Path,
    rows_file: Rows,
    tmp_path: Path,
) -> None:
    root = folders(a=2, b=2, c=2, size=200)
    words = [f"rows={rows_file(TOPK)}", "baselines=[resize]", f"weights={weights}"]
    assert compare(root, tmp_path / "out", *words) == 0
    topk, *smaller = read(tmp_path / "out")["rows"]
    assert [(row["kind"], row["img_size"]) for row in (topk, *smaller)] == [
        ("policy", 160),
        ("resize", 144),
        ("resize", 112),
        ("resize", 96),
    ]
    more = ["policy=none", f"weights={weights}", "model.img_size=112"]
    assert evaluate(root, tmp_path / "alone", *more) == 0
    (alone,) = read(tmp_path / "alone")["rows"]
    for name in ("top1", "gmacs", "tokens_mean"):
        assert smaller[1][name] == pytest.approx(alone[name]), name
    assert smaller[1]["dense_gmacs"] == topk["dense_gmacs"] > topk["gmacs"]
    assert smaller[1]["dense_top1"] == topk["dense_top1"]
    assert smaller[1]["agreement"] < 100.0 or smaller[1]["logit_mean_abs"] > 1e-3
    assert all(smaller[1][name] is None for name in SPEED_COLUMNS)


def test_equal_cost(folders: Folders, tmp_path: Path) -> None:
    words = ["model=vit_tiny_patch16_224", "model.img_size=96", "model.pretrained=false", "gmacs=[0.15]"]
    assert compare(folders(a=1, b=1, c=1), tmp_path / "out", "policies=[evit,tome]", *words) == 0
    rows = read(tmp_path / "out")["rows"]
    assert [row["name"] for row in rows] == ["evit gmacs=0.15", "tome gmacs=0.15"]
    assert all(row["gmacs"] == pytest.approx(0.15, rel=0.01) for row in rows)
    assert rows[0]["knob"] == "keep_rate"
    assert rows[1]["knob_value"] is not None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policies=[evit,topk,evit]"], "policies: evit is listed twice"),
        (["keep_rates=[0.5,0.5]"], "keep_rates: 0.5 is listed twice"),
        (["seeds=[]"], "seeds: must hold a value, got none"),
        (["seeds=[0,1]", "rows=rows.yaml"], "seeds: belongs to policies; in a file of rows"),
        (["policies=[[evit]]"], "policies: must be a list of single values, got [['evit']]"),
        (["policies=[]"], "policies: must name at least one policy"),
        (
            ["policies=[evit,tome]"],
            "keep_rates: tome has no keep_rate, its knob is r; use gmacs=[...], or rows=FILE",
        ),
        (["policies=[none]"], "keep_rates: none has no keep_rate, it has no knob"),
        (["policies=[evti]"], "policies: unknown name, got evti; the nearest is evit"),
        (["policies=[evit]", "keep_rates=[1.5]"], "keep_rate must be in (0, 1], got 1.5"),
        (["keep_rates=[0.5]", "gmacs=[1.0]"], "gmacs: sets the knob of each policy itself"),
        (["baselines=[shrink]"], "baselines: must be one of resize, model, got shrink"),
        (
            ["baselines=[model]", "model=vit_tiny_patch16_224", "model.img_size=32"],
            "baselines: no smaller model of the family of vit_tiny_patch16_224 is known",
        ),
        (["rows=/nowhere.yaml"], "rows: must be a readable YAML file, got /nowhere.yaml"),
        (["policy=evit"], "policy: unknown key"),
        (["batchsize=3"], "batchsize: unknown key; the nearest is batch_size"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], message: str, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folders(a=1, b=1, c=1), tmp_path / "out", "model.pretrained=false", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["policy: evit, weights: gone.safetensors"], "row 1 of rows.yaml: weights must be a file, got gone"),
        (["policy: evit", "policy: evit"], "rows: evit keep_rate=0.7 stands for 2 rows; give each a name"),
        (["policy: random, seed: 1", "policy: random, seed: 1"], "random keep_rate=0.7 stands for 2 rows"),
        (["policy: random, name: a, seed: 1", "policy: topk, name: a, seed: 2"], "a stands for 2 rows"),
        (["policy: evit, name: dense"], "rows: a row may not be called 'dense'"),
        (["policy: evit, name: unpruned"], "rows: a row may not be called 'unpruned', which means something"),
        (["policy: evit, name: the unpruned model"], "rows: a row may not be called 'the unpruned model'"),
        (
            [
                "policy: {name: evit, layers: [1]}, name: unpruned at 144 px",
                "policy: {name: evit, layers: [1]}",
            ],
            "rows: a row may not be called 'unpruned at 144 px', which a baseline is; give it another name",
        ),
        (["policy: evit, sed: 1"], "row 1 of rows.yaml has an unknown key sed; the nearest is seed"),
        (["policy: evit, seed: -1"], "row 1 of rows.yaml: seed must be a whole number from 0"),
        (["policy: evit, name: [a]"], "row 1 of rows.yaml: name must be text, got ['a']"),
        (["policy: evit, name: ''"], "row 1 of rows.yaml: name must be text, got none"),
        (
            ["policy: &a {name: evit, layers: *a}"],
            "rows: must be a readable YAML file, got rows.yaml (it holds",
        ),
        (["seed: 1"], "row 1 of rows.yaml: policy must be a name or a mapping with a name, got None"),
        (["policy: {name: evit, keeprate: 1}"], "policy.keeprate: unknown key of EViT"),
    ],
)
def test_a_wrong_file_of_rows_is_one_line(
    rows: list[str],
    message: str,
    folders: Folders,
    rows_file: Rows,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows_file(*rows)
    words = ["rows=rows.yaml", "model.pretrained=false", "baselines=[resize]"]
    assert compare(folders(a=1, b=1, c=1), tmp_path / "out", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "out").exists()


def test_rows_that_differ_by_the_seed_only_need_no_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text("rows:\n- {policy: random}\n- {policy: random, seed: 1}\n- {policy: evit, seed: 1}\n")
    config = compose("compare", CompareConfig, [f"rows={path}"])
    named = [(row.name, row.seed) for row in plan_rows(config)]
    assert named == [
        ("random keep_rate=0.7 seed=0", 0),
        ("random keep_rate=0.7 seed=1", 1),
        ("evit keep_rate=0.7", 1),
    ]


def test_rows_of_different_files_are_named_after_them(tmp_path: Path, weights: Path) -> None:
    """The name of the file, and where that is one of several, as many folders above as tell them apart."""

    def names(*files: str) -> list[str]:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(weights, tmp_path / file)
        lines = [f"- {{policy: evit, weights: {tmp_path / file}}}\n" for file in files]
        (tmp_path / "rows.yaml").write_text("rows:\n- {policy: evit}\n" + "".join(lines))
        config = compose("compare", CompareConfig, [f"rows={tmp_path / 'rows.yaml'}"])
        plain, *others = (row.name for row in plan_rows(config))
        assert plain == "evit keep_rate=0.7"
        return [name.removeprefix("evit keep_rate=0.7 ") for name in others]

    assert names("x/a.safetensors", "y/b.safetensors") == ["a", "b"]
    assert names("x/best.safetensors", "y/best.safetensors") == ["x/best", "y/best"]
    assert names("x/1/best.safetensors", "y/1/best.safetensors") == ["x/1/best", "y/1/best"]
    assert names("x/best.1.safetensors", "x/best.2.safetensors") == ["best.1", "best.2"]


def test_a_file_of_something_else_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.yaml").write_text("policies: [evit]\n")
    assert compare(tmp_path, tmp_path / "out", "rows=rows.yaml", "model.pretrained=false") == 2
    assert "rows.yaml must hold rows: and a list of rows, got policies" in capsys.readouterr().err


def test_a_row_may_be_called_anything(
    folders: Folders, rows_file: Rows, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["file", "[/bold]", r"$\\no$", "../a b", "<b>", "0"]
    rows = rows_file(
        *(f'name: "{name}", policy: {{name: topk, layers: [{i}]}}' for i, name in enumerate(names))
    )
    words = [f"rows={rows}", "model.pretrained=false", "pictures=1"]
    assert compare(folders(a=1, b=1, c=1), tmp_path / "out", *words) == 0
    names[2] = r"$\no$"
    assert [row["name"] for row in read(tmp_path / "out")["rows"]] == names
    with np.load(tmp_path / "out" / "predictions.npz") as arrays:
        assert {*arrays} == {"index", "target", "dense", *names}
        assert arrays["target"].tolist() == [0, 1, 2]
    assert "[/bold]" in capsys.readouterr().out
