"""Kernels to bind: triton wants their source in a file."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def copy_kernel(source, target, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + index, tl.load(source + index, mask=index < size), mask=index < size)


@triton.jit
def mixed_up_kernel(source, BLOCK: tl.constexpr, size):
    pass
