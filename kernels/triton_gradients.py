"""The backward of ragged attention on a GPU: gradients by tiles of keys and by tiles of queries, without atomics.

With G_ij the gradient of probability_ij (d_out_i . v_j, and what the reported probabilities send back), e_ij = p_ij
without its weight and f_i the floor that `softmax_eps` gives::

    delta_i = sum_j probability_ij G_ij         g_ij = G_ij - delta_i
    ds_ij = p_ij g_ij + [j is the top key of i] f_i sum_j g_ij
    dq_i = scale sum_j ds_ij k_j                dk_j = scale sum_i ds_ij q_i
    dv_j = sum_i probability_ij d_out_i         d weight_ij = e_ij g_ij

The one key of an image of one row has probability 1 whatever its score: its gradients are exactly 0, not rounding.

Where a program's tile holds all keys of an image it has all it needs, and gives dq too: `keys_kernel` alone does it.
Otherwise `queries_kernel` goes first, and leaves delta (and the rest) behind.
"""

# mypy: disable-error-code="no-untyped-def, assignment"

import triton
import triton.language as tl

from prunevit.kernels.launch import wait_for_previous
from prunevit.kernels.triton_parts import dot_rows, load_tile, load_weights, locate, store_tile


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def keys_kernel(
    q, cu_seqlens, d_out, saved, dq, num_rows, batch_size, num_tiles, k, v, dk, dv, key_weight, soft, d_prefix,
    d_received, d_key_weight, d_soft, row_grads,
    PART: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, SCALE_LOG2: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr, WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write dk and dv, unless they are None `d_key_weight` and `d_soft` [H, T], and dq if a tile holds the WHOLE image.

    A program owns a tile of keys of one head and sums over the queries in order. PART > 0: q, k and v are packed,
    and so are the gradients, [T, 3, H, D].
    """
    wait_for_previous(OVERLAP)
    tile, h, is_dead, start, length = locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    first_key = tile * BLOCK_N
    column = tl.cast(h, tl.int64) * num_rows + start  # of the image in a plane [H, T]
    plane = tl.cast(num_rows, tl.int64) * H
    GRAD_ROW: tl.constexpr = 3 * H * D if PART > 0 else H * D
    if PART > 0:
        k = q + PART
        v = q + 2 * PART
        dk = dq + H * D
        dv = dq + 2 * H * D
    if d_key_weight is not None:
        d_key_weight += column
    if d_soft is not None:
        d_soft += column
    dq += start * GRAD_ROW + h * D
    dk += start * GRAD_ROW + h * D
    dv += start * GRAD_ROW + h * D
    if is_dead:
        for dead in range(first_key, length, num_tiles * BLOCK_N):
            zero = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
            if WHOLE:
                store_tile(dq, zero, dead, length, GRAD_ROW, D, BLOCK_N, BLOCK_D)
            store_tile(dk, zero, dead, length, GRAD_ROW, D, BLOCK_N, BLOCK_D)
            store_tile(dv, zero, dead, length, GRAD_ROW, D, BLOCK_N, BLOCK_D)
            _store_row(d_key_weight, tl.zeros([BLOCK_N], tl.float32), dead, length, BLOCK_N)
            _store_row(d_soft, tl.zeros([BLOCK_N], tl.float32), dead, length, BLOCK_N)
        return
    if first_key >= length:
        return

    scale = tl.where(length > 1, SCALE, 0.0)
    q += start * Q_ROW + h * Q_HEAD
    d_out += start * (H * D) + h * D
    saved += column
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start
    if d_prefix is not None:
        d_prefix += column * PREFIX_ROWS
    if d_received is not None:
        d_received += column
    k_tile = load_tile(k + start * K_ROW + h * K_HEAD, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, True)
    v_tile = load_tile(v + start * V_ROW + h * V_HEAD, first_key, length, V_ROW, D, BLOCK_N, BLOCK_D, True)
    own, weight = load_weights(key_weight, soft, first_key, length, BLOCK_N)
    key = first_key + tl.arange(0, BLOCK_N)
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    weighs: tl.constexpr = d_key_weight is not None or d_soft is not None
    dk_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_sum = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    d_weight = tl.zeros([BLOCK_N], tl.float32)
    d_own = tl.zeros([BLOCK_N], tl.float32)  # ... where a row attends to itself and is exempt
    d_log = tl.zeros([BLOCK_N], tl.float32)  # of log key_weight, as the top key
    for first in range(0, length, BLOCK_M):
        query = first + tl.arange(0, BLOCK_M)
        q_tile = load_tile(q, first, length, Q_ROW, D, BLOCK_M, BLOCK_D, True)
        o_tile = load_tile(d_out, first, length, H * D, D, BLOCK_M, BLOCK_D, True)
        lse = tl.load(saved + query, mask=query < length, other=float("inf"))
        product = dot_rows(k_tile, q_tile)
        e, p = _probabilities(
            product, lse[None, :], own[:, None], weight[:, None], key[:, None], query[None, :], length, SCALE_LOG2,
            has_weights, EXEMPT_SELF,
        )  # fmt: skip
        probability = p
        g = dot_rows(v_tile, o_tile)
        g = _add_reported(g, d_prefix, d_received, key[:, None], query[None, :], first, length, PREFIX_ROWS)
        if EPS > 0:
            floor = tl.load(saved + plane + query, mask=query < length, other=0.0)
            probability = tl.where((key < length)[:, None], p + floor[None, :], 0.0)
        if WHOLE:
            g -= tl.sum(probability * g, 0)[None, :]
        else:
            g -= tl.load(row_grads + column + query, mask=query < length, other=0.0)[None, :]
        dv_sum = tl.dot(probability.to(o_tile.dtype), o_tile, dv_sum, input_precision="ieee")
        ds = p * g
        if EPS > 0:
            if WHOLE:
                push = floor * tl.sum(tl.where((key < length)[:, None], g, 0.0), 0)
                top = tl.argmax(_against_top(product, own[:, None], key[:, None], length, SCALE_LOG2), 0)
            else:
                push = tl.load(row_grads + column + plane + query, mask=query < length, other=0.0)
                top = tl.load(row_grads + column + 2 * plane + query, mask=query < length, other=0.0).to(
                    tl.int32
                )
            pushed = tl.where(key[:, None] == top[None, :], push[None, :], 0.0)
            ds += pushed
            if weighs:
                d_log += tl.sum(pushed, 1)
        if weighs:
            eg = e * g
            if EXEMPT_SELF:
                is_self = key[:, None] == query[None, :]
                d_own += tl.sum(tl.where(is_self, eg, 0.0), 1)
                eg = tl.where(is_self, 0.0, eg)
            d_weight += tl.sum(eg, 1)
        ds = ds.to(q_tile.dtype)
        dk_sum = tl.dot(ds, q_tile, dk_sum, input_precision="ieee")
        if WHOLE:
            dq_tile = tl.trans(tl.dot(tl.trans(k_tile), ds, input_precision="ieee"))
            store_tile(dq, dq_tile * scale, first, length, GRAD_ROW, D, BLOCK_M, BLOCK_D)

    store_tile(dk, dk_sum * scale, first_key, length, GRAD_ROW, D, BLOCK_N, BLOCK_D)
    store_tile(dv, dv_sum, first_key, length, GRAD_ROW, D, BLOCK_N, BLOCK_D)
    if weighs:
        varies = tl.where(length > 1, 1.0, 0.0)
        _, softness = load_weights(None, soft, first_key, length, BLOCK_N)
        d_own += d_log / tl.where(own > 0.0, own, 1.0)
        _store_row(d_soft, varies * d_weight * own, first_key, length, BLOCK_N)
        _store_row(d_key_weight, varies * (d_weight * softness + d_own), first_key, length, BLOCK_N)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def queries_kernel(
    q, cu_seqlens, d_out, saved, dq, num_rows, batch_size, num_tiles, k, v, out, key_weight, soft, d_prefix,
    d_received, row_grads,
    PART: tl.constexpr, Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, SCALE_LOG2: tl.constexpr,
    EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write dq and `row_grads` [1 or 3, H, T]: delta and, if EPS > 0, what the top key gets, and which it is.

    A program owns a tile of queries of one head. delta_i is d_out_i . out_i where nothing else has a gradient.
    """
    wait_for_previous(OVERLAP)
    tile, h, is_dead, start, length = locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    first = tile * BLOCK_M
    column = tl.cast(h, tl.int64) * num_rows + start
    plane = tl.cast(num_rows, tl.int64) * H
    GRAD_ROW: tl.constexpr = 3 * H * D if PART > 0 else H * D
    dq += start * GRAD_ROW + h * D
    if is_dead:
        for dead in range(first, length, num_tiles * BLOCK_M):
            store_tile(
                dq, tl.zeros([BLOCK_M, BLOCK_D], tl.float32), dead, length, GRAD_ROW, D, BLOCK_M, BLOCK_D
            )
        return
    if first >= length:
        return

    if PART > 0:
        k = q + PART
        v = q + 2 * PART
    k += start * K_ROW + h * K_HEAD
    v += start * V_ROW + h * V_HEAD
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start
    if d_prefix is not None:
        d_prefix += column * PREFIX_ROWS
    if d_received is not None:
        d_received += column
    scale = tl.where(length > 1, SCALE, 0.0)
    query = first + tl.arange(0, BLOCK_M)
    alive = query < length
    q_tile = load_tile(q + start * Q_ROW + h * Q_HEAD, first, length, Q_ROW, D, BLOCK_M, BLOCK_D, True)
    row = start * (H * D) + h * D
    o_tile = load_tile(d_out + row, first, length, H * D, D, BLOCK_M, BLOCK_D, True)
    lse = tl.load(saved + column + query, mask=alive, other=float("inf"))
    floor = tl.zeros([BLOCK_M], tl.float32)
    if EPS > 0:
        floor = tl.load(saved + column + plane + query, mask=alive, other=0.0)

    out_tile = load_tile(out + row, first, length, H * D, D, BLOCK_M, BLOCK_D, True)
    delta = tl.sum(o_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    push = tl.zeros([BLOCK_M], tl.float32)
    top = tl.zeros([BLOCK_M], tl.int32)
    looking: tl.constexpr = 2147483647 if EPS > 0 or d_received is not None else PREFIX_ROWS
    if looking > 0:  # noqa: SIM102 (settled when compiling: it leaves out what follows)
        if first < looking:
            delta, push, top = _look_ahead(
                q_tile, o_tile, lse, floor, k, v, key_weight, soft, d_prefix, d_received, first, length, K_ROW, V_ROW,
                D, BLOCK_D, BLOCK_M, BLOCK_N, SCALE_LOG2, EXEMPT_SELF, EPS, PREFIX_ROWS,
            )  # fmt: skip
    tl.store(row_grads + column + query, delta, mask=alive)
    if EPS > 0:
        tl.store(row_grads + column + plane + query, push, mask=alive)
        tl.store(row_grads + column + 2 * plane + query, top.to(tl.float32), mask=alive)  # exact below 2**24

    dq_sum = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first_key in range(0, length, BLOCK_N):
        k_tile = load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, True)
        _, p, g, _ = _against(
            q_tile, o_tile, lse, k_tile, v, key_weight, soft, d_prefix, d_received, first, first_key, length, V_ROW, D,
            BLOCK_D, BLOCK_M, BLOCK_N, SCALE_LOG2, EXEMPT_SELF, PREFIX_ROWS,
        )  # fmt: skip
        ds = p * (g - delta[:, None])
        if EPS > 0:
            key = first_key + tl.arange(0, BLOCK_N)
            ds += tl.where(key[None, :] == top[:, None], push[:, None], 0.0)
        dq_sum = tl.dot(ds.to(k_tile.dtype), k_tile, dq_sum, input_precision="ieee")
    store_tile(dq, dq_sum * scale, first, length, GRAD_ROW, D, BLOCK_M, BLOCK_D)


@triton.jit
def _look_ahead(
    q_tile, o_tile, lse, floor, k, v, key_weight, soft, d_prefix, d_received, first, length, K_ROW: tl.constexpr,
    V_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE_LOG2: tl.constexpr, EXEMPT_SELF: tl.constexpr, EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Return delta, what the top key gets and which it is, from a pass over all keys."""
    delta = tl.zeros([BLOCK_M], tl.float32)
    g_sum = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    top = tl.zeros([BLOCK_M], tl.int32)
    for first_key in range(0, length, BLOCK_N):
        k_tile = load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D, True)
        product, p, g, own = _against(
            q_tile, o_tile, lse, k_tile, v, key_weight, soft, d_prefix, d_received, first, first_key, length, V_ROW, D,
            BLOCK_D, BLOCK_M, BLOCK_N, SCALE_LOG2, EXEMPT_SELF, PREFIX_ROWS,
        )  # fmt: skip
        delta += tl.sum(p * g, 1)
        if EPS > 0:
            key = first_key + tl.arange(0, BLOCK_N)
            g_sum += tl.sum(tl.where((key < length)[None, :], g, 0.0), 1)
            height = _against_top(product, own[None, :], key[None, :], length, SCALE_LOG2)
            higher = tl.max(height, 1) > peak
            top = tl.where(higher, first_key + tl.argmax(height, 1), top)
            peak = tl.maximum(peak, tl.max(height, 1))
    delta += floor * g_sum
    return delta, floor * (g_sum - length * delta), top


@triton.jit
def _against(
    q_tile, o_tile, lse, k_tile, v, key_weight, soft, d_prefix, d_received, first, first_key, length,
    V_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE_LOG2: tl.constexpr, EXEMPT_SELF: tl.constexpr, PREFIX_ROWS: tl.constexpr,
):  # fmt: skip
    """Return q.k, p and G of a tile of queries against a tile of keys, and the keys' own weights."""
    key = first_key + tl.arange(0, BLOCK_N)
    query = first + tl.arange(0, BLOCK_M)
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    own, weight = load_weights(key_weight, soft, first_key, length, BLOCK_N)
    product = dot_rows(q_tile, k_tile)
    _, p = _probabilities(
        product, lse[:, None], own[None, :], weight[None, :], key[None, :], query[:, None], length, SCALE_LOG2,
        has_weights, EXEMPT_SELF,
    )  # fmt: skip
    g = dot_rows(o_tile, load_tile(v, first_key, length, V_ROW, D, BLOCK_N, BLOCK_D, True))
    g = _add_reported(g, d_prefix, d_received, key[None, :], query[:, None], first, length, PREFIX_ROWS)
    return product, p, g, own


@triton.jit
def _probabilities(
    product, lse, own, weight, key, query, length, SCALE_LOG2: tl.constexpr, HAS_WEIGHTS: tl.constexpr,
    EXEMPT_SELF: tl.constexpr,
):  # fmt: skip
    """Return e and p, 0 beyond the image. The arguments are shaped as the tile is, queries by keys or keys by queries.

    Only a key of weight 0 can lie far above the sum; the limit keeps its e finite.
    """
    exponent = product * SCALE_LOG2 - lse
    if HAS_WEIGHTS:
        if EXEMPT_SELF:
            weight = tl.where(key == query, own, weight)
        e = tl.exp2(tl.minimum(exponent, 100.0))
        p = e * weight
    else:
        e = tl.where(key < length, tl.exp2(exponent), 0.0)
        p = e
    return e, p


@triton.jit
def _add_reported(g, d_prefix, d_received, key, query, first, length, PREFIX_ROWS: tl.constexpr):
    """Add to G what the reported probabilities send back."""
    if PREFIX_ROWS > 0:  # noqa: SIM102 (settled when compiling)
        if first < PREFIX_ROWS:
            mask = (query < PREFIX_ROWS) & (query < length) & (key < length)
            g += tl.load(d_prefix + key * PREFIX_ROWS + query, mask=mask, other=0.0)
    if d_received is not None:
        g += tl.load(d_received + key, mask=key < length, other=0.0) / length
    return g


@triton.jit
def _against_top(product, own, key, length, SCALE_LOG2: tl.constexpr):
    """Return log2(key_weight exp(s)), whose maximum EPS counts against."""
    log_weight = tl.where(own > 0.0, tl.log2(tl.maximum(own, 1e-37)), float("-inf"))
    return tl.where(key < length, product * SCALE_LOG2 + log_weight, float("-inf"))


@triton.jit
def _store_row(pointer, values, first, length, BLOCK: tl.constexpr):
    """Store values of the rows [first, first + BLOCK), if somebody wants them."""
    if pointer is not None:
        row = first + tl.arange(0, BLOCK)
        tl.store(pointer + row, values, mask=row < length)
