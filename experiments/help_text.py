"""What `--help` says: rows of two columns, as wide as their words need, within the terminal."""

import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING, Field
from typing import Any

from prunevit.experiments.compose import group_names, read_yaml
from prunevit.experiments.config import GROUPS, leaves

OTHER_NAMES = {"model": ", or any timm architecture", "policy": ", or package.module:Class, or file.py:Class"}
WIDEST = 34  # characters of the first column; what is longer has the line to itself
WHOLE: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}  # of textwrap
UNSET = "???"  # how YAML writes a key that must be set


def columns(rows: Sequence[tuple[str, str]], widest: int = WIDEST) -> list[str]:
    """Lay rows out in two columns.

    Args:
        rows: First and second column of each.
        widest: Bound on the width of the first.
    """
    width = max((len(left) for left, _ in rows if len(left) <= widest), default=widest)
    room = max(shutil.get_terminal_size().columns - width - 4, 30)
    lines = []
    for left, right in rows:
        parts = textwrap.wrap(right, room, **WHOLE) or [""]
        if len(left) > width:
            lines += textwrap.wrap(
                left, width + room + 4, initial_indent="  ", subsequent_indent="    ", **WHOLE
            )
            left = ""
        lines += [
            f"  {first:<{width}}  {part}".rstrip() for first, part in zip([left, *[""] * len(parts)], parts)
        ]
    return lines


def group_rows(keys: dict[str, Any], tree: dict[str, Any]) -> list[tuple[str, str]]:
    """The groups of a verb: what each is, and what else it can be.

    Args:
        keys: Fields of the verb's schema by dotted key.
        tree: The values that a run would have.
    """
    return [
        (
            f"{group}={tree.get(group, {}).get('name', 'null')}",
            ", ".join(group_names(group)) + OTHER_NAMES.get(group, ""),
        )
        for group in GROUPS
        if any(path.partition(".")[0] == group for path in keys)
    ]


def key_rows(keys: dict[str, Any], tree: dict[str, Any]) -> list[tuple[str, str]]:
    """The keys of a verb with their values: what each means, and what it can be; arguments as `group_rows`."""
    rows = [("config=null", "a YAML file of keys, read before the command line")]
    for path, declared in keys.items():
        if path == "policy":
            own = tree.get("policy", {})
            rows += [
                (f"policy.{name}={in_yaml(value)}", f"of {own.get('name')}")
                for name, value in own.items()
                if name not in ("name", "gmacs", _solved_for(own))
            ]
            if "calibration_images" in keys:
                rows.append(
                    (
                        f"policy.gmacs={in_yaml(own.get('gmacs'))}",
                        "equal cost: GMACs an image that the policy's knob is set to",
                    )
                )
        else:
            choices = declared.metadata["choices"]
            among = f"; one of {', '.join(choices)}" if choices else ""
            rows.append((f"{path}={_value(declared, path, tree)}", declared.metadata["help"] + among))
    return rows


def _solved_for(policy: dict[str, Any]) -> str | None:
    """The knob, where a cost is asked for: its value as shipped would not apply."""
    if policy.get("gmacs") is None:
        return None
    from prunevit.experiments.policy_spec import knob_of

    return knob_of(policy.get("name"))


def policy_rows() -> list[tuple[str, str]]:
    """Each policy's name with its settings as shipped."""
    rows = []
    for policy in group_names("policy"):
        settings = read_yaml(f"policy/{policy}.yaml").items()
        words = [f"policy.{key}={in_yaml(value)}" for key, value in settings if key != "name"]
        rows.append((policy, " ".join(words)))
    return rows


def in_yaml(value: object) -> str:
    """Write a value as the command line takes it.

    Args:
        value: From YAML.
    """
    if value in (None, MISSING):
        return "null"
    if value == UNSET:
        return "(must be set)"
    if isinstance(value, list):
        return f"[{','.join(map(in_yaml, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _value(declared: Field[Any], path: str, tree: dict[str, Any]) -> str:
    value = declared.default_factory() if callable(declared.default_factory) else declared.default
    *groups, key = path.split(".")
    for group in groups:
        tree = tree.get(group, {})
    value = tree.get(key, value)
    return "null" if value == UNSET else in_yaml(value)


def positional_word(keys: dict[str, Any], positional: str) -> str:
    """How the usage line writes the key that bare words fill; empty without one.

    Args:
        keys: Fields of the verb's schema by dotted key.
        positional: Its name.
    """
    if not positional:
        return ""
    return f" [{positional.upper()}{' ...' if holds_list(keys[positional]) else ''}]"


def holds_list(declared: Field[Any]) -> bool:
    """Whether a key holds a list: several bare words may fill it.

    Args:
        declared: Its field in the schema.
    """
    return callable(declared.default_factory) and isinstance(declared.default_factory(), list)


def verb_text(usage: str, summary: str, schema: type, tree: dict[str, Any]) -> str:
    """Text of `prunevit VERB --help`: groups, then keys with values and meaning.

    Args:
        usage: The usage line.
        summary: What the verb does.
        schema: The dataclass of its keys.
        tree: The values that a run would have.
    """
    keys, lines = leaves(schema), [usage, "", summary, ""]
    if not keys:
        return "\n".join([*lines, "It has no keys."])
    if rows := group_rows(keys, tree):
        lines += ["groups (GROUP=NAME; a key of it: GROUP.KEY=VALUE)", *columns(rows), ""]
    lines += ["keys", *columns(key_rows(keys, tree))]
    if "policy" in keys:
        lines += [
            "",
            "keys of the policy are its constructor's arguments; as shipped:",
            *columns(policy_rows()),
        ]
    return "\n".join(lines)
