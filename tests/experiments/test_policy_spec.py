"""A policy's part of the configuration: the constructor is the schema."""

import inspect
import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import timm
import torch

from prunevit import PruningPolicy, prune
from prunevit.experiments.compose import group_names, read_yaml
from prunevit.experiments.config import InputError
from prunevit.experiments.policy_spec import build_policy, fits, in_words, policy_errors, policy_problems
from prunevit.policies import POLICIES


def test_every_policy_has_a_file_with_its_defaults() -> None:
    assert set(group_names("policy")) == set(POLICIES)
    for name, cls in POLICIES.items():
        settings = read_yaml(f"policy/{name}.yaml")
        assert settings.pop("name") == name
        parameters = inspect.signature(cls).parameters
        unset = [key for key in settings if settings[key] == "???"]
        assert unset == [key for key in parameters if parameters[key].default is inspect.Parameter.empty]
        settings = {key: value for key, value in settings.items() if key not in unset}
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
    assert found[0] == "policy.alpha: must be a number, got 'x'"
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
        ([1], list, True),
        (1, list, False),
        ({"name": "evit"}, Mapping[str, Any], True),
        (3, str | Mapping[str, Any] | PruningPolicy, False),
        ("folder", Path, True),
    ],
)
def test_values_and_hints(value: object, hint: Any, expected: bool) -> None:
    assert fits(value, hint) == expected


def test_keys_reach_through_arguments_that_are_handed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(
        tmp_path,
        monkeypatch,
        "from prunevit.policies import RandomPruning",
        "class Mine(RandomPruning):",
        "    def __init__(self, alpha: float, /, **settings) -> None:",
        "        super().__init__(alpha, **settings)",
    )
    policy: Any = build_policy({"name": name, "alpha": 0.5, "shared": True, "layers": [2]}, seed=7)
    assert (policy.knob_value, policy.shared, policy.layers, policy.seed) == (0.5, True, (2,), 7)
    assert policy_problems({"name": name}) == ["policy.alpha: must be set for Mine"]
    assert policy_problems({"name": name, "alpha": 0.5, "share": True}) == [
        "policy.share: unknown key of Mine; the nearest is policy.shared"
    ]
    assert policy_problems({"name": name, "alpha": 0.5, "shared": 3}) == [
        "policy.shared: must be true or false, got 3"
    ]
    (line,) = policy_problems({"name": name, "alpha": 0.5, "settings": 3})
    assert line.startswith("policy.settings: unknown key of Mine; ")


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> str:
    """Write a module with a policy of the user's; return the policy's name."""
    monkeypatch.syspath_prepend(folder)
    stem = f"user_{folder.name.replace('-', '_')}"
    (folder / f"{stem}.py").write_text("\n".join(lines) + "\n")
    return f"{stem}:Mine"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "self.alpha = 3",
            "__init__ must call super().__init__(value, layers), and before it assigns modules",
        ),
        (
            "self.part = torch.nn.Linear(1, 1)",
            "AttributeError: cannot assign module before Module.__init__() call ({file}:5)",
        ),
        (
            "super().__init__(0.5, [])",
            "layers must name at least one block, got none; to prune nowhere use NoPruning ({file}:5)",
        ),
        ("super().__init__(1.5, [1])", "keep_rate must be in (0, 1], got 1.5 ({file}:5)"),
        ("raise ValueError('no\\nluck')", "no ({file}:5)"),
        ("{}['x']", "KeyError: 'x' ({file}:5)"),
    ],
)
def test_a_constructor_that_fails_says_where(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(
        tmp_path,
        monkeypatch,
        "import torch, prunevit",
        "class Mine(prunevit.PruningPolicy):",
        "    knob, knob_range = 'keep_rate', (0.0, 1.0)",
        "    def __init__(self):",
        f"        {body}",
    )
    file = f"{name.partition(':')[0]}.py"
    assert policy_problems({"name": name}) == [f"policy {name}: {message.replace('{file}', file)}"]


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (["raise RuntimeError('later')"], ":1)"),
        (["def make():", "    return 1 / 0", "make()"], ":2)"),
        (["class Mine(:"], ":1)"),
    ],
)
def test_a_module_that_fails_says_where(
    lines: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(tmp_path, monkeypatch, *lines)
    by_file = f"{tmp_path / name.partition(':')[0]}.py:Mine"
    for each in (name, by_file):
        (line,) = policy_problems({"name": each})
        assert line.startswith(f'policy: "{each}" must name a class that can be imported, got ')
        assert line.endswith(f" ({name.partition(':')[0]}.py{place}")


def test_an_error_deep_inside_names_the_innermost_line_of_the_users_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(
        tmp_path,
        monkeypatch,
        "import prunevit",
        "class Base(prunevit.PruningPolicy):",
        "    def __init__(self):",
        "        super().__init__(0.5, [1])",
        "    def forward(self, tokens, attention, layer):",
        "        return prunevit.top_k(tokens, self.look(attention), 0.5)",
        "class Mine(Base):",
        "    def look(self, attention):",
        "        return attention.prefix_attention[:, 0]",
    )
    pruned = prune(timm.create_model("test_vit", num_classes=3), build_policy({"name": name}))
    with pytest.raises(InputError) as caught, policy_errors(name):
        pruned(torch.zeros(1, 3, 160, 160))
    assert caught.value.problems == (
        f"policy {name}: AttentionState: prefix_attention is not computed; name it in needs of the policy "
        f"({name.partition(':')[0]}.py:9)",
    )
    # What was wrapped on the way keeps its place.
    with pytest.raises(InputError, match=r"^policy .*:Mine: no \(user_.*\.py:9\)$"), policy_errors(name):
        wrap(build_policy({"name": name}))


def wrap(policy: Any) -> None:
    """As `prune_model` does it."""
    try:
        policy.look(None)
    except AttributeError as error:
        raise InputError("no") from error


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"nothing of the kind", "it holds something else than tensors"),
        (pickle.dumps({"a": Path()}), "it holds something else than tensors"),
    ],
)
def test_a_trace_that_would_run_code_is_refused_without_advice_to_run_it(
    content: bytes, reason: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    file = tmp_path / "trace.pt"
    file.write_bytes(content)
    (line,) = policy_problems({"name": "replay", "trace": str(file)})
    assert line == f"policy.trace: must be a file that Trace.save wrote, got {file} ({reason})"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (Sequence[int], "a list of whole numbers"),
        (tuple[float, ...], "a list of numbers"),
        (Literal["a", "b"], "one of a, b"),
        (str | Mapping[str, Any] | PruningPolicy, "text or a mapping"),
        (list[Path], "a list of Path"),
        (dict, "a mapping"),
    ],
)
def test_hints_in_words(hint: Any, words: str) -> None:
    assert in_words(hint) == words


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ("none", "replay")])
def test_one_layer_may_stand_without_brackets(name: str) -> None:
    policy: Any = build_policy({"name": name, "layers": 3})
    assert policy.layers == (3,)
    assert policy_problems({"name": name, "layers": 3.5}) == [
        "policy.layers: must be a whole number or a list of whole numbers or text, got 3.5"
    ]
