"""`pack`: the one place where tokens move. It carries out a `KeepMask` on a ragged batch.

It has two halves, so that a graph segment can end with the first and the next one start with the second: `plan`
finds each row's destination on the device, `gather` moves the rows once the host knows how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from prunevit.checks import require
from prunevit.keepmask import KeepMask
from prunevit.tokens import RaggedTokens


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each row goes.

    Attributes:
        kept: Rows that stay, bool `[T]`.
        destination: New row of each row that stays, int64 `[T]`.
        cu_seqlens: Boundaries of the images after packing, int32 `[B + 1]`.
    """

    kept: Tensor
    destination: Tensor
    cu_seqlens: Tensor


def pack(tokens: RaggedTokens, mask: KeepMask, capacity: int | None = None) -> RaggedTokens:
    """Remove the rows that a mask drops, fold those that it folds, and put the rest in its order.

    A kept row `d` becomes `x'[d] = sum over i with merge_into[i] == d of merge_weight[i] * x[i]`, `d` itself included,
    summed in at least fp32. A row whose heir is not kept vanishes. Prefix rows always stay. Under `mask.soft` no row
    leaves: heirs take up what is folded into them, and all else stays as it was.

    Args:
        tokens: The batch.
        mask: A decision about its rows.
        capacity: Number of rows of the result, at least those that stay; the rest are dead rows of zeros. Default:
            no dead rows.

    Raises:
        ValueError: If an image is left without a patch, if `mask.rows_per_image` is not what each image keeps, or if
            `capacity` is too small. On a GPU, where the host does not know the counts and would have to wait for
            them, the same checks stop the device with an assertion instead.

    Cost:
        One copy of the rows that stay. No synchronisation if `mask.rows_per_image` or `capacity` is given; else
        exactly one read-back, of the total, the longest and the shortest image together.
    """
    _check_shapes(tokens, mask)
    layout = plan(tokens, mask)
    lengths = layout.cu_seqlens[1:] - layout.cu_seqlens[:-1]
    if mask.soft is not None:
        return gather(tokens, mask, layout, tokens.x.shape[0], tokens.max_seqlen, tokens.uniform)
    if mask.rows_per_image is not None:
        total, longest = mask.rows_per_image * tokens.batch_size, mask.rows_per_image
        require(
            (lengths == longest).all(),
            f"pack: each image must keep the {longest} rows of mask.rows_per_image; mend the mask or leave it out",
        )
        uniform = True
    elif capacity is not None:
        total, longest, uniform = capacity, tokens.max_seqlen, False
        require(layout.cu_seqlens[-1] <= capacity, f"pack: the rows kept must fit into capacity={capacity}")
    else:
        total, longest, shortest = torch.stack([layout.cu_seqlens[-1], lengths.max(), lengths.min()]).tolist()
        uniform = longest == shortest
    require(
        (lengths > tokens.num_prefix_tokens).all(),
        "pack: each image must keep at least one patch; select with the verbs, which keep the best one",
    )
    if capacity is not None and capacity < total:
        raise ValueError(f"pack: capacity must be at least the {total} rows kept, got {capacity}")
    return gather(tokens, mask, layout, total if capacity is None else capacity, longest, uniform)


def plan(tokens: RaggedTokens, mask: KeepMask) -> Plan:
    """Find where each row goes; on the device alone.

    Cost:
        A running sum over `T` rows; with `mask.order` two stable sorts.
    """
    kept = tokens.live if mask.soft is not None else tokens.live & (mask.keep | ~tokens.is_patch)
    upto = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    if mask.order is None:
        destination = upto[1:] - 1
    else:
        by_order = torch.argsort(mask.order, stable=True)
        group = tokens.image_id * 2 + (~kept).int()
        rows = by_order[torch.argsort(group[by_order], stable=True)]
        destination = torch.empty_like(rows).scatter_(0, rows, kept[rows].cumsum(0) - 1)
    return Plan(kept, destination, upto[tokens.cu_seqlens].int())


