"""A policy from its part of the configuration: the class's constructor is the schema.

Any class can be named (`policy=package.module:Class`, or `policy=file.py:Class`), so its arguments are known only from
its signature: unknown, missing and wrongly typed ones are refused with the key's path.
"""

import os
import pickle
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import walk_tb
from typing import Any, Literal, Union, get_args, get_origin

import torch

from prunevit.experiments.compose import nearest
from prunevit.experiments.config import InputError, first_line
from prunevit.policies import Replay, resolve
from prunevit.policy import PruningPolicy, check_made
from prunevit.settings import construct, settings_of
from prunevit.trace import Trace

Spec = dict[str, Any]

# What reading raises of a file that is missing, cut off, or holds something else than a trace.
UNREADABLE = (
    *(OSError, EOFError, pickle.UnpicklingError, RuntimeError),
    *(ValueError, TypeError, KeyError, AttributeError, IndexError),
)


def build_policy(spec: Spec, seed: int = 0) -> PruningPolicy:
    """Construct the policy that a configuration names.

    Args:
        spec: `name` and the arguments of the constructor.
        seed: Given to a constructor that takes a `seed`, unless `spec` sets one.

    Raises:
        InputError: If the name, an argument or a value is wrong.
    """
    problems = policy_problems(spec)
    if problems:
        raise InputError(*problems)
    cls = resolve(spec["name"])
    default_seed = {"seed": seed} if "seed" in settings_of(cls) else {}
    return construct(cls, {**default_seed, **_arguments(spec)})


def policy_problems(spec: Spec) -> list[str]:
    """Say what is wrong with a policy's part of the configuration, a line for each problem.

    Args:
        spec: `name` and the arguments of the constructor.
    """
    if not isinstance(spec.get("name"), str):
        return [
            "policy.name: must be set; name a file of configs/policy, package.module:Class or file.py:Class"
        ]
    try:
        cls = resolve(spec["name"])
    except ValueError as error:
        return [str(error) + _place(error.__cause__, {spec["name"].rpartition(":")[0]})]
    lines = _signature_problems(cls, _arguments(spec)) + _gmacs_problems(cls, spec.get("gmacs"))
    if lines:
        return lines
    if issubclass(cls, Replay) and (line := _trace_problem(spec["trace"])):
        return [line]
    try:
        with policy_errors(spec["name"]):
            check_made(construct(cls, _arguments(spec)))
    except InputError as error:
        return list(error.problems)
    return []


@contextmanager
def policy_errors(name: str) -> Iterator[None]:
    """Turn what a policy raises into a line that names it, and the place in its file where it was raised.

    Args:
        name: Of the policy. From a shipped one only refusals are wrong input; a class of the user may do anything.

    Raises:
        InputError: In place of what was raised.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except InputError as error:
        place = _place(error.__cause__, _modules(name))
        if not place:
            raise
        raise InputError(*(_named(name, line) + place for line in error.problems)) from error
    except (ValueError, TypeError) as error:
        raise InputError(_named(name, first_line(error)) + _place(error, _modules(name))) from error
    except (Exception, SystemExit) as error:
        if ":" not in name:
            raise
        line = f"policy {name}: {type(error).__name__}: {first_line(error)}"
        raise InputError(line + _place(error, _modules(name))) from error


def _named(name: str, line: str) -> str:
    """A refusal with the policy's name ahead of it; a shipped policy's class names itself."""
    own = f"{resolve(name).__name__}: "
    return line if line.startswith(own) and ":" not in name else f"policy {name}: {line.removeprefix(own)}"


def _modules(name: str) -> set[str]:
    """The modules of the user's that a policy comes from."""
    owners = {owner.__module__ for owner in resolve(name).__mro__ if issubclass(owner, PruningPolicy)}
    return {module for module in owners if module.partition(".")[0] != "prunevit"}


