"""Ragged attention as one Triton kernel over packed rows: online softmax, nothing padded. Gradients: `triton_backward`.

q, k and v are read where they lie, by strides; rows [T, H, D] are written. Without atomics: the same input gives
the same bits.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from prunevit.kernels.launch import Bound
from prunevit.kernels.tiles import ShortTile, Tile, has_many_heads
from prunevit.kernels.triton_long import forward_kernel, received_kernel
from prunevit.kernels.triton_short import short_kernel
from prunevit.kernels.tuning import find_tile

# TRITON_INTERPRET=1 at import makes `triton.jit` return an interpreted function, which runs on CPU tensors.
INTERPRETED = not isinstance(forward_kernel, triton.JITFunction)

_BLOCK_P = 16  # prefix rows that a program of `forward_kernel` reports


def triton_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    softmax_scale: float,
    key_weight: Tensor | None,
    soft: Tensor | None,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
    tile: Tile | None = None,
    saves: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Attend within each image; meaning and shapes as in `ragged_attention`, q packed if k and v are None.

    `tile` is for the tuner: it replaces the one of the table. If it `saves`, the last result is what
    `triton_backward` takes, fp32 [1 or 2, H, T] (see `forward_kernel`); else None.

    The probabilities are views of buffers in which the rows of a head lie together, as one program writes them.

    Cost: one launch; `return_received` takes a second one, which computes the scores again.
    """
    num_rows, num_heads, head_dim = q.shape[0], q.shape[-2], q.shape[-1]
    num_images = cu_seqlens.shape[0] - 1
    plan = _plan(
        max_seqlen, q.dtype, q.stride(), None if k is None else k.stride(), None if v is None else v.stride(),
        num_heads, head_dim, softmax_scale, key_weight is not None, soft is not None, exempt_self, softmax_eps,
        prefix_rows, return_received, has_many_heads(num_images, num_heads), q.get_device(), tile,
    )  # fmt: skip
    out = q.new_empty_strided((num_rows, num_heads, head_dim), (num_heads * head_dim, head_dim, 1))
    prefix = None
    if prefix_rows:
        prefix = _fp32(q, (num_rows, prefix_rows, num_heads), (prefix_rows, 1, num_rows * prefix_rows))
    saved = None
    if saves:
        planes = 2 if softmax_eps else 1
        saved = _fp32(q, (planes, num_heads, num_rows), (num_heads * num_rows, num_rows, 1))
    if plan.query_tiles == 0:
        programs = min(num_images * num_heads, plan.resident)
        plan.forward(programs, q, cu_seqlens, out, num_rows, num_images, k, v, key_weight, prefix, saved)
        return out, prefix, None, saved

    segments = num_heads * (num_images + 1)  # of rows: the images and the dead rows
    stats = None
    if plan.received is not None:
        stats = _fp32(q, (3, num_heads, num_rows), (num_heads * num_rows, num_rows, 1))
    sizes = (num_rows, num_images, plan.query_tiles)
    plan.forward(
        segments * plan.query_tiles, q, cu_seqlens, out, *sizes, k, v, key_weight, prefix, soft, stats, saved
    )
    if plan.received is None or stats is None:
        return out, prefix, None, saved
    received = _fp32(q, (num_rows, num_heads), (1, num_rows))
    sizes = (num_rows, num_images, plan.key_tiles)
    plan.received(segments * plan.key_tiles, q, cu_seqlens, stats, received, *sizes, k, key_weight, soft)
    return out, prefix, received, saved


