"""Where another implementation of a pruned model first computes something else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from prunevit.tokens import RaggedTokens
from prunevit.trace import Stage
from prunevit.vit import RaggedViT


@dataclass(frozen=True)
class Divergence:
    """The first place where two models part.

    Attributes:
        place: What lies between here and the last place where they agreed: "block 3, attention; EViT after it".
        block: That block, 0-based; -1 for the embedding, the depth for norm and head.
        images: Images of the batch that differ.
        rows: (image, patch) of each row of ours without a counterpart, patch -1 for prefix rows; empty at the logits.
        counts: Rows of the first image that differs, ours and theirs.
        max_abs: The largest difference to the nearest counterpart.
    """

    place: str
    block: int
    images: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    counts: tuple[int, int]
    max_abs: float

    def __str__(self) -> str:
        """Say it in a few lines."""
        lines = [
            f"they part in {self.place}: images {', '.join(map(str, self.images))} differ by up to {self.max_abs:.3g}"
        ]
        if self.counts[0] != self.counts[1]:
            lines.append(
                f"  image {self.images[0]} has {self.counts[0]} rows here, {self.counts[1]} in the other model"
            )
        for image in self.images[:4]:
            own = [("prefix" if patch < 0 else str(patch)) for each, patch in self.rows if each == image]
            if own:
                lines.append(
                    f"  image {image}: {len(own)} rows without a counterpart, patches "
                    + ", ".join(own[:12])
                    + (", ..." if len(own) > 12 else "")
                )
        return "\n".join(lines)


@dataclass(frozen=True)
class _Point:
    """Rows at one place of a model: `rows[i]` of image `i` `[n, C]`, and the patch of each where that is known."""

    rows: Sequence[Tensor]
    patches: Sequence[Tensor]


def compare(
    pruned: RaggedViT, other: nn.Module, images: Tensor, tolerance: float | None = None
) -> Divergence | None:
    """Run two models on the same images and name the first block and rows where they part.

    The rows that enter the attention and the MLP of each block are compared, then those that leave the last block, then
    the logits. The order of an image's rows does not matter, since attention does not see it: each row needs a
    counterpart within the tolerance. Rows of zeros in the other model are taken for padding.

    Args:
        pruned: The pruned model.
        other: Another one: a `RaggedViT`, or any module that takes images and has timm's `blocks` with `norm2`; what
            its blocks get and give is `[B, N, C]`.
        images: `[B, 3, height, width]`.
        tolerance: Largest difference of an entry, as a share of the largest entry at that place; default: the square
            root of the dtype's rounding step.

    Returns:
        Where they part, or None if they never do.

    Raises:
        ValueError: If the first model is no pruned one; if the other one has no blocks to look into, or another number.

    Cost:
        One forward pass of each; all rows of all places are held; O(n * m) distances for each image and place.
    """
    if not isinstance(pruned, RaggedViT):
        raise ValueError(
            f"compare: the first model must be a RaggedViT, as prunevit.prune gives it, got {type(pruned).__name__}"
        )
    eps = torch.finfo(next(pruned.parameters()).dtype).eps
    tolerance = eps**0.5 if tolerance is None else tolerance
    with torch.no_grad():
        ours, stages, logits = _walk(pruned, images)
        theirs, other_logits = _watch(other, images, len(ours))
    for number, (mine, yours) in enumerate(zip(ours, theirs)):
        if yours is not None and (found := _part(mine, yours, tolerance)):
            block = (number - 1) // 2 if number else -1
            return Divergence(_place(pruned, number, stages), block, *found)
    error = (logits - other_logits).abs()
    differ = (error.amax(1) > tolerance * logits.abs().max()).nonzero()[:, 0].tolist()
    if not differ and bool(error.isfinite().all()):
        return None
    return Divergence(
        "the norm and the head", pruned.info.depth, tuple(differ), (), (0, 0), error.max().item()
    )


def _walk(pruned: RaggedViT, images: Tensor) -> tuple[list[_Point], list[list[str]], Tensor]:
    """Rows that enter each half-block and leave the last one; the policies that acted ahead of each; the logits."""
    points: list[_Point] = []
    acted: list[list[str]] = [[]]

    def record(event: Stage | RaggedTokens) -> None:
        if isinstance(event, Stage):
            acted[-1].append(type(pruned.policies[event.policy]).__name__)
        else:
            points.append(_point(event))
            acted.append([])

    tokens = pruned.walk(pruned.embed(images), record, last=2 * pruned.info.depth)
    points.append(_point(tokens))
    return points, acted, pruned(images)


def _point(tokens: RaggedTokens) -> _Point:
    lengths = tokens.seqlens.tolist()
    live = sum(lengths)
    return _Point(tokens.x[:live].split(lengths), tokens.source[:live].split(lengths))


def _watch(other: nn.Module, images: Tensor, number: int) -> tuple[list[_Point | None], Tensor]:
    """What enters each half-block and leaves the last block of the other model, where it can be seen; its logits."""
    if isinstance(other, RaggedViT):
        points, _, logits = _walk(other, images)
        return list(points), logits
    blocks: Any = getattr(other, "blocks", None)
    if blocks is None or 2 * len(blocks) + 1 != number:
        raise ValueError(
            f"compare: the other model must have {number // 2} blocks in .blocks, got "
            f"{'none' if blocks is None else len(blocks)}"
        )
    seen: list[_Point | None] = [None] * number
    with _hooked(blocks, seen):
        logits = other(images)
    if all(each is None for each in seen):
        raise ValueError("compare: the other model must call its .blocks, got no call; it may call others")
    return seen, logits


@contextmanager
def _hooked(blocks: Any, seen: list[_Point | None]) -> Iterator[None]:
    def keep(number: int, values: Any) -> None:
        x = next((each for each in values if isinstance(each, Tensor) and each.ndim == 3), None)
        if x is not None:
            seen[number] = _Point(list(x), [])

    handles = []
    for number, block in enumerate(blocks):
        handles.append(
            block.register_forward_pre_hook(lambda _, given, at=2 * number: keep(at, given))  # type: ignore[misc]
        )
        if isinstance(getattr(block, "norm2", None), nn.Module):
            handles.append(
                block.norm2.register_forward_pre_hook(lambda _, given, at=2 * number + 1: keep(at, given))
            )
    handles.append(
        blocks[-1].register_forward_hook(
            lambda _, given, out: keep(len(seen) - 1, out if isinstance(out, tuple | list) else [out])
        )
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _part(
    mine: _Point, yours: _Point, tolerance: float
) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...], tuple[int, int], float] | None:
    """Images and rows that differ at one place, the counts of the first, and the largest difference."""
    bound = tolerance * max(each.abs().max().item() for each in mine.rows)
    images, rows, worst = list[int](), list[tuple[int, int]](), 0.0
    counts = (0, 0)
    for number, (own, other) in enumerate(zip(mine.rows, yours.rows)):
        own, other = _wide(own), _wide(other[other.abs().amax(1) > 0])
        distance = torch.cdist(own[None], other[None], p=torch.inf)[0].nan_to_num(torch.inf)
        lost, extra = distance.amin(1) > bound, distance.amin(0) > bound
        if bool(lost.any()) or bool(extra.any()) or len(own) != len(other):
            counts = counts if images else (len(own), len(other))
            images.append(number)
            rows += [(number, patch) for patch in mine.patches[number][lost].tolist()]
            worst = max(worst, distance.amin(1).max().item(), distance.amin(0).max().item())
    return (tuple(images), tuple(rows), counts, worst) if images else None


def _wide(values: Tensor) -> Tensor:
    """At least fp32: distances of half precision are not implemented."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _place(pruned: RaggedViT, number: int, acted: list[list[str]]) -> str:
    """What lies between a place and the one before it."""
    half = f"block {(number - 1) // 2}, {'attention' if number % 2 else 'MLP'}"
    return (half if number else "the embedding") + "".join(f"; {each} after it" for each in acted[number])
