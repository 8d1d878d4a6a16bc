"""Composition of a configuration: a verb's YAML, the groups it names, a user's YAML, the command line.

Later layers win. A group (`model`, `policy`, `data`, `logger`) is chosen by name (`policy=evit` reads
`configs/policy/evit.yaml`) and refined by dotted keys (`policy.keep_rate=0.5`), in whatever order they stand.
All problems are gathered and raised together.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import Field, fields, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from prunevit.experiments.config import GROUPS, InputError, VerbConfig, first_line, leaves
from prunevit.experiments.plain_yaml import plain

CONFIGS = files("prunevit.configs")
Tree = dict[str, Any]


def compose(verb: str, schema: type[VerbConfig], arguments: list[str]) -> Any:
    """Make the configuration of one run.

    Args:
        verb: Its file is `configs/<verb>.yaml`.
        schema: The dataclass that holds it.
        arguments: `key=value` words of the command line; `config=FILE` reads a YAML first.

    Returns:
        An instance of `schema`.

    Raises:
        InputError: With a line for each problem found.
    """
    problems: list[str] = []
    return _finish(_laid(verb, schema, arguments, problems), schema, problems)


def tree_of(verb: str, schema: type[VerbConfig], arguments: list[str]) -> Tree:
    """The values that a run would have, by group and key, neither typed nor checked; a key without one is not there.

    Args:
        verb: As for `compose`.
        schema: Likewise.
        arguments: Likewise.

    Raises:
        InputError: With a line for each word that names nothing.
    """
    problems: list[str] = []
    tree = _laid(verb, schema, arguments, problems)
    if problems:
        raise InputError(*problems)
    return tree


def _laid(verb: str, schema: type[VerbConfig], arguments: list[str], problems: list[str]) -> Tree:
    """Lay all layers over each other, the command line last."""
    tree: Tree = {}
    known = {each.name for each in fields(schema)}
    overrides = _parse(arguments, problems)
    user_file = overrides.pop("config", None)
    chosen = {name: value for name, value in overrides.items() if name in GROUPS}
    user_layer = _read_user_file(user_file, problems)
    said = _said_by_weights(overrides.get("weights", user_layer.get("weights")), known, problems)
    shipped = read_yaml(f"{verb}.yaml")
    recipe = _recipe((shipped, user_layer, chosen), problems) if "recipe" in known else {}
    try:
        beneath = schema.beneath(overrides)
    except InputError as error:
        problems += error.problems
        beneath = {}
    for layer in (shipped, recipe, said, beneath, user_layer, chosen):
        # Naming again what the weights file names keeps its settings.
        news = {key: value for key, value in layer.items() if value != said.get(key, {}).get("name", "")}
        if "recipe" in known and isinstance(news.get("recipe"), str):
            del news["recipe"]  # it stands for the layer above
        _merge_layer(tree, news, known, problems)
    unknown = {line.partition(":")[0] for line in problems}
    for name in overrides:
        # Keys of a group that does not exist mean nothing.
        if name not in chosen and name.partition(".")[0] not in unknown:
            _set(tree, name, overrides[name], problems)
    problems += _cost_problems(tree, overrides, known)
    return tree


def read_yaml(name: str) -> Tree:
    """Read one of the shipped files.

    Args:
        name: Path under `configs/`.
    """
    return plain(CONFIGS.joinpath(name).read_text(encoding="utf-8"))


def group_names(group: str) -> list[str]:
    """List the files of a group, without `.yaml`."""
    found = (entry.name for entry in CONFIGS.joinpath(group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in found if name.endswith(".yaml"))


def nearest(name: str, names: list[str]) -> str:
    """Say which of `names` a misspelt one is closest to.

    Args:
        name: What was given.
        names: What exists.
    """
    by_last_part = {each.rsplit(".", 1)[-1]: each for each in reversed(names)}
    close = get_close_matches(name, names, n=1) or [
        by_last_part[each] for each in get_close_matches(name.rsplit(".", 1)[-1], by_last_part, n=1)
    ]
    if close:
        return f"the nearest is {close[0]}"
    return (
        f"known: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}" if names else "there are none"
    )


def _parse(arguments: list[str], problems: list[str]) -> Tree:
    overrides: Tree = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not argument.isascii() and argument != argument.encode(errors="replace").decode():
            problems.append(f"{argument!a}: an argument must be UTF-8")
            continue
        if not equals or not name:
            problems.append(f"{argument}: an argument must be key=value")
            continue
        if not value.strip():
            known = (
                f"known: {', '.join(group_names(name))}" if name in GROUPS else f"write {name}=null for none"
            )
            problems.append(f"{name}: must have a value, got none; {known}")
            continue
        if name in overrides:
            problems.append(f"{name}: must be given once, got {argument} again")
            continue
        try:
            overrides[name] = plain(f"value: {value}")["value"]
        except (yaml.YAMLError, OmegaConfBaseException) as error:
            if value[0] in "[{\"'$":
                problems.append(f"{name}: must be a YAML value, got {value} ({first_line(error)})")
            else:  # text with a colon, as in policy.layers=3:
                overrides[name] = value
    return overrides


def _read_user_file(path: object, problems: list[str]) -> Tree:
    if path is None:
        return {}
    try:
        return plain(Path(str(path)).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        problems.append(f"config: must be a readable YAML file, got {path} ({first_line(error)})")
        return {}


def _said_by_weights(path: object, known: set[str], problems: list[str]) -> Tree:
    """The model and the policy that a weights file was made with, as far as it says so."""
    if path in (None, "") or "weights" not in known:
        return {}
    from prunevit.experiments.weights import settings

    try:
        said = settings(str(path))
    except InputError as error:
        problems += error.problems
        return {}
    return {name: _whole(name, group) for name, group in said.items() if name in known}


def _recipe(layers: Sequence[Tree], problems: list[str]) -> Tree:
    """The recipe that the last of the layers names: unlike other groups it sets keys of the whole run."""
    names = [layer["recipe"] for layer in layers if isinstance(layer.get("recipe"), str)]
    known = group_names("recipe")
    if names and names[-1] not in known:
        problems.append(f"recipe: unknown name, got {names[-1]}; {nearest(names[-1], known)}")
    return read_yaml(f"recipe/{names[-1]}.yaml") if names and names[-1] in known else {}


def _whole(group: str, settings: Tree) -> Tree:
    """Settings with the shipped ones of that name beneath them."""
    name = settings.get("name")
    shipped = read_yaml(f"{group}/{name}.yaml") if name in group_names(group) else {}
    return {**shipped, **settings}


def _cost_problems(tree: Tree, overrides: Tree, known: set[str]) -> list[str]:
    """`policy.gmacs` is for verbs that solve for the knob, and a user leaves the knob to it."""
    policy = tree.get("policy")
    if not isinstance(policy, dict) or policy.get("gmacs") is None:
        return []
    if "calibration_images" not in known:
        return ["policy.gmacs: this verb does not solve for it; prunevit plan says which knob it is"]
    from prunevit.experiments.policy_spec import knob_of

    knob = f"policy.{knob_of(policy.get('name'))}"
    return [f"{knob}: is solved for by policy.gmacs; give one of the two"] if knob in overrides else []


def _merge_layer(tree: Tree, layer: Tree, known: set[str], problems: list[str]) -> None:
    """Lay one file, or the groups chosen on the command line, over the tree."""
    for name, value in layer.items():
        if name in GROUPS and name in known:
            _merge_group(tree, name, value, problems)
        else:
            tree[name] = value


def _merge_group(tree: Tree, group: str, value: Any, problems: list[str]) -> None:
    """A name reads that file; a mapping with a name stands alone; one without refines what is there."""
    if isinstance(value, dict):
        tree[group] = value if "name" in value else {**tree.get(group, {}), **value}
    elif value in group_names(group):
        tree[group] = read_yaml(f"{group}/{value}.yaml")
    elif group == "policy" and (":" in str(value) or str(value).endswith(".py")):
        tree[group] = {"name": value}
    elif group == "model" and _is_timm_name(str(value)):
        tree[group] = {**read_yaml("model/timm.yaml"), "name": value}
    else:
        names = group_names(group)
        if group == "model":
            import timm

            names = names + timm.list_models()
        given = "null" if value is None else value
        problems.append(f"{group}: unknown name, got {given}; {nearest(str(given), names)}")


def _is_timm_name(name: str) -> bool:
    import timm

    return name.startswith(("hf-hub:", "hf_hub:", "local-dir:")) or timm.is_model(name)


def _set(tree: Tree, name: str, value: Any, problems: list[str]) -> None:
    *path, last = name.split(".")
    if not last:
        problems.append(f"{name}: unknown key; a name must follow the dot")
        return
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            problems.append(f"{name}: unknown key; {part} is a value, not a group")
            return
    tree[last] = value


def _flat(tree: Tree, schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Walk the tree down to the keys of the schema."""
    nested = {f.name: f.default_factory for f in fields(schema) if is_dataclass(f.default_factory)}
    for name, value in tree.items():
        inner = nested.get(name)
        if isinstance(inner, type) and isinstance(value, dict):
            yield from _flat(value, inner, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _finish(tree: Tree, schema: type, problems: list[str]) -> Any:
    """Check everything that can be checked before a model is built, and raise all problems at once."""
    config = _typed(tree, schema, problems)
    problems += [line for name, each in leaves(schema).items() for line in _out_of_bounds(config, name, each)]
    if "policy" in tree and "policy" in leaves(schema) and not _as_shipped(tree["policy"]):
        problems += _policy_problems(config)
    if problems:
        raise InputError(*problems)
    try:
        OmegaConf.resolve(config)
        typed = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        raise InputError(f"{error.full_key or 'config'}: {first_line(error)}") from error
    assert isinstance(typed, VerbConfig)
    if lines := typed.problems():
        raise InputError(*lines)
    return typed


def _typed(tree: Tree, schema: type, problems: list[str]) -> DictConfig:
    """Put every value into the schema, noting each that does not fit and each that is missing."""
    config, known = OmegaConf.structured(schema), leaves(schema)
    policy = tree.get("policy")  # a verb without that group leaves whatever was given
    policy_keys = [f"policy.{name}" for name in policy] if isinstance(policy, dict) else []
    for name, value in _flat(tree, schema):
        if name not in known:
            problems.append(f"{name}: unknown key; {nearest(name, [*known, *policy_keys])}")
            continue
        try:
            OmegaConf.update(config, name, value)
        except OmegaConfBaseException as error:
            problems.append(f"{name}: {first_line(error)}")
    with suppress(OmegaConfBaseException):  # an interpolation of nothing: the check of the bounds names it
        missing = sorted(OmegaConf.missing_keys(config))
        problems += [f"{name}: must be set" for name in missing if not name.startswith("policy.")]
    return config


def _as_shipped(policy: Any) -> bool:
    """Whether a policy stands as its file has it, with nothing left to set: to look would take torch."""
    name = policy.get("name") if isinstance(policy, dict) else None
    shipped = read_yaml(f"policy/{name}.yaml") if name in group_names("policy") else None
    return policy == shipped and "???" not in policy.values()


def _policy_problems(config: DictConfig) -> list[str]:
    from prunevit.experiments.policy_spec import policy_problems

    try:
        spec = plain(OmegaConf.to_yaml(config.policy, resolve=True))
        return policy_problems({name: value for name, value in spec.items() if value != "???"})
    except OmegaConfBaseException as error:
        return [f"{error.full_key}: {first_line(error)}"]


def _out_of_bounds(config: DictConfig, name: str, declared: Field[Any]) -> list[str]:
    try:
        value = OmegaConf.select(config, name, default=None)
    except OmegaConfBaseException as error:
        return [f"{name}: {first_line(error)}"]
    given = [each for each in (value if isinstance(value, ListConfig) else [value]) if each is not None]
    if isinstance(value, ListConfig) and any(isinstance(each, DictConfig | ListConfig) for each in given):
        return [f"{name}: must be a list of single values, got {value}"]
    misfits = [(each, _misfit(each, declared)) for each in given]
    return [
        f"{name}: must {line}, got {each!r}" if each == "" else f"{name}: must {line}, got {each}"
        for each, line in misfits
        if line
    ]


def _misfit(value: Any, declared: Field[Any]) -> str | None:
    """What a value of a key must be and is not."""
    low, high, choices = (declared.metadata[name] for name in ("low", "high", "choices"))
    if isinstance(value, float) and not math.isfinite(value):
        return "be a finite number"
    if low is not None and value < low:
        return f"be at least {low}"
    if low is not None and value > high:
        return f"be at most {high}"
    if choices and value not in choices:
        return f"be one of {', '.join(choices)}"
    if value == "" and declared.default != "":
        return "have a value"
    return None
