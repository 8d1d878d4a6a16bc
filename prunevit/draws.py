"""Random numbers keyed by what they are for, so that no batch order and no number of processes changes them."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


def keyed_uniform(seed: int, *keys: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp32, one for each combination of keys; the same wherever and whenever it is asked.

    Args:
        seed: Any integer.
        keys: Integer tensors that broadcast together.

    Cost:
        A dozen elementwise operations a key; no generator state, so it replays in a CUDA graph.
    """
    state = torch.full((), seed & _MASK, dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((_mix(state) + (key.long() & _MASK) * 0x1E3779B1) & _MASK)
    return (_mix(state) >> 8).float() * 2.0**-24


def _mix(value: Tensor) -> Tensor:
    """Spread 32 bits over 32 bits; multipliers stay below 2^31 so that no product leaves int64."""
    for _ in range(2):
        value = (((value >> 16) ^ value) * 0x45D9F3B) & _MASK
    return (value >> 16) ^ value
