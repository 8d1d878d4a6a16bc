"""The knob of a policy in few words: in a title, in a table, in a row's label."""

import re
from itertools import groupby
from typing import Any

LONGEST = 24  # characters of a list; what is longer says from where to where
ASKED = re.compile(r"(?<!\S)gmacs=\S+")  # in the name of a row that was set to a cost


def in_short(value: Any, longest: int = LONGEST) -> str:
    """Write a knob's value: four digits of a number, of a list each run of equal entries once (`13x6`).

    Args:
        value: A number, or a list of numbers, one a layer.
        longest: Characters that a list may take; of a longer one its bounds are told.
    """
    if not isinstance(value, list | tuple):
        return f"{value:.4g}" if isinstance(value, float) else str(value)
    runs = [(in_short(each), len([*equal])) for each, equal in groupby(value)]
    text = f"[{', '.join(each if count == 1 else f'{each}x{count}' for each, count in runs)}]"
    return text if len(text) <= longest else f"{in_short(min(value))} to {in_short(max(value))}"


def row_label(row: dict[str, Any], with_cost: bool = True) -> str:
    """The name of a row, with what its knob was set to where a cost was asked for.

    Args:
        row: Of a comparison; "evit gmacs=2.7" is called "evit keep_rate=0.66 (gmacs=2.7)".
        with_cost: Leave the parenthesis.
    """
    if row.get("knob_value") is None:
        return row["name"]
    knob = f"{row['knob']}={in_short(row['knob_value'])}"
    return ASKED.sub(lambda asked: f"{knob} ({asked[0]})" if with_cost else knob, row["name"], count=1)
