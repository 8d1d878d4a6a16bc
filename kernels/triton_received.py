"""The attention that each key receives, for images of any length, from what `triton_long` says of each query."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from prunevit.kernels.launch import wait_for_previous
from prunevit.kernels.triton_parts import dot_rows, load_tile, load_weights, locate


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def received_kernel(
    q, cu_seqlens, row_stats, received, num_rows, batch_size, num_tiles, k, key_weight, soft,
    PART: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, TRIM: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `received` [H, T], the mean over an image's queries of the probability on each key.

    A program owns a tile of keys and sums over the queries in order, using what `forward_kernel` left in `row_stats`.
    TRIM: the last queries of an image take the smallest tile that holds them, and so, if few, do the last keys.
    """
    wait_for_previous(OVERLAP)
    tile, h, is_dead, start, length = locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    column = tl.cast(h, tl.int64) * num_rows + start
    plane = tl.cast(num_rows, tl.int64) * H
    received += column
    first_key = tile * BLOCK_N
    key = tl.arange(0, BLOCK_N)
    if is_dead:
        for dead in range(first_key, length, num_tiles * BLOCK_N):
            tl.store(received + dead + key, tl.zeros([BLOCK_N], tl.float32), mask=dead + key < length)
        return
    if first_key >= length:
        return

    if PART > 0:
        k = q + PART
    q += start * Q_ROW + h * Q_HEAD
    k += start * K_ROW + h * K_HEAD
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start
    row_stats += column
    if TRIM and first_key + BLOCK_N // 4 >= length:
        _receive(
            q, k, key_weight, soft, row_stats, received, plane, first_key, length, Q_ROW, K_ROW, D, BLOCK_D, BLOCK_M,
            BLOCK_N // 4, PRE, POST, EXEMPT_SELF, EPS, TRIM,
        )  # fmt: skip
    else:
        _receive(
            q, k, key_weight, soft, row_stats, received, plane, first_key, length, Q_ROW, K_ROW, D, BLOCK_D, BLOCK_M,
            BLOCK_N, PRE, POST, EXEMPT_SELF, EPS, TRIM,
        )  # fmt: skip


@triton.jit
def _receive(
    q, k, key_weight, soft, row_stats, received, plane, first_key, length, Q_ROW: tl.constexpr, K_ROW: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRE: tl.constexpr,
    POST: tl.constexpr, EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, TRIM: tl.constexpr,
):  # fmt: skip
    """Write what one tile of keys receives.

    Keys are the rows of the products, so that a thread adds up most of a sum by itself, and what a key weighs counts
    once, at the end.
    """
    k_tile = load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, True)
    own, weight = load_weights(key_weight, soft, first_key, length, BLOCK_N)
    mass = tl.zeros([BLOCK_N], tl.float32)
    full = length // BLOCK_M * BLOCK_M if TRIM else 0
    for first in range(0, full if TRIM else length, BLOCK_M):
        mass = _add_queries(
            q, k_tile, row_stats, plane, own, weight, mass, first, first_key, length, Q_ROW, D, BLOCK_D,
            BLOCK_M, BLOCK_N, PRE, POST, EXEMPT_SELF, not TRIM,
        )  # fmt: skip
    if TRIM:
        rest = length - full
        if rest > BLOCK_M // 2:
            mass = _add_queries(
                q, k_tile, row_stats, plane, own, weight, mass, full, first_key, length, Q_ROW, D, BLOCK_D,
                BLOCK_M, BLOCK_N, PRE, POST, EXEMPT_SELF, True,
            )  # fmt: skip
        elif rest > BLOCK_M // 4:
            mass = _add_queries(
                q, k_tile, row_stats, plane, own, weight, mass, full, first_key, length, Q_ROW, D, BLOCK_D,
                BLOCK_M // 2, BLOCK_N, PRE, POST, EXEMPT_SELF, True,
            )  # fmt: skip
        elif rest > 0:
            mass = _add_queries(
                q, k_tile, row_stats, plane, own, weight, mass, full, first_key, length, Q_ROW, D, BLOCK_D,
                BLOCK_M // 4, BLOCK_N, PRE, POST, EXEMPT_SELF, True,
            )  # fmt: skip
    if EXEMPT_SELF == 0:
        mass = tl.where(weight > 0.0, mass * weight, 0.0)
    mean = mass / length
    if EPS > 0:
        mean += _mean_floor(row_stats + 2 * plane, length, BLOCK_M)
    key = first_key + tl.arange(0, BLOCK_N)
    tl.store(received + key, mean, mask=key < length)


@triton.jit
def _add_queries(
    q, k_tile, row_stats, plane, own, weight, mass, first, first_key, length, Q_ROW: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what a tile of queries gives to the sums of a tile of keys."""
    q_tile = load_tile(q, first, length, Q_ROW, D, BLOCK_M, BLOCK_D, MASKED)
    score = dot_rows(k_tile, q_tile) * PRE
    row = first + tl.arange(0, BLOCK_M)
    if MASKED:
        shift = tl.load(row_stats + row, mask=row < length, other=0.0)
        scale = tl.load(row_stats + plane + row, mask=row < length, other=0.0)
    else:
        shift = tl.load(row_stats + row)
        scale = tl.load(row_stats + plane + row)
    p = tl.exp2(score * POST - shift[None, :])
    if EXEMPT_SELF:
        is_self = row[None, :] == (first_key + tl.arange(0, BLOCK_N))[:, None]
        weights = tl.where(is_self, own[:, None], weight[:, None])
        p = tl.where(weights > 0.0, p * weights, 0.0)
    return mass + tl.sum(p * scale[None, :], 1)


@triton.jit
def _mean_floor(floor, length, BLOCK: tl.constexpr):
    """Return the mean over an image's queries of the floor of their probabilities."""
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, length, BLOCK):
        row = first + tl.arange(0, BLOCK)
        total += tl.load(floor + row, mask=row < length, other=0.0)
    return tl.sum(total, 0) / length
