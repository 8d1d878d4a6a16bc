"""A policy from its part of the configuration: the class's constructor is the schema.

Any class on the path can be named (`policy=package.module:Class`), so its arguments are known only from its
signature: unknown, missing and wrongly typed ones are refused with the key's path.
"""

import inspect
import pickle
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from prunevit.experiments.compose import nearest
from prunevit.experiments.config import InputError, first_line
from prunevit.policies import Replay, resolve
from prunevit.policy import PruningPolicy
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
    default_seed = {"seed": seed} if "seed" in inspect.signature(cls).parameters else {}
    return cls(**{**default_seed, **_arguments(spec)})


def policy_problems(spec: Spec) -> list[str]:
    """Say what is wrong with a policy's part of the configuration, a line for each problem.

    Args:
        spec: `name` and the arguments of the constructor.
    """
    if not isinstance(spec.get("name"), str):
        return ["policy.name: must be set; name a file of configs/policy or package.module:Class"]
    try:
        cls = resolve(spec["name"])
    except ValueError as error:
        return [str(error)]
    lines = _signature_problems(cls, _arguments(spec))
    if lines:
        return lines
    if issubclass(cls, Replay) and (line := _trace_problem(spec["trace"])):
        return [line]
    try:
        with policy_errors(spec["name"]):
            cls(**_arguments(spec))
    except InputError as error:
        return list(error.problems)
    return []


@contextmanager
def policy_errors(name: str) -> Iterator[None]:
    """Turn what a policy raises into a line that names it.

    Args:
        name: Of the policy. From a shipped one only refusals are wrong input; a class of the user may do anything.

    Raises:
        InputError: In place of what was raised.
    """
    try:
        yield
    except (InputError, torch.OutOfMemoryError):
        raise
    except (ValueError, TypeError) as error:
        line = first_line(error)
        named = line.startswith(f"{resolve(name).__name__}:")
        raise InputError(line if named else f"policy {name}: {line}") from error
    except Exception as error:
        if ":" not in name:
            raise
        raise InputError(f"policy {name}: {type(error).__name__}: {first_line(error)}") from error


def _trace_problem(path: object) -> str | None:
    try:
        Trace.load(str(path))
    except UNREADABLE as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
        return f"policy.trace: must be a file that Trace.save wrote, got {path} ({reason})"
    return None


def _arguments(spec: Spec) -> Spec:
    return {name: value for name, value in spec.items() if name != "name"}


def _signature_problems(cls: type[PruningPolicy], arguments: Spec) -> list[str]:
    parameters = inspect.signature(cls).parameters
    try:
        hints = get_type_hints(cls.__init__)
    except (
        NameError,
        TypeError,
        AttributeError,
        SyntaxError,
    ):  # names imported for type checkers only, or no types
        hints = {}
    lines = []
    for name, value in arguments.items():
        if name not in parameters:
            known = [f"policy.{each}" for each in parameters]
            lines.append(f"policy.{name}: unknown key of {cls.__name__}; {nearest('policy.' + name, known)}")
        elif not fits(value, hints.get(name, Any)):
            lines.append(f"policy.{name}: must be {_words(hints[name])}, got {value!r}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in arguments:
            lines.append(f"policy.{name}: must be set for {cls.__name__}")
    return lines


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
    return True


def _words(hint: Any) -> str:
    return (
        hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")
    )
