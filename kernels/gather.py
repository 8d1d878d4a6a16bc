"""Moving the rows that stay and folding others into them: meaning, torch reference, choice of what computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.select import takes_triton


class Gathered(NamedTuple):
    """Rows after packing, each [capacity] or, `x`, [capacity, C]; the last three None where there are none."""

    x: Tensor
    image_id: Tensor
    source: Tensor
    size: Tensor | None
    key_weight: Tensor | None
    soft: Tensor | None


def gather(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None = None,
    key_weight: Tensor | None = None,
    soft: Tensor | None = None,
    *,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None = None,
    merge_weight: Tensor | None = None,
    plain: Tensor | None = None,
    size_in: Tensor | None = None,
    key_weight_in: Tensor | None = None,
) -> Gathered:
    """Move each row that stays to its destination; with `merge_into`, fold others into it on the way.

    ::

        x'[cu_new[image of d] + destination[d]] = sum over i with merge_into[i] == d of merge_weight[i] * x[i]

    in at least fp32, d itself only if merge_into[d] == d; sizes are summed alike without the weight, and so are
    key weights if `key_weight_in` is given. Rows behind the last image are zeros, with image B and source -1.

    Args:
        x: [T, C]. Fp16, bf16 and fp32 run on Triton where the tensor is on a GPU and no gradient is needed; the
            reference computes all else.
        image_id: image of each row, int32 [T]; B for dead rows.
        source: patch of each row, int32 [T].
        size: how many patches a row stands for, [T]. None: 1 where rows are folded, else no sizes result.
        key_weight: [T], or None.
        soft: [T], or None; is moved, never folded.
        destination: new place in its image of each row, int32 [T], no two of an image alike; -1 for rows that leave.
            A row whose place lies at `capacity` or behind is lost.
        cu_old: boundaries of the images, int32 [B + 1].
        cu_new: boundaries after packing, int32 [B + 1]; rows from the last one on are dead.
        capacity: number of rows of the result.
        merge_into: row of the same image that a row is folded into, int64 [T]; -1: none. A row folded into one
            that does not stay is lost.
        merge_weight: [T]; None: 1.
        plain: rows that stay and take up no other, bool [T], given where `merge_into` folds as `select` does: all
            other rows of an image into one of them, the only one that has a destination, and the plain rows, of
            weight 1, into themselves. Then nobody has to search `merge_into`.
        size_in: what a row adds to the size of its heir, or, where nothing is folded, its new size, [T]; None:
            `size`.
        key_weight_in: likewise for `key_weight`; None: each row keeps its own.

    Cost: one launch on a GPU, and one more where `merge_into` has to be searched; reads the rows that stay or are
        folded, writes `capacity` rows. Deterministic, no host synchronisation.
    """
    floats = [x, size, key_weight, soft, merge_weight, size_in, key_weight_in]
    compute = _gather_op if torch.compiler.is_compiling() else choose_gather
    if torch.is_grad_enabled() and any(values is not None and values.requires_grad for values in floats):
        compute = gather_reference
    folds_key_weight = merge_into is not None and key_weight_in is not None
    size = size if size_in is None else size_in
    key_weight = key_weight if key_weight_in is None else key_weight_in
    features, ids, *rest = compute(
        x, image_id, source, size, key_weight, soft, destination, cu_old, cu_new, capacity,
        merge_into, merge_weight, plain, folds_key_weight,
    )  # fmt: skip
    present = (size is not None or merge_into is not None, key_weight is not None, soft is not None)
    moved = iter(rest)
    return Gathered(features, *ids.unbind(), *(next(moved) if there else None for there in present))


def gather_reference(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None,
    merge_weight: Tensor | None,
    plain: Tensor | None,
    folds_key_weight: bool,
) -> list[Tensor]:
    """Say what `gather` means in torch operations; returns `x`, the ids [2, capacity], and what else there is.

    It goes by `merge_into` alone, of which `plain` says only how it looks.
    """
    if merge_into is not None:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        size = torch.ones_like(wide[:, 0]) if size is None else size
        weighted = wide if merge_weight is None else wide * merge_weight.to(wide.dtype)[:, None]
        x, size = fold(weighted, merge_into).to(x.dtype), fold(size, merge_into)
        if key_weight is not None and folds_key_weight:
            key_weight = fold(key_weight, merge_into)
    here = torch.arange(len(destination), device=x.device)
    rows = here.new_zeros(capacity + 1)
    new = torch.where(destination >= 0, cu_new[image_id].long() + destination, capacity)
    rows.scatter_(0, new.clamp(max=capacity), here)
    rows = rows[:capacity]
    dead = torch.arange(capacity, device=x.device) >= cu_new[-1]

    def moved(values: Tensor, fill: int = 0) -> Tensor:
        return values.index_select(0, rows).masked_fill(dead.view(-1, *(1,) * (values.dim() - 1)), fill)

    ids = torch.stack([moved(image_id, len(cu_new) - 1), moved(source, -1)])
    return [moved(x), ids, *(moved(values) for values in (size, key_weight, soft) if values is not None)]


def fold(values: Tensor, into: Tensor) -> Tensor:
    """Add each row to its heir, in row order and at least fp32; rows with heir -1 go nowhere."""
    nowhere = values.shape[0]
    target = torch.where(into >= 0, into.long(), nowhere)
    wide = values.to(torch.promote_types(values.dtype, torch.float32))
    total = wide.new_zeros(nowhere + 1, *values.shape[1:]).index_add(0, target, wide)[:nowhere]
    return total.to(values.dtype)


def choose_gather(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None,
    merge_weight: Tensor | None,
    plain: Tensor | None,
    folds_key_weight: bool,
) -> list[Tensor]:
    """Compute `gather` by the kernel where it can, by the reference elsewhere."""
    arguments = (
        x, image_id, source, size, key_weight, soft, destination, cu_old, cu_new, capacity,
        merge_into, merge_weight, plain, folds_key_weight,
    )  # fmt: skip
    if not (takes_triton(x) and x.numel() and capacity and len(cu_new) > 1):
        return gather_reference(*arguments)
    from prunevit.kernels.triton_gather import triton_gather

    return triton_gather(*arguments)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_gather_op = torch.library.custom_op("prunevit::gather", choose_gather, mutates_args=())


@_gather_op.register_fake
def _(
    x: Tensor,
    image_id: Tensor,
    source: Tensor,
    size: Tensor | None,
    key_weight: Tensor | None,
    soft: Tensor | None,
    destination: Tensor,
    cu_old: Tensor,
    cu_new: Tensor,
    capacity: int,
    merge_into: Tensor | None,
    *rest: object,
) -> list[Tensor]:
    if size is None and merge_into is not None:
        size = x.new_empty(0, dtype=torch.promote_types(x.dtype, torch.float32))
    return [
        x.new_empty((capacity, x.shape[1])),
        image_id.new_empty((2, capacity)),
        *(values.new_empty(capacity) for values in (size, key_weight, soft) if values is not None),
    ]
