"""What a plan becomes where there is too little room for it: meaning, torch reference, choice of what computes it."""

import torch
from torch import Tensor

from prunevit.kernels.plan import takes_triton


def fit(
    destination: Tensor, cu_seqlens: Tensor, extent: Tensor, rows: int, longest: int, least: int
) -> tuple[Tensor, Tensor]:
    """Leave a plan as it is where it fits into a room, else keep only the first rows of each image, equally many.

    Args:
        destination: place in its image of each row that stays, int32 [T]; -1 for others.
        cu_seqlens: boundaries of the images after packing, int32 [B + 1].
        extent: all rows that stay, and those of the longest image, int32 [2] or more.
        rows: room for rows.
        longest: room for rows of an image.
        least: rows of each image that are kept where the plan does not fit.

    Returns:
        The destination and the boundaries.

    Cost: on a GPU one launch. No host synchronisation.
    """
    # A compiler makes one kernel of the reference, for any room.
    if torch.compiler.is_compiling() or not (takes_triton(destination) and len(destination)):
        return fit_reference(destination, cu_seqlens, extent, rows, longest, least)
    from prunevit.kernels.triton_fit import triton_fit

    return triton_fit(destination, cu_seqlens, extent, rows, longest, least)


def fit_reference(
    destination: Tensor, cu_seqlens: Tensor, extent: Tensor, rows: int, longest: int, least: int
) -> tuple[Tensor, Tensor]:
    """Say what `fit` means."""
    exceeds = (extent[0] > rows) | (extent[1] > longest)
    fewest = torch.arange(0, len(cu_seqlens) * least, least, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    leaves = exceeds & (destination >= least)
    return torch.where(leaves, -1, destination), torch.where(exceeds, fewest, cu_seqlens)
