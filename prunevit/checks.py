"""Conditions that hold on the device and that nobody should have to wait for."""

import torch
from torch import Tensor


def require(condition: Tensor, message: str) -> None:
    """Raise at once on a CPU; on a GPU assert on the device, without waiting for it.

    Args:
        condition: One bool.
        message: What must hold, what was got, what to do.

    Raises:
        ValueError: On a CPU, if the condition is false. A GPU stops with a device-side assertion at its next
            synchronisation.
    """
    if condition.device.type != "cpu" or torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition.item():
        raise ValueError(message)
