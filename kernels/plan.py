"""Where each row goes when some of them leave: meaning, torch reference, choice of what computes it."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prunevit.kernels.parts import join_parts, pitches, split_parts
from prunevit.kernels.select import has_triton


class Places(NamedTuple):
    """Where the rows go.

    Attributes:
        destination: place in its image of each row that stays, int32 [T]; -1 for others.
        cu_seqlens: boundaries of the images after packing, int32 [B + 1].
        extent: all rows that stay, those of the longest image, those of the shortest, int32 [3]; zeros without images.
    """

    destination: Tensor
    cu_seqlens: Tensor
    extent: Tensor


def plan(
    source: Tensor,
    keep: Tensor | None = None,
    order: Tensor | None = None,
    *,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Places:
    """Find the place of each row that stays in its image.

    The prefix rows come first, then the patches by rising `order`, the earlier one of equals first; NaN comes last
    and -0 equals 0.

    Args:
        source: patch of each row, int32 [T]; negative for prefix rows, which lead their image and always stay, and
            for dead rows, which never do.
        keep: patches that stay, bool [T]; None: all.
        order: bool, floating or of signed integers, [T], compared as it is; None: the present order.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.

    Cost: on a GPU two launches, one for a batch of one image, and O(T * max_seqlen) comparisons; elsewhere a running
        sum, and with `order` two stable sorts. No host synchronisation.
    """
    compute = _plan_op if torch.compiler.is_compiling() else choose_plan
    order = None if order is None else order.detach()
    ints = compute(source, keep, order, image_id, cu_seqlens, max_seqlen)
    return Places(*split_parts(ints, plan_lengths(len(source), len(cu_seqlens) - 1), MULTIPLE))


MULTIPLE = 4
"""Where the parts of what is computed start: so that each is aligned to 16 bytes."""


def plan_lengths(num_rows: int, batch_size: int) -> tuple[int, ...]:
    """Lengths of the parts of what is computed."""
    return num_rows, batch_size + 1, 3


def plan_reference(
    source: Tensor,
    keep: Tensor | None,
    order: Tensor | None,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Say what `plan` means; returns its parts one behind the other, see `plan_lengths`."""
    live, is_patch = image_id < len(cu_seqlens) - 1, source >= 0
    kept = live if keep is None else live & (keep | ~is_patch)
    upto = F.pad(kept.cumsum(0), (1, 0))
    bounds = upto[cu_seqlens]
    if order is None:
        new = upto[1:] - 1
    else:
        low = -torch.inf if order.is_floating_point() else torch.iinfo(order.dtype).min
        by_order = torch.argsort(order.masked_fill(~is_patch, low), stable=True)
        group = image_id * 2 + (~kept).int()
        rows = by_order[torch.argsort(group[by_order], stable=True)]
        new = torch.empty_like(rows).scatter_(0, rows, kept[rows].cumsum(0) - 1)
    destination = torch.where(kept, new - bounds[image_id], -1)
    lengths = bounds.diff()
    ends = (lengths.amax()[None], lengths.amin()[None]) if len(lengths) else (lengths.new_zeros(2),)
    extent = torch.cat([bounds[-1:], *ends])
    return join_parts([destination, bounds, extent], MULTIPLE).int()


def takes_triton(rows: Tensor) -> bool:
    """Whether a Triton kernel plans where these rows go: on a GPU, triton installed."""
    return rows.is_cuda and has_triton()


def choose_plan(
    source: Tensor,
    keep: Tensor | None,
    order: Tensor | None,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    """Compute `plan` by the kernel where it can, by the reference elsewhere."""
    if order is not None and order.dtype == torch.bool:
        order = order.view(torch.int8)  # here, where no compiler sees it: inductor has no such view of bool
    if not (takes_triton(source) and len(source) and len(cu_seqlens) > 1 and max_seqlen):
        return plan_reference(source, keep, order, image_id, cu_seqlens, max_seqlen)
    from prunevit.kernels.triton_plan import triton_plan

    return triton_plan(source, keep, order, cu_seqlens, max_seqlen)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_plan_op = torch.library.custom_op("prunevit::plan", choose_plan, mutates_args=())


@_plan_op.register_fake
def _(
    source: Tensor,
    keep: Tensor | None,
    order: Tensor | None,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
) -> Tensor:
    return source.new_empty(
        sum(pitches(plan_lengths(source.shape[0], cu_seqlens.shape[0] - 1), MULTIPLE)), dtype=torch.int32
    )
