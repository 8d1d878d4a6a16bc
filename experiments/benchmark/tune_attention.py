"""Times the tiles that the attention kernels could take, and prints those to put into `kernels/tiles.py`.

    python -m prunevit.experiments.benchmark.tune_attention --lengths 48 64 128 197 577 --images 1 64 256

needs a CUDA device. A tile is ranked by the geometric mean, over the batch sizes, of its time against the best
one; a time is the median of replays of a CUDA graph of 20 calls on synthetic images of equal length. All tiles are
compiled first, by as many processes as there are cores.
"""

import argparse
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prunevit.kernels.tiles import LongTile, ShortTile, Tile, choose_tile, has_many_heads
from prunevit.kernels.tuning import microseconds, time_tile


class Setting(NamedTuple):
    """What is tuned for."""

    num_heads: int
    head_dim: int
    dtype: str
    prefix_rows: int


def candidates(length: int, head_dim: int) -> Iterator[Tile]:
    """Yield the tiles worth a try for images of `length` rows."""
    if length <= 128:
        block_m = max(16, 1 << (length - 1).bit_length())
        for num_warps in {16: (1,), 32: (1, 2), 64: (4,), 128: (4, 8)}[block_m]:
            for pieces in {pieces_of(length), (block_m,)}:
                yield ShortTile(block_m, pieces, num_warps)
                for resident in (2, 3, 4):
                    yield ShortTile(block_m, pieces, num_warps, 2, resident)
    if length > 64 or head_dim > 64:
        for block_m, num_warps in ((64, 4), (128, 8), (128, 4)):
            for block_n in (32, 64, 128):
                for num_stages in (2, 3, 4):
                    yield LongTile(block_m, block_n, num_warps, num_stages, trims=block_n >= 64)


def pieces_of(length: int) -> tuple[int, ...]:
    """Return the powers of 2, from 16 on, that add up to `length` rounded up to 16."""
    rounded = -(-length // 16) * 16
    return tuple(1 << bit for bit in range(rounded.bit_length() - 1, 3, -1) if rounded >> bit & 1)


def of_tile(tile: Tile, setting: Setting, images: int, length: int) -> float | None:
    """Return the time of a tile in microseconds, None if the GPU lacks the registers or the memory for it."""
    dtype = getattr(torch, setting.dtype)
    return time_tile(
        tile, images, length, setting.num_heads, setting.head_dim, dtype, setting.prefix_rows, device=0
    )


def dense(setting: Setting, images: int, length: int) -> Callable[[], Tensor]:
    """Return a call of torch's own attention on a dense batch, the rival where nothing is pruned."""
    shape = (3, images, setting.num_heads, length, setting.head_dim)
    q, k, v = torch.randn(shape, device="cuda", dtype=getattr(torch, setting.dtype))
    return lambda: F.scaled_dot_product_attention(q, k, v)


def compiles(tile: Tile, setting: Setting, length: int) -> bool:
    """Compile a tile into triton's cache; False if the GPU lacks the registers or the memory for it."""
    return of_tile(tile, setting, 1, length) is not None


def rank(
    length: int, tiles: list[Tile], setting: Setting, batches: list[int]
) -> list[tuple[float, Tile, list[float]]]:
    """Return (how many times slower than the best, tile, time for each batch size), best first."""
    timed = [[of_tile(tile, setting, images, length) or math.inf for images in batches] for tile in tiles]
    best = [min(column) for column in zip(*timed)]
    slower = [math.prod(a / b for a, b in zip(row, best)) ** (1 / len(best)) for row in timed]
    return sorted(zip(slower, tiles, timed), key=lambda entry: entry[0])


def main() -> None:
    """Parse the command line and print, for each length, the best tiles beside the table's and dense attention."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[16, 32, 48, 64, 80, 96, 112, 128, 197, 577, 1025]
    )
    parser.add_argument("--images", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["float16", "bfloat16"])
    parser.add_argument("--prefix-rows", type=int, default=0)
    parser.add_argument("--top", type=int, default=5, help="tiles shown for each length")
    options = parser.parse_args()
    setting = Setting(options.heads, options.head_dim, options.dtype, options.prefix_rows)

    tried = [(tile, length) for length in options.lengths for tile in candidates(length, options.head_dim)]
    workers = max(1, (os.cpu_count() or 1) - 2)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        arguments = zip(*((tile, setting, length) for tile, length in tried))
        usable = [case for case, fits in zip(tried, pool.map(compiles, *arguments)) if fits]

    for length in options.lengths:
        table = choose_tile(
            length,
            options.head_dim,
            getattr(torch, options.dtype),
            infers=True,
            prefix_rows=options.prefix_rows,
            many_heads=has_many_heads(max(options.images), options.heads),
        )
        tiles = list(dict.fromkeys([table, *(tile for tile, n in usable if n == length)]))
        ranking = rank(length, tiles, setting, options.images)
        rivals = [dense(setting, images, length) for images in options.images]
        rival = [microseconds(call) for call in rivals if call() is not None]
        print(f"{length} rows, images {options.images}; dense {_row(rival)} us", flush=True)
        shown = [*ranking[: options.top], *(entry for entry in ranking[options.top :] if entry[1] == table)]
        for slower, tile, times in shown:
            print(f"  {slower:.3f}x {_row(times)} us {tile}{' (table)' if tile == table else ''}", flush=True)


def _row(times: list[float]) -> str:
    return " / ".join(f"{time:.1f}" for time in times)


if __name__ == "__main__":
    main()
