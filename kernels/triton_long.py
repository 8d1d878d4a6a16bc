"""Ragged attention for images of any length: a program holds a tile of queries of one head and walks over the keys."""

# mypy: disable-error-code="no-untyped-def"

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
    locate,
    mask_scores,
    store_tile,
    sum_as_used,
)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def forward_kernel(
    q, cu_seqlens, out, num_rows, batch_size, num_tiles, k, v, key_weight, prefix, soft, row_stats, saved,
    PART: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr, PREFIX_TILES: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, ONE_PASS: tl.constexpr, TRIM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write `out` [T, H, D], and what is not None of `prefix` [H, T, P], `row_stats` and `saved`.

    `row_stats` [2 or 3, H, T] is what `received_kernel` takes: probability_ij =
    w_ij 2 ** (s_ij / log(2) - stats_0i) stats_1i + stats_2i; the shift, the scale and, if EPS > 0, the floor.
    `saved` [1 or 2, H, T] is what the backward takes, which has one number less to load and one rounding more:
    probability_ij = w_ij 2 ** (s_ij / log(2) - saved_0i) + saved_1i; the log-sum-exp and, if EPS > 0, the floor.
    The first PREFIX_TILES tiles of a head only report whom its prefix rows attend to.
    PART > 0: k and v are None, and lie PART and 2 PART elements behind q.
    """
    wait_for_previous(OVERLAP)
    tile, h, is_dead, start, length = locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    out += start * (H * D) + h * D
    column = tl.cast(h, tl.int64) * num_rows + start  # of the image in a plane [H, T]
    plane = tl.cast(num_rows, tl.int64) * H
    if PREFIX_ROWS > 0:
        prefix += column * PREFIX_ROWS
    if is_dead:
        _zero_dead_rows(
            out, prefix, saved, column, plane, tile * BLOCK_M, num_tiles * BLOCK_M, length, H * D, D, BLOCK_M, BLOCK_D,
            PREFIX_ROWS, EPS,
        )  # fmt: skip
        return

    if PART > 0:
        k = q + PART
        v = q + 2 * PART
    q += start * Q_ROW + h * Q_HEAD
    k += start * K_ROW + h * K_HEAD
    v += start * V_ROW + h * V_HEAD
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start
    if PREFIX_ROWS > 0:  # noqa: SIM102 (settled when compiling: it leaves out what follows)
        if tile < PREFIX_TILES:
            _report_prefix(
                q, k, key_weight, soft, prefix, tile * BLOCK_P, length, Q_ROW, K_ROW, D, BLOCK_D, PRE, POST,
                EXEMPT_SELF, EPS, PREFIX_ROWS, BLOCK_P, BLOCK_K, ONE_PASS,
            )  # fmt: skip
            return
    first = (tile - PREFIX_TILES) * BLOCK_M
    if first < length:
        if row_stats is not None:
            row_stats += column
        if saved is not None:
            saved += column
        _attend(
            q, k, v, key_weight, soft, out, row_stats, saved, plane, first, length, Q_ROW, K_ROW, V_ROW, H * D, D,
            BLOCK_D, BLOCK_M, BLOCK_N, PRE, POST, EXEMPT_SELF, EPS, TRIM,
        )  # fmt: skip


@triton.jit
def _zero_dead_rows(
    out, prefix, saved, column, plane, first, step, length, OUT_ROW: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, PREFIX_ROWS: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    zero = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    for dead in range(first, length, step):
        store_tile(out, zero, dead, length, OUT_ROW, D, BLOCK, BLOCK_D)
        row = dead + tl.arange(0, BLOCK)
        if saved is not None:
            for p in tl.static_range(2 if EPS > 0 else 1):
                tl.store(saved + p * plane + column + row, tl.zeros([BLOCK], tl.float32), mask=row < length)
        for p in tl.static_range(PREFIX_ROWS):
            pointer = prefix + tl.cast(row, tl.int64) * PREFIX_ROWS + p
            tl.store(pointer, tl.zeros([BLOCK], tl.float32), mask=row < length)


@triton.jit
def _attend(
    q, k, v, key_weight, soft, out, row_stats, saved, plane, first, length,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, TRIM: tl.constexpr,
):  # fmt: skip
    """Attend with one tile of queries.

    TRIM: only the last keys are masked, and take the smallest tile that holds them.
    """
    q_tile = load_tile(q, first, length, Q_ROW, D, BLOCK_M, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    v_sum = tl.zeros([BLOCK_D], tl.float32)
    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores
    top = shift  # ... that EPS counts against
    total = tl.zeros([BLOCK_M], tl.float32)
    mass = total  # as `total`, unrounded
    exact: tl.constexpr = row_stats is not None or saved is not None
    full = length // BLOCK_N * BLOCK_N if TRIM else 0
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    own, weight = load_weights(key_weight, soft, 0, length, BLOCK_N)
    for first_key in range(0, full if TRIM else length, BLOCK_N):
        # Asked for a tile ahead: keys and values come through shared memory in time, these do not.
        later_own, later_weight = load_weights(key_weight, soft, first_key + BLOCK_N, length, BLOCK_N)
        acc, v_sum, shift, top, total, mass = _step(
            q_tile, k, v, own, weight, has_weights, acc, v_sum, shift, top, total, mass, first, first_key, length,
            K_ROW, V_ROW, D, BLOCK_D, BLOCK_M, BLOCK_N, PRE, POST, EXEMPT_SELF, EPS, exact, not TRIM,
        )  # fmt: skip
        own, weight = later_own, later_weight
    if TRIM:
        rest = length - full
        if rest > BLOCK_N // 2:
            own, weight = load_weights(
                key_weight, soft, full, length, BLOCK_N
            )  # again: kept, they take registers
            acc, v_sum, shift, top, total, mass = _step(
                q_tile, k, v, own, weight, has_weights, acc, v_sum, shift, top, total, mass, first, full, length,
                K_ROW, V_ROW, D, BLOCK_D, BLOCK_M, BLOCK_N, PRE, POST, EXEMPT_SELF, EPS, exact, True,
            )  # fmt: skip
        elif rest > BLOCK_N // 4:
            acc, v_sum, shift, top, total, mass = _step(
                q_tile, k, v, *load_weights(key_weight, soft, full, length, BLOCK_N // 2), has_weights, acc, v_sum,
                shift, top, total, mass, first, full, length, K_ROW, V_ROW, D, BLOCK_D, BLOCK_M, BLOCK_N // 2, PRE,
                POST, EXEMPT_SELF, EPS, exact, True,
            )  # fmt: skip
        elif rest > 0:
            acc, v_sum, shift, top, total, mass = _step(
                q_tile, k, v, *load_weights(key_weight, soft, full, length, BLOCK_N // 4), has_weights, acc, v_sum,
                shift, top, total, mass, first, full, length, K_ROW, V_ROW, D, BLOCK_D, BLOCK_M, BLOCK_N // 4, PRE,
                POST, EXEMPT_SELF, EPS, exact, True,
            )  # fmt: skip

    scale, floor = _normaliser(shift, top, total, length, EPS, has_weights)
    acc *= scale[:, None]
    if EPS > 0:
        acc += floor[:, None] * v_sum[None, :]
    store_tile(out, acc, first, length, OUT_ROW, D, BLOCK_M, BLOCK_D)
    if exact:
        row = first + tl.arange(0, BLOCK_M)
        shift = finite(shift, has_weights)
        scale, floor = _normaliser(shift, top, mass, length, EPS, has_weights)
        if row_stats is not None:
            tl.store(row_stats + row, shift, mask=row < length)
            tl.store(row_stats + plane + row, scale, mask=row < length)
            if EPS > 0:
                tl.store(row_stats + 2 * plane + row, floor, mask=row < length)
        if saved is not None:
            tl.store(saved + row, shift - exact_log2(scale), mask=row < length)
            if EPS > 0:
                tl.store(saved + plane + row, floor, mask=row < length)


@triton.jit
def _normaliser(shift, top, total, length, EPS: tl.constexpr, HAS_WEIGHTS: tl.constexpr):
    """Return scale and floor: probability_ij = p_ij * scale_i + floor_i."""
    if EPS > 0:
        # EPS counts against exp(score - top), the sums so far are relative to shift.
        relative = tl.exp2(shift - finite(top, HAS_WEIGHTS))
        scale = relative / (total * relative + EPS)
        floor = EPS / tl.maximum(length, 1) / (total * relative + EPS)
    else:
        scale = 1.0 / tl.where(total > 0.0, total, 1.0)
        floor = tl.zeros(total.shape, tl.float32)
    return scale, floor


@triton.jit
def _step(
    q_tile, k, v, own, weight, HAS_WEIGHTS: tl.constexpr, acc, v_sum, shift, top, total, mass, first, first_key,
    length, K_ROW: tl.constexpr, V_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr,
    EXACT: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take one tile of keys into the running softmax."""
    k_tile = load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, MASKED)
    product = dot_rows(q_tile, k_tile)
    score, weights = mask_scores(
        product,
        own,
        weight,
        first,
        first_key,
        length,
        PRE,
        HAS_WEIGHTS,
        EXEMPT_SELF,
        BLOCK_M,
        BLOCK_N,
        MASKED,
    )
    new_shift = tl.maximum(shift, tl.max(score, 1) * POST)
    finite_shift = finite(new_shift, HAS_WEIGHTS)
    p = exponentiate(score, weights, finite_shift, POST, HAS_WEIGHTS)
    decay = tl.exp2(shift - finite_shift)
    total = total * decay + sum_as_used(p, q_tile.dtype)
    if EXACT:
        mass = mass * decay + tl.sum(p, 1)
    v_tile = load_tile(v, first_key, length, V_ROW, D, BLOCK_N, BLOCK_D, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
    if EPS > 0:
        top = tl.maximum(top, _top(product, own, first_key, length, PRE * POST, BLOCK_N))
        v_sum += tl.sum(v_tile.to(tl.float32), 0)
    return acc, v_sum, new_shift, top, total, mass


@triton.jit
def _top(product, own, first_key, length, SCALE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the maximum of log2(key_weight exp(s)) over a tile of keys, soft-masked ones included."""
    key = first_key + tl.arange(0, BLOCK_N)
    log_weight = tl.where(own > 0.0, tl.log2(tl.maximum(own, 1e-37)), float("-inf"))
    log_weight = tl.where(key < length, log_weight, float("-inf"))
    return tl.max(product * SCALE + log_weight[None, :], 1)


@triton.jit
def _report_prefix(
    q, k, key_weight, soft, prefix, first, length,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PRE: tl.constexpr,
    POST: tl.constexpr, EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Store the probabilities [N, P] of the prefix rows [first, first + BLOCK_P).

    ONE_PASS: BLOCK_K holds all keys; else their scores are computed twice.
    """
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    p_tile = load_tile(q, first, length, Q_ROW, D, BLOCK_P, BLOCK_D, True)
    shift = tl.full([BLOCK_P], float("-inf"), tl.float32)
    top = shift
    total = tl.zeros([BLOCK_P], tl.float32)
    p = tl.zeros([BLOCK_P, BLOCK_K], tl.float32)
    for first_key in range(0, 1 if ONE_PASS else length, BLOCK_K):
        score, weights, product, own = _scores(
            p_tile, k, key_weight, soft, first, first_key, length, K_ROW, D, BLOCK_D, PRE, EXEMPT_SELF, BLOCK_P,
            BLOCK_K,
        )  # fmt: skip
        new_shift = tl.maximum(shift, tl.max(score, 1) * POST)
        finite_shift = finite(new_shift, True)  # an empty image has no key
        p = exponentiate(score, weights, finite_shift, POST, has_weights)
        total = total * tl.exp2(shift - finite_shift) + tl.sum(p, 1)
        shift = new_shift
        if EPS > 0:
            top = tl.maximum(top, _top(product, own, first_key, length, PRE * POST, BLOCK_K))
    scale, floor = _normaliser(shift, top, total, length, EPS, True)
    shift = finite(shift, True)
    query = first + tl.arange(0, BLOCK_P)
    for first_key in range(0, length, BLOCK_K):
        if not ONE_PASS:
            score, weights, product, own = _scores(
                p_tile, k, key_weight, soft, first, first_key, length, K_ROW, D, BLOCK_D, PRE, EXEMPT_SELF, BLOCK_P,
                BLOCK_K,
            )  # fmt: skip
            p = exponentiate(score, weights, shift, POST, has_weights)
        probability = p * scale[:, None] + floor[:, None]
        probability = tl.where((query < length)[:, None], probability, 0.0)  # the image may lack the row
        key = first_key + tl.arange(0, BLOCK_K)
        mask = (query < PREFIX_ROWS)[:, None] & (key < length)[None, :]
        tl.store(prefix + key[None, :] * PREFIX_ROWS + query[:, None], probability, mask=mask)


@triton.jit
def _scores(
    q_tile, k, key_weight, soft, first, first_key, length, K_ROW: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, PRE: tl.constexpr, EXEMPT_SELF: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile of keys, their weights, and what `_top` takes."""
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    own, weight = load_weights(key_weight, soft, first_key, length, BLOCK_N)
    k_tile = load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, True)
    product = dot_rows(q_tile, k_tile)
    score, weights = mask_scores(
        product, own, weight, first, first_key, length, PRE, has_weights, EXEMPT_SELF, BLOCK_M, BLOCK_N, True
    )
    return score, weights, product, own
