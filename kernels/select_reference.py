"""What `select` and `rank` mean, in torch operations: any dtype, any device, no host synchronisation."""

import torch
import torch.nn.functional as F
from torch import Tensor

from prunevit.kernels.parts import join_parts

Planes = tuple[Tensor, Tensor, Tensor, Tensor]
"""What `select` computes, so that a kernel's outputs are few: int32 (destination, destination_fused, cu_seqlens,
cu_fused, extent with extent_fused, parts of `int_lengths`), bool (keep and keep_fused, parts of `flag_lengths`),
merge_into [T] and merge_weight [T]."""


INT_MULTIPLE, FLAG_MULTIPLE = 4, 16
"""Where the parts of `Planes` start: so that each is aligned to 16 bytes."""


def int_lengths(num_rows: int, batch_size: int) -> tuple[int, ...]:
    """Lengths of the int32 parts of `Planes`."""
    return num_rows, num_rows, batch_size + 1, batch_size + 1, 6


def flag_lengths(num_rows: int) -> tuple[int, ...]:
    """Lengths of the bool parts of `Planes`."""
    return num_rows, num_rows


def select_reference(
    score: Tensor,
    cu_seqlens: Tensor | None,
    eligible: Tensor | None,
    order: Tensor | None,
    each: Tensor | None,
    batch_size: int,
    rows: int,
    prefix: int,
    kind: str,
    value: float,
    least: int,
    most: int,
) -> Planes:
    """Say what `select` means; arguments as the operation takes them, `rows` a bound if `cu_seqlens` is given."""
    num_rows, device, width = score.shape[0], score.device, max(rows, 1)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(batch_size + 1, device=device) * rows
    start, length = cu_seqlens[:-1, None].long(), cu_seqlens.diff()[:, None]
    column = torch.arange(width, device=device)
    row, is_live = start + column, column < length
    mean = mean_over_heads(score)
    is_patch = is_live & (column >= prefix)
    here = row.clamp(max=max(num_rows - 1, 0))
    laid = mean.detach()[here] if num_rows else mean.new_zeros(batch_size, width)
    if eligible is not None and num_rows:
        is_patch &= eligible[here]
    present = is_patch.sum(1, keepdim=True)

    falling = laid.masked_fill(~is_patch | laid.isnan(), -torch.inf).argsort(
        dim=1, descending=True, stable=True
    )
    falling = falling.gather(1, (~is_patch).gather(1, falling).int().argsort(dim=1, stable=True))
    ranks = torch.empty_like(falling).scatter_(1, falling, column.expand_as(falling))
    setting = (
        torch.full_like(present, 1, dtype=torch.float64) * value if each is None else each[:, None].double()
    )
    count = _count(kind, setting, laid, is_patch, is_live, falling, prefix)
    count = count.clamp(min=least).clamp(max=most).minimum(present)

    is_prefix = is_live & (column < prefix)
    loses = is_patch & (ranks >= count)
    heir = row.gather(1, falling.gather(1, count.clamp(max=width - 1)))
    joins = torch.where(loses, heir, torch.where(is_prefix | is_patch, row, -1))
    image = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(num_rows, device=device), right=True)
    cell = image * width + torch.arange(num_rows, device=device) - cu_seqlens[image]
    cell = torch.where(image < batch_size, cell, batch_size * width)

    def by_row(cells: Tensor, dead: int) -> Tensor:
        return F.pad(cells.flatten(), (0, 1), value=dead)[cell]

    goes_behind = order[here] & ~is_prefix if order is not None and num_rows else torch.zeros_like(is_live)
    slots, bounds, extents, flags = [], [], [], []
    for keep in (is_prefix | (is_patch & ~loses), is_prefix | (is_patch & (ranks <= count))):
        kept = keep.sum(1)
        ahead, behind = keep & ~goes_behind, keep & goes_behind
        slot = torch.where(goes_behind, ahead.sum(1, keepdim=True) + behind.cumsum(1), ahead.cumsum(1)) - 1
        slots.append(by_row(torch.where(keep, slot, -1), -1))
        flags.append(by_row(keep, False))
        bounds.append(F.pad(kept.cumsum(0), (1, 0)))
        ends = (kept.amax()[None], kept.amin()[None]) if batch_size else (kept.new_zeros(2),)
        extents += [kept.sum()[None], *ends]
    loser = by_row(loses, False)
    weight = torch.where(loser, mean, torch.ones_like(mean))
    ints = join_parts([*slots, *bounds, torch.cat(extents)], INT_MULTIPLE).int()
    return ints, join_parts(flags, FLAG_MULTIPLE), by_row(joins, -1), weight