def gather(
    tokens: RaggedTokens, mask: KeepMask, layout: Plan, capacity: int, max_seqlen: int, uniform: bool
) -> RaggedTokens:
    """Move the rows to where a plan puts them.

    Args:
        tokens: The batch.
        mask: The decision that `layout` was made from.
        layout: The plan.
        capacity: Number of rows of the result.
        max_seqlen: Bound on the rows of one image after packing.
        uniform: Whether each image has exactly `max_seqlen` rows after packing.
    """
    x, size, key_weight = _folded(tokens, mask)
    here = torch.arange(tokens.image_id.shape[0], device=x.device)
    rows = here.new_zeros(capacity + 1)
    rows.scatter_(0, torch.where(layout.kept, layout.destination, capacity).clamp(max=capacity), here)
    rows = rows[:capacity]
    dead = torch.arange(capacity, device=x.device) >= layout.cu_seqlens[-1]

    def moved(values: Tensor | None, fill: float = 0) -> Tensor | None:
        if values is None:
            return None
        return values.index_select(0, rows).masked_fill(dead.view(-1, *(1,) * (values.ndim - 1)), fill)

    features, image_id, source = moved(x), moved(tokens.image_id, tokens.batch_size), moved(tokens.source, -1)
    assert features is not None
    assert image_id is not None
    assert source is not None
    return replace(
        tokens,
        x=features,
        cu_seqlens=layout.cu_seqlens,
        image_id=image_id,
        max_seqlen=max_seqlen,
        uniform=uniform,
        source=source,
        size=moved(size),
        key_weight=moved(key_weight),
        soft=moved(mask.soft if mask.soft is not None else tokens.soft),
    )


def _folded(tokens: RaggedTokens, mask: KeepMask) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Features, sizes and key weights after folding, each still in its old row."""
    if mask.merge_into is None:
        size = tokens.size if mask.size is None else mask.size
        return tokens.x, size, tokens.key_weight if mask.key_weight is None else mask.key_weight
    wide = torch.promote_types(tokens.x.dtype, torch.float32)
    x = tokens.x.to(wide)
    if mask.merge_weight is not None:
        x = x * mask.merge_weight.to(wide)[:, None]
    features = _fold(x, mask.merge_into).to(tokens.x.dtype)
    size = _fold(tokens.sizes if mask.size is None else mask.size, mask.merge_into)
    key_weight = tokens.key_weight
    if mask.key_weight is not None:
        key_weight = _fold(mask.key_weight, mask.merge_into)
    if mask.soft is not None:
        here = torch.arange(mask.merge_into.shape[0], device=x.device)
        stays = mask.merge_into != here
        features = torch.where(stays[:, None], tokens.x, features)
        size = torch.where(stays, tokens.sizes, size)
        if key_weight is not None:
            before = torch.ones_like(key_weight) if tokens.key_weight is None else tokens.key_weight
            key_weight = torch.where(stays, before, key_weight)
    return features, size, key_weight


def _fold(values: Tensor, into: Tensor) -> Tensor:
    """Add each row to its heir; rows with heir -1 go nowhere."""
    nowhere = values.shape[0]
    target = torch.where(into >= 0, into, nowhere)
    return values.new_zeros(nowhere + 1, *values.shape[1:]).index_add(0, target, values)[:nowhere]


def _check_shapes(tokens: RaggedTokens, mask: KeepMask) -> None:
    """Raise if a mask cannot belong to these tokens; costs nothing on the device."""
    rows = tokens.x.shape[0]
    for name in ("keep", "merge_into", "merge_weight", "size", "key_weight", "order", "soft"):
        values = getattr(mask, name)
        if values is not None and values.shape != (rows,):
            raise ValueError(
                f"KeepMask: {name} must have shape [{rows}], one entry a row, got {list(values.shape)}"
            )
    if mask.keep.dtype != torch.bool:
        raise ValueError(
            f"KeepMask: keep must be bool, got {mask.keep.dtype}; compare the score with a bound"
        )
    if mask.rows_per_image is not None and not tokens.uniform:
        raise ValueError(
            "KeepMask: rows_per_image must be None for tokens that are not uniform; leave it out"
        )
