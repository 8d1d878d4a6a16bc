"""What results must look like before anything is drawn from them: types of all that page and tables read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from prunevit.experiments.comparison.series import DEVIATIONS, METRICS, UNPRUNED
from prunevit.experiments.report import SPEED_COLUMNS

Fits = Callable[[Any], bool]
Shape = Mapping[str, Fits]


def misfit(value: Mapping[str, Any], shape: Shape) -> str | None:
    """Name the first entry that is not what it must be.

    Args:
        value: A row, or another part of the results; what it lacks counts as null.
        shape: Whether each entry fits, by its name.
    """
    return next((name for name, fits in shape.items() if not fits(value.get(name))), None)


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _or_null(fits: Fits) -> Fits:
    return lambda value: value is None or fits(value)


def _list_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _holding(shape: Shape) -> Fits:
    return lambda value: isinstance(value, dict) and misfit(value, shape) is None


def _all(names: tuple[str, ...], fits: Fits) -> Shape:
    return dict.fromkeys(names, fits)


_SPEEDS = ("images_per_s", "dense_images_per_s")
_VERDICT: Shape = {"verdict": _text, **_all(("difference", "low", "high", "p"), _number)}
FAILED: Shape = {
    **_all(("name", "policy", "error"), _text),
    "kind": lambda value: value in ("policy", *UNPRUNED),
    "data": _holding({"name": _text, "sha256": _or_null(_text)}),
}
ROW: Shape = {
    **{name: fits for name, fits in FAILED.items() if name != "error"},
    **_all(("model", "accelerator"), _text),
    "weights": _or_null(_text),
    **_all(("top1", "gmacs", "dense_top1", "dense_gmacs", "images"), _number),
    **_all(
        (
            *(name for each in METRICS for name in (each, f"{each}_low", f"{each}_high")),
            *(f"dense_top1_{end}" for end in ("low", "high")),
            *DEVIATIONS,
            *("tokens_mean", "unpruned_difference", "unpruned_low", "unpruned_high", "unpruned_p"),
            *SPEED_COLUMNS,
        ),
        _or_null(_number),
    ),
    "top1": _number,
    "timing": _or_null(
        _holding({name: _or_null(_holding(_all(("p20", "p80"), _number))) for name in _SPEEDS})
    ),
    "tokens_by_block": _or_null(_list_of(_holding(_all(("mean", "p5", "p95"), _number)))),
}
CONTENT: Shape = {
    "environment": _holding(
        {"command": _text, "platform": _or_null(_text), "gpus": _or_null(_list_of(_text))}
    ),
    "config": lambda value: isinstance(value, dict) and isinstance(value.get("data", {}), dict),
    "rows": lambda value: (
        isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)
    ),
    "pairs": _or_null(_list_of(_holding({**_all(("a", "b"), _text), **_VERDICT}))),
    "seeds": _or_null(
        _list_of(_holding({"rows": _list_of(_text), **_all(("top1_mean", "top1_std"), _number)}))
    ),
}
