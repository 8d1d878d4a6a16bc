"""The benchmark without a GPU: its refusal, its rows, its correctness gate, and a whole eager run of a tiny model."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import randomise

from prunevit.experiments.benchmark import attention_suite, model_suite, stage_suite
from prunevit.experiments.benchmark import run as benchmark
from prunevit.experiments.benchmark.attention_rivals import Inputs, Shape, our_gradients, padded_sdpa
from prunevit.experiments.benchmark.attention_suite import check, check_gradients, lengths
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.contestants import CHECKED, Check, check_batches, contestants, static_twin
from prunevit.experiments.benchmark.measurements import WRONG, Measurement, Measurements
from prunevit.experiments.benchmark.model_rows import MUST_REACH, Case, cases, pruning
from prunevit.experiments.cli import main
from prunevit.experiments.config import InputError
from prunevit.experiments.policy_spec import build_policy
from prunevit.experiments.timing import Spread
from prunevit.policies import NoPruning
from prunevit.vit import prune

CPU = torch.device("cpu")
L2 = {"name": "threshold_l2", "threshold": 0.5, "layers": [2], "rule": "share"}
EVIT = {"name": "evit", "keep_rate": 0.5, "layers": [1, 3]}
TOP_P = {"name": "top_p", "p": 0.6, "layers": [1, 3]}


@pytest.mark.parametrize("suite", ["attention", "model", "stages"])
def test_without_a_gpu_it_says_so_in_one_line(
    suite: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", f"suite={suite}", f"output_dir={tmp_path / 'out'}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"prunevit: bench: suite={suite} needs a CUDA device (a GPU), found none"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite=speed"], "suite: must be one of attention, model, stages, policies, got speed"),
        (["suite=model", "dtypes=[bf16,int8]"], "dtypes: must be one of bf16, fp16, fp32, got int8"),
        (["suite=model", "batch_sizes=[0]"], "batch_sizes: must be at least 1, got 0"),
        (["suite=model", "batch_size=4"], "batch_size: unknown key; the nearest is batch_sizes"),
        (
            ["suite=model", "modes=[best]"],
            "modes: must be one of eager, compile, graph, compile+graph, got best",
        ),
        (["suite=model", "ratios=[-0.1]"], "ratios: must be at least 0"),
    ],
)
def test_bad_keys_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_rows_can_be_narrowed() -> None:
    assert tuple(cases(BenchConfig(suite="model"))) == MUST_REACH
    (case,) = cases(BenchConfig(suite="model", models=["deit_base_patch16_384"], batch_sizes=[64, 128]))
    assert case.batch_sizes == (64,)
    small = cases(BenchConfig(suite="model", batch_sizes=[8]))
    assert [case.model for case in small] == ["deit_base_patch16_224"]
    assert {case.model for case in cases(BenchConfig(suite="model", img_sizes=[384]))} == {
        "deit_base_patch16_384"
    }
    with pytest.raises(InputError, match="no row has these models"):
        cases(BenchConfig(suite="model", models=["deit_tiny_patch16_224"]))


def test_a_sweep_is_a_product() -> None:
    config = BenchConfig(
        suite="model",
        rows="sweep",
        models=["a", "b"],
        policies=["evit", "drawn"],
        ratios=[0.3, 0.9],
        batch_sizes=[8, 1],
    )
    found = cases(config)
    assert [(case.model, case.batch_sizes, len(case.policies)) for case in found] == [
        ("a", (1, 8), 4),
        ("b", (1, 8), 4),
    ]
    assert pruning("threshold_l2", 0.75)["threshold"] == 0.25
    assert build_policy(pruning("top_p", 0.25)).knob_value == 0.75
    assert build_policy(pruning("drawn", 0.25)).knob_value == 0.75
    with pytest.raises(InputError, match="must have a knob that is a share, got tome with r"):
        pruning("tome", 0.5)
    with pytest.raises(InputError, match="unknown name, got evti; the nearest is evit"):
        cases(BenchConfig(suite="model", rows="sweep", policies=["evti"]))


def test_every_row_can_be_built() -> None:
    for case in MUST_REACH:
        assert all(build_policy(spec).layers for spec in case.policies.values())


@torch.no_grad()
def test_a_static_twin_keeps_the_mean_count() -> None:
    case = Case("test_vit", {}, ())
    model = model_suite.build(case).double()
    randomise(model)
    images = model_suite.photos(case, model, 6).double()
    for spec in (TOP_P, {**L2, "rule": "deviation", "threshold": -0.2, "layers": [1, 3]}):
        trace = prune(model, build_policy(spec)).trace(images)
        twin = prune(model, static_twin(spec, trace)).trace(images)
        for ours, theirs in zip(trace.stages, twin.stages):
            assert theirs.counts.unique().tolist() == [round(ours.counts.double().mean().item())]
            assert len(ours.counts.unique()) > 1


@torch.no_grad()
def test_the_gate_lets_right_models_pass_and_no_others() -> None:
    case = Case("test_vit", {"L2": L2}, (2,), rivals=("free", "masked", "padded"))
    model = model_suite.build(case).bfloat16()
    images = model_suite.photos(case, model, 18).bfloat16()
    check = Check(model, copy.deepcopy(model).double(), check_batches(images[:2], images[2:]))
    assert sum(map(len, check.batches)) == 16
    found = contestants(case, model, images[:2])
    assert list(found) == ["dense", "none", "L2", "free L2", "masked L2", "padded L2"]
    for name, builder in found.items():
        module = builder(model)
        assert check.walk(builder, module) == "", name
        assert check.mode(module) == "", name
    # Another model, a stale output, a NaN.
    none = found["none"]
    assert check.walk(none, found["free L2"](model)) == WRONG
    assert check.walk(none, none(model)) == ""
    assert check.mode(lambda batch: model(images[:2])) == WRONG
    assert check.mode(lambda batch: model(batch) * torch.nan) == WRONG


def test_a_wrong_attention_gets_no_time() -> None:
    inputs = Inputs.make(Shape((5, 3, 7), 2, 8, torch.float32), CPU)
    assert check("padded SDPA", padded_sdpa, inputs) == ""
    assert check("padded SDPA", lambda given: padded_sdpa(given) * 1.01, inputs) == WRONG
    assert check("padded SDPA", lambda given: padded_sdpa(given) * torch.nan, inputs) == WRONG
    assert "cannot run" in check("triton", lambda given: torch.ops.aten.mm(given.qkv, given.qkv), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_gradients_get_no_time(dtype: torch.dtype) -> None:
    inputs = Inputs.make(Shape((5, 3, 7), 2, 8, dtype), CPU)
    dq, dk, dv = our_gradients(inputs, "padded")
    assert check_gradients(lambda given: (dq, dk, dv), inputs) == ""
    for wrong in ((dq, dv, dk), (dq * 1.1, dk, dv), (dq, dk, dv * torch.nan), (dq, dk, dv.flip(0))):
        assert check_gradients(lambda given: wrong, inputs) == WRONG  # noqa: B023 (called at once)
    assert "cannot run" in check_gradients(our_gradients, inputs)  # "triton" on a CPU


def test_forward_and_backward_are_compared_with_fa2() -> None:
    place = attention_suite.place_of((256, 197, 0.5), "bf16")

    def figure(name: str, us: float | None) -> Measurement:
        value = None if us is None else Spread(us, us, us)
        return Measurement(place, name, "graph", attention_suite.BOTH_WAYS, value, "" if us else WRONG)

    for ours, ratio in ((100.0, 1.5), (None, None)):
        figures = Measurements([figure("triton", ours), figure("FA2 aten", 150.0)])
        found = attention_suite.targets(figures, BenchConfig(suite="attention"))
        (target,) = (each for each in found if "backward" in each.what)
        assert (target.ratio, target.reach, target.at) == (ratio, 1.3, place)


def test_lengths_stay_within_ten_per_cent() -> None:
    assert set(lengths((64, 197, 1.0))) == {197}
    drawn = lengths((64, 197, 0.5))
    assert 0.9 * 98.5 - 1 <= min(drawn) < max(drawn) <= 1.1 * 98.5 + 1
    assert len(set(drawn)) > 5


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_batch_of_the_check_is_empty() -> None:
    for size in (1, 3, 7, 16, 256):
        images = torch.zeros(size + CHECKED, 1)
        batches = check_batches(images[:size], images[size:])
        assert {len(batch) for batch in batches} == {size}
        assert sum(map(len, batches)) >= CHECKED


def run_on_a_cpu(config: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "find_gpu", lambda suite: CPU)
    monkeypatch.setattr(stage_suite, "captured", lambda calls: lambda: [call() for call in calls])
    benchmark.run(config)


def test_a_whole_model_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = Case("test_vit", {"EViT": EVIT}, (1, 2), rivals=("free", "gather"), dense_first={1: 1e9})
    for module in (benchmark, model_suite):
        monkeypatch.setattr(module, "cases", lambda config: [case])
    monkeypatch.setattr(  # one contestant goes wrong
        model_suite.Check,
        "mode",
        lambda self, run: WRONG if type(run.model).__name__ == "DenseGather" else "",
    )
    config = BenchConfig(
        suite="model", dtypes=["fp32"], modes=["eager"], seconds=0.0, output_dir=str(tmp_path / "out")
    )
    run_on_a_cpu(config, monkeypatch)
    lines = read(tmp_path / "out" / "results.jsonl")
    assert [each["kind"] for each in lines[:2]] == ["header", "measurement"]
    figures = [each for each in lines if each["kind"] == "measurement" and each["quantity"] == "ms a batch"]
    assert [each["contestant"] for each in figures] == [
        "dense",
        "none",
        "EViT",
        "free EViT",
        "gather EViT",
    ] * 2
    assert all((each["value"] is None) == (each["contestant"] == "gather EViT") for each in figures)
    targets = {each["what"]: each for each in lines if each["kind"] == "target" and "batch 1," in each["at"]}
    assert targets["EViT, best mode against dense best"]["met"] is False
    assert targets["EViT against free pruning, same mode"]["ratio"] > 0
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "break-even of EViT" in text
    assert "| gather EViT | eager | - | - | - | incorrect |" in text
    assert (tmp_path / "out" / "figure1.png").exists()
    with pytest.raises(InputError, match="already holds results"):
        benchmark.run(config)


@pytest.mark.parametrize("suite", ["attention", "model", "stages", "policies"])
@pytest.mark.parametrize("measured", [0, 2])
def test_a_run_that_is_stopped_leaves_what_it_measured(
    suite: str, measured: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = BenchConfig(suite=suite, output_dir=str(tmp_path / "out"))
    place = "deit_small_patch16_224, batch 1, bf16"
    entries = [
        Measurement(place, name, "graph", model_suite.MS, Spread(median=each, p20=each, p80=each))
        for name, each in (("dense", 1.0), ("EViT 0.7", 0.5))
    ][:measured]

    def measure(*_: Any) -> Any:
        yield from entries
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark.SUITES[suite], "run", measure)
    with pytest.raises(KeyboardInterrupt, match=r"^what was measured until then is in .*out$"):
        run_on_a_cpu(config, monkeypatch)
    lines = read(tmp_path / "out" / "results.jsonl")
    assert [each["contestant"] for each in lines if each["kind"] == "measurement"] == [
        each.contestant for each in entries
    ]
    text = (tmp_path / "out" / "summary.md").read_text()
    assert "stopped before all was measured" in text
    met = [each for each in lines if each["kind"] == "target" and each["ratio"] is not None]
    assert [(each["ratio"], each["at"]) for each in met] == [(2.0, place)] * (
        suite == "model" and measured == 2
    )


def test_the_pieces_of_a_forward(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policies = {name: {**spec, "layers": [2]} for name, spec in stage_suite.POLICIES.items()}
    monkeypatch.setattr(stage_suite, "POLICIES", policies)
    monkeypatch.setattr(stage_suite, "CALLS", 1)
    config = BenchConfig(
        suite="stages",
        models=["test_vit"],
        batch_sizes=[2],
        dtypes=["fp32"],
        seconds=0.0,
        output_dir=str(tmp_path / "o"),
    )
    run_on_a_cpu(config, monkeypatch)
    figures = [each for each in read(tmp_path / "o" / "results.jsonl") if each["kind"] == "measurement"]
    assert len(figures) == 10 * len(policies)
    assert all(each["value"]["median"] > 0 for each in figures)


@torch.no_grad()
def test_the_pieces_fit_together() -> None:
    """What the policy's piece and the pack's piece give is the stage that the walk itself records."""
    case = Case("test_vit", {}, ())
    model = model_suite.build(case).double()
    images = model_suite.photos(case, model, 3).double()
    for spec in (EVIT, L2, TOP_P):
        pruned = prune(model, build_policy({**spec, "layers": [2]})).eval()
        calls: dict[str, Any] = stage_suite.pieces(pruned, images)
        (stage,) = pruned.trace(images).stages
        assert torch.equal(calls["policy"]().keep, stage.mask.keep)
        assert torch.equal(calls["pack"]().seqlens, stage.counts)
        assert torch.equal(calls["policy + pack"]().x, calls["pack"]().x)
        torch.testing.assert_close(calls["norm and head"](), pruned(images))
    assert prune(model, NoPruning())(images).shape == (3, 1000)
