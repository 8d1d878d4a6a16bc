"""Which rows a comparison has: policies at rates or at costs, or those of a file."""

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from omegaconf.errors import OmegaConfBaseException

from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.paths import told_apart
from prunevit.experiments.comparison.saved import UNPRUNED
from prunevit.experiments.compose import group_names, nearest, read_yaml
from prunevit.experiments.config import InputError, first_line
from prunevit.experiments.contender import GUESSES, RowSpec
from prunevit.experiments.plain_yaml import plain
from prunevit.experiments.policy_spec import knob_of, policy_problems
from prunevit.experiments.weights import settings
from prunevit.policies import resolve

RATES = (0.7, 0.5, 0.3)  # where nobody says anything else
KEYS = ("name", "policy", "weights", "seed")  # of a row in a file
# Names that predictions.npz has itself, and those of the unpruned model in tables and pairs.
TAKEN = (*GUESSES, "unpruned", UNPRUNED)
Spec = dict[str, Any]


def plan_rows(config: CompareConfig) -> list[RowSpec]:
    """Say what each row is to be.

    Args:
        config: The composed configuration.

    Raises:
        InputError: With a line for each problem found.
    """
    rows = _of_file(config.rows, config) if config.rows is not None else _of_policies(config)
    rows = [each for row in rows for each in _by_seed(row, config)]
    problems = [f"{line} (row {row.name})" for row in rows for line in policy_problems(row.policy)]
    names = Counter(row.name for row in rows)
    problems += [
        f"rows: {name} stands for {count} rows; give each a name of its own, or leave out what is there twice"
        for name, count in names.items()
        if count > 1
    ]
    problems += [
        f"rows: a row may not be called {name!r}, which means something else in the results; give it another name"
        for name in names
        if name in TAKEN
    ]
    if problems:
        raise InputError(*dict.fromkeys(problems))
    return rows


def _of_policies(config: CompareConfig) -> list[RowSpec]:
    """Every policy at every rate, or set to every cost."""
    problems, rows = [], []
    for name in config.policies:
        settings = _settings(name)
        try:
            knob = resolve(name).knob
        except ValueError as error:
            problems.append(str(error))
            continue
        if config.gmacs is None and knob != "keep_rate":
            has = f"its knob is {knob}" if knob else "it has no knob"
            problems.append(f"keep_rates: {name} has no keep_rate, {has}; use gmacs=[...], or rows=FILE")
            continue
        key, values = ("gmacs", config.gmacs) if config.gmacs else ("keep_rate", config.keep_rates or RATES)
        for value in values:
            rows.append(_row(f"{name} {key}={value:g}", {**settings, key: value}, config))
    if problems:
        raise InputError(*problems)
    return rows


