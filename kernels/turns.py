"""The patches of each image split by turns: meaning, torch reference, choice of what computes it."""

import torch
from torch import Tensor

from prunevit.kernels.plan import takes_triton


def split_by_turns(source: Tensor, image_id: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Find the patches at even and those at odd positions of their image, prefix rows counted; bool [T] each.

    For an image of a prefix row and four patches they are rows 2 and 4, and rows 1 and 3.

    Args:
        source: patch of each row, int32 [T]; negative for prefix and dead rows.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].

    Cost: on a GPU one launch. No host synchronisation.
    """
    # A compiler makes one kernel of the reference.
    if torch.compiler.is_compiling() or not (takes_triton(source) and len(source)):
        return split_reference(source, image_id, cu_seqlens)
    from prunevit.kernels.triton_turns import triton_split

    return triton_split(source, image_id, cu_seqlens)


def split_reference(source: Tensor, image_id: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Say what `split_by_turns` means."""
    rows = torch.arange(source.shape[0], device=source.device, dtype=torch.int32)
    is_patch, odd = source >= 0, (rows - cu_seqlens.index_select(0, image_id)) % 2
    return is_patch > odd, is_patch.logical_and(odd)
