"""Which of a run's processes this one is, before any of them has met the others."""

import os

# As torchrun, Lightning's own launcher and Slurm say it; the first one that is set counts.
NAMES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this is the process of rank 0: the one that makes folders, prints and writes."""
    return next((os.environ[name] for name in NAMES if name in os.environ), "0") == "0"
