"""Clusters of the patches of each image by Euclidean distance: meaning, and the choice of what computes them."""

import torch
from torch import Tensor

from prunevit.kernels.clusters_reference import medoids_reference, nearest_reference, peaks_reference
from prunevit.kernels.select import takes_triton

LONGEST = 2048
"""Rows of an image whose distances to a row one program of the kernels can hold."""


def medoids(
    x: Tensor,
    weight: Tensor,
    keep: Tensor,
    source: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    turns: int,
) -> Tensor:
    """Move the medoids of each image: rows that stay, bool [T], prefix rows among them.

    A turn puts each patch with its nearest medoid, the earlier one of equals, and a medoid with itself; then the
    member of least cost, the earlier one of equals, is the medoid of its cluster. The cost of a patch is its weight
    times the sum of its distances to all patches.

    Args:
        x: features, [T, C]. Fp16, bf16 and fp32 run on Triton where the tensor is on a GPU and no image exceeds
            `LONGEST`; the reference computes all else. Distances are at least fp32, without a gradient.
        weight: [T].
        keep: the first medoids, bool [T]; only its patches count.
        source: patch of each row, int32 [T]; negative for prefix rows and dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.
        turns: how many.

    Cost: on a GPU two launches and one each turn; O(T * max_seqlen) distances. No host synchronisation.
    """
    compute = _medoids_op if torch.compiler.is_compiling() else choose_medoids
    return compute(x.detach(), weight.detach(), keep, source, cu_seqlens, max_seqlen, turns)


def density_peaks(
    x: Tensor, noise: Tensor, source: Tensor, *, cu_seqlens: Tensor, max_seqlen: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Density of each patch times its distance to a denser patch, [T], and all distances over `sqrt(C)`.

    The density is `exp(-mean of d^2 over the nearest neighbours) + 1e-6 * noise`, the patch itself one of them; the
    densest patches are as far from a denser one as any two of the image from each other.

    Args:
        x: as for `medoids`.
        noise: in [0, 1), [T].
        source: as for `medoids`.
        cu_seqlens: as for `medoids`.
        max_seqlen: as for `medoids`.
        neighbours: how many, at least 1.

    Returns:
        The product, 0 for other rows, and the distances, [B, max_seqlen, max_seqlen], infinite where a row or a
        column is no patch; both at least fp32.

    Cost: on a GPU four launches; O(T * max_seqlen) distances. No host synchronisation.
    """
    compute = _peaks_op if torch.compiler.is_compiling() else choose_peaks
    return compute(x.detach(), noise, source, cu_seqlens, max_seqlen, neighbours)


def nearest_kept(
    distance: Tensor, keep: Tensor, source: Tensor, *, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Row of the nearest patch that stays, int64 [T], the earlier one of equals; -1 for rows that are no patches.

    Args:
        distance: [B, max_seqlen, max_seqlen], as `density_peaks` gives it.
        keep: bool [T]; only its patches count.
        source: as for `medoids`.
        cu_seqlens: as for `medoids`.
        max_seqlen: as for `medoids`.

    Cost: one launch on a GPU. No host synchronisation.
    """
    compute = _nearest_op if torch.compiler.is_compiling() else choose_nearest
    return compute(distance, keep, source, cu_seqlens, max_seqlen)


def _takes_triton(values: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> bool:
    there = len(values) and values.shape[1] and len(cu_seqlens) > 1
    return bool(takes_triton(values) and there and 0 < max_seqlen <= LONGEST)


def choose_medoids(
    x: Tensor, weight: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, turns: int
) -> Tensor:
    """Compute `medoids` by the kernels where they can, by the reference elsewhere."""
    if not _takes_triton(x, cu_seqlens, max_seqlen):
        return medoids_reference(x, weight, keep, source, cu_seqlens, max_seqlen, turns)
    from prunevit.kernels.triton_clusters import triton_medoids

    return triton_medoids(x, weight, keep, source, cu_seqlens, max_seqlen, turns)


def choose_peaks(
    x: Tensor, noise: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Compute `density_peaks` by the kernels where they can, by the reference elsewhere."""
    if not _takes_triton(x, cu_seqlens, max_seqlen):
        return peaks_reference(x, noise, source, cu_seqlens, max_seqlen, neighbours)
    from prunevit.kernels.triton_clusters import triton_peaks

    return triton_peaks(x, noise, source, cu_seqlens, max_seqlen, neighbours)


def choose_nearest(
    distance: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `nearest_kept` by the kernel where it can, by the reference elsewhere."""
    if not _takes_triton(distance, cu_seqlens, max_seqlen):
        return nearest_reference(distance, keep, source, cu_seqlens, max_seqlen)
    from prunevit.kernels.triton_clusters import triton_nearest

    return triton_nearest(distance, keep, source, cu_seqlens, max_seqlen)


# Opaque operations for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_medoids_op = torch.library.custom_op("prunevit::medoids", choose_medoids, mutates_args=())
_peaks_op = torch.library.custom_op("prunevit::density_peaks", choose_peaks, mutates_args=())
_nearest_op = torch.library.custom_op("prunevit::nearest_kept", choose_nearest, mutates_args=())


@_medoids_op.register_fake
def _(x: Tensor, weight: Tensor, keep: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(keep)


@_peaks_op.register_fake
def _(
    x: Tensor, noise: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty(x.shape[0], dtype=wide),
        x.new_empty((cu_seqlens.shape[0] - 1, max_seqlen, max_seqlen), dtype=wide),
    )


@_nearest_op.register_fake
def _(distance: Tensor, keep: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(keep, dtype=torch.int64)
