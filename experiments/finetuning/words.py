"""What a run says before and after."""

from pathlib import Path

from prunevit.experiments.finetuning.checkpoints import Resumption
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.files import BEST, FINAL
from prunevit.experiments.finetuning.monitor import CURVE
from prunevit.experiments.finetuning.plan import Length


def introduction(config: FinetuneConfig, length: Length, resumption: Resumption | None, before: int) -> str:
    """Say what is about to happen.

    Args:
        config: Of the run.
        length: Of the run.
        resumption: Where it goes on.
        before: Steps that it was to have until now.
    """
    recipe = config.recipe
    lines = [f"recipe {recipe.name or 'of your own'}, version {recipe.version}; verified: {recipe.verified}"]
    lines += [f"source: {recipe.source}"] if recipe.source else []
    lines += [f"differs: {line}" for line in recipe.differs]
    lines.append(
        f"{length.steps} steps of {length.batch_size} images, {length.epoch} steps an epoch of {length.images} images"
    )
    lines += [f"goes on from {resumption.path} at step {resumption.step}"] if resumption else []
    if length.steps > before:
        lines.append(
            f"{length.steps} steps where {before} were planned: from here on lr falls as it would over all of them"
        )
    return "\n".join(lines)


def summary(val: dict[str, float], rows: list[dict[str, str]], folder: Path) -> str:
    """Say what came out: the loss of the first and the last quarter of the steps, and the accuracy.

    Args:
        val: The last validation.
        rows: Of metrics.csv.
        folder: Of the files.
    """
    losses = [float(row["train/loss"]) for row in rows if row.get("train/loss")]
    lines = []
    if quarter := len(losses) // 4:
        first, last = (sum(part) / quarter for part in (losses[:quarter], losses[-quarter:]))
        lines.append(f"loss {first:.4f} -> {last:.4f} (means of the first and the last quarter of the steps)")
    before = next((f"{float(row['val/top1']):.2f} -> " for row in rows if row["step"] == "0"), "")
    lines.append(f"top-1 of the pruned model {before}{val['val/top1']:.2f} %")
    lines.append(
        f"{folder / BEST}: the best validation; {folder / FINAL}: the last step; {folder / CURVE}: the curve"
    )
    return "\n".join(lines)
