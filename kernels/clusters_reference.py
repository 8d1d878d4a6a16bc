"""What the clusterings of `clusters` mean, in torch operations: any dtype, any device, no host synchronisation."""

import torch
from torch import Tensor


def medoids_reference(
    x: Tensor, weight: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, turns: int
) -> Tensor:
    """Say what `medoids` means."""
    lay = _Layout(source, cu_seqlens, max_seqlen)
    distance = lay.distances(x)
    cost = lay.padded(weight) * distance.masked_fill(distance.isinf(), 0).sum(2)
    cost = cost.masked_fill(~lay.is_patch | cost.isnan(), torch.inf)
    column = torch.arange(lay.width, device=x.device)
    medoid = lay.padded(keep) & lay.is_patch
    for _ in range(turns):
        cluster = distance.masked_fill(~medoid[:, None, :], torch.inf).argmin(2)
        medoid = _cheapest(cost, torch.where(medoid, column, cluster), column) & lay.is_patch
    return lay.rows(medoid | (lay.is_live & ~lay.is_patch), fill=False)


def peaks_reference(
    x: Tensor, noise: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int, neighbours: int
) -> tuple[Tensor, Tensor]:
    """Say what `density_peaks` means."""
    lay = _Layout(source, cu_seqlens, max_seqlen)
    distance = lay.distances(x) / x.shape[1] ** 0.5
    is_finite = distance.isfinite()
    near = distance.topk(min(neighbours, distance.shape[2]), largest=False).values
    is_near = near.isfinite()
    spread = near.masked_fill(~is_near, 0).square().sum(2) / is_near.sum(2).clamp(min=1)
    density = (-spread).exp() + 1e-6 * lay.padded(noise.to(spread.dtype))
    farthest = distance.masked_fill(~is_finite, 0).amax((1, 2))[:, None, None]
    denser = (density[:, None, :] > density[:, :, None]) & is_finite
    gap = torch.where(denser, distance, farthest).amin(2)
    return lay.rows((gap * density).masked_fill(~lay.is_patch, 0), fill=0), distance


def nearest_reference(
    distance: Tensor, keep: Tensor, source: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Say what `nearest_kept` means."""
    lay = _Layout(source, cu_seqlens, max_seqlen)
    low, column = distance.masked_fill(~(lay.padded(keep) & lay.is_patch)[:, None, :], torch.inf).min(2)
    row = torch.where(low < torch.inf, lay.start + column, -1)
    return lay.rows(row.masked_fill(~lay.is_patch, -1), fill=-1)


class _Layout:
    """Rows of ragged images, and where each stands in a dense batch `[B, max_seqlen]`."""

    def __init__(self, source: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> None:
        self.num_rows, self.width = source.shape[0], max_seqlen
        self.start = cu_seqlens[:-1, None].long()
        column = torch.arange(max_seqlen, device=source.device)
        self.is_live = column < cu_seqlens.diff()[:, None]
        self.row = torch.where(self.is_live, self.start + column, self.num_rows)
        self.is_patch = self.padded(source) >= 0
        self.is_patch &= self.is_live

    def padded(self, values: Tensor) -> Tensor:
        """Lay rows out; 0 where an image has none."""
        return torch.cat([values, values.new_zeros(1, *values.shape[1:])])[self.row]

    def rows(self, padded: Tensor, fill: float) -> Tensor:
        """Take a dense batch apart into rows."""
        out = padded.new_full((self.num_rows + 1,), fill)
        return out.index_put((self.row,), padded.masked_fill(~self.is_live, fill))[: self.num_rows]

    def distances(self, x: Tensor) -> Tensor:
        """Distances between the patches of each image, at least fp32; infinite elsewhere."""
        x = self.padded(x.to(torch.promote_types(x.dtype, torch.float32)))
        both = self.is_patch[:, :, None] & self.is_patch[:, None, :]
        return torch.cdist(x, x).masked_fill(~both, torch.inf)


def _cheapest(cost: Tensor, cluster: Tensor, column: Tensor) -> Tensor:
    """Mark the member of least cost of each cluster, the earliest of equals, bool `[B, N]`.

    Args:
        cost: `[B, N]`, infinite for what belongs to no cluster.
        cluster: column that names each member's cluster, int64 `[B, N]`.
        column: 0 to N - 1.
    """
    least = torch.full_like(cost, torch.inf).scatter_reduce(1, cluster, cost, "amin")
    best = cost == least.gather(1, cluster)
    place = torch.where(best, column, len(column))
    first = torch.full_like(cluster, len(column)).scatter_reduce(1, cluster, place, "amin")
    return column == first.gather(1, cluster)
