"""The verbs of the command line: what each does, its help, and the way from its words to its run."""

import importlib
import os
import sys
from dataclasses import MISSING, Field, dataclass
from typing import Any

from prunevit.experiments.compose import compose, group_names, nearest, read_yaml
from prunevit.experiments.config import GROUPS, InputError, leaves


@dataclass(frozen=True)
class Verb:
    """A verb: what it does, `module:class` of its keys, and `module:function` that takes the configuration.

    Both are imported only when the verb is asked for.
    """

    summary: str
    keys: str
    entry: str

    @property
    def schema(self) -> type:
        """The dataclass of its keys."""
        return _named(self.keys)


def _named(path: str) -> Any:
    module, name = path.split(":")
    return getattr(importlib.import_module(f"prunevit.experiments.{module}"), name)


# Beside its line, a verb has configs/<verb>.yaml.
VERBS = {
    "evaluate": Verb("accuracy, logit deviation and speed", "config:EvaluateConfig", "evaluation:run"),
    "bench": Verb(
        "speed on a GPU beside the strongest rivals", "benchmark.config:BenchConfig", "benchmark.run:run"
    ),
    "policies": Verb("list the pruning policies", "config:PoliciesConfig", "policy_table:run"),
}


def dispatch(words: list[str]) -> int:
    """Run the verb that the words name, or say what there is.

    Args:
        words: Those after the program's name.

    Returns:
        The exit code.

    Raises:
        InputError: If the input is wrong.
    """
    asks_help = any(word in ("-h", "--help", "help") for word in words)
    rest = [word for word in words if word not in ("-h", "--help", "help")]
    if not rest:
        print(overview())
        return 0 if asks_help else 2
    name, arguments = rest[0], rest[1:]
    if name not in VERBS:
        raise InputError(f"prunevit: unknown verb, got {name}; {nearest(name, list(VERBS))}")
    verb = VERBS[name]
    if asks_help:
        print(help_text(name, verb))
        return 0
    # A user's policy is found beside the place where the command runs, as `python -m` would find it.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    config = compose(name, verb.schema, arguments)
    _named(verb.entry)(config)
    return 0


def overview() -> str:
    """Text of `prunevit --help`."""
    verbs = [f"  {name:<10} {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: prunevit VERB [key=value ...]",
            "",
            *verbs,
            "",
            "prunevit VERB --help lists the keys of a verb.",
            "example: prunevit evaluate policy=topk policy.keep_rate=0.5 policy.layers=[3,6,9]",
        ]
    )


def help_text(name: str, verb: Verb) -> str:
    """Text of `prunevit VERB --help`: groups, then keys with defaults and meaning.

    Args:
        name: The verb.
        verb: Its line of the table.
    """
    lines = [f"usage: prunevit {name} [key=value ...]", "", verb.summary, ""]
    keys = leaves(verb.schema)
    if not keys:
        return "\n".join([*lines, "It has no keys."])
    chosen = read_yaml(f"{name}.yaml")
    groups = [group for group in GROUPS if group in chosen]
    if groups:
        lines.append("groups (GROUP=NAME; a key of it: GROUP.KEY=VALUE)")
        for group in groups:
            names = ", ".join(group_names(group)) + OTHER_NAMES.get(group, "")
            lines.append(f"  {group + '=' + chosen[group]:<27} {names}")
        lines.append("")
    lines += ["keys", "  config=null                 a YAML file of keys, read before the command line"]
    for path, declared in keys.items():
        if path != "policy":
            lines.append(f"  {path + '=' + _default(declared, path, chosen):<27} {declared.metadata['help']}")
            if declared.metadata["choices"]:
                lines.append(f"{'':<30}one of {', '.join(declared.metadata['choices'])}")
    if "policy" not in groups:
        return "\n".join(lines)
    lines += ["", "keys of the policy are its constructor's arguments; as shipped:"]
    for policy in group_names("policy"):
        settings = {key: value for key, value in read_yaml(f"policy/{policy}.yaml").items() if key != "name"}
        lines.append(f"  {policy:<13}" + " ".join(f"policy.{key}={value}" for key, value in settings.items()))
    return "\n".join(lines)


OTHER_NAMES = {"model": ", or any timm architecture", "policy": ", or package.module:Class"}


def _default(declared: Field[Any], path: str, chosen: dict[str, Any]) -> str:
    group, _, key = path.partition(".")
    value = declared.default_factory() if callable(declared.default_factory) else declared.default
    value = read_yaml(f"{group}/{chosen[group]}.yaml").get(key, value) if key else value
    if value is MISSING or value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