def _of_file(path: str, config: CompareConfig) -> list[RowSpec]:
    """The rows of a file: `rows:` and a list of mappings with the keys `KEYS`."""
    try:
        content = plain(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise InputError(f"rows: must be a readable YAML file, got {path} ({first_line(error)})") from error
    listed = content.get("rows")
    if set(content) != {"rows"} or not isinstance(listed, list) or not listed:
        raise InputError(
            f"rows: {path} must hold rows: and a list of rows, got {', '.join(content) or 'nothing'}"
        )
    problems: list[str] = []
    files = _names_of_files(listed)
    rows = [_from_file(number, row, config, files, problems) for number, row in enumerate(listed, 1)]
    if problems:
        raise InputError(*problems)
    return _apart_by_seed([row for row in rows if row is not None])


def _apart_by_seed(rows: Sequence[RowSpec]) -> list[RowSpec]:
    """The seed behind the name of rows that differ in nothing else, as `seeds` puts it there."""

    def has_sisters(row: RowSpec) -> bool:
        named = [each for each in rows if each.name == row.name]
        seeds = {each.seed for each in named}
        return len(seeds) > 1 and all(replace(each, seed=row.seed) == row for each in named)

    return [replace(row, name=f"{row.name} seed={row.seed}") if has_sisters(row) else row for row in rows]


def _names_of_files(listed: Sequence[Any]) -> dict[str, str]:
    """What each weights file of the rows is called in a label: without its ending, if that tells it from the others."""
    given = {str(row["weights"]) for row in listed if isinstance(row, dict) and row.get("weights")}
    files = {path: Path(path).resolve() for path in given if Path(path).is_file()}
    whole = [*{*files.values()}]
    short = [path.with_suffix("") for path in whole]
    names = dict(zip(whole, told_apart(short if len({*short}) == len(short) else whole)))
    return {path: names[file] for path, file in files.items()}


def _from_file(
    number: int, row: Any, config: CompareConfig, files: dict[str, str], problems: list[str]
) -> RowSpec | None:
    where = f"rows: row {number} of {config.rows}"
    if not isinstance(row, dict):
        problems.append(f"{where} must be a mapping, got {row}")
        return None
    unknown = [str(key) for key in row if key not in KEYS]
    if unknown:
        problems.append(f"{where} has an unknown key {unknown[0]}; {nearest(unknown[0], list(KEYS))}")
        return None
    seed, weights = row.get("seed", config.seed), row.get("weights", config.weights)
    if type(seed) is not int or not 0 <= seed < 2**32:
        problems.append(f"{where}: seed must be a whole number from 0 to 4294967295, got {seed}")
        return None
    if weights is not None and not Path(str(weights)).is_file():
        problems.append(f"{where}: weights must be a file, got {weights}")
        return None
    policy = _policy_of(row.get("policy"), weights)
    if policy is None:
        problems.append(f"{where}: policy must be a name or a mapping with a name, got {row.get('policy')}")
        return None
    own, knob = row.get("policy"), knob_of(policy["name"])
    if isinstance(own, dict) and own.get("gmacs") is not None and knob in own:
        problems.append(f"{where}: policy.{knob} is solved for by policy.gmacs; give one of the two")
        return None
    name = row.get("name")
    if isinstance(name, dict | list) or name == "":
        problems.append(f"{where}: name must be text, got {name or 'none'}")
        return None
    name = _label(policy, files[str(weights)] if row.get("weights") else None) if name is None else name
    return RowSpec(str(name), policy, config.model, None if weights is None else str(weights), seed)


def _policy_of(given: Any, weights: str | None) -> Spec | None:
    """What a row says over what its weights file says over what is shipped."""
    said = settings(str(weights)).get("policy", {}) if weights is not None else {}
    own = {"name": given} if isinstance(given, str) else given or {}
    if not isinstance(own, dict):
        return None
    name = own.get("name", said.get("name"))
    if not isinstance(name, str):
        return None
    return {**_settings(name), **(said if said.get("name") == name else {}), **own}


def _settings(name: str) -> Spec:
    return read_yaml(f"policy/{name}.yaml") if name in group_names("policy") else {"name": name}


def _label(policy: Spec, file: str | None) -> str:
    """The policy, what is set otherwise than as shipped, and the file."""
    shipped, knob = _settings(policy["name"]), knob_of(policy["name"])
    told = (
        "gmacs" if "gmacs" in policy else knob,
        *(key for key in policy if policy[key] != shipped.get(key)),
    )
    parts = [f"{key}={policy[key]}".replace(" ", "") for key in dict.fromkeys(told) if key in policy]
    return " ".join([policy["name"], *parts, *([file] if file else [])])


def _row(name: str, policy: Spec, config: CompareConfig) -> RowSpec:
    return RowSpec(name, policy, config.model, config.weights, config.seed)


def _by_seed(row: RowSpec, config: CompareConfig) -> Iterator[RowSpec]:
    """One row for each seed, where the policy draws."""
    if config.seeds is None or not _draws(row.policy):
        yield row
        return
    for seed in config.seeds:
        name = f"{row.name} seed={seed}" if len(config.seeds) > 1 else row.name
        yield RowSpec(name, row.policy, row.model, row.weights, seed)


def _draws(policy: Spec) -> bool:
    cls = resolve(policy["name"])
    return cls.stochastic or "seed" in inspect.signature(cls).parameters
