"""The verb that samples: `sample` keeps the patches that points of the score's distribution function hit."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from prunevit.checks import require
from prunevit.keepmask import KeepMask, check_host_count, check_score, check_within, counts_of_images
from prunevit.kernels.sample import sample as hit_rows
from prunevit.kernels.select_reference import mean_over_heads
from prunevit.tokens import RaggedTokens


def sample(
    tokens: RaggedTokens, score: Tensor, points: int | Tensor, within: KeepMask | None = None
) -> KeepMask:
    """Keep the patches that evenly spaced points of the score's distribution function hit (Fayyaz et al., ECCV 2022).

    The patches of an image are put in rising order of score, their running sum is scaled to [0, 1], and each of
    `points` values between the smallest positive one and 1 takes the patch whose running sum is nearest. Several
    points may take one patch, so the number of patches kept differs from image to image. Nothing is drawn.

    Args:
        tokens: The batch.
        score: Non-negative, `[T]`, or `[T, H]` to go by the mean over heads.
        points: Number of points, at least 1: a bound on the patches kept. Or one for each image, int `[B]`, from 1
            to the patches of the grid.
        within: Select among the patches that this mask keeps, and hand on its folds.

    Raises:
        ValueError: If `points` is no such number (on a GPU the device stops with an assertion where those of an
            image are not).

    Cost:
        One launch on a GPU; elsewhere one `rank`, and a search in each image for each point. No synchronisation.
    """
    check_score(tokens, score)
    if within is not None:
        check_within(tokens, within)
    number, each = _points(tokens, points)
    keep = hit_rows(
        mean_over_heads(score),
        tokens.source,
        number,
        image_id=tokens.image_id,
        cu_seqlens=tokens.cu_seqlens,
        max_seqlen=tokens.max_seqlen,
        each=each,
        within=None if within is None else within.keep,
    )
    return KeepMask(keep) if within is None else replace(within, keep=keep, rows_per_image=None)


def _points(tokens: RaggedTokens, points: int | Tensor) -> tuple[int, Tensor | None]:
    """Check the points; return a bound on them, and those of each image if they differ."""
    if isinstance(points, Tensor):
        points, patches = counts_of_images(tokens, points), tokens.grid[0] * tokens.grid[1]
        require(
            ((points >= 1) & (points <= patches)).all(),
            f"sample: points must be from 1 to the {patches} patches of the grid in every image; clamp them",
        )
        return patches, points
    check_host_count("sample: points", points)
    if points < 1:
        raise ValueError(f"sample: points must be at least 1, got {points}")
    return points, None
