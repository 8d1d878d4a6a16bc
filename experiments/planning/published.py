"""What papers and repositories publish (published.yaml), and how their code counts the patches that stay."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunevit.experiments.plain_yaml import plain

FIGURES = Path(__file__).parent / "published.yaml"
Counts = tuple[int, ...]  # patches after each stage, a fused token included


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published figure.

    Attributes:
        name: Ours, for `prunevit reproduce`.
        method: Theirs.
        model: timm architecture.
        policy: `name` and arguments of our policy.
        top1: Published top-1, %.
        trained: "fine-tuned", "trained" (from scratch), or "off-the-shelf".
        source: Where it is published.
        rule: Key of `RULES`, or None where the count depends on the data.
        gmacs: Published GMACs as printed, or None.
        dense_top1: Published top-1 of the unpruned model, %, or None.
        img_size: Input size, px, where it is not the model's own.
        note: What explains a difference between their cost and ours.
    """

    name: str
    method: str
    model: str
    policy: Mapping[str, Any]
    top1: float
    trained: str
    source: str
    rule: str | None
    gmacs: str | None = None
    dense_top1: float | None = None
    img_size: int | None = None
    note: str = ""


def _evit(patches: int, blocks: int, policy: Mapping[str, Any], fused: int = 1) -> Counts:
    """Round up, of what is present; a fused token counts as present and comes on top."""
    counts: list[int] = []
    for _ in range(3):
        counts.append(math.ceil(policy["keep_rate"] * (counts[-1] if counts else patches)) + fused)
    return tuple(counts)


def _initial(patches: int, blocks: int, policy: Mapping[str, Any]) -> Counts:
    """Round down, of the initial patches, the rates compounding."""
    return tuple(int(patches * policy["keep_rate"] ** stage) for stage in (1, 2, 3))


def _tome(patches: int, blocks: int, policy: Mapping[str, Any]) -> Counts:
    """`r` tokens fewer a block, at most half of what is there without CLS."""
    counts = [patches]
    for _ in range(blocks):
        counts.append(counts[-1] - min(policy["r"], counts[-1] // 2))
    return tuple(counts[1:])


# How the authors' code counts, from the patches of the grid, the blocks and the policy; written apart from ours.
RULES: dict[str, Callable[[int, int, Mapping[str, Any]], Counts]] = {
    "none": lambda patches, blocks, policy: (),
    "evit": _evit,
    "evit_not_fused": lambda patches, blocks, policy: _evit(patches, blocks, policy, fused=0),
    "initial": _initial,
    "tome": _tome,
    "merge_counts": lambda patches, blocks, policy: tuple(rows - 1 for rows in policy["merge_counts"]),
}


def read_published() -> dict[str, Published]:
    """Read the figures, by name."""
    rows = plain(FIGURES.read_text(encoding="utf-8"))
    return {name: Published(name=name, **row) for name, row in rows.items()}


PUBLISHED = read_published()

REPRODUCIBLE = {name: row for name, row in PUBLISHED.items() if row.trained == "off-the-shelf"}
"""Those that need no weights but timm's."""