def _count(
    kind: str, setting: Tensor, score: Tensor, is_patch: Tensor, is_live: Tensor, falling: Tensor, prefix: int
) -> Tensor:
    """Number of patches that a rule asks for, int64 [B, 1], from scores [B, rows] in fp64, rounded as the score is."""
    present = is_patch.sum(1, keepdim=True).double()
    if kind == "count":
        return setting.long()
    if kind in ("ceil", "floor"):
        return (setting * present).ceil().long() if kind == "ceil" else (setting * present).floor().long()
    if kind == "mass":
        mass = score.double().masked_fill(~is_patch | ~(score > 0), 0.0).gather(1, falling)
        before = F.pad(mass.cumsum(1), (1, -1))
        share = (before / mass.sum(1, keepdim=True)).to(score.dtype)
        return (is_patch.gather(1, falling) & (share < setting.to(score.dtype))).sum(1, keepdim=True)
    if kind == "rows":
        return _left_by_prefix(
            (setting * is_live.sum(1, keepdim=True)).floor().long(), score, is_live, prefix
        )
    limit = setting
    if kind == "deviation":
        mean = score.double().masked_fill(~is_patch, 0.0).sum(1, keepdim=True) / present
        away = (score.double() - mean).masked_fill(~is_patch, 0.0)
        limit = mean + setting * ((away * away).sum(1, keepdim=True) / present).sqrt()
    elif kind == "maximum":
        limit = (
            setting * score.masked_fill(~is_patch | score.isnan(), -torch.inf).amax(1, keepdim=True).double()
        )
    return (is_patch & (score >= limit.to(score.dtype))).sum(1, keepdim=True)


def _left_by_prefix(target: Tensor, score: Tensor, is_live: Tensor, prefix: int) -> Tensor:
    """Patches among the best `target` rows, prefix rows competing; ties go to the earlier row, NaN counts as -inf."""
    score = score.masked_fill(score.isnan(), -torch.inf)
    column = torch.arange(score.shape[1], device=score.device)
    own = score[:, :prefix, None]
    is_ahead = (score[:, None] > own) | ((score[:, None] == own) & (column < column[:prefix, None]))
    ahead = (is_ahead & is_live[:, None]).sum(2)
    return target - (is_live[:, :prefix] & (ahead < target)).sum(1, keepdim=True)


def mean_over_heads(score: Tensor) -> Tensor:
    """Mean of [T, H] over its heads in at least fp32, summed in order: the same bits as the kernel's; or [T] itself."""
    wide = score.to(torch.promote_types(score.dtype, torch.float32))
    return (
        wide if score.dim() == 1 else sum(wide.unbind(1), torch.zeros_like(wide[:, 0])) * (1 / score.shape[1])
    )


def rank_reference(
    score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Say what `rank` means."""
    score = score.masked_fill(~eligible | score.isnan(), -torch.inf)
    by_score = torch.argsort(score, descending=True, stable=True)
    group = image_id * 2 + (~eligible).int()
    order = by_score[torch.argsort(group[by_score], stable=True)]
    position = torch.arange(score.shape[0], device=score.device) - cu_seqlens[image_id]
    return torch.empty_like(order).scatter_(0, order, position)
