"""Inverse-transform sampling in each image: meaning, torch reference, choice of what computes it."""

import torch
from torch import Tensor

from prunevit.kernels.select import choose_rank, takes_triton

LONGEST = 2048
"""Rows of an image that one program of the kernel can hold."""


def sample(
    score: Tensor,
    source: Tensor,
    points: int,
    *,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    each: Tensor | None = None,
    within: Tensor | None = None,
) -> Tensor:
    """Keep the patches that evenly spaced points of the score's distribution function hit, bool [T].

    The patches of an image are put in rising order, earlier ones first. Their running sum is scaled to [0, 1], and each
    point between the smallest positive value and 1 takes the patch whose value is nearest, the lower one of two. All
    this is computed in fp64. Prefix rows stay.

    Args:
        score: finite and not negative, [T]; NaN comes last and adds nothing. Fp16, bf16 and fp32 run on Triton where
            the tensor is on a GPU and no image exceeds `LONGEST`; the reference computes all else.
        source: patch of each row, int32 [T]; negative for prefix rows and dead rows.
        points: number of points, at least 1; or, with `each`, a bound on it.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.
        each: points of each image, integers [B].
        within: patches that can be hit, bool [T]; default: all. Others leave.

    Cost: on a GPU one launch and O(T * max_seqlen) comparisons, O(T * points) of them for the points. No host
        synchronisation.

    Reference: Fayyaz et al., ATS, ECCV 2022.
    """
    compute = _sample_op if torch.compiler.is_compiling() else choose_sample
    return compute(score.detach(), source, within, each, points, image_id, cu_seqlens, max_seqlen)


def sample_reference(
    score: Tensor,
    source: Tensor,
    within: Tensor | None,
    each: Tensor | None,
    points: int,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Say what `sample` means."""
    batch_size, device = len(cu_seqlens) - 1, score.device
    eligible = source >= 0 if within is None else (source >= 0) & within
    image, width = image_id.long(), max(max_seqlen, 1)
    place = choose_rank(-score, eligible, image_id, cu_seqlens, max_seqlen).clamp(max=width - 1)
    mass = score.double().nan_to_num(nan=0.0, posinf=None, neginf=None).masked_fill(~eligible, 0.0)
    rising = mass.new_zeros(batch_size + 1, width).index_put((image, place), mass)[:batch_size]
    present = image.new_zeros(batch_size + 1).index_add(0, image, eligible.long())[:batch_size, None]
    absent = torch.arange(width, device=device) >= present

    running = rising.cumsum(1)
    low, high = running[:, :1], running.masked_fill(absent, 0.0).amax(1, keepdim=True)
    share = ((running - low) / torch.where(high > low, high - low, 1.0)).clamp(max=1.0)
    share = share.masked_fill(absent, torch.inf)
    first = share.masked_fill(share == 0, torch.inf).amin(1, keepdim=True).clamp(max=1.0)
    last = (torch.full_like(present, points) if each is None else each[:, None]) - 1
    step = torch.arange(points, device=device).minimum(last) / last.clamp(min=1).double()
    level = (first + (1 - first) * step).clamp(max=1.0)

    above = torch.searchsorted(share, level).minimum((present - 1).clamp(min=0))
    below = (above - 1).clamp(min=0)
    is_below = level - share.gather(1, below) <= share.gather(1, above) - level
    hit = torch.zeros(batch_size + 1, width, dtype=torch.bool, device=device)
    hit[:batch_size].scatter_(1, torch.where(is_below, below, above), True)
    return (hit[image, place] & eligible) | ((image_id < batch_size) & (source < 0))


def choose_sample(
    score: Tensor,
    source: Tensor,
    within: Tensor | None,
    each: Tensor | None,
    points: int,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Compute `sample` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(score) and len(score) and len(cu_seqlens) > 1 and 0 < max_seqlen <= LONGEST):
        return sample_reference(score, source, within, each, points, image_id, cu_seqlens, max_seqlen)
    from prunevit.kernels.triton_sample import triton_sample

    return triton_sample(score, source, within, each, points, cu_seqlens, max_seqlen)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_sample_op = torch.library.custom_op("prunevit::sample", choose_sample, mutates_args=())


@_sample_op.register_fake
def _(score: Tensor, source: Tensor, *rest: object) -> Tensor:
    return torch.empty_like(source, dtype=torch.bool)