def _place(error: BaseException | None, modules: set[str]) -> str:
    """Where an error was raised in some modules, or called what raised it, as " (file.py:15)"; empty for elsewhere."""
    if error is None:
        return ""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({os.path.basename(error.filename)}:{error.lineno})"
    files = {os.path.realpath(module) for module in modules}  # a module may be named by its file
    place = ""
    for frame, line in walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if frame.f_globals.get("__name__") in modules or file in files:
            place = f" ({os.path.basename(file)}:{line})"
    return place


def knob_of(name: object) -> str:
    """The setting that `policy.gmacs` solves for; empty for a policy without one, or if there is no such policy.

    Args:
        name: Of the policy.
    """
    try:
        return resolve(str(name)).knob
    except ValueError:
        return ""


def _gmacs_problems(cls: type[PruningPolicy], gmacs: object) -> list[str]:
    if gmacs is None:
        return []
    if not fits(gmacs, float) or not 0 < gmacs < float("inf"):  # type: ignore[operator]
        return [f"policy.gmacs: must be a number above 0, got {gmacs!r}"]
    if cls.knob not in settings_of(cls):
        return [f"policy.gmacs: {cls.__name__} has no knob to solve for"]
    return []


def _trace_problem(path: object) -> str | None:
    try:
        with (
            warnings.catch_warnings()
        ):  # what torch warns of is said by the line, or is no concern of the user's
            warnings.simplefilter("ignore")
            Trace.load(str(path))
    except pickle.UnpicklingError:
        # torch advises to load such a file by running the code in it.
        return f"policy.trace: must be a file that Trace.save wrote, got {path} (it holds something else than tensors)"
    except UNREADABLE as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        return f"policy.trace: must be a file that Trace.save wrote, got {path} ({reason})"
    return None


def _arguments(spec: Spec) -> Spec:
    return {name: value for name, value in spec.items() if name not in ("name", "gmacs")}


def _signature_problems(cls: type[PruningPolicy], arguments: Spec) -> list[str]:
    known, lines = settings_of(cls), []
    for name, value in arguments.items():
        if name not in known:
            keys = [f"policy.{each}" for each in known]
            lines.append(f"policy.{name}: unknown key of {cls.__name__}; {nearest('policy.' + name, keys)}")
        elif not fits(value, known[name].hint):
            lines.append(f"policy.{name}: must be {in_words(known[name].hint)}, got {value!r}")
    missing = [name for name, each in known.items() if each.required and name not in arguments]
    return lines + [f"policy.{name}: must be set for {cls.__name__}" for name in missing]


def fits(value: object, hint: Any) -> bool:
    """Tell whether a value from YAML fits a type hint.

    Args:
        value: Number, text, truth value, None, list or mapping.
        hint: A type; unions, literals and sequences are looked into, whatever else is unknown is accepted.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return value in inner
    if hint is None or hint is types.NoneType:
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (str, bool):
        return isinstance(value, hint)
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(fits(each, inner[0]) for each in value)
    if hint in (list, tuple):
        return isinstance(value, list)
    if hint is dict or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return isinstance(value, dict)
    return fits_something(hint)


WORDS = {
    float: "a number",
    int: "a whole number",
    str: "text",
    bool: "true or false",
    types.NoneType: "null",
    None: "null",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}
PLURALS = {float: "numbers", int: "whole numbers", str: "texts"}


def in_words(hint: Any) -> str:
    """Say what a value from YAML must be to fit a type hint.

    Args:
        hint: As for `fits`.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(each) for each in inner if fits_something(each))
    if origin is Literal:
        return f"one of {', '.join(map(str, inner))}"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"a list of {PLURALS.get(inner[0], in_words(inner[0]))}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    return str(WORDS.get(hint) or getattr(hint, "__name__", hint))


def fits_something(hint: Any) -> bool:
    """Tell whether any value from YAML fits a type hint; an object of Python cannot be written in YAML."""
    return not (isinstance(hint, type) and issubclass(hint, torch.nn.Module | Trace))
