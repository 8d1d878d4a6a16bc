"""Ragged attention as one Triton kernel over packed rows: online softmax, nothing padded. Gradients: `triton_backward`.

q, k and v are read where they lie, by strides; rows [T, H, D] are written. Without atomics: the same input gives
the same bits.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from prunevit.kernels.launch import Bound, Start, is_direct
from prunevit.kernels.tiles import LongTile, ShortTile, Tile, choose_received_tile, has_many_heads
from prunevit.kernels.triton_long import forward_kernel
from prunevit.kernels.triton_received import received_kernel
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
    received_tile: LongTile | None = None,
    saves: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Attend within each image; meaning and shapes as in `ragged_attention`, q packed if k and v are None.

    `tile` and, for `received_kernel`, `received_tile` are for the tuner: they replace those of the table. If it
    `saves`, the last result is what `triton_backward` takes, fp32 [1 or 2, H, T] (see `forward_kernel`).

    The probabilities are views of buffers in which the rows of a head lie together, as one program writes them.

    Cost: one launch; `return_received` takes a second one, which computes the scores again, unless the tile is a
        `ShortTile`.
    """
    prepared = prepare(
        q, k, v, cu_seqlens, max_seqlen, softmax_scale, key_weight, soft, exempt_self, softmax_eps, prefix_rows,
        return_received, tile, received_tile, saves,
    )  # fmt: skip
    return prepared(q.shape[0], q, k, v, cu_seqlens, key_weight, soft)


class _Plan(NamedTuple):
    """The kernels of a call, and how many programs they take."""

    forward: Bound
    resident: int = 0  # of `short_kernel`: how many programs at most
    query_tiles: int = 0  # of `forward_kernel`, for each head of each image; 0: it is `short_kernel`
    received: Bound | None = None
    key_tiles: int = 0  # of `received_kernel`


