"""What a policy costs: the walk with given counts, LTMP at ToMe's rows, and a whole eager run on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from tests_support import randomise, small_vit
from torch import Tensor

from prunevit import KeepMask, PruningPolicy, RaggedTokens, prune, top_k
from prunevit.experiments.benchmark import model_suite, policy_suite
from prunevit.experiments.benchmark import run as benchmark
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.contestants import ltmp_twin, walk_of
from prunevit.experiments.benchmark.measurements import Measurement, Measurements
from prunevit.experiments.benchmark.model_rows import Case
from prunevit.experiments.benchmark.rivals import FreePruning, counts_of
from prunevit.experiments.timing import Spread
from prunevit.policies import POLICIES
from prunevit.tokens import AttentionState

CPU = torch.device("cpu")
TOME = {"name": "tome", "r": 6}
TOP_P = {"name": "top_p", "p": 0.6, "layers": [1, 3]}


class FirstOfEach(PruningPolicy):
    """Keep the first patches of each image, in each image another number."""

    def __init__(self, counts: dict[int, list[int]], site: str) -> None:
        super().__init__(None, sorted(counts))
        self.counts, self.site = counts, site  # type: ignore[assignment]

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        return top_k(tokens, -tokens.position.double(), count=torch.tensor(self.counts[layer]))


def photos(batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
@pytest.mark.parametrize("site", ["before_block", "after_attention"])
@pytest.mark.parametrize(
    "counts", [{1: [9, 30, 17], 2: [9, 12, 1]}, {0: [20, 20, 20], 1: [4, 20, 7], 2: [4, 4, 4]}]
)
def test_given_counts_are_those_of_each_image(counts: dict[int, list[int]], site: str) -> None:
    model = small_vit()
    trace = prune(model, FirstOfEach(counts, site)).trace(photos())
    given = counts_of(trace)
    assert [isinstance(each, int) for each in given.values()] == [
        len(set(each)) == 1 for each in counts.values()
    ]
    free = FreePruning(model, given, batch_size=3)(photos())
    torch.testing.assert_close(free, trace.logits, rtol=0, atol=1e-11)


@torch.no_grad()
def test_ltmp_leaves_as_many_rows_as_tome_behind_each_block() -> None:
    case = Case("test_vit", {}, ())
    model = model_suite.build(case).double()
    randomise(model)
    images = model_suite.photos(case, model, 8).double()
    tome = walk_of(TOME)(model).trace(images)
    ltmp = walk_of(ltmp_twin(model, tome, images))(model).trace(images)
    for ours, theirs in zip(ltmp.stages, tome.stages, strict=True):
        mean = theirs.counts.double().mean().item()
        assert ours.counts.double().mean().item() == pytest.approx(mean, rel=0.01)
    assert len(ltmp.stages[-1].counts.unique()) > 1
    with pytest.raises(ValueError, match=r"ltmp_twin: no threshold leaves \d+ rows at layer 0"):
        ltmp_twin(model, tome, images, near=-1.0)


def test_every_policy_that_prunes_in_evaluation_takes_part() -> None:
    found = policy_suite.policies()
    assert set(found) == set(POLICIES) - {"none", "patch_dropout", "replay"}
    assert next(iter(found)) == "tome"
    (case,) = policy_suite.cases(BenchConfig(suite="policies"))
    assert (case.model, case.batch_sizes, case.rivals) == (
        "deit_small_patch16_224",
        (256,),
        ("given", "ltmp"),
    )
    (swept,) = policy_suite.cases(BenchConfig(suite="policies", rows="sweep", batch_sizes=[8]))
    assert (len(swept.policies), swept.rivals) == (3, ("given",))


def test_targets_of_made_up_figures() -> None:
    config = BenchConfig(suite="policies")
    (case,) = policy_suite.cases(config)
    place = case.place(256, "bf16")
    times = {"dense": 10.0, "tome": 7.0, "given tome": 6.0, "ltmp tome": 8.0, "ats": 9.0, "given ats": 6.5}
    figures = [
        Measurement(place, name, "graph", model_suite.MS, Spread(time, time, time))
        for name, time in times.items()
    ]
    figures.append(Measurement(place, "tome", "graph", model_suite.GRAPHS, Spread(2, 2, 2)))
    targets = {each.what: each for each in policy_suite.targets(Measurements(figures), config)}
    share = "its cost as a share of the dense time"
    assert (targets[f"tome: {share}"].ratio, targets[f"tome: {share}"].met) == (0.1, True)
    assert (targets[f"ats: {share}"].ratio, targets[f"ats: {share}"].met) == (0.25, False)
    assert (targets[f"evit: {share}"].ratio, targets[f"evit: {share}"].note) == (
        None,
        "ours was not measured",
    )
    graphs = {name: each for name, each in targets.items() if name.endswith("CUDA graphs of a forward")}
    known = {"tome", "evit", "topk", "random", "fixed_rate", "kmedoids", "dpc_knn", "dynamicvit", "diffrate"}
    assert {name.partition(":")[0] for name in graphs} == known
    assert graphs["tome: CUDA graphs of a forward"].met is False
    (ltmp,) = (each for name, each in targets.items() if name.startswith("LTMP"))
    assert (ltmp.ratio, ltmp.reach, ltmp.met) == (7 / 8, 0.85, True)
    (cost,) = (each for name, each in targets.items() if name.startswith("ltmp: its cost where"))
    assert (cost.ratio, cost.met) == (0.2, False)


def test_a_whole_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(benchmark, "find_gpu", lambda suite: CPU)
    monkeypatch.setattr(policy_suite, "MODE", "eager")
    monkeypatch.setattr(policy_suite, "policies", lambda: {"tome": TOME, "top_p": TOP_P})
    config = BenchConfig(
        suite="policies",
        models=["test_vit"],
        batch_sizes=[2],
        dtypes=["fp32"],
        seconds=0.0,
        output_dir=str(tmp_path / "out"),
    )
    benchmark.run(config)
    lines = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    times = {
        each["contestant"]: each["value"]
        for each in lines
        if each["kind"] == "measurement" and each["quantity"] == model_suite.MS
    }
    assert list(times) == ["dense", "none", "tome", "top_p", "given tome", "ltmp tome", "given top_p"]
    assert None not in times.values()
    targets = {each["what"]: each for each in lines if each["kind"] == "target"}
    expected = (times["tome"]["median"] - times["given tome"]["median"]) / times["dense"]["median"]
    assert targets["tome: its cost as a share of the dense time"]["ratio"] == pytest.approx(expected)


@pytest.mark.gpu
def test_host_known_counts_run_in_one_graph() -> None:
    case = Case("test_vit", {"tome": TOME}, (2,), rivals=("given", "ltmp"))
    figures = model_suite.measured(case, "fp32", ["graph"], 0.0, torch.device("cuda"))
    graphs = {
        each.contestant: each.value.median
        for each in figures
        if each.quantity == model_suite.GRAPHS and each.value is not None
    }
    assert graphs == dict.fromkeys(("dense", "none", "tome", "given tome", "ltmp tome"), 1)
