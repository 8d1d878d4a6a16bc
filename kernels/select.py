"""Which rows stay and where they go: what it means, and the choice of what computes it."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from prunevit.kernels.parts import pitches, split_parts
from prunevit.kernels.select_reference import (
    FLAG_MULTIPLE,
    INT_MULTIPLE,
    Planes,
    flag_lengths,
    int_lengths,
    mean_over_heads,
    rank_reference,
    select_reference,
)


class Rule(NamedTuple):
    """How many patches an image keeps, the best ones by score: what `kind` says, within `least` and `most`.

    Statistics are those of the patches that can be selected, computed in fp64 and rounded to the score's precision.

    Attributes:
        kind: "count": `value`. "ceil" or "floor": `value` times the patches, the double product rounded so. "score":
            those that score at least `value`. "deviation": ... at least the mean plus `value` standard deviations.
            "maximum": ... at least `value` times the largest score. "mass": the fewest that hold the share `value`
            of the sum; a score below 0 holds nothing. "rows": of the best `floor(value * rows)` rows those that are
            patches, the prefix rows competing.
        value: A number.
        each: One for each image in its place, [B].
        least: Patches that each image keeps if it has them.
        most: Patches that no image exceeds; goes before `least`.
    """

    kind: str
    value: float = 0.0
    each: Tensor | None = None
    least: int = 1
    most: int | None = None


KINDS = ("count", "ceil", "floor", "score", "deviation", "maximum", "mass", "rows")
_MOST = 2**31 - 1


class Selection(NamedTuple):
    """The best patches of each image, and beside them the same selection with one row that takes up the rest.

    The best patch that is not selected is the heir of its image. Dead rows are kept nowhere.

    Attributes:
        keep: rows that stay, bool [T].
        destination: place in its image of each row that stays, int32 [T]; -1 for others.
        cu_seqlens: boundaries of the images after packing, int32 [B + 1].
        extent: all rows that stay, those of the longest image, those of the shortest, int32 [3].
        keep_fused: `keep` and the heirs.
        destination_fused: as `destination`, for `keep_fused`.
        cu_fused: as `cu_seqlens`, for `keep_fused`.
        extent_fused: as `extent`, for `keep_fused`.
        merge_into: row that a row is folded into, int64 [T]: the heir for it and all patches behind it, the row
            itself for the others, -1 for dead rows and patches that could not be selected.
        merge_weight: the score, mean over the heads, of rows that are folded into an heir, 1 for others, [T], at
            least fp32.
    """

    keep: Tensor
    destination: Tensor
    cu_seqlens: Tensor
    extent: Tensor
    keep_fused: Tensor
    destination_fused: Tensor
    cu_fused: Tensor
    extent_fused: Tensor
    merge_into: Tensor
    merge_weight: Tensor


def select(
    score: Tensor,
    rule: Rule,
    *,
    batch_size: int,
    rows: int,
    prefix: int,
    cu_seqlens: Tensor | None = None,
    eligible: Tensor | None = None,
    order: Tensor | None = None,
) -> Selection:
    """Select the patches of the highest score in each image, as many as a rule says.

    Ties go to the earlier row; NaN counts as -inf. Where all patches stay there is no heir.

    Args:
        score: [T], or [T, H] to go by the mean over H heads, summed in order in fp32; any strides. Fp16, bf16 and
            fp32 run on Triton where the tensor is on a GPU; the reference computes all else. Gradients flow through
            `merge_weight`.
        rule: how many.
        batch_size: B, number of images.
        rows: rows of each image, image b owning the rows b * rows to (b + 1) * rows; or, with `cu_seqlens`, a bound
            on them. Rows behind the last image are dead.
        prefix: leading rows of each image, which always stay and are no patches.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        eligible: patches that can be selected, bool [T]; default: all. Others leave, and are folded nowhere.
        order: patches that go behind those that are not in it, bool [T]; default: all keep their order.

    Raises:
        ValueError: a shape or number cannot be.

    Cost: one launch on a GPU if all images have `rows` rows and the rule is a count, or there is one image; else a
        second one, which adds up the images. No host synchronisation.

    Reference: Liang et al., EViT, ICLR 2022 (the fused row).
    """
    num_rows = score.shape[0]
    if score.dim() not in (1, 2) or not score.is_floating_point():
        raise ValueError(
            f"select: score must be floating [T] or [T, H], got {score.dtype} {list(score.shape)}"
        )
    if cu_seqlens is None and num_rows < batch_size * rows:
        raise ValueError(f"select: score must have at least {batch_size} x {rows} rows, got {num_rows}")
    if rule.kind not in KINDS or not 0 <= prefix <= rows:
        raise ValueError(
            f"select: rule must be one of {', '.join(KINDS)} and prefix in [0, {rows}], "
            f"got {rule.kind!r} and {prefix}"
        )
    compute = _select_op if torch.compiler.is_compiling() else choose_select
    differentiable = torch.is_grad_enabled() and score.requires_grad
    most = _MOST if rule.most is None else min(rule.most, _MOST)
    value = min(rule.value, _MOST) if rule.kind == "count" else rule.value
    with _where_edits_count():
        ints, flags, merge_into, merge_weight = compute(
            score.detach() if differentiable else score, cu_seqlens, eligible, order,
            None if rule.each is None else rule.each.detach(), batch_size, rows, prefix,
            rule.kind, float(value), min(rule.least, _MOST), most,
        )  # fmt: skip
    lengths = int_lengths(num_rows, batch_size)
    destination, destination_fused, cu, cu_fused, extents = split_parts(ints, lengths, INT_MULTIPLE)
    extent, extent_fused = extents.split(3)
    keep, keep_fused = split_parts(flags, flag_lengths(num_rows), FLAG_MULTIPLE)
    if differentiable:
        mean = mean_over_heads(score)
        merge_weight = torch.where(keep | (merge_into < 0), torch.ones_like(mean), mean)
    return Selection(
        keep, destination, cu, extent, keep_fused, destination_fused, cu_fused, extent_fused, merge_into, merge_weight
    )  # fmt: skip


def _where_edits_count() -> AbstractContextManager[None]:
    """Inside inference mode a way out of it: what is made there does not count how often it is written to in place."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()
    return _out_of_inference_mode()