class PreparedAttention:
    """What calls have in common that differ in nothing but their number of rows, addresses and contents.

    It keeps what `Bound` compiled, or found compiled, for addresses that are multiples of 16, and starts it directly:
    `Bound` would look at each argument anew.
    """

    def __init__(
        self,
        plan: _Plan,
        num_images: int,
        num_heads: int,
        head_dim: int,
        prefix_rows: int,
        return_received: bool,
        planes: int,
        stats: int,
        is_bare: bool,
        device: int,
    ) -> None:
        """Prepare a call.

        Args:
            plan: The kernels.
            num_images: Images of the batch.
            num_heads: Heads.
            head_dim: Head size.
            prefix_rows: How many rows of an image report whom they attend to.
            return_received: Whether each row reports what attention it receives.
            planes: How many [H, T] are saved for the backward.
            stats: How many [H, T] are written for `received_kernel`.
            is_bare: Whether the kernel takes no tensors but packed rows, bounds and `out`.
            device: Index of the device.
        """
        self.plan, self.prefix_rows, self.device = plan, prefix_rows, device
        self.planes, self.stats = planes, stats
        self.num_images, self.num_heads, self.head_dim = num_images, num_heads, head_dim
        self.return_received = return_received
        self.out_stride = (num_heads * head_dim, head_dim, 1)
        self.segments = num_heads * (num_images + 1)  # of rows: the images and the dead rows
        self.is_short = plan.query_tiles == 0
        self.sizes: tuple[int, ...] = (num_images,) if self.is_short else (num_images, plan.query_tiles)
        self.programs = self.segments * plan.query_tiles
        if self.is_short:
            self.programs = min(num_images * num_heads, plan.resident)
        self.absent = (None,) * (6 if self.is_short else 7) if is_bare else None
        self.start: Start | None = None

    def __call__(
        self,
        num_rows: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        cu_seqlens: Tensor,
        key_weight: Tensor | None,
        soft: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return what `triton_attention` does. Eager calls pay for each line."""
        out = q.new_empty_strided((num_rows, self.num_heads, self.head_dim), self.out_stride)
        address, address_cu, address_out = q.data_ptr(), cu_seqlens.data_ptr(), out.data_ptr()
        low_bits = address | address_cu | address_out
        prefix = received = saved = row_stats = None
        others: tuple[Tensor | None, ...] | None = self.absent  # the tensors behind the integers
        addresses: Sequence[int | None] | None = self.absent
        if others is None or addresses is None:
            prefix, received, saved, row_stats = self._allocate(q, num_rows)
            others = (k, v, key_weight, prefix, soft, row_stats, saved)
            if self.is_short:
                others = (k, v, key_weight, prefix, saved, received)
            addresses = []
            for x in others:
                other = 0 if x is None else x.data_ptr()
                low_bits |= other
                addresses.append(other)
        is_usual = low_bits % 16 == 0 and num_rows < 2**31
        if is_usual and self.start is not None and is_direct(self.device):
            values = (address, address_cu, address_out, num_rows, *self.sizes, *addresses)
            self.start(self.programs, values)
        else:
            start = self.plan.forward(self.programs, q, cu_seqlens, out, num_rows, *self.sizes, *others)
            self.start = start if is_usual else self.start
        if self.plan.received is None:
            return out, prefix, received, saved
        sizes = (num_rows, self.num_images, self.plan.key_tiles)
        self.plan.received(
            self.segments * sizes[2], q, cu_seqlens, row_stats, received, *sizes, k, key_weight, soft
        )
        return out, prefix, received, saved

    def _allocate(self, q: Tensor, num_rows: int) -> tuple[Tensor | None, ...]:
        """Return what prefix rows report, what each row receives, what is saved, and what `received_kernel` takes."""
        prefix = received = None
        if self.prefix_rows:
            shape = (num_rows, self.prefix_rows, self.num_heads)
            prefix = _fp32(q, shape, (self.prefix_rows, 1, num_rows * self.prefix_rows))
        if self.return_received:
            received = _fp32(q, (num_rows, self.num_heads), (1, num_rows))
        return prefix, received, self._planes(q, self.planes, num_rows), self._planes(q, self.stats, num_rows)

    def _planes(self, q: Tensor, count: int, num_rows: int) -> Tensor | None:
        """Return room for so many [H, T], if any."""
        if not count:
            return None
        return _fp32(q, (count, self.num_heads, num_rows), (self.num_heads * num_rows, num_rows, 1))


def _fp32(q: Tensor, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    return q.new_empty_strided(shape, stride, dtype=torch.float32)


def prepare(
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
    received_tile: LongTile | None = None,
    saves: bool = False,
) -> PreparedAttention:
    """Decide all of a `triton_attention` that hangs neither on the number of rows nor on addresses and contents."""
    dtypes = (q.dtype, None if key_weight is None else key_weight.dtype, None if soft is None else soft.dtype)
    return _prepare(
        cu_seqlens.shape[0] - 1, max_seqlen, dtypes, q.stride(), None if k is None else k.stride(),
        None if v is None else v.stride(), q.shape[-2], q.shape[-1], softmax_scale, exempt_self, softmax_eps,
        prefix_rows, return_received, q.get_device(), tile, received_tile, saves,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _prepare(
    num_images: int,
    max_seqlen: int,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    q_stride: tuple[int, ...],
    k_stride: tuple[int, ...] | None,
    v_stride: tuple[int, ...] | None,
    num_heads: int,
    head_dim: int,
    softmax_scale: float,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
    device: int,
    tile: Tile | None,
    received_tile: LongTile | None,
    saves: bool,
) -> PreparedAttention:
    dtype, has_key_weight, has_soft = dtypes[0], dtypes[1] is not None, dtypes[2] is not None
    tile = tile or find_tile(
        max_seqlen, num_heads, head_dim, dtype, not (has_soft or softmax_eps), prefix_rows,
        has_many_heads(num_images, num_heads), device, return_received, has_key_weight,
    )  # fmt: skip
    plan = _plan(
        tile, received_tile or choose_received_tile(head_dim, dtype), max_seqlen, dtype,
        layout(q_stride, k_stride, v_stride), num_heads, head_dim, softmax_scale, exempt_self and has_soft,
        softmax_eps, prefix_rows, return_received, device,
    )  # fmt: skip
    floors = 1 if softmax_eps else 0
    planes, stats = (1 + floors if saves else 0), (2 + floors if plan.received else 0)
    is_bare = k_stride is None and not (has_key_weight or has_soft or prefix_rows or return_received or saves)
    return PreparedAttention(
        plan, num_images, num_heads, head_dim, prefix_rows, return_received, planes, stats, is_bare, device
    )


def _plan(
    tile: Tile,
    received_tile: LongTile,
    max_seqlen: int,
    dtype: torch.dtype,
    strides: dict[str, int],
    num_heads: int,
    head_dim: int,
    softmax_scale: float,
    exempt_self: bool,
    softmax_eps: float,
    prefix_rows: int,
    return_received: bool,
    device: int,
) -> _Plan:
    # See `triton_parts` about PRE and POST.
    scale = softmax_scale / math.log(2)
    folds = scale > 0
    constants: dict[str, Any] = {
        **strides,
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
        if return_received and len(set(tile.pieces)) > 1:  # triton 3.6 gets them wrong, see `tiles`
            raise ValueError(f"ShortTile: received attention takes pieces of one size, got {tile.pieces}")
        starts = [sum(tile.pieces[:i]) for i in range(len(tile.pieces))]
        constants |= {"PIECES": tuple(zip(starts, tile.pieces)), "STAGES": tile.num_stages}
        resident = tile.resident * _multiprocessors(device) if tile.resident else 2**31 - 1
        return _Plan(bind(short_kernel, **constants, **_cap(tile)), resident)
    most_keys = 64 if dtype == torch.float32 or head_dim > 128 else 256 if head_dim <= 64 else 128
    one_pass = max_seqlen <= most_keys
    block_k = max(triton.next_power_of_2(max_seqlen), 64) if one_pass else max(most_keys // 2, 64)
    prefix_tiles = triton.cdiv(prefix_rows, _BLOCK_P)
    constants |= {
        "BLOCK_N": tile.block_n,
        "EXEMPT_SELF": exempt_self,
        "EPS": softmax_eps,
        "PREFIX_TILES": prefix_tiles,
        "BLOCK_P": _BLOCK_P,
        "BLOCK_K": block_k,
        "ONE_PASS": one_pass,
        "TRIM": tile.trims,
        "num_stages": tile.num_stages,
    }
    forward, received = bind(forward_kernel, **constants, **_cap(tile)), None
    if return_received:
        constants |= {
            "BLOCK_M": received_tile.block_m,
            "BLOCK_N": received_tile.block_n,
            "TRIM": received_tile.trims,
            "num_warps": received_tile.num_warps,
            "num_stages": received_tile.num_stages,
        }
        received = bind(received_kernel, **constants, **_cap(received_tile))
    return _Plan(
        forward,
        query_tiles=prefix_tiles + triton.cdiv(max_seqlen, tile.block_m),
        received=received,
        key_tiles=triton.cdiv(max_seqlen, received_tile.block_n),
    )


def _cap(tile: Tile) -> dict[str, int]:
    return {"maxnreg": tile.registers} if tile.registers and torch.version.hip is None else {}


@functools.cache
def bind(kernel: Any, **constants: Any) -> Bound:
    """Bind a kernel to those of the constants that it takes; the same `Bound` for each `max_seqlen` of a tile."""
    taken = {*kernel.arg_names, "num_warps", "num_stages", "maxnreg"}
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


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1
