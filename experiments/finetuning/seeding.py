"""Random numbers that depend on what they are for and on nothing that happened before.

Every training step, and every photo of an epoch, sets the generators from a key of its own. So a run that goes on from
a checkpoint, or that reads its photos with another number of processes, draws the same numbers; no state is kept.
"""

import random
from enum import IntEnum

import numpy as np
import torch


class Purpose(IntEnum):
    """What draws are for; keeps keys of equal numbers apart."""

    ORDER = 1
    PHOTO = 2
    STEP = 3


def seed_draws(seed: int, purpose: Purpose, *key: int) -> None:
    """Set the generators of Python, numpy and torch.

    Args:
        seed: Of the run.
        purpose: What is drawn for.
        key: Whole numbers that tell this occasion from others.
    """
    python, numpy, low, high = map(int, np.random.SeedSequence([seed, purpose, *key]).generate_state(4))
    random.seed(python)
    np.random.seed(numpy)
    torch.manual_seed(low | (high & 0x7FFFFFFF) << 32)
