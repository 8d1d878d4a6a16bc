"""`pack`: the one place where tokens move. It carries out a `KeepMask` on a ragged batch.

It has two halves: `plan` finds each row's destination on the device, `gather` moves the rows once the host knows how
many there are, or has foreseen a `Room` for them (`pack_into`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from prunevit.checks import SIGNED_INTEGERS, require
from prunevit.keepmask import KeepMask, check_host_count
from prunevit.kernels.fit import fit
from prunevit.kernels.gather import fold
from prunevit.kernels.gather import gather as gather_rows
from prunevit.kernels.plan import plan as find_places
from prunevit.tokens import RaggedTokens

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPES = {
    "keep": ("bool, as a comparison gives it", frozenset({torch.bool})),
    "merge_into": ("of signed integers", SIGNED_INTEGERS),
    **dict.fromkeys(("merge_weight", "size", "key_weight", "soft"), ("floating", _FLOATS)),
    "order": ("bool, floating or of signed integers", _FLOATS | SIGNED_INTEGERS | {torch.bool}),
}
"""What the fields of a mask may hold, in words and as dtypes."""

_NO_PATCH = "pack: each image must keep at least one patch; select with the verbs, which keep the best one"


class Room(NamedTuple):
    """Rows of a batch, and of one image, prefix included: what packing needs, or what there is room for.

    Attributes:
        rows: Rows of the batch.
        longest: Rows of its longest image.
    """

    rows: int
    longest: int

    def holds(self, need: Room) -> bool:
        """Whether a need fits."""
        return need.rows <= self.rows and need.longest <= self.longest


@dataclass(frozen=True, eq=False)
class Plan:
    """Where each row goes.

    Attributes:
        destination: New place in its image of each row that stays, int32 `[T]`; -1 for rows that leave.
        cu_seqlens: Boundaries of the images after packing, int32 `[B + 1]`.
        extent: All rows that stay, those of the longest image, those of the shortest, int32 `[3]`.
        is_sound: Whether a verb that selects among all patches made the plan: then nothing is left to check.
        plain: Where the mask's folds are those of such a verb, rows that stay and take up no other, bool `[T]`; else
            None.
    """

    destination: Tensor
    cu_seqlens: Tensor
    extent: Tensor
    is_sound: bool = False
    plain: Tensor | None = None


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
        ValueError: If an image is left without a patch, if `mask.rows_per_image` is not what each image keeps, if
            `capacity` is no whole number or too small, or if counts must be read from meta tensors. On a GPU, where one
            of the two numbers is given and the host would have to wait for the counts, the same checks stop the device
            with an assertion instead.

    Cost:
        One copy of the rows that stay. No synchronisation if `mask.rows_per_image` or `capacity` is given; else
        exactly one read-back, of the total, the longest and the shortest image together.
    """
    if not isinstance(mask, KeepMask):
        raise ValueError(f"pack: a policy must return a KeepMask, got {type(mask).__name__}; use the verbs")
    if capacity is not None:
        check_host_count("pack: capacity", capacity)
    _check_shapes(tokens, mask)
    layout = plan(tokens, mask)
    if mask.soft is not None:
        return gather(tokens, mask, layout, tokens.x.shape[0], tokens.max_seqlen, tokens.uniform)
    _check_folds(tokens, layout, mask)
    if mask.rows_per_image is not None:
        total, longest, uniform = mask.rows_per_image * tokens.batch_size, mask.rows_per_image, True
    elif capacity is not None:
        total, longest, uniform = 0, tokens.max_seqlen, False
    elif tokens.batch_size == 0:
        total, longest, uniform = 0, tokens.max_seqlen, True
    elif layout.extent.is_meta:
        raise ValueError(
            "pack: counts that depend on the data need tensors with data, got meta tensors; give a capacity, or a "
            "mask with rows_per_image"
        )
    else:
        total, longest, shortest = layout.extent.tolist()
        if shortest <= tokens.num_prefix_tokens:
            raise ValueError(_NO_PATCH)
        return gather(tokens, mask, layout, total, longest, longest == shortest)
    if capacity is not None and capacity < total:
        raise ValueError(f"pack: capacity must be at least the {total} rows kept, got {capacity}")
    _check_counts(tokens, mask, layout, capacity)
    return gather(tokens, mask, layout, total if capacity is None else capacity, longest, uniform)


