"""A policy's part of the configuration: the constructor is the schema."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from prunevit.experiments.compose import group_names, read_yaml
from prunevit.experiments.config import InputError
from prunevit.experiments.policy_spec import build_policy, fits, policy_problems
from prunevit.policies import POLICIES


def test_every_policy_has_a_file_with_its_defaults() -> None:
    assert set(group_names("policy")) == set(POLICIES)
    for name, cls in POLICIES.items():
        settings = read_yaml(f"policy/{name}.yaml")
        assert settings.pop("name") == name
        parameters = inspect.signature(cls).parameters
        for key, value in settings.items():
            default = parameters[key].default
            assert value == (list(default) if isinstance(default, tuple) else default), f"{name}.{key}"
        assert set(parameters) - set(settings) <= {"seed", "trace"} | set(parameters) - set(settings)


def test_a_class_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_policies.py").write_text(
        "from prunevit.policies import TopK\n"
        "class Mine(TopK):\n"
        "    def __init__(self, alpha: float, layers: list[int] = [1]) -> None:\n"
        "        super().__init__(alpha, layers)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    policy: Any = build_policy({"name": "my_policies:Mine", "alpha": 0.3})
    assert (policy.knob_value, policy.layers) == (0.3, (1,))
    assert policy_problems({"name": "my_policies:Mine"}) == ["policy.alpha: must be set for Mine"]
    found = policy_problems({"name": "my_policies:Mine", "alpha": "x", "gamma": 1})
    assert found[0] == "policy.alpha: must be float, got 'x'"
    assert found[1].startswith("policy.gamma: unknown key of Mine; ")
    del sys.modules["my_policies"]


def test_the_seed_reaches_a_policy_that_draws() -> None:
    drawn: Any = build_policy({"name": "random"}, seed=5)
    fixed: Any = build_policy({"name": "random", "seed": 2}, seed=5)
    assert (drawn.seed, fixed.seed) == (5, 2)
    build_policy({"name": "topk"}, seed=5)


def test_a_missing_trace_is_one_line() -> None:
    with pytest.raises(InputError, match="nowhere"):
        build_policy({"name": "replay", "trace": "/nowhere.pt"})


@pytest.mark.parametrize(
    ("value", "hint", "expected"),
    [
        (1, float, True),
        (True, float, False),
        (1.5, int, False),
        ("a", str, True),
        (None, float | None, True),
        (None, float, False),
        ([1, 2], Sequence[int] | str, True),
        ([1, "a"], Sequence[int], False),
        (":", Sequence[int] | str, True),
        ("grid", Literal["grid", "center"], True),
        ("gird", Literal["grid", "center"], False),
        ([0.5], list[float], True),
        ("anything", Any, True),
    ],
)
def test_values_and_hints(value: object, hint: Any, expected: bool) -> None:
    assert fits(value, hint) == expected
