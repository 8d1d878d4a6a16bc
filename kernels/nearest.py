"""The most alike row of the same image: meaning, torch reference, choice of what computes it."""

import torch
from torch import Tensor
from torch.nn.functional import normalize

from prunevit.kernels.autocast import without_casts
from prunevit.kernels.select import takes_triton


def nearest(
    features: Tensor,
    queries: Tensor,
    keys: Tensor,
    *,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cosine: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find for each query row the key row of its image with the largest dot product.

    Args:
        features: [T, D], or [T, H, D] to go by the mean over H heads. Fp16, bf16 and fp32 run on Triton where the
            tensor is on a GPU; the reference computes all else, and what a gradient flows through.
        queries: rows that look for a partner, bool [T].
        keys: rows that may be one, bool [T]; a row is never its own partner.
        image_id: image of each row, int32 [T]; B for dead rows, which neither look nor are found.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.
        cosine: divide the product by the lengths of both.

    Returns:
        The partner, int64 [T], and the product, at least fp32 [T]; -1 and -inf where there is none. Ties go to the
        earlier row.

    Cost: on a GPU one launch, two with heads of more than 64 channels or images of more than 256 rows, and
        O(T * max_seqlen) products, in fp32 or as exact; elsewhere [B, max_seqlen, max_seqlen] of memory. No host
        synchronisation.
    """
    layout = (image_id, cu_seqlens, max_seqlen)
    if torch.is_grad_enabled() and features.requires_grad:
        return nearest_reference(features, queries, keys, *layout, cosine)
    compute = _nearest_op if torch.compiler.is_compiling() else choose_nearest
    partner, value = compute(features.detach(), queries, keys, *layout, cosine)
    return partner, value


def nearest_reference(
    features: Tensor,
    queries: Tensor,
    keys: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cosine: bool,
) -> tuple[Tensor, Tensor]:
    """Say what `nearest` means."""
    num_rows, batch_size = len(features), len(cu_seqlens) - 1
    wide_type = torch.promote_types(features.dtype, torch.float32)
    if not num_rows or not batch_size or not max_seqlen:
        nobody = torch.full_like(image_id, -1, dtype=torch.int64)
        nothing = features[:0].sum(dtype=wide_type)  # ties the values to the features, whose gradient is 0
        return nobody, torch.full_like(image_id, -torch.inf, dtype=wide_type) + nothing
    start, column = cu_seqlens[:-1, None], torch.arange(max_seqlen, device=features.device)
    here = (start + column).clamp(max=num_rows - 1)
    cell = (
        image_id.long() * max_seqlen + torch.arange(num_rows, device=features.device) - cu_seqlens[image_id]
    )
    cell = torch.where(image_id < batch_size, cell, batch_size * max_seqlen)
    # Half precision ties what is nearly alike, and autocast would bring it back.
    with without_casts(features.device.type):
        wide = features.to(wide_type)
        wide = wide.mean(1) if wide.dim() == 3 else wide
        wide = normalize(wide, dim=-1) if cosine else wide
        laid = wide.index_select(0, here.flatten()).unflatten(0, here.shape)
        product = laid @ laid.transpose(1, 2)
    found = keys[here] & (column < cu_seqlens.diff()[:, None])
    itself = torch.eye(max_seqlen, dtype=torch.bool, device=features.device)
    value, partner = product.masked_fill(~found[:, None] | itself, -torch.inf).max(-1)
    dead = value.new_full((1,), -torch.inf)
    value = torch.cat([value.flatten(), dead]).index_select(0, cell).masked_fill(~queries, -torch.inf)
    partner = torch.cat([(start + partner).flatten(), partner.new_zeros(1)])[cell]
    return torch.where(value > -torch.inf, partner, -1), value


def choose_nearest(
    features: Tensor,
    queries: Tensor,
    keys: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cosine: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `nearest` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(features) and features.numel() and len(cu_seqlens) > 1 and max_seqlen):
        return nearest_reference(features, queries, keys, image_id, cu_seqlens, max_seqlen, cosine)
    from prunevit.kernels.triton_nearest import triton_nearest

    return triton_nearest(features, queries, keys, cu_seqlens, max_seqlen, cosine)


# An opaque operation for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_nearest_op = torch.library.custom_op("prunevit::nearest", choose_nearest, mutates_args=())


@_nearest_op.register_fake
def _(
    features: Tensor,
    queries: Tensor,
    keys: Tensor,
    image_id: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cosine: bool,
) -> tuple[Tensor, Tensor]:
    num_rows, wide = features.shape[0], torch.promote_types(features.dtype, torch.float32)
    return features.new_empty(num_rows, dtype=torch.int64), features.new_empty(num_rows, dtype=wide)
