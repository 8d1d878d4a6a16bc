"""A policy's settings as its constructor declares them, and a policy made from such settings."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import Parameter
from typing import Any, get_type_hints

from prunevit.policy import PruningPolicy


@dataclass(frozen=True)
class Setting:
    """One argument of a constructor.

    Attributes:
        hint: Its type; `Any` where none can be found out.
        default: What it is if nobody sets it, if `required` is false.
        required: Whether it must be set.
    """

    hint: Any
    default: Any
    required: bool


def settings_of(cls: type[PruningPolicy]) -> dict[str, Setting]:
    """List what the constructor of a policy takes, in its order.

    Where it takes `**settings`, those of the next class that has a constructor of its own are added, down to
    `PruningPolicy`: that is where they are handed on.

    Args:
        cls: The policy.
    """
    found: dict[str, Setting] = {}
    for owner in cls.__mro__[: cls.__mro__.index(PruningPolicy) + 1]:
        if "__init__" not in vars(owner):
            continue
        hints = _hints(owner)
        parameters = _parameters(owner)
        for name, each in parameters.items():
            if each.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) and name not in found:
                # What is handed on may be given by the class itself.
                required = each.default is Parameter.empty and owner is _constructor_of(cls)
                found[name] = Setting(hints.get(name, Any), each.default, required)
        if all(each.kind is not Parameter.VAR_KEYWORD for each in parameters.values()):
            break
    return found


def construct(cls: type[PruningPolicy], settings: Mapping[str, Any]) -> PruningPolicy:
    """Make a policy of named settings, those that its constructor takes by position alone included.

    Args:
        cls: The policy.
        settings: By name.

    Raises:
        TypeError: As a call raises it, if one is missing or unknown.
    """
    named, positional = dict(settings), []
    for name, each in _parameters(_constructor_of(cls)).items():
        given = name in named or each.default is not Parameter.empty
        if each.kind is not Parameter.POSITIONAL_ONLY or not given:
            break
        positional.append(named.pop(name, each.default))
    return cls(*positional, **named)


def _constructor_of(cls: type) -> type:
    """The class that the constructor comes from."""
    return next(owner for owner in cls.__mro__ if "__init__" in vars(owner))


def _parameters(owner: Any) -> dict[str, Parameter]:
    return dict(list(inspect.signature(owner.__init__).parameters.items())[1:])


def _hints(owner: Any) -> dict[str, Any]:
    try:
        return get_type_hints(owner.__init__)
    except (NameError, TypeError, AttributeError, SyntaxError):
        return {}  # names imported for type checkers only, or no types
