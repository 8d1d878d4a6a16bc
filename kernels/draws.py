"""Random numbers keyed by what they are for, so that no batch order and no number of processes changes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from prunevit.kernels.select import has_triton

MOST_KEYS = 3
"""Keys that the kernel takes."""

_MASK = 0xFFFFFFFF


def keyed_uniform(seed: int, *keys: Tensor) -> Tensor:
    """Uniform numbers in [0, 1), fp32, one for each combination of keys; the same wherever and whenever it is asked.

    Args:
        seed: Any integer.
        keys: Integer tensors that broadcast together.

    Cost:
        One launch on a GPU for up to three keys, `[n]` or `[1]` each; elsewhere two dozen elementwise operations a key.
        No generator state, so it replays in a CUDA graph; no host synchronisation.
    """
    compute = _uniform_op if torch.compiler.is_compiling() else choose_uniform
    return compute(seed & _MASK, keys)


def uniform_reference(seed: int, keys: Sequence[Tensor]) -> Tensor:
    """Say what `keyed_uniform` means; multipliers stay below 2^31 so that no product leaves int64."""
    state = torch.full((), seed, dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((_mix(state) + (key.long() & _MASK) * 0x1E3779B1) & _MASK)
    return (_mix(state) >> 8).float() * 2.0**-24


def _mix(value: Tensor) -> Tensor:
    """Spread 32 bits over 32 bits."""
    for _ in range(2):
        value = (((value >> 16) ^ value) * 0x45D9F3B) & _MASK
    return (value >> 16) ^ value


def takes_triton(keys: Sequence[Tensor]) -> bool:
    """Whether the Triton kernel draws for these keys: a few rows of integers on a GPU, triton installed."""
    return keys[0].is_cuda and has_triton()


def choose_uniform(seed: int, keys: Sequence[Tensor]) -> Tensor:
    """Compute `keyed_uniform` by the kernel where it can, by the reference elsewhere."""
    are_rows = all(key.dim() == 1 and len(key) for key in keys) and len(keys) <= MOST_KEYS
    if not (are_rows and takes_triton(keys)):
        return uniform_reference(seed, keys)
    from prunevit.kernels.triton_draws import triton_uniform

    return triton_uniform(seed, keys)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_uniform_op = torch.library.custom_op("prunevit::keyed_uniform", choose_uniform, mutates_args=())


@_uniform_op.register_fake
def _(seed: int, keys: Sequence[Tensor]) -> Tensor:
    shape = torch.broadcast_shapes(*(key.shape for key in keys))
    return torch.empty(shape, dtype=torch.float32, device=keys[0].device)
