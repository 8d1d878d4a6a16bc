"""`policy.gmacs`: the knob is found, the cost is met on images nobody calibrated on, and counts are true."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from prunevit import RaggedTokens, RaggedViT, prune
from prunevit.experiments import equal_cost, evaluation
from prunevit.experiments.calibration import Calibration, training_split
from prunevit.experiments.cli import main
from prunevit.experiments.config import DataConfig, InputError, ModelConfig
from prunevit.experiments.cost import Cost, cost_of, known_cost
from prunevit.experiments.equal_cost import check_reach, solve
from prunevit.experiments.models import architecture
from prunevit.experiments.policy_spec import build_policy
from prunevit.macs import dense_macs, model_macs, policy_macs

Folders = Callable[..., Path]
Evaluate = Callable[..., int]

SMALL = {"layers": [1, 3]}
KNOWN: dict[str, dict[str, Any]] = {
    "topk": SMALL,
    "evit": SMALL,
    "random": SMALL,
    "fixed_rate": SMALL,
    "kmedoids": SMALL,
    "dpc_knn": SMALL,
    "dynamicvit": SMALL,
    "tome": {},
    "threshold_l2": {"layers": [2], "rule": "share"},
}
BY_DATA: dict[str, dict[str, Any]] = {
    "top_p": SMALL,
    "threshold_l2": {"layers": [1, 3]},
    "ats": {"layers": "1:"},
    "ltmp": {},
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(3)
    model: Any = timm.create_model("test_vit", num_classes=3).eval()
    with torch.no_grad():  # fresh weights attend evenly
        for block in model.blocks:
            block.attn.qkv.weight.mul_(8)
    return model


def no_photos() -> Calibration:
    return Calibration(DataConfig(name="folder", root="/nowhere"), None, 8, 4)


def calibrated(model: Any, seed: int, count: int) -> Calibration:
    """Photos of noise, as if they had been read."""
    photos = Calibration(DataConfig(name="folder"), model, count, count)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, 160, 160, generator=generator)
    photos.__dict__["batches"] = [(images, torch.arange(count))]
    return photos


@pytest.mark.parametrize("name", KNOWN)
def test_what_the_host_knows_is_what_the_model_does(model: Any, name: str) -> None:
    spec = {"name": name, **KNOWN[name]}
    if name == "threshold_l2":
        spec["threshold"] = 0.5
    cost = known_cost(model, build_policy(spec))
    assert cost is not None
    pruned = prune(model, build_policy(spec)).eval()
    with torch.no_grad():
        trace = pruned.trace(torch.randn(1, 3, 160, 160))
    assert list(cost.attention_rows) == trace.attention_rows[:, 0].tolist()
    assert list(cost.mlp_rows) == trace.mlp_rows[:, 0].tolist()
    own = policy_macs(pruned, trace)
    total = model_macs(model, trace.attention_rows, trace.mlp_rows) + own
    assert cost.gmacs == pytest.approx(total.item() / 1e9, rel=1e-12)
    assert cost.policy_gmacs == pytest.approx(own.item() / 1e9, rel=1e-12)


@pytest.mark.parametrize("name", BY_DATA)
def test_what_depends_on_the_data_is_not_known(model: Any, name: str) -> None:
    assert known_cost(model, build_policy({"name": name, **BY_DATA[name]})) is None


@pytest.mark.parametrize(
    ("spec", "model_gmacs", "gmacs"),
    [
        ({"name": "tome", "r": 13}, 2.70, 2.71),
        ({"name": "evit", "keep_rate": 0.7}, 3.03, 3.03),
        ({"name": "evit", "keep_rate": 0.5}, 2.31, 2.31),
        ({"name": "topk", "keep_rate": 0.7}, 3.00, 3.00),
        ({"name": "dynamicvit", "keep_rate": 0.7}, 2.88, 2.98),
        ({"name": "dynamicvit", "keep_rate": 0.5}, 2.15, 2.23),
    ],
)
def test_deit_small_costs_what_is_known_of_it(spec: Any, model_gmacs: float, gmacs: float) -> None:
    cost = known_cost(architecture(ModelConfig("deit_small_patch16_224")), build_policy(spec))
    assert cost is not None
    assert cost.gmacs - cost.policy_gmacs == pytest.approx(model_gmacs, abs=5e-3)
    assert cost.gmacs == pytest.approx(gmacs, abs=5e-3)


@pytest.mark.parametrize("target", [3.0, 2.3])
@pytest.mark.parametrize("name", ["topk", "evit", "tome", "dynamicvit", "dpc_knn"])
def test_equal_cost_without_running_a_model(name: str, target: float) -> None:
    deit = architecture(ModelConfig("deit_small_patch16_224"))
    found = solve({"name": name, "gmacs": target}, deit, no_photos())
    assert "gmacs" not in found
    cost = cost_of(found, deit, no_photos())
    assert (cost.gmacs, cost.images) == (pytest.approx(target, rel=0.01), 0)


def test_tome_mixes_two_neighbours() -> None:
    deit = architecture(ModelConfig("deit_small_patch16_224"))
    r = solve({"name": "tome", "gmacs": 2.65}, deit, no_photos())["r"]
    assert (min(r), max(r), len(r)) == (13, 14, 12)
    middle = known_cost(deit, build_policy({"name": "tome", "r": r}))
    ends = [known_cost(deit, build_policy({"name": "tome", "r": each})) for each in (13, 14)]
    assert middle is not None
    assert [each.gmacs > middle.gmacs for each in ends if each] == [True, False]


@pytest.mark.parametrize("name", BY_DATA)
def test_equal_cost_on_unseen_images(model: Any, name: str) -> None:
    target = (0.5 if name == "ats" else 0.8) * dense_macs(model) / 1e9
    spec = {"name": name, **BY_DATA[name], "gmacs": target}
    found = solve(spec, model, calibrated(model, 0, 24))
    cost = cost_of(found, model, calibrated(model, 1, 24))
    assert (cost.gmacs, cost.images) == (pytest.approx(target, rel=0.02), 24)
    assert len(set(cost.mlp_rows)) > 1


@pytest.mark.parametrize("name", BY_DATA)
def test_few_photos_lead_and_all_have_the_last_word(
    model: Any, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = calibrated(model, 0, 24)
    photos.__dict__["few"] = few = calibrated(model, 2, 6)
    (given, numbers) = few.batches[0]
    few.__dict__["batches"] = [(0.8 * given, numbers)]  # they cost something else than all
    seen: list[tuple[int, float]] = []

    def counted(*arguments: Any) -> Cost:
        cost = cost_of(*arguments)
        seen.append((cost.images, cost.gmacs))
        return cost

    monkeypatch.setattr(equal_cost, "cost_of", counted)
    target = (0.5 if name == "ats" else 0.8) * dense_macs(model) / 1e9
    found = solve({"name": name, **BY_DATA[name], "gmacs": target}, model, photos)
    whole = [gmacs for images, gmacs in seen if images == 24]
    assert 1 <= len(whole) <= 3
    assert min(whole, key=lambda gmacs: abs(gmacs - target)) == cost_of(found, model, photos).gmacs
    assert cost_of(found, model, calibrated(model, 1, 24)).gmacs == pytest.approx(target, rel=0.02)
    knob = build_policy({"name": name, **BY_DATA[name]}).knob
    first, last = capsys.readouterr().err.splitlines()
    assert first == f"{name}: {knob} for {target:g} GMACs on up to 24 training photos"
    assert last.startswith(f"found {knob}={found[knob]:.4g}, ")


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "top_p", "layers": [2, 3]},
        {"name": "ats", "layers": "0:"},
        {"name": "threshold_l2", "layers": [2]},
        {"name": "threshold_l2", "layers": [0, 3]},
    ],
)
def test_a_cost_that_starts_where_rows_first_leave_is_that_of_the_whole_walk(model: Any, spec: Any) -> None:
    photos = calibrated(model, 0, 5)
    cost_of({**spec, "layers": [3]}, model, photos)  # leaves rows that enter a later block
    for _ in range(2):
        cost = cost_of(spec, model, photos)
        pruned = prune(model, build_policy(spec)).eval()
        with torch.no_grad():
            trace = pruned.trace(*photos.batches[0])
        macs = model_macs(model, trace.attention_rows, trace.mlp_rows) + policy_macs(pruned, trace)
        assert cost.gmacs == pytest.approx(macs.mean().item() / 1e9, rel=1e-12)
        assert cost.attention_rows == tuple(trace.attention_rows.double().mean(1).tolist())
        assert cost.mlp_rows == tuple(trace.mlp_rows.double().mean(1).tolist())


def test_rows_that_enter_are_walked_to_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    photos, embedded = calibrated(model, 0, 5), list[int]()
    embed = RaggedViT.embed

    def counted(self: RaggedViT, images: Tensor, *numbers: Tensor) -> RaggedTokens:
        embedded.append(len(images))
        return embed(self, images, *numbers)

    monkeypatch.setattr(RaggedViT, "embed", counted)
    for p in (0.4, 0.6, 0.8):
        cost_of({"name": "top_p", "p": p, "layers": [2, 3]}, model, photos)
    assert embedded == [5]


def test_a_row_with_a_cost_and_a_knob_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.yaml").write_text("rows:\n  - policy: {name: evit, gmacs: 3.0, keep_rate: 0.5}\n")
    assert main(["compare", f"rows={tmp_path / 'rows.yaml'}", "data=sample"]) == 2
    assert capsys.readouterr().err == (
        f"prunevit: rows: row 1 of {tmp_path / 'rows.yaml'}: policy.keep_rate is solved for by policy.gmacs; "
        "give one of the two\n"
    )


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ({"name": "evit", "gmacs": 5.0}, r"keep_rate of evit reaches 1\.385 to 4\.599 GMACs here, got 5"),
        ({"name": "tome", "gmacs": 0.1}, r"r of tome reaches 0\.59\d+ to 4\.606 GMACs here, got 0\.1"),
        ({"name": "patch_dropout", "gmacs": 3.0}, r"reaches 4\.599 to 4\.599 GMACs here"),
    ],
)
def test_costs_that_cannot_be_had(spec: dict[str, Any], line: str) -> None:
    deit = architecture(ModelConfig("deit_small_patch16_224"))
    with pytest.raises(InputError, match=rf"policy\.gmacs: .*{line}") as caught:
        solve(spec, deit, no_photos())
    assert len(caught.value.problems) == 1


def test_the_ends_are_looked_at_once(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    photos, spec = calibrated(model, 0, 6), {"name": "top_p", **SMALL}
    looks: list[Cost] = []

    def counted(*arguments: Any) -> Cost:
        looks.append(cost_of(*arguments))
        return looks[-1]

    monkeypatch.setattr(equal_cost, "cost_of", counted)
    with pytest.raises(InputError, match=r"^policy\.gmacs: p of top_p reaches .* GMACs here, got 9; ask for"):
        check_reach({**spec, "gmacs": 9.0}, model, photos)
    assert len(looks) == 2
    low, high = sorted(cost.gmacs for cost in looks)
    said = capsys.readouterr().err
    assert said.startswith(
        f"top_p: p reaches {low:.4g} to {high:.4g} GMACs on up to 6 training photos, seen in"
    )
    for target in (0.3 * low + 0.7 * high, 0.7 * low + 0.3 * high):
        check_reach({**spec, "gmacs": target}, model, photos)
    assert len(looks) == 2
    assert capsys.readouterr().err == ""
    solve({**spec, "gmacs": target}, model, photos)
    assert all(cost.gmacs not in (low, high) for cost in looks[2:])


def test_all_costs_out_of_reach_are_refused_before_any_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evaluation, "solve", None)
    words = ["model=deit_tiny_patch16_224", "model.pretrained=false", f"output_dir={tmp_path / 'out'}"]
    assert main(["compare", "policies=[evit,topk,tome]", "gmacs=[1.0,5.0]", "accelerator=cpu", *words]) == 2
    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("prunevit: policy.gmacs: keep_rate of evit reaches ")
    assert first.endswith(" got 5; ask for another cost, or leave evit out (row evit gmacs=5)")
    assert len(others) == 2
    assert not (tmp_path / "out").exists()


def test_training_photos_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^data\.root: .*there must be a folder train in data\.root"):
        training_split(DataConfig(name="folder", root=str(tmp_path)), 8)
    with pytest.raises(InputError, match=r"^data\.root: must exist, got .*nowhere"):
        training_split(DataConfig(name="folder", root=str(tmp_path / "nowhere")), 8)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["policy=evit", "policy.gmacs=0"], "policy.gmacs: must be a number above 0, got 0"),
        (["policy=evit", "policy.gmacs=much"], "policy.gmacs: must be a number above 0, got 'much'"),
        (["policy=diffrate", "policy.gmacs=3"], "policy.gmacs: DiffRate has no knob to solve for"),
        (
            ["policy=evit", "policy.gmacs=3", "policy.keep_rate=0.5"],
            "policy.keep_rate: is solved for by policy.gmacs; give one of the two",
        ),
    ],
)
def test_wrong_words(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=deit_small_patch16_224", *words]) == 2
    assert capsys.readouterr().err == f"prunevit: {line}\n"


def test_verbs_that_do_not_solve_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "photo.jpg", "policy=evit", "policy.gmacs=3"]) == 2
    assert "policy.gmacs: this verb does not solve for it" in capsys.readouterr().err


def test_a_row_at_equal_cost(folders: Folders, evaluate: Evaluate, tmp_path: Path) -> None:
    """The training split beside the validation split is what the knob is set on."""
    for split in ("train", "val"):
        folders(f"photos/{split}", a=2, b=2, c=2)
    words = ["policy=top_p", "policy.layers=[1,3]", "policy.gmacs=0.03", "calibration_images=6"]
    assert evaluate(tmp_path / "photos", tmp_path / "out", *words) == 0
    (row,) = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert row["gmacs"] == pytest.approx(0.03, rel=0.02)
    assert (row["knob"], row["images"]) == ("p", 6)
    assert 0 < row["knob_value"] < 1
    assert row["knob_value"] != 0.9  # as shipped
