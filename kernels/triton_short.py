"""Ragged attention for short images: a program takes a whole head of an image, all keys at once.

The probabilities of all keys are there when the normaliser is, so the attention received is a sum by the way. With
STAGES > 1 a program takes one head after the other, and what the next one needs comes into shared memory meanwhile.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from prunevit.kernels.launch import wait_for_previous
from prunevit.kernels.triton_parts import (
    dot_rows,
    exact_log2,
    exponentiate,
    finite,
    load_tile,
    load_weights,
    mask_scores,
    store_tile,
    sum_as_used,
)


@triton.jit(do_not_specialize=["num_rows", "batch_size"])
def short_kernel(
    q, cu_seqlens, out, num_rows, batch_size, k, v, key_weight, prefix, saved, received,
    PART: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    PREFIX_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `out` [T, H, D], and `prefix` [H, T, P], `saved` [1, H, T] and `received` [H, T] unless they are None.

    For images of at most BLOCK_M rows. PIECES are the tiles (first key, keys) that all keys of an image fit into.
    `saved` and PART as in `forward_kernel`, `received` as in `received_kernel`.
    """
    wait_for_previous(OVERLAP)
    if PART > 0:
        k = q + PART
        v = q + 2 * PART
    if STAGES == 1:
        _take_head(
            tl.program_id(0), q, cu_seqlens, out, num_rows, k, v, key_weight, prefix, saved, received, Q_ROW,
            Q_HEAD, K_ROW, K_HEAD, V_ROW, V_HEAD, H, D, BLOCK_D, BLOCK_M, PIECES, PRE, POST, PREFIX_ROWS,
        )  # fmt: skip
    else:
        for unit in tl.range(tl.program_id(0), batch_size * H, tl.num_programs(0), num_stages=STAGES):
            _take_head(
                unit, q, cu_seqlens, out, num_rows, k, v, key_weight, prefix, saved, received, Q_ROW, Q_HEAD,
                K_ROW, K_HEAD, V_ROW, V_HEAD, H, D, BLOCK_D, BLOCK_M, PIECES, PRE, POST, PREFIX_ROWS,
            )  # fmt: skip
    _zero_dead_rows(
        out, prefix, saved, received, tl.load(cu_seqlens + batch_size), num_rows, H, D, BLOCK_M, BLOCK_D, PREFIX_ROWS
    )  # fmt: skip


