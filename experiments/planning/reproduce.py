"""`prunevit reproduce NAME`: run a published off-the-shelf row, and print ours minus theirs."""

from typing import Any

from rich.console import Console
from rich.table import Table

from prunevit.experiments import evaluation
from prunevit.experiments.config import InputError
from prunevit.experiments.planning.config import ReproduceConfig
from prunevit.experiments.planning.published import REPRODUCIBLE, Published
from prunevit.experiments.report import Row


def run(config: ReproduceConfig) -> list[Row]:
    """Evaluate the row's policy on the row's model, and compare; without a name, list the rows.

    Args:
        config: The composed configuration.

    Returns:
        The row that was measured, on the first process.

    Raises:
        InputError: If the input is wrong, or makes something else of the published row.
    """
    if config.name == "":
        _list()
        return []
    published = REPRODUCIBLE[config.name]
    _check_untouched(config, published)
    rows = evaluation.run(config)
    for row in rows:
        for line in differences(row, published):
            print(line)
    return rows


def differences(row: Row, published: Published) -> list[str]:
    """Say what was measured less what was published, a line each.

    Args:
        row: What was measured.
        published: What was published.
    """
    lines = [f"{published.name}: {published.source}, {published.method} on {published.model}"]
    if published.dense_top1 is not None:
        lines.append(_difference("unpruned top-1", row, "dense_top1", published.dense_top1))
    lines.append(_difference("top-1", row, "top1", published.top1))
    if published.gmacs is not None:
        model = row["gmacs"] - row["policy_gmacs"]
        lines.append(f"GMACs: ours {row['gmacs']:.3f} (model {model:.3f}), theirs {published.gmacs}")
    return lines


def _difference(label: str, row: Row, name: str, theirs: float) -> str:
    ours, low, high = (row[name + end] - theirs for end in ("", "_low", "_high"))
    verdict = "no difference shown" if low <= 0 <= high else "they differ"
    return (
        f"{label}: ours {row[name]:.2f} - theirs {theirs:.2f} = {ours:+.2f} "
        f"(95 % interval {low:+.2f} to {high:+.2f} on {row['images']} images: {verdict})"
    )


def _check_untouched(config: ReproduceConfig, published: Published) -> None:
    """A row that was given another policy or model is not the published one."""
    asked: dict[str, Any] = {key: config.policy.get(key) for key in published.policy}
    wrong = [f"policy.{key}" for key, value in published.policy.items() if asked[key] != value]
    wrong += ["model"] if config.model.name != published.model else []
    wrong += ["model.img_size"] if config.model.img_size != published.img_size else []
    if wrong or "gmacs" in config.policy:
        raise InputError(
            f"{wrong[0] if wrong else 'policy.gmacs'}: is that of the published row {published.name}; "
            "leave it out, or use prunevit evaluate"
        )


def _list() -> None:
    table = Table("name", "top-1 %", "unpruned", "source", box=None)
    table.columns[0].no_wrap = True
    for name, row in REPRODUCIBLE.items():
        table.add_row(name, f"{row.top1:.2f}", f"{row.dense_top1:.2f}", row.source)
    Console().print(table)
    print("prunevit reproduce NAME data.root=IMAGENET runs one; weights are timm's, or weights=FILE")