@contextmanager
def _out_of_inference_mode() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def rank(score: Tensor, eligible: Tensor, *, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Rank the eligible rows of each image by falling score, int64 [T]; ties go to the earlier row, NaN comes last.

    All other rows of an image rank behind them, in their own order; a dead row gets its distance from the first one.

    Args:
        score: [T]. Fp16, bf16 and fp32 run on Triton where the tensor is on a GPU; the reference computes all else.
        eligible: bool [T]; False for dead rows.
        image_id: image of each row, int32 [T]; B for dead rows.
        cu_seqlens: boundaries of the images, int32 [B + 1].
        max_seqlen: bound on the rows of an image, known on the host.

    Cost: on a GPU one launch, O(T * max_seqlen) comparisons; else two stable sorts. No host synchronisation.
    """
    compute = _rank_op if torch.compiler.is_compiling() else choose_rank
    return compute(score.detach(), eligible, image_id, cu_seqlens, max_seqlen)


def takes_triton(values: Tensor) -> bool:
    """Whether a Triton kernel computes with these values: on a GPU, at most fp32, triton installed."""
    return values.is_cuda and values.dtype in (torch.float32, torch.bfloat16, torch.float16) and has_triton()


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def choose_select(
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
    """Compute `select` by the kernel where it can, by the reference elsewhere."""
    settings = (batch_size, rows, prefix, kind, value, least, most)
    if not (takes_triton(score) and score.shape[0] and batch_size * rows):
        return select_reference(score, cu_seqlens, eligible, order, each, *settings)
    from prunevit.kernels.triton_select import triton_select

    return triton_select(score, cu_seqlens, eligible, order, each, *settings)


def choose_rank(
    score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int
) -> Tensor:
    """Compute `rank` by the kernel where it can, by the reference elsewhere."""
    if not (takes_triton(score) and len(score) and len(cu_seqlens) > 1 and max_seqlen):
        return rank_reference(score, eligible, image_id, cu_seqlens, max_seqlen)
    from prunevit.kernels.triton_select import triton_rank

    return triton_rank(score, eligible, cu_seqlens, max_seqlen)


# Opaque operations for `torch.compile` and export: what computes is chosen inside, where tensors are real.
_select_op = torch.library.custom_op("prunevit::select", choose_select, mutates_args=())
_rank_op = torch.library.custom_op("prunevit::rank", choose_rank, mutates_args=())


@_select_op.register_fake
def _(
    score: Tensor,
    cu_seqlens: Tensor | None,
    eligible: Tensor | None,
    order: Tensor | None,
    each: Tensor | None,
    batch_size: int,
    *settings: object,
) -> Planes:
    num_rows = score.shape[0]
    wide = torch.promote_types(score.dtype, torch.float32)
    return (
        score.new_empty(sum(pitches(int_lengths(num_rows, batch_size), INT_MULTIPLE)), dtype=torch.int32),
        score.new_empty(sum(pitches(flag_lengths(num_rows), FLAG_MULTIPLE)), dtype=torch.bool),
        score.new_empty(num_rows, dtype=torch.int64),
        score.new_empty(num_rows, dtype=wide),
    )


@_rank_op.register_fake
def _(score: Tensor, eligible: Tensor, image_id: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    return torch.empty_like(score, dtype=torch.int64)
