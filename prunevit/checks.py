"""Conditions on what a policy is given, and those that hold on the device and that nobody should have to wait for."""

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

SIGNED_INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})


def require(condition: Tensor, message: str) -> None:
    """Raise at once on a CPU; on a GPU assert on the device, without waiting for it.

    Args:
        condition: One bool; a fake tensor, which knows no value, is not asked.
        message: What must hold, what was got, what to do.

    Raises:
        ValueError: On a CPU, if the condition is false. A GPU stops with a device-side assertion at its next
            synchronisation.
    """
    if condition.device.type != "cpu" or torch.compiler.is_compiling() or isinstance(condition, FakeTensor):
        torch._assert_async(condition, message)
    elif not condition.item():
        raise ValueError(message)


def check_number(
    owner: str, name: str, value: object, low: float = -math.inf, high: float = math.inf
) -> None:
    """Refuse a setting that is no finite number between two bounds.

    Args:
        owner: Class name of the policy, for the error.
        name: The setting.
        value: What was given; a truth value is no number.
        low: Smallest value allowed.
        high: Largest value allowed.

    Raises:
        ValueError: If it is refused.
    """
    wrong = isinstance(value, bool) or not isinstance(value, Real)
    if wrong or not (low <= value <= high and math.isfinite(value)):  # type: ignore[operator, arg-type]
        raise ValueError(f"{owner}: {name} must be a number{_bounds(low, high)}, got {value!r}")


def check_whole(owner: str, name: str, value: object, low: int, high: float = math.inf) -> None:
    """Refuse a setting that is no whole number between two bounds; arguments and error as `check_number`."""
    wrong = isinstance(value, bool) or not isinstance(value, Integral)
    if wrong or not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{owner}: {name} must be a whole number{_bounds(low, high)}, got {value!r}")


def check_seed(owner: str, seed: object) -> None:
    """Refuse a seed that is no whole number of 32 bits."""
    check_whole(owner, "seed", seed, 0, 2**32 - 1)


def check_word(owner: str, name: str, value: object, words: Sequence[str]) -> None:
    """Refuse a setting that is none of `words`.

    Raises:
        ValueError: Names them.
    """
    if value not in words:
        raise ValueError(f"{owner}: {name} must be one of {', '.join(words)}, got {value!r}")


def check_counting(owner: str, rounding: str, of: str, compound: bool) -> None:
    """Refuse count conventions that are unknown or contradict each other.

    Args:
        owner: Class name of the policy, for the error.
        rounding: "ceil" or "floor".
        of: Fraction of the "current" or of the "initial" patches.
        compound: Whether the rates of the stages multiply: the present patches are so many for that already.

    Raises:
        ValueError: If a word is another one, or rates of the current patches are to multiply.
    """
    check_word(owner, "rounding", rounding, ("ceil", "floor"))
    check_word(owner, "of", of, ("current", "initial"))
    if compound and of == "current":
        raise ValueError(f'{owner}: compound=True must go with of="initial", got of="current"')


def check_limits(owner: str, min_keep: object, max_keep: object) -> None:
    """Refuse bounds on the patches that an image keeps which are no counts, or the larger of which is the lower one.

    Args:
        owner: Class name of the policy, for the error.
        min_keep: At least 1.
        max_keep: At least `min_keep`; None: no bound.

    Raises:
        ValueError: If one is refused.
    """
    check_whole(owner, "min_keep", min_keep, 1)
    if max_keep is not None:
        check_whole(owner, "max_keep", max_keep, 1)
        if max_keep < min_keep:  # type: ignore[operator]
            raise ValueError(f"{owner}: max_keep must be at least min_keep={min_keep}, got {max_keep}")


def _bounds(low: float, high: float) -> str:
    if math.isinf(low) and math.isinf(high):
        return ""
    return f" of at least {low:g}" if math.isinf(high) else f" in [{low:g}, {high:.10g}]"
