"""A plan cut down to its room where it exceeds it, in one launch."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

BLOCK = 1024


def triton_fit(
    destination: Tensor, cu_seqlens: Tensor, extent: Tensor, rows: int, longest: int, least: int
) -> tuple[Tensor, Tensor]:
    """Compute `fit`."""
    num_rows, num_bounds = len(destination), len(cu_seqlens)
    fitted = torch.empty(num_rows, dtype=torch.int32, device=destination.device)
    bounds = torch.empty(num_bounds, dtype=torch.int32, device=destination.device)
    _bound_fit()(
        triton.cdiv(max(num_rows, num_bounds), BLOCK), destination, cu_seqlens, extent, fitted, bounds, num_rows,
        num_bounds, rows, longest, least,
    )  # fmt: skip
    return fitted, bounds


@functools.cache
def _bound_fit() -> Bound:
    return Bound(fit_kernel, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["num_rows", "num_bounds", "rows", "longest", "least"])
def fit_kernel(
    destination, cu_seqlens, extent, fitted, bounds, num_rows, num_bounds, rows, longest, least, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `fitted` [T] and `bounds` [B + 1]."""
    wait_for_previous(OVERLAP)
    exceeds = (tl.load(extent) > rows) | (tl.load(extent + 1) > longest)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(destination + row, mask=row < num_rows, other=-1)
    tl.store(fitted + row, tl.where(exceeds & (place >= least), -1, place), mask=row < num_rows)
    bound = tl.load(cu_seqlens + row, mask=row < num_bounds, other=0)
    tl.store(bounds + row, tl.where(exceeds, row * least, bound), mask=row < num_bounds)
