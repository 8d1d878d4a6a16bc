"""The conformance kit: a sound policy passes; each broken one fails its check, for its reason, and no other."""

from unittest import SkipTest

import broken_policies
import pytest
import torch
from broken_policies import Sound
from torch import nn

import prunevit
from prunevit.policies import LTMP, EViT, PatchDropout
from prunevit.testing import Candidate, CheckFailure, Result, check_policy, checks

BROKEN = {
    "RefusesAllModels": (["setup"], "refuses every model of 1 to 64 blocks"),
    "ReturnsTensor": (["mask"], "forward must return a KeepMask, got Tensor at layer 1"),
    "LosesARow": (["mask"], r"keep must have shape \[129\], got \[128\] at layer 1"),
    "KeepsFloats": (["mask"], "keep must be bool, got torch.float64"),
    "FoldsIntoTheNeighbour": (["mask"], "merge_into must be -1 or a row of the same image"),
    "FoldsWhatStays": (["mask"], "merge_into of a row that stays must be that row"),
    "DropsAll": (["one_patch_stays"], "image 0 keeps no patch at layer 1"),
    "Miscounts": (["known_count"], r"rows_per_image is 26 at layer 1, but the images keep \[27, 27, 27\]"),
    "ScalesPrefix": (["prefix"], "the prefix rows are changed at layer 1"),
    "ScoresNothing": (["score"], "the score of 84 of 126 patches is NaN at layer 1"),
    "Exits": (["forward"], r"SystemExit: enough \(broken_policies.py:\d+\)"),
    "SetsTheDefault": (
        ["leaves_alone"],
        "forward must leave torch's default dtype at torch.float32, got torch.float64 after it",
    ),
    "GoesIntoTraining": (
        ["leaves_alone"],
        "forward must leave the training mode of the policy at False, got True after it",
    ),
    "TurnsGradientsOff": (
        ["leaves_alone"],
        "forward must leave torch's grad mode at True, got False after it",
    ),
    "SeedsTheDice": (
        ["leaves_alone"],
        r"forward must leave torch's next random number at 0\.\d+, got 0\.\d+",
    ),
    "ForgetsNeeds": (
        ["forward"],
        r"prefix_attention.*\(broken_policies.py:\d+\)|NoneType.*\(broken_policies.py:\d+\)",
    ),
    "ThrowsDice": (["repeats"], "two forward passes of the same images differ"),
    "LooksAtNeighbours": (["independence"], r"images \[2, 0\] alone keep other patches at layer 1"),
    "NeverKeepsAll": (["keep_all"], "keep_rate=1 must keep every row"),
    "ChangesTokens": (["replay"], "does it change tokens"),
    "NeedsTheGrid": (["pruned_rows"], r"RuntimeError: .* \(broken_policies.py:\d+\)"),
    "ForgetsDeadRows": (["dead_rows"], r"IndexError: .* \(broken_policies.py:\d+\)"),
    "HalvesOnePatch": (["one_patch"], "each image must keep at least one patch"),
    "DividesByTwoLess": (["two_patches"], r"ZeroDivisionError: .* \(broken_policies.py:\d+\)"),
    "OnePrefixToken": (["registers", "distilled"], r"IndexError: .* \(broken_policies.py:\d+\)"),
    "NeedsCLS": (["no_cls"], r"IndexError: .* \(broken_policies.py:\d+\)"),
    "SpareParameter": (["gradients"], "no gradient reaches its parameter spare"),
    "RootOfNothing": (["gradients"], "the gradient of policies.0.scale is not finite"),
    "InfiniteLoss": (["gradients"], r'losses\["ratio"\] must be one finite number'),
    "HidesItsState": (["state_dict"], "use a buffer"),
    "HoldsAFunction": (["copies"], "it cannot be pickled"),
    "Overflows": (["half_precision"], "in torch.float16 the logits are not finite"),
    "Asks": (["no_wait"], r"it waits for the device: .* \(broken_policies.py:\d+\)"),
    "CountsBatches": (["cost"], r"macs\(counts\) must be a number >= 0 for each image"),
}


def failures(results: list[Result]) -> dict[str, str]:
    return {each.name: each.reason for each in results if each.status == "failed"}


