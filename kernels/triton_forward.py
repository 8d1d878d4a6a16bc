"""Ragged attention as one Triton kernel over packed rows: forward only, online softmax, nothing padded.

A program holds one tile of queries of one head of one image and walks over the keys of that image. It reads
q, k and v where they lie, by strides, and writes rows [T, H, D]. Scores are in units of log2; key weights
join them as log2(weight) in fp32: a weight of 0 is -inf there, which is harmless without a backward.
"""

# mypy: disable-error-code="no-untyped-def"

import contextlib
import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """How the work is cut: queries and keys that a program holds at a time, its warps, loads in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def choose_tile(max_seqlen: int, head_dim: int, dtype: torch.dtype) -> Tile:
    """Return the tile for images of at most `max_seqlen` rows: all keys at once while registers allow it.

    From 64 queries on a tile runs on wgmma (Hopper). fp32 runs on plain cores, where small tiles are best.
    """
    if max_seqlen <= 16:
        return Tile(16, 16, 1, 1)
    if dtype == torch.float32:
        return Tile(32, 32, 8, 2) if head_dim <= 128 else Tile(16, 16, 4, 2)
    if max_seqlen <= 32:
        return Tile(32, 32, 2, 1)
    if head_dim > 128:
        return Tile(64, 32, 8, 2)
    if max_seqlen <= 64:
        return Tile(64, 64, 4, 1)
    if max_seqlen <= 128:
        return Tile(64, 128, 4, 1)
    if head_dim > 64:
        return Tile(128, 64, 8, 2)
    return Tile(64, 64, 4, 2) if max_seqlen <= 256 else Tile(128, 64, 8, 3)


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    key_weight: Tensor | None,
    soft: Tensor | None,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attend within each image; meaning and shapes as in `ragged_attention`.

    Without atomics: the same input gives the same bits. The probabilities are views of buffers in which the
    rows of a head lie together, as one program writes them.

    Cost: one launch; `return_received` takes a second one, which computes the scores again.
    """
    num_rows, num_heads, head_dim = q.shape
    batch_size = len(cu_seqlens) - 1
    tile = choose_tile(max_seqlen, head_dim, q.dtype)
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    prefix = _fp32(num_heads, num_rows, prefix_rows, device=q.device) if prefix_rows else None
    received = _fp32(num_heads, num_rows, device=q.device) if return_received else None
    row_stats = _fp32(3, num_heads, num_rows, device=q.device) if return_received else None

    sizes = {"num_rows": num_rows, "batch_size": batch_size}
    scores = {
        "Q_ROW": q.stride(0),
        "Q_HEAD": q.stride(1),
        "K_ROW": k.stride(0),
        "K_HEAD": k.stride(1),
        "H": num_heads,
        "D": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "SCALE": softmax_scale / math.log(2),
        "EXEMPT_SELF": exempt_self and soft is not None,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    segments = num_heads * (batch_size + 1)  # of rows: the images and the dead rows
    query_tiles = triton.cdiv(max(max_seqlen, prefix_rows), tile.block_m)
    key_tiles = triton.cdiv(max_seqlen, tile.block_n)
    weights = (key_weight, soft, cu_seqlens)
    with torch.cuda.device(q.device) if q.is_cuda else contextlib.nullcontext():
        forward_kernel[(segments * query_tiles,)](
            q, k, v, *weights, out, prefix, row_stats, **sizes, num_tiles=query_tiles, **scores,
            V_ROW=v.stride(0), V_HEAD=v.stride(1), EPS=softmax_eps, ONE_PASS=max_seqlen <= tile.block_n,
            PREFIX_ROWS=prefix_rows, BLOCK_P=min(max(triton.next_power_of_2(prefix_rows), 16), tile.block_m),
        )  # fmt: skip
        if return_received:
            received_kernel[(segments * key_tiles,)](
                q, k, *weights, row_stats, received, **sizes, num_tiles=key_tiles, **scores
            )
    return (
        out,
        None if prefix is None else prefix.permute(1, 2, 0),
        None if received is None else received.T,
    )


def _fp32(*shape: int, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=device)


@triton.jit
def _load_tile(
    rows, first, length, ROW: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Load rows [first, first + BLOCK) of an image, with zeros beyond its length and beyond D."""
    row = tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK_D)
    mask = (first + row < length)[:, None]
    if D < BLOCK_D:
        mask = mask & (lane < D)[None, :]
    pointer = rows + tl.cast(first, tl.int64) * ROW
    return tl.load(pointer + row[:, None] * ROW + lane[None, :], mask=mask, other=0.0)


@triton.jit
def _log2(weight):
    return tl.where(weight > 0.0, tl.log2(tl.maximum(weight, 1e-37)), float("-inf"))


@triton.jit
def _scores(
    q_tile, k_tile, key_weight, soft, first_query, first_key, length,
    SCALE: tl.constexpr, EXEMPT_SELF: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return log2(w_ij exp(s_ij)) of a tile, and the same without `soft`, which the maximum for EPS needs."""
    key = first_key + tl.arange(0, BLOCK_N)
    score = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * SCALE
    if key_weight is not None:
        score += _log2(tl.load(key_weight + key, mask=key < length, other=0.0).to(tl.float32))[None, :]
    score = tl.where((key < length)[None, :], score, float("-inf"))
    weighted = score
    if soft is not None:
        log_soft = _log2(tl.load(soft + key, mask=key < length, other=0.0).to(tl.float32))[None, :]
        if EXEMPT_SELF:
            query = first_query + tl.arange(0, BLOCK_M)
            log_soft = tl.where(query[:, None] == key[None, :], 0.0, log_soft)
        weighted += log_soft
    return weighted, score


@triton.jit
def _locate(cu_seqlens, num_rows, batch_size, num_tiles, H: tl.constexpr):
    """Return (tile, head, is_dead, start, length) of a program; the tiles of one head are neighbours.

    The rows beyond the last image form one more segment, which comes first: zeroing it is never the tail.
    """
    program = tl.program_id(0)
    image = batch_size - program // (num_tiles * H)
    is_dead = image == batch_size
    start = tl.load(cu_seqlens + image)
    stop = tl.load(cu_seqlens + image + 1, mask=image < batch_size, other=num_rows)
    return program % num_tiles, program // num_tiles % H, is_dead, start.to(tl.int64), stop - start


@triton.jit
def _head(values, SIZE: tl.constexpr):
    """Return the first SIZE of a tile's values."""
    groups = tl.reshape(values, [values.shape[0] // SIZE, SIZE])
    is_first = tl.arange(0, values.shape[0] // SIZE) == 0
    return tl.sum(tl.where(is_first[:, None], groups, 0.0), 0)


@triton.jit
def _store_prefix(
    prefix, q, k, key_weight, soft, shift, scale, floor, first, length,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr, SCALE: tl.constexpr, EXEMPT_SELF: tl.constexpr, PREFIX_ROWS: tl.constexpr,
    ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Store the probabilities [N, P] of the prefix rows from `first` on, their scores computed again."""
    query = first + tl.arange(0, BLOCK_P)
    q_tile = _load_tile(q, first, length, Q_ROW, D, BLOCK_P, BLOCK_D)
    for first_key in range(0, BLOCK_N if ONE_PASS else length, BLOCK_N):
        k_tile = _load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D)
        weighted, _ = _scores(
            q_tile, k_tile, key_weight, soft, first, first_key, length, SCALE, EXEMPT_SELF, BLOCK_P, BLOCK_N
        )
        probability = tl.exp2(weighted - shift[:, None]) * scale[:, None] + floor[:, None]
        probability = tl.where((query < length)[:, None], probability, 0.0)  # the image may lack the row
        key = first_key + tl.arange(0, BLOCK_N)
        mask = (query < PREFIX_ROWS)[:, None] & (key < length)[None, :]
        tl.store(prefix + key[None, :] * PREFIX_ROWS + query[:, None], probability, mask=mask)


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def forward_kernel(
    q, k, v, key_weight, soft, cu_seqlens, out, prefix, row_stats, num_rows, batch_size, num_tiles,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    V_ROW: tl.constexpr, V_HEAD: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALE: tl.constexpr, EXEMPT_SELF: tl.constexpr,
    EPS: tl.constexpr, PREFIX_ROWS: tl.constexpr, BLOCK_P: tl.constexpr, ONE_PASS: tl.constexpr,
):  # fmt: skip
    """Write `out` [T, H, D], and `prefix` [H, T, P] and `row_stats` [3, H, T] unless they are None.

    probability_ij = 2 ** (score_ij - shift_i) * scale_i + floor_i; the three planes of `row_stats` are shift,
    scale and floor.
    """
    tile, head, is_dead, start, length = _locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    first = tile * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)
    out_tile = out + start * (H * D) + head * D + lane[None, :]
    column = tl.cast(head, tl.int64) * num_rows + start  # of the image in a plane [H, T] of probabilities
    plane = tl.cast(num_rows, tl.int64) * H
    if is_dead:
        for dead in range(first, length, num_tiles * BLOCK_M):
            zero = tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty)
            below = dead + row < length
            out_rows = out_tile + tl.cast(dead, tl.int64) * (H * D) + row[:, None] * (H * D)
            tl.store(out_rows, zero, mask=below[:, None] & (lane < D)[None, :])
            for prefix_row in tl.static_range(PREFIX_ROWS):
                pointer = prefix + (column + dead + row) * PREFIX_ROWS + prefix_row
                tl.store(pointer, tl.zeros([BLOCK_M], tl.float32), mask=below)
        return
    if (length == 0) | (first >= tl.maximum(length, PREFIX_ROWS)):
        return

    q += start * Q_ROW + head * Q_HEAD
    k += start * K_ROW + head * K_HEAD
    v += start * V_ROW + head * V_HEAD
    has_weights: tl.constexpr = key_weight is not None or soft is not None
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start

    q_tile = _load_tile(q, first, length, Q_ROW, D, BLOCK_M, BLOCK_D)
    shift = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the weighted scores
    top = shift  # ... of the scores without `soft`
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    v_sum = tl.zeros([BLOCK_D], tl.float32)
    for first_key in range(0, BLOCK_N if ONE_PASS else length, BLOCK_N):
        k_tile = _load_tile(k, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D)
        weighted, score = _scores(
            q_tile, k_tile, key_weight, soft, first, first_key, length, SCALE, EXEMPT_SELF, BLOCK_M, BLOCK_N
        )
        new_max = tl.maximum(shift, tl.max(weighted, 1))
        finite_max = new_max
        if has_weights:
            finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(weighted - finite_max[:, None])
        decay = tl.exp2(shift - finite_max)
        total = total * decay + tl.sum(p, 1)
        v_tile = _load_tile(v, first_key, length, V_ROW, D, BLOCK_N, BLOCK_D)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * decay[:, None], input_precision="ieee")
        shift = new_max
        if EPS > 0:
            top = tl.maximum(top, tl.max(score, 1))
            v_sum += tl.sum(v_tile.to(tl.float32), 0)

    floor = tl.zeros([BLOCK_M], tl.float32)
    if EPS > 0:
        # EPS counts against exp(score - top), the sums so far are relative to shift.
        finite_top = tl.where(top == float("-inf"), 0.0, top)
        relative = tl.exp2(shift - finite_top)
        scale = relative / (total * relative + EPS)
        floor = EPS / length / (total * relative + EPS)
    else:
        scale = 1.0 / tl.where(total > 0.0, total, 1.0)
    if has_weights:
        shift = tl.where(shift == float("-inf"), 0.0, shift)

    acc *= scale[:, None]
    if EPS > 0:
        acc += floor[:, None] * v_sum[None, :]
    out_rows = out_tile + tl.cast(first, tl.int64) * (H * D) + row[:, None] * (H * D)
    alive = first + row < length
    tl.store(out_rows, acc.to(out.dtype.element_ty), mask=alive[:, None] & (lane < D)[None, :])

    if row_stats is not None:
        stats = row_stats + column + first + row
        tl.store(stats, shift, mask=alive)
        tl.store(stats + plane, scale, mask=alive)
        tl.store(stats + 2 * plane, floor, mask=alive)

    if PREFIX_ROWS > 0:  # noqa: SIM102 (settled when compiling: without prefix rows `prefix` is None)
        if first < PREFIX_ROWS:
            _store_prefix(
                prefix + column * PREFIX_ROWS, q, k, key_weight, soft,
                _head(shift, BLOCK_P), _head(scale, BLOCK_P), _head(floor, BLOCK_P), first, length,
                Q_ROW, K_ROW, D, BLOCK_D, BLOCK_P, BLOCK_N, SCALE, EXEMPT_SELF, PREFIX_ROWS, ONE_PASS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "batch_size", "num_tiles"])
def received_kernel(
    q, k, key_weight, soft, cu_seqlens, row_stats, received, num_rows, batch_size, num_tiles,
    Q_ROW: tl.constexpr, Q_HEAD: tl.constexpr, K_ROW: tl.constexpr, K_HEAD: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr, EXEMPT_SELF: tl.constexpr,
):  # fmt: skip
    """Write `received` [H, T], the mean over an image's queries of the probability on each key.

    A program owns a tile of keys and sums over the queries in order, using what `forward_kernel` left in
    `row_stats`.
    """
    tile, head, is_dead, start, length = _locate(cu_seqlens, num_rows, batch_size, num_tiles, H)
    column = tl.cast(head, tl.int64) * num_rows + start
    plane = tl.cast(num_rows, tl.int64) * H
    first_key = tile * BLOCK_N
    key = tl.arange(0, BLOCK_N)
    if is_dead:
        for dead in range(first_key, length, num_tiles * BLOCK_N):
            pointer = received + column + dead + key
            tl.store(pointer, tl.zeros([BLOCK_N], tl.float32), mask=dead + key < length)
        return
    if first_key >= length:
        return

    q += start * Q_ROW + head * Q_HEAD
    k_tile = _load_tile(k + start * K_ROW + head * K_HEAD, first_key, length, K_ROW, D, BLOCK_N, BLOCK_D)
    if key_weight is not None:
        key_weight += start
    if soft is not None:
        soft += start
    row = tl.arange(0, BLOCK_M)
    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, length, BLOCK_M):
        q_tile = _load_tile(q, first, length, Q_ROW, D, BLOCK_M, BLOCK_D)
        weighted, _ = _scores(
            q_tile, k_tile, key_weight, soft, first, first_key, length, SCALE, EXEMPT_SELF, BLOCK_M, BLOCK_N
        )
        stats = row_stats + column + first + row
        alive = first + row < length
        shift = tl.load(stats, mask=alive, other=0.0)
        scale = tl.load(stats + plane, mask=alive, other=0.0)
        floor = tl.load(stats + 2 * plane, mask=alive, other=0.0)
        mass += tl.exp2(weighted - shift[:, None]) * scale[:, None] + floor[:, None]
    mean = tl.sum(mass, 0) / length
    tl.store(received + column + first_key + key, mean, mask=first_key + key < length)


# TRITON_INTERPRET=1 at import makes `triton.jit` return an interpreted function, which runs on CPU tensors.
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)