@triton.jit
def _take_head(
    unit, q, cu_seqlens, out, num_rows, k, v, key_weight, prefix, saved, received, Q_ROW: tl.constexpr,
    Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr, V_ROW: tl.constexpr, V_HEAD: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, PIECES: tl.constexpr,
    PRE: tl.constexpr, POST: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Attend with all queries of one head of one image."""
    image = unit // H
    h = unit % H
    start = tl.load(cu_seqlens + image).to(tl.int64)
    length = (tl.load(cu_seqlens + image + 1) - start).to(tl.int32)
    q += start * Q_ROW + h * Q_HEAD
    k += start * K_ROW + h * K_HEAD
    v += start * V_ROW + h * V_HEAD
    if key_weight is not None:
        key_weight += start
    q_tile = load_tile(q, 0, length, Q_ROW, D, BLOCK_M, BLOCK_D, True)
    k_tiles = ()
    v_tiles = ()
    for i in tl.static_range(len(PIECES)):
        k_tiles += (load_tile(k, PIECES[i][0], length, K_ROW, D, PIECES[i][1], BLOCK_D, True),)
        v_tiles += (load_tile(v, PIECES[i][0], length, V_ROW, D, PIECES[i][1], BLOCK_D, True),)

    acc, total, mass, shift, p = _attend(
        q_tile, k_tiles, v_tiles, key_weight, length, BLOCK_M, PIECES, PRE, POST
    )
    acc *= (1.0 / tl.where(total > 0.0, total, 1.0))[:, None]
    store_tile(out + start * (H * D) + h * D, acc, 0, length, H * D, D, BLOCK_M, BLOCK_D)
    column = tl.cast(h, tl.int64) * num_rows + start  # of the image in a plane [H, T]
    if saved is not None:
        row = tl.arange(0, BLOCK_M)
        log_sum = shift + exact_log2(tl.where(mass > 0.0, mass, 1.0))
        tl.store(saved + column + row, log_sum, mask=row < length)
    if received is not None:
        _report_received(received + column, p, mass, length, BLOCK_M, PIECES)
    if PREFIX_ROWS > 0:
        prefix += column * PREFIX_ROWS
        _report_prefix(
            q, k_tiles, key_weight, prefix, length, Q_ROW, D, BLOCK_D, PIECES, PRE, POST, PREFIX_ROWS
        )


@triton.jit
def _report_received(received, p, mass, length, BLOCK_M: tl.constexpr, PIECES: tl.constexpr):
    """Store the mean [N] over the queries of the probabilities p / mass on each key.

    A sum over threads takes many shuffles, a product with ones none. Two fp16 hold 22 bits of a probability.
    """
    is_live = tl.arange(0, BLOCK_M) < length
    share = is_live.to(tl.float32) / tl.where(is_live & (mass > 0.0), mass * length, 1.0)
    ones = tl.full([16, BLOCK_M], 1.0, tl.float16)
    for i in tl.static_range(len(PIECES)):
        key = PIECES[i][0] + tl.arange(0, PIECES[i][1])
        part = p[i] * (share * 4096.0)[:, None]
        high = part.to(tl.float16)
        low = (part - high.to(tl.float32)).to(tl.float16)
        mean = tl.max(tl.dot(ones, low, tl.dot(ones, high)), 0) * (1.0 / 4096)  # all rows are alike
        tl.store(received + key, mean, mask=key < length)


@triton.jit
def _attend(
    q_tile, k_tiles, v_tiles, key_weight, length, BLOCK_M: tl.constexpr, PIECES: tl.constexpr, PRE: tl.constexpr,
    POST: tl.constexpr,
):  # fmt: skip
    """Return sum_j p_ij v_j [M, D]; sum_j p_ij [M], rounded and not; what p counts against [M]; p by pieces."""
    has_weights: tl.constexpr = key_weight is not None
    scores = ()
    weights = ()
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for i in tl.static_range(len(PIECES)):
        _, weight = load_weights(key_weight, None, PIECES[i][0], length, PIECES[i][1])
        product = dot_rows(q_tile, k_tiles[i])
        score, weight = mask_scores(
            product,
            weight,
            weight,
            0,
            PIECES[i][0],
            length,
            PRE,
            has_weights,
            False,
            BLOCK_M,
            PIECES[i][1],
            True,
        )
        scores += (score,)
        weights += (weight,)
        top = tl.maximum(top, tl.max(score, 1))
    shift = finite(top * POST, True)
    dtype: tl.constexpr = q_tile.dtype
    acc = tl.zeros(q_tile.shape, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mass = total
    all_p = ()
    for i in tl.static_range(len(PIECES)):
        p = exponentiate(scores[i], weights[i], shift, POST, has_weights)
        total += sum_as_used(p, dtype)
        mass += tl.sum(p, 1)  # left out by the compiler where nobody wants it
        acc = tl.dot(p.to(dtype), v_tiles[i], acc, input_precision="ieee")
        all_p += (p,)
    return acc, total, mass, shift, all_p


@triton.jit
def _report_prefix(
    q, k_tiles, key_weight, prefix, length, Q_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    PIECES: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Store the probabilities [N, P] of the prefix rows: for so few, vector products with the keys at hand."""
    lane = tl.arange(0, BLOCK_D)
    for row in tl.static_range(PREFIX_ROWS):
        q_row = tl.load(q + row * Q_ROW + lane, mask=(lane < D) & (row < length), other=0.0).to(tl.float32)
        scores = ()
        top = float("-inf")
        for i in tl.static_range(len(PIECES)):
            key = PIECES[i][0] + tl.arange(0, PIECES[i][1])
            score = tl.sum(k_tiles[i].to(tl.float32) * q_row[None, :], 1) * PRE
            _, weight = load_weights(key_weight, None, PIECES[i][0], length, PIECES[i][1])
            score = tl.where((key < length) & (weight > 0.0), score, float("-inf"))
            scores += (score,)
            top = tl.maximum(top, tl.max(score, 0))
        shift = finite(top * POST, True)
        total = 0.0
        masses = ()
        for i in tl.static_range(len(PIECES)):
            _, weight = load_weights(key_weight, None, PIECES[i][0], length, PIECES[i][1])
            masses += (tl.exp2(scores[i] * POST - shift) * weight,)
            total += tl.sum(masses[i], 0)
        is_live = (total > 0.0) & (row < length)  # the image may lack the row
        scale = is_live.to(tl.float32) / tl.where(is_live, total, 1.0)
        for i in tl.static_range(len(PIECES)):
            key = PIECES[i][0] + tl.arange(0, PIECES[i][1])
            tl.store(prefix + key * PREFIX_ROWS + row, masses[i] * scale, mask=key < length)


@triton.jit
def _zero_dead_rows(
    out, prefix, saved, received, stop, num_rows, H: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Zero the rows behind the last image; each program takes its share."""
    zero = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    row = tl.arange(0, BLOCK)
    for first in range(stop + tl.program_id(0) * BLOCK, num_rows, tl.num_programs(0) * BLOCK):
        for h in range(H):
            store_tile(out + h * D, zero, first, num_rows, H * D, D, BLOCK, BLOCK_D)
            place = tl.cast(h, tl.int64) * num_rows + first + row
            if saved is not None:
                tl.store(saved + place, tl.zeros([BLOCK], tl.float32), mask=first + row < num_rows)
            if received is not None:
                tl.store(received + place, tl.zeros([BLOCK], tl.float32), mask=first + row < num_rows)
            for p in tl.static_range(PREFIX_ROWS):
                pointer = prefix + place * PREFIX_ROWS + p
                tl.store(pointer, tl.zeros([BLOCK], tl.float32), mask=first + row < num_rows)
