"""The patches of each image split by turns, in one launch."""

# mypy: disable-error-code="no-untyped-def"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from prunevit.kernels.launch import Bound, wait_for_previous

BLOCK = 512


def triton_split(source: Tensor, image_id: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `split_by_turns`."""
    num_rows = len(source)
    even = torch.empty(num_rows, dtype=torch.bool, device=source.device)
    odd = torch.empty(num_rows, dtype=torch.bool, device=source.device)
    _bound_split()(
        triton.cdiv(num_rows, BLOCK),
        source.contiguous(),
        image_id.contiguous(),
        cu_seqlens,
        even,
        odd,
        num_rows,
    )
    return even, odd


@functools.cache
def _bound_split() -> Bound:
    return Bound(split_kernel, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["num_rows"])
def split_kernel(
    source, image_id, cu_seqlens, even, odd, num_rows, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """Write `even` and `odd` [T]; the image of dead rows starts where the last one ends."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = row < num_rows
    start = tl.load(cu_seqlens + tl.load(image_id + row, mask=is_row, other=0))
    is_patch = tl.load(source + row, mask=is_row, other=-1) >= 0
    is_odd = ((row - start) & 1) != 0
    tl.store(even + row, is_patch & (is_odd == 0), mask=is_row)
    tl.store(odd + row, is_patch & is_odd, mask=is_row)