def test_a_sound_policy_passes() -> None:
    results = check_policy(Sound)
    assert [each.name for each in results] == [name for name, _ in checks()]
    statuses = {each.name: each.status for each in results}
    graph = "passed" if torch.cuda.is_available() else "not applicable"
    assert statuses == dict.fromkeys(statuses, "passed") | {"graph": graph}
    reasons = {each.name: each.reason for each in results}
    assert reasons["known_count"] == "27, 17 rows"  # ceil(0.6 * 42), ceil(0.6 * 26), and CLS
    assert reasons["keep_all"] == "keep_rate=1"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_policy_fails_its_check_for_its_reason(name: str) -> None:
    expected, reason = BROKEN[name]
    results = check_policy(getattr(broken_policies, name), device="cpu", raises=False)
    found = failures(results)
    assert list(found) == expected, found
    for line in found.values():
        assert len(line.splitlines()) == 1
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(next(iter(found.values())))


def test_every_broken_policy_is_here_and_every_check_but_those_of_a_gpu_can_fail() -> None:
    classes = [each for each in vars(broken_policies).values() if isinstance(each, type)]
    own = {each.__name__ for each in classes if each.__module__ == "broken_policies"}
    assert set(BROKEN) == own - {"Sound"}
    assert {name for names, _ in BROKEN.values() for name in names} == {name for name, _ in checks()} - {
        "graph"
    }


def test_what_builds_on_a_failed_check_is_not_reached() -> None:
    results = check_policy(broken_policies.ThrowsDice, device="cpu", raises=False)
    names = [each.name for each in results]
    beyond = results[names.index("repeats") + 1 :]
    assert {each.status for each in beyond} == {"not reached"}


def test_it_raises_a_line_for_each_failure() -> None:
    with pytest.raises(CheckFailure, match=r"registers: IndexError.*\ndistilled: IndexError"):
        check_policy(broken_policies.OnePrefixToken, device="cpu")


def test_a_policy_itself_is_copied_and_stays_as_it_was() -> None:
    policy = EViT(0.6, (1, 2))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_policy(policy, device="cpu")
    assert torch.equal(torch.rand(3), expected)
    prunevit.testing.check_policy(policy, device="cpu")
    assert policy.layers == (1, 2)


def test_a_refusal_in_clear_words_is_no_failure() -> None:
    results = {each.name: each for each in check_policy(EViT, device="cpu")}
    assert results["no_cls"].status == "not applicable"
    assert "EViT: the attention of a CLS token is needed" in results["no_cls"].reason


def test_something_else_than_a_policy_is_refused() -> None:
    found = failures(check_policy(nn.Identity, device="cpu", raises=False))  # type: ignore[arg-type]
    assert found == {"setup": "a prunevit.PruningPolicy is needed, got Identity"}


def test_checks_run_one_by_one_as_pytest_does() -> None:
    candidate = Candidate(lambda: LTMP(0.9, layers=(1,)), "cpu")
    by_name = dict(checks())
    by_name["forward"](candidate)
    with pytest.raises(SkipTest, match="depends on the data"):
        by_name["known_count"](candidate)
    with pytest.raises(CheckFailure, match="keep must be bool"):
        by_name["mask"](Candidate(broken_policies.KeepsFloats))


def test_what_drops_nothing_in_evaluation_is_compared_as_it_is() -> None:
    results = {each.name: each for each in check_policy(PatchDropout, device="cpu")}
    assert results["keep_all"].reason == "as it is"


@pytest.mark.gpu
def test_on_a_gpu_graphs_and_waiting_are_looked_at() -> None:
    results = {each.name: each for each in check_policy(lambda: EViT(0.6, (1, 2)), device="cuda")}
    assert results["graph"].status == "passed"
    assert results["no_wait"].reason == "with fake tensors, and on the GPU"


def test_what_forward_never_decided_is_not_passed() -> None:
    class Falls(Sound):
        def forward(self, *_: object) -> prunevit.KeepMask:
            raise RuntimeError("at once")

    statuses = {each.name: each.status for each in check_policy(Falls, raises=False)}
    assert statuses["forward"] == "failed"
    assert {statuses[name] for name in ("mask", "one_patch_stays", "known_count", "prefix")} == {
        "not applicable"
    }
