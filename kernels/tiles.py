"""How the attention kernels cut their work."""

import functools
from typing import NamedTuple

import torch


class ShortTile(NamedTuple):
    """For `short_kernel`: all rows of an image at once.

    Attributes:
        block_m: Queries, at least as many as the longest image has rows.
        pieces: Tiles that the keys are cut into, together at least as many.
        num_warps: Warps of a program.
        num_stages: Heads in flight; 1 where each program takes one head only.
        resident: Programs that a multiprocessor holds; 0 where each program takes one head only.
        registers: Bound on a thread's registers, for more programs on a multiprocessor; 0: none.
    """

    block_m: int
    pieces: tuple[int, ...]
    num_warps: int
    num_stages: int = 1
    resident: int = 0
    registers: int = 0


class LongTile(NamedTuple):
    """For `forward_kernel`: some queries, and so many keys at a time.

    Attributes:
        block_m: Queries.
        block_n: Keys.
        num_warps: Warps of a program.
        num_stages: Tiles of keys in flight.
        trims: Whether full tiles of keys go unmasked, and the rest takes the smallest tile that holds it. More code.
        registers: As in `ShortTile`.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    trims: bool = True
    registers: int = 0


Tile = ShortTile | LongTile

# (longest image, tile), found on sm_90 by experiments/benchmark/tune_attention.py for a head size of at most 64.
_SHORT = (
    (16, ShortTile(16, (16,), 1)),
    (32, ShortTile(32, (32,), 2)),
    (48, ShortTile(64, (32, 16), 4, num_stages=2, resident=4)),
    (64, ShortTile(64, (64,), 4, num_stages=2, resident=4)),
    (80, ShortTile(128, (64, 16), 8)),
    (96, ShortTile(128, (64, 32), 8)),
    (112, ShortTile(128, (64, 32, 16), 8)),
    (128, ShortTile(128, (128,), 8)),
)
# ... where prefix rows are reported: few tiles of keys, and no registers for a second head.
_SHORT_REPORTING = (
    (16, ShortTile(16, (16,), 1)),
    (32, ShortTile(32, (32,), 2)),
    (64, ShortTile(64, (64,), 4)),
    (80, ShortTile(128, (64, 16), 4)),
    (128, ShortTile(128, (128,), 8)),
)
# ... where each row reports what attention it receives: no probability goes before the last one is there. Pieces that
# differ are out: 64 keys and 32 gave wrong results on an H200 (triton 3.6).
_SHORT_RECEIVED = (
    (16, ShortTile(16, (16,), 1)),
    (32, ShortTile(32, (32,), 1)),
    (64, ShortTile(64, (64,), 4)),
    (128, ShortTile(128, (64, 64), 8, registers=128)),
)
_FEW_PREFIX_ROWS = 2  # that `short_kernel` can report
_MANY_HEADS = 1024  # of all images together: enough to fill the GPU with large tiles, or several times over


@functools.cache
def choose_tile(
    max_seqlen: int,
    head_dim: int,
    dtype: torch.dtype,
    infers: bool,
    prefix_rows: int,
    many_heads: bool,
    return_received: bool = False,
    weighted: bool = False,
) -> Tile:
    """Return the tile for images of at most `max_seqlen` rows.

    Args:
        max_seqlen: Bound of an image's rows.
        head_dim: Head size.
        dtype: Of q, k and v. fp32 runs on plain cores, where small tiles are best.
        infers: Whether there is neither `soft` nor `softmax_eps`, which only training has.
        prefix_rows: How many rows report whom they attend to.
        many_heads: See `has_many_heads`.
        return_received: Whether each row reports what attention it receives.
        weighted: Whether keys have weights. They take registers and come into shared memory too: without a bound and
            with a stage more, tiles that just fit four times into a multiprocessor fit three times; for a second head
            there is no room.
    """
    if dtype == torch.float32:
        return LongTile(32, 32, 8, 2 if head_dim <= 64 else 1, False)
    if (
        infers
        and prefix_rows <= _FEW_PREFIX_ROWS
        and max_seqlen <= (128 if head_dim <= 64 else 64)
        and head_dim <= 128
    ):
        table = _SHORT_RECEIVED if return_received else _SHORT_REPORTING if prefix_rows else _SHORT
        tile = next(tile for bound, tile in table if max_seqlen <= bound)
        if prefix_rows:  # which take more
            tile = tile._replace(registers=0)
        if weighted and tile.pieces == (64,):
            tile = tile._replace(num_stages=1, resident=0)
        return tile if many_heads else tile._replace(num_stages=1, resident=0)
    if head_dim > 128:
        return LongTile(64, 32, 8, 2, False)
    if head_dim > 64:
        return LongTile(64, 64, 4, 2)
    if not infers:
        return LongTile(64, 32, 4, 2, False)
    large = max_seqlen > 384 and many_heads and not prefix_rows
    if large:
        return LongTile(128, 64, 8, 3)
    return LongTile(64, 64, 4, 2, registers=128) if weighted else LongTile(64, 64, 4, 3)


def choose_received_tile(head_dim: int, dtype: torch.dtype) -> LongTile:
    """Return the tile of `received_kernel`, `block_m` queries at a time for `block_n` keys.

    Measured on sm_90 with a head size of 64.

    Args:
        head_dim: Head size.
        dtype: Of q and k.
    """
    if dtype == torch.float32:
        return LongTile(32, 32, 8, 2 if head_dim <= 64 else 1, False)
    return LongTile(64, 128, 4, 3) if head_dim <= 64 else LongTile(64, 64, 4, 2)


class BackwardTiles(NamedTuple):
    """For the backward.

    Attributes:
        keys: Of `keys_kernel`.
        queries: Of `queries_kernel`; None where the tile of keys holds the longest image, and `keys_kernel` gives all.
    """

    keys: LongTile
    queries: LongTile | None


# (longest image, tile of `keys_kernel`), found on sm_90 for 256 images, 6 heads, a head size of 64 and bf16.
_WHOLE = (
    (16, LongTile(16, 16, 1, 1, False)),
    (32, LongTile(32, 32, 2, 1, False)),
    (64, LongTile(64, 64, 4, 2, False)),
    (128, LongTile(32, 128, 4, 2, False)),
)


@functools.cache
def choose_backward_tiles(max_seqlen: int, head_dim: int, dtype: torch.dtype, plain: bool) -> BackwardTiles:
    """Return the tiles of the backward for images of at most `max_seqlen` rows.

    Tiles on tensor cores have two stages or more: with one, ptxas keeps the descriptors of all operands in uniform
    registers, runs out of them, and (12.8 was seen to) reads some that it never wrote.

    Args:
        max_seqlen: Bound of an image's rows.
        head_dim: Head size.
        dtype: Of q, k and v.
        plain: Whether there are neither weights nor `softmax_eps` nor gradients of reported probabilities, which
            leave no registers for whole heads of more than 64 rows.
    """
    if dtype == torch.float32:
        tile = LongTile(32, 32, 8, 1, False) if head_dim <= 128 else LongTile(16, 16, 8, 1, False)
        return BackwardTiles(tile, None if max_seqlen <= tile.block_n else tile)
    if head_dim <= 64 and max_seqlen <= (128 if plain else 64):
        return BackwardTiles(next(tile for bound, tile in _WHOLE if max_seqlen <= bound), None)
    if head_dim > 128:
        return BackwardTiles(LongTile(32, 64, 8, 2, False), LongTile(64, 32, 8, 2, False))
    if head_dim > 64:
        return BackwardTiles(LongTile(32, 64, 4, 2, False), LongTile(64, 64, 4, 2, False))
    return BackwardTiles(LongTile(32, 64, 4, 3, False), LongTile(64, 32, 4, 3, False))


def has_many_heads(batch_size: int, num_heads: int) -> bool:
    """Whether a batch fills the GPU even with large tiles, or with more than one head for each program."""
    return batch_size * num_heads >= _MANY_HEADS


def dense_is_faster(max_seqlen: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether torch's own attention on a dense batch is the faster one where all images are equally long.

    Measured on sm_90: these kernels compute with head sizes rounded up to a power of 2, which costs most
    between 64 and 128.
    """
    return dtype != torch.float32 and head_dim > 64 and max_seqlen > 64