def pack_into(tokens: RaggedTokens, mask: KeepMask, room: Room) -> tuple[RaggedTokens, Tensor]:
    """Pack rows in a number that the host does not know into a room that it has foreseen; it never waits.

    What does not fit is not lost in silence: the need says so, and every image then has its prefix and its first kept
    patch alone, a valid batch for all that comes after, but not the one that was asked for.

    Args:
        tokens: The batch.
        mask: A decision about its rows, without `rows_per_image` and `soft`.
        room: Room for at least the prefix and a patch of each image; what the rows leave of it is dead.

    Returns:
        The rows, and what they need, int32 `[3]`: those of the batch, of its longest image and of its shortest. They
        fit if the first two do not exceed the room; the mask was wrong if the third does not exceed the prefix.

    Raises:
        ValueError: If the shapes of the mask are wrong, or the room is too small for any batch.

    Cost:
        One copy of the rows that stay; one launch more where the room is less than what `tokens` takes up. No
        synchronisation.
    """
    _check_shapes(tokens, mask)
    least = tokens.num_prefix_tokens + 1
    if room.rows < tokens.batch_size * least or room.longest < least:
        raise ValueError(
            f"pack_into: room must be for at least {least} rows of each of {tokens.batch_size} images, got {room}"
        )
    layout = plan(tokens, mask)
    _check_folds(tokens, layout, mask)
    need = layout.extent
    # Compiled code must not depend on which rooms are whole: each such question is one more variant to compile.
    if torch.compiler.is_compiling() or not room.holds(Room(tokens.x.shape[0], tokens.max_seqlen)):
        fitted, bounds = fit(layout.destination, layout.cu_seqlens, layout.extent, *room, least)
        layout = replace(layout, destination=fitted, cu_seqlens=bounds)
    return gather(tokens, mask, layout, room.rows, room.longest, False), need


@dataclass
class Foreseen:
    """Room for each stage of a walk whose counts the host does not know, in turn, and what they turn out to need.

    Attributes:
        rooms: The rooms.
        needs: The need of each stage that has packed, as `pack_into` gives it.
    """

    rooms: Sequence[Room]
    needs: list[Tensor] = field(default_factory=list)

    def pack(self, tokens: RaggedTokens, mask: KeepMask) -> RaggedTokens:
        """Pack into the next room; arguments as `pack_into`."""
        tokens, need = pack_into(tokens, mask, self.rooms[len(self.needs)])
        self.needs.append(need)
        return tokens


def plan(tokens: RaggedTokens, mask: KeepMask) -> Plan:
    """Find where each row goes; on the device alone.

    Cost:
        None if a verb that selects has found out; else two launches on a GPU, elsewhere a running sum over `T` rows
        and, with `mask.order`, two stable sorts.
    """
    found = None if mask.soft is not None else _found_by_selecting(tokens, mask)
    if found is not None:
        return found
    places = find_places(
        tokens.source,
        mask.keep if mask.soft is None else None,
        mask.order,
        image_id=tokens.image_id,
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
    )
    return Plan(*places)


def _found_by_selecting(tokens: RaggedTokens, mask: KeepMask) -> Plan | None:
    """The plan that selecting has made, if it is that of this mask and these rows."""
    selected = mask.selection
    if selected is None or mask.order is not selected.order or not selected.holds_for(tokens):
        return None
    chosen, claimed, is_sound = selected.chosen, mask.rows_per_image, selected.among_all
    if mask.keep is chosen.keep and claimed in (None, selected.rows):
        return Plan(chosen.destination, chosen.cu_seqlens, chosen.extent, is_sound)
    fuses = mask.keep is chosen.keep_fused and mask.merge_into is chosen.merge_into
    if fuses and claimed in (None, selected.fused_rows()):
        plain = chosen.keep if mask.merge_weight is chosen.merge_weight else None
        return Plan(chosen.destination_fused, chosen.cu_fused, chosen.extent_fused, is_sound, plain)
    return None


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
    x, size, key_weight, soft = tokens.x, tokens.size, tokens.key_weight, tokens.soft
    folds: dict[str, Tensor | None] = {
        "merge_into": mask.merge_into,
        "merge_weight": mask.merge_weight,
        "size_in": mask.size,
        "key_weight_in": mask.key_weight,
    }
    if mask.soft is not None:
        x, size, key_weight = _folded_in_place(tokens, mask)
        soft, folds = mask.soft, {}
    moved = gather_rows(
        x,
        tokens.image_id,
        tokens.source,
        size,
        key_weight,
        soft,
        destination=layout.destination,
        cu_old=tokens.cu_seqlens,
        cu_new=layout.cu_seqlens,
        capacity=capacity,
        plain=layout.plain,
        **folds,
    )
    return replace(
        tokens, cu_seqlens=layout.cu_seqlens, max_seqlen=max_seqlen, uniform=uniform, **moved._asdict()
    )


