"""Keyed random numbers as one launch: the reference's 32 bits, in registers of 32 bits that wrap by themselves."""

# mypy: disable-error-code="no-untyped-def"

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.draws import MOST_KEYS
from prunevit.kernels.launch import Bound, wait_for_previous

BLOCK = 512


def triton_uniform(seed: int, keys: Sequence[Tensor]) -> Tensor:
    """Compute `keyed_uniform`."""
    rows = torch.broadcast_tensors(*keys)
    out = torch.empty(rows[0].shape, dtype=torch.float32, device=rows[0].device)
    present = [row.contiguous() for row in rows]
    absent = [None] * (MOST_KEYS - len(rows))
    _bound_uniform()(triton.cdiv(len(out), BLOCK), out, *present, *absent, seed, len(out))
    return out


@functools.cache
def _bound_uniform() -> Bound:
    return Bound(uniform_kernel, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _mix(value):
    """Spread 32 bits over 32 bits."""
    value = ((value >> 16) ^ value) * 0x45D9F3B
    value = ((value >> 16) ^ value) * 0x45D9F3B
    return (value >> 16) ^ value


@triton.jit
def _mixed_in(state, key, row, mask):
    number = tl.load(key + row, mask=mask, other=0).to(tl.uint32)
    return _mix(_mix(state) + number * 0x1E3779B1)


@triton.jit(do_not_specialize=["seed", "num_rows"])
def uniform_kernel(out, first, second, third, seed, num_rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    """Mix the keys into the seed one by one; the upper 24 bits are the number."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    state = tl.zeros([BLOCK], tl.uint32) + seed.to(tl.uint32)
    state = _mixed_in(state, first, row, mask)
    if second is not None:
        state = _mixed_in(state, second, row, mask)
    if third is not None:
        state = _mixed_in(state, third, row, mask)
    tl.store(out + row, (_mix(state) >> 8).to(tl.float32) * (2.0**-24), mask=mask)
