"""What `prunevit finetune` leaves, by name, for those who are given it."""

from pathlib import Path

LAST = "last.ckpt"  # to go on from
BEST, FINAL = "best.safetensors", "last.safetensors"  # of the best validation, of the last step
OURS = "prunevit"  # key of what this project puts into Lightning's checkpoint


def weights_in(folder: Path) -> Path | None:
    """The weights that a run has left so far: the best ones, else those of the last step.

    Args:
        folder: Of the run.
    """
    return next((folder / name for name in (BEST, FINAL) if (folder / name).is_file()), None)