def _fp32(q: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return q.new_empty_strided(shape, stride, dtype=torch.float32)


class _Plan(NamedTuple):
    """The kernels of a call, and how many programs they take."""

    forward: Bound
    resident: int = 0  # of `short_kernel`: how many programs at most
    query_tiles: int = 0  # of `forward_kernel`, for each head of each image; 0: it is `short_kernel`
    received: Bound | None = None
    key_tiles: int = 0  # of `received_kernel`


@functools.lru_cache(maxsize=4096)
def _plan(
    max_seqlen: int,
    dtype: torch.dtype,
    q_stride: tuple[int, ...],
    k_stride: tuple[int, ...] | None,
    v_stride: tuple[int, ...] | None,
    num_heads: int,
    head_dim: int,
    softmax_scale: float,
    has_key_weight: bool,
    has_soft: bool,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
    many_heads: bool,
    device: int,
    tile: Tile | None,
) -> _Plan:
    infers = not (has_soft or softmax_eps or return_received)
    tile = tile or find_tile(max_seqlen, num_heads, head_dim, dtype, infers, prefix_rows, many_heads, device)
    # See `triton_parts` about PRE and POST.
    scale = softmax_scale / math.log(2)
    folds = scale > 0
    constants: dict[str, Any] = {
        **layout(q_stride, k_stride, v_stride),
        **overlap(device),
        "H": num_heads,
        "D": head_dim,
        "BLOCK_D": max(triton.next_power_of_2(head_dim), 16),
        "BLOCK_M": tile.block_m,
        "PRE": 1.0 if folds else scale,
        "POST": scale if folds else 1.0,
        "PREFIX_ROWS": prefix_rows,
        "num_warps": tile.num_warps,
    }
    if isinstance(tile, ShortTile):
        starts = [sum(tile.pieces[:i]) for i in range(len(tile.pieces))]
        constants |= {"PIECES": tuple(zip(starts, tile.pieces)), "STAGES": tile.num_stages}
        resident = tile.resident * _multiprocessors(device) if tile.resident else 2**31 - 1
        return _Plan(bind(short_kernel, **constants), resident)
    most_keys = 64 if dtype == torch.float32 or head_dim > 128 else 256 if head_dim <= 64 else 128
    one_pass = max_seqlen <= most_keys
    block_k = max(triton.next_power_of_2(max_seqlen), 64) if one_pass else max(most_keys // 2, 64)
    prefix_tiles = triton.cdiv(prefix_rows, _BLOCK_P)
    constants |= {
        "BLOCK_N": tile.block_n,
        "EXEMPT_SELF": exempt_self and has_soft,
        "EPS": softmax_eps,
        "PREFIX_TILES": prefix_tiles,
        "BLOCK_P": _BLOCK_P,
        "BLOCK_K": block_k,
        "ONE_PASS": one_pass,
        "TRIM": tile.trims,
        "num_stages": tile.num_stages,
    }
    return _Plan(
        bind(forward_kernel, **constants),
        query_tiles=prefix_tiles + triton.cdiv(max_seqlen, tile.block_m),
        received=bind(received_kernel, **constants) if return_received else None,
        key_tiles=triton.cdiv(max_seqlen, tile.block_n),
    )


@functools.cache
def bind(kernel: Any, **constants: Any) -> Bound:
    """Bind a kernel to those of the constants that it takes; the same `Bound` for each `max_seqlen` of a tile."""
    taken = {*kernel.arg_names, "num_warps", "num_stages"}
    if "OVERLAP" in kernel.arg_names:
        taken.add("launch_pdl")
    return Bound(kernel, **{name: value for name, value in constants.items() if name in taken})


def layout(
    q_stride: tuple[int, ...], k_stride: tuple[int, ...] | None, v_stride: tuple[int, ...] | None
) -> dict[str, int]:
    """Return where q, k and v of a row and head lie; PART is the way from q to k to v in packed rows, else 0."""
    if k_stride is None or v_stride is None:
        row, part, head, _ = q_stride
        k_stride = v_stride = q_stride = (row, head)
    else:
        part = 0
    return {
        "PART": part,
        "Q_ROW": q_stride[0],
        "Q_HEAD": q_stride[1],
        "K_ROW": k_stride[0],
        "K_HEAD": k_stride[1],
        "V_ROW": v_stride[0],
        "V_HEAD": v_stride[1],
    }


@functools.cache
def overlap(device: int) -> dict[str, bool]:
    """Return the constants with which a kernel's start overlaps the end of the one before, where the GPU can."""
    overlaps = (
        device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1