def _folded_in_place(tokens: RaggedTokens, mask: KeepMask) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Features, sizes and key weights where no row leaves: heirs take up what joins them, all else stays."""
    key_weight = tokens.key_weight
    if mask.merge_into is None:
        size = tokens.size if mask.size is None else mask.size
        return tokens.x, size, key_weight if mask.key_weight is None else mask.key_weight
    here = torch.arange(mask.merge_into.shape[0], device=mask.merge_into.device)
    stays = mask.merge_into != here
    x = tokens.x.to(torch.promote_types(tokens.x.dtype, torch.float32))
    if mask.merge_weight is not None:
        x = x * mask.merge_weight.to(x.dtype)[:, None]
    x = torch.where(stays[:, None], tokens.x, fold(x, mask.merge_into).to(tokens.x.dtype))
    size = fold(tokens.sizes if mask.size is None else mask.size, mask.merge_into)
    size = torch.where(stays, tokens.sizes, size)
    if mask.key_weight is not None:
        before = torch.ones_like(mask.key_weight) if key_weight is None else key_weight
        key_weight = torch.where(stays, before, fold(mask.key_weight, mask.merge_into))
    return x, size, key_weight


def _check_counts(tokens: RaggedTokens, mask: KeepMask, layout: Plan, capacity: int | None) -> None:
    """Hold a plan against what was promised, without waiting for a GPU."""
    if mask.rows_per_image is None and capacity is not None and capacity < tokens.x.shape[0]:
        require(layout.cu_seqlens[-1] <= capacity, f"pack: the rows kept must fit into capacity={capacity}")
    if layout.is_sound or tokens.batch_size == 0:
        return
    if mask.rows_per_image is not None:
        require(
            (layout.extent[1:] == mask.rows_per_image).all(),
            f"pack: each image must keep the {mask.rows_per_image} rows of mask.rows_per_image; "
            "mend the mask or leave it out",
        )
        if mask.rows_per_image > tokens.num_prefix_tokens:
            return
    require(layout.extent[2] > tokens.num_prefix_tokens, _NO_PATCH)


def _check_folds(tokens: RaggedTokens, layout: Plan, mask: KeepMask) -> None:
    """Hold folds against what they must be; on a CPU alone, since a GPU would pay with launches at each stage."""
    into = mask.merge_into
    if into is None or into.device.type != "cpu":
        return
    rows = torch.arange(into.shape[0])
    inside = (into >= -1) & (into < into.shape[0])
    image = tokens.image_id[into.long().clamp(0, into.shape[0] - 1)]
    require(
        (inside & ((into < 0) | (image == tokens.image_id))).all(),
        "pack: merge_into must be -1 or a row of the same image; mend the mask",
    )
    require(
        ((into == rows) | (layout.destination < 0)).all(),
        "pack: merge_into of a row that stays must be the row itself; mend the mask",
    )


def _check_shapes(tokens: RaggedTokens, mask: KeepMask) -> None:
    """Raise if a mask cannot belong to these tokens; costs nothing on the device."""
    rows, device = tokens.x.shape[0], tokens.x.device
    for name, (words, dtypes) in _DTYPES.items():
        values = getattr(mask, name)
        if values is None and name != "keep":
            continue
        if not isinstance(values, Tensor):
            raise ValueError(f"KeepMask: {name} must be a tensor, got {type(values).__name__}")
        if values.shape != (rows,):
            raise ValueError(
                f"KeepMask: {name} must have shape [{rows}], one entry a row, got {list(values.shape)}"
            )
        if values.device != device:
            raise ValueError(f"KeepMask: {name} must be on {device}, as the rows are, got {values.device}")
        if values.dtype not in dtypes:
            raise ValueError(f"KeepMask: {name} must be {words}, got {values.dtype}")
    if mask.merge_weight is not None and mask.merge_into is None:
        raise ValueError(
            "KeepMask: merge_weight needs merge_into, got none; say into which row each is folded"
        )
    known = mask.rows_per_image
    if known is not None and (isinstance(known, bool) or not isinstance(known, (int, torch.SymInt))):
        raise ValueError(f"KeepMask: rows_per_image must be a whole number or None, got {known!r}")
    if known is not None and not tokens.uniform:
        raise ValueError(
            "KeepMask: rows_per_image must be None for tokens that are not uniform; leave it out"
        )
    if known is not None and not 0 <= known <= tokens.max_seqlen:
        raise ValueError(
            f"KeepMask: rows_per_image must be in [0, {tokens.max_seqlen}], the rows of each image, got {known}; "
            "mend the mask or leave it out"
        )
