"""Autocast as the kernels see it: whether it is on, and out of its way."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def casts(device_type: str) -> bool:
    """Whether autocast is on for a device; "meta" has none, and PyTorch does not take the question."""
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def without_casts(device_type: str) -> AbstractContextManager[Any]:
    """What is computed in fp32 inside stays in fp32."""
    return torch.autocast(device_type, enabled=False) if casts(device_type) else nullcontext()
