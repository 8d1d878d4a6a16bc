"""The verbs of the command line: what each does, its help, and the way from its words to its run."""

import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any

from prunevit import __version__
from prunevit.experiments.compose import compose, nearest, tree_of
from prunevit.experiments.config import InputError, leaves
from prunevit.experiments.help_text import columns, holds_list, positional_word, verb_text
from prunevit.experiments.output_dir import take_back


@dataclass(frozen=True)
class Verb:
    """A verb: what it does, `module:class` of its keys, and `module:function` that takes the configuration.

    Both are imported only when the verb is asked for; the function may return an exit code. `positional` names the key
    that words without "=" fill: one word, or any number of them where the key holds a list.
    """

    summary: str
    keys: str
    entry: str
    positional: str = ""

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
    "finetune": Verb("train a pruned model", "finetuning.config:FinetuneConfig", "finetuning.run:run"),
    "compare": Verb(
        "many policies in one pass: statistics, equal cost, one report",
        "comparison.config:CompareConfig",
        "comparison.run:run",
    ),
    "plan": Verb(
        "tokens and GMACs of a policy, ahead of a run", "planning.config:PlanConfig", "planning.run:run"
    ),
    "reproduce": Verb(
        "a published row on your ImageNet, ours minus theirs",
        "planning.config:ReproduceConfig",
        "planning.reproduce:run",
        "name",
    ),
    "bench": Verb(
        "speed on a GPU beside the strongest rivals", "benchmark.config:BenchConfig", "benchmark.run:run"
    ),
    "report": Verb(
        "a page over several runs", "comparison.config:ReportConfig", "comparison.report_run:run", "runs"
    ),
    "show": Verb(
        "a photo, and what a policy keeps of it",
        "comparison.config:ShowConfig",
        "comparison.show:run",
        "image",
    ),
    "policies": Verb("list the pruning policies", "config:PoliciesConfig", "policy_table:run"),
    "check": Verb(
        "hold a policy against what every policy owes", "config:CheckConfig", "checking:run", "policy"
    ),
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
    if words == ["--version"]:
        print(f"prunevit {__version__}")
        return 0
    asks_help = any(word in ("-h", "--help", "help") for word in words)
    rest = [word for word in words if word not in ("-h", "--help", "help")]
    if not rest:
        print(overview())
        return 0 if asks_help else 2
    name, arguments = rest[0], rest[1:]
    if name not in VERBS:
        raise InputError(f"unknown verb, got {name}; {nearest(name, list(VERBS))}")
    verb = VERBS[name]
    if asks_help:
        print(help_text(name, verb, with_keys(verb, arguments)))
        return 0
    # A user's policy is found beside the place where the command runs, as `python -m` would find it.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    config = compose(name, verb.schema, with_keys(verb, arguments))
    try:
        outcome = _named(verb.entry)(config)
    finally:
        take_back()
    return outcome if isinstance(outcome, int) else 0


def with_keys(verb: Verb, words: list[str]) -> list[str]:
    """Give each word of a command line its key: "evit" is policy="evit", "--all" is all=true.

    Args:
        verb: Says which key a bare word fills.
        words: Those after the verb.
    """
    keys = leaves(verb.schema)
    switches = {
        f"--{name.replace('_', '-')}": name for name, each in keys.items() if each.type in (bool, "bool")
    }
    named = [f"{switches[word]}=true" if word in switches else word for word in words]
    if verb.positional:
        bare = [json.dumps(word, ensure_ascii=False) for word in named if _is_bare(word)]
        named = [word for word in named if not _is_bare(word)]
        if holds_list(keys[verb.positional]):
            bare = [f"[{','.join(bare)}]"] if bare else []
        named = [f"{verb.positional}={word}" for word in bare] + named
    return named


def _is_bare(word: str) -> bool:
    """Whether a word is no key=value: no "=" ahead of which a key could stand, which a path like a/b=c is."""
    key, equals, _ = word.partition("=")
    return word[:1] != "-" and (not equals or os.sep in key)


def overview() -> str:
    """Text of `prunevit --help`."""
    verbs = columns([(name, verb.summary) for name, verb in VERBS.items()])
    return "\n".join(
        [
            "usage: prunevit VERB [key=value ...]",
            "",
            *verbs,
            "",
            "prunevit VERB --help lists the keys of a verb; prunevit --version says which version this is.",
            "example: prunevit evaluate policy=topk policy.keep_rate=0.5 policy.layers=[3,6,9]",
        ]
    )


def help_text(name: str, verb: Verb, arguments: list[str]) -> str:
    """Text of `prunevit VERB --help`.

    Args:
        name: The verb.
        verb: Its line of the table.
        arguments: Words that stand beside it: the values shown are those that they would lead to.

    Raises:
        InputError: If one of them names nothing.
    """
    bare = positional_word(leaves(verb.schema), verb.positional)
    usage = f"usage: prunevit {name}{bare} [key=value ...]"
    return verb_text(usage, verb.summary, verb.schema, tree_of(name, verb.schema, arguments))
