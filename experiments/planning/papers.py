"""The papers' costs and token counts beside ours: `prunevit plan suite=papers`."""

import json
from collections import Counter
from dataclasses import asdict
from functools import cache
from typing import Any

from rich.console import Console
from rich.table import Table

from prunevit.experiments.config import ModelConfig
from prunevit.experiments.cost import Cost, known_cost
from prunevit.experiments.models import architecture
from prunevit.experiments.planning.published import PUBLISHED, RULES, Published
from prunevit.experiments.policy_spec import build_policy

COMMAND = "prunevit plan suite=papers output_dir=docs/results overwrite=true"
INTRODUCTION = """# GMACs and token counts of the papers, beside ours

Made by `{command}` from the counts alone; no model was run.
GMACs are those of an image with patch embedding and head, as the papers count them: multiply-accumulates of linear
layers and attention products. Most papers leave out what the policy itself computes; "policy" is that part of ours.
Patches are those left after each stage, fused tokens included: by the authors' rule, then ours; where they are equal
they stand once. The figures and their sources: [published.yaml](../../experiments/planning/published.yaml).

"agrees" says which of our two figures, the model alone or with the policy, rounds to what is printed; else by how
much the nearer one is off, and the note says why.

"0.7" is no unit: EViT rounds up and counts its fused token at the next stage, DynamicViT and Haurum et al. round down
from the initial patches, and pruning before a block or after its attention differs by the attention of three blocks.
"""
LEFT_OUT = """
Not here, for there is no policy of it: DynamicViT's static and structural ablations, A-ViT, Evo-ViT, Prune&Merge,
Zero-TPrune, MaMe, ToMeCIS ([left_out.md](../left_out.md)). ATS keeps what the data says: `prunevit reproduce
ats_deit_s` measures it.
"""


def rows() -> list[dict[str, Any]]:
    """Put ours beside each published figure."""
    return [_row(each) for each in PUBLISHED.values()]


def documents(found: list[dict[str, Any]]) -> dict[str, str | bytes]:
    """Write the rows out.

    Args:
        found: The rows.

    Returns:
        Name and content of each file.
    """
    content = {"schema": 1, "command": COMMAND, "rows": found}
    return {"papers.json": json.dumps(content, indent=1) + "\n", "papers.md": _markdown(found)}


def show(found: list[dict[str, Any]]) -> None:
    """Print the rows.

    Args:
        found: The rows.
    """
    table = Table("row", "GMACs", "ours", "policy", "agrees", "patches", box=None)
    table.columns[0].no_wrap = True
    for row in found:
        ours = [_number(row[name]) for name in ("model_gmacs", "policy_gmacs")]
        same = (
            "-"
            if row["our_counts"] is None
            else ("equal" if row["our_counts"] == row["counts"] else "DIFFER")
        )
        table.add_row(row["name"], row["gmacs"] or "-", *ours, row["agrees"] or "-", same)
    Console().print(table)


@cache
def _model(name: str, img_size: int | None) -> Any:
    return architecture(ModelConfig(name, img_size=img_size))


def _row(published: Published) -> dict[str, Any]:
    model = _model(published.model, published.img_size)
    policy = build_policy(dict(published.policy))
    cost = known_cost(model, policy)
    shape = model.patch_embed.num_patches, len(model.blocks)
    counts = None if published.rule is None else list(RULES[published.rule](*shape, published.policy))
    said = {**asdict(published), "counts": counts}
    if cost is None:
        ours = dict.fromkeys(("model_gmacs", "policy_gmacs", "agrees", "our_counts"))
        return said | ours
    prefix = model.num_prefix_tokens
    left = cost.attention_rows if policy.site == "before_block" else cost.mlp_rows
    return said | {
        "model_gmacs": round(cost.gmacs - cost.policy_gmacs, 4),
        "policy_gmacs": round(cost.policy_gmacs, 4),
        "agrees": None if published.gmacs is None else _agreement(published.gmacs, cost),
        "our_counts": [int(left[layer]) - prefix for layer in policy.layers],
    }


def _agreement(printed: str, cost: Cost) -> str:
    """Which of our figures rounds to the one printed, or how far the nearer one is off."""
    digits = len(printed.partition(".")[2])
    ours = {"model": cost.gmacs - cost.policy_gmacs, "with policy": cost.gmacs}
    for name, gmacs in ours.items():
        if round(gmacs, digits) == float(printed):
            return name
    nearest = min(ours.values(), key=lambda gmacs: abs(gmacs - float(printed)))
    return f"{nearest / float(printed) - 1:+.1%}"


def _markdown(found: list[dict[str, Any]]) -> str:
    lines = [
        INTRODUCTION.format(command=COMMAND),
        "| row | method | trained | top-1 % | GMACs | ours: model | policy | agrees | patches | source | note |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        cells = [
            *(row["name"], row["method"], row["trained"], f"{row['top1']:.2f}", row["gmacs"] or "-"),
            *(_number(row["model_gmacs"]), _number(row["policy_gmacs"]), row["agrees"] or "-"),
            *(_patches(row), row["source"], row["note"] if _needs_note(row) else ""),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    judged = Counter(_verdict(row) for row in found)
    counted = [row for row in found if row["our_counts"] is not None]
    same = sum(row["our_counts"] == row["counts"] for row in counted)
    lines.append(
        f"\n{judged['yes']} of {judged['yes'] + judged['no']} published costs agree to the last digit, and the "
        f"patches of {same} of {len(counted)} rows."
    )
    return "\n".join(lines) + "\n" + LEFT_OUT


def _needs_note(row: dict[str, Any]) -> bool:
    return _verdict(row) == "no"


def _verdict(row: dict[str, Any]) -> str:
    if row["agrees"] is None:
        return "unknown"
    return "yes" if row["agrees"] in ("model", "with policy") else "no"


def _patches(row: dict[str, Any]) -> str:
    theirs, ours = row["counts"], row["our_counts"]
    if ours is None:
        return "by the data"
    if theirs == ours:
        return ", ".join(map(str, ours)) or "-"
    return f"{theirs} / {ours}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
