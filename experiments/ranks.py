"""How many processes a run has and which of them this one is, before any of them has met the others."""

import os

# As torchrun, Lightning's own launcher and Slurm say it; the first one that is set counts.
NAMES = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this is the process of rank 0: the one that makes folders, prints and writes."""
    return next((os.environ[name] for name in NAMES if name in os.environ), "0") == "0"


def processes(devices: int) -> tuple[int, int]:
    """Count the processes of this machine, and the machines: as torchrun says, or as the configuration does.

    Args:
        devices: What the configuration says.
    """
    from torch.distributed import is_torchelastic_launched  # a configuration is checked without torch

    if is_torchelastic_launched():
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return here, int(os.environ["WORLD_SIZE"]) // here
    return devices, 1


def world_size(devices: int) -> int:
    """Count the processes of all machines.

    Args:
        devices: What the configuration says.
    """
    here, machines = processes(devices)
    return here * machines
