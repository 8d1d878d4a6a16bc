"""Tiles for GPUs that the table was not found on: timed at first use, and kept on disk."""

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from prunevit.kernels.tiles import LongTile, ShortTile, Tile, choose_tile

MEASURED = (9, 0)  # compute capability of the table in `tiles`
CALLS = 20
_BOUNDS = (16, 32, 48, 64, 80, 96, 112, 128, 256, 384, 640, 1088)
_KINDS: dict[str, type[Tile]] = {"ShortTile": ShortTile, "LongTile": LongTile}

log = logging.getLogger("prunevit")


def find_tile(
    max_seqlen: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    infers: bool,
    prefix_rows: int,
    many_heads: bool,
    device: int,
    return_received: bool = False,
    weighted: bool = False,
) -> Tile:
    """Return the table's tile on the GPU that it was found on, elsewhere the fastest of it and a few others.

    Only inference in half precision is tuned. What a graph is captured with comes from the table: nothing can be timed
    then.

    Args:
        max_seqlen: Bound of an image's rows.
        num_heads: Heads.
        head_dim: Head size.
        dtype: Of q, k and v.
        infers: As in `choose_tile`.
        prefix_rows: As in `choose_tile`.
        many_heads: As in `choose_tile`.
        device: Index of the CUDA device; negative: the interpreter.
        return_received: As in `choose_tile`.
        weighted: As in `choose_tile`.

    Cost:
        Off `MEASURED`, once for each kind of batch and GPU: some ten compilations and host synchronisations. The
        result is kept in `tiles.json` in the folder `PRUNEVIT_CACHE_DIR`, by default `~/.cache/prunevit`.
    """
    table = choose_tile(
        max_seqlen, head_dim, dtype, infers, prefix_rows, many_heads, return_received, weighted
    )
    if device < 0 or not infers or dtype == torch.float32 or max_seqlen > _BOUNDS[-1]:
        return table
    if torch.cuda.get_device_capability(device) == MEASURED or torch.cuda.is_current_stream_capturing():
        return table
    bound = next(each for each in _BOUNDS if max_seqlen <= each)
    images = max(1024 // num_heads, 1) if many_heads else 8
    kind = f"rows {bound}, heads {num_heads} x {head_dim}, {dtype}, prefix {prefix_rows}, images {images}"
    kind += ", received" if return_received else ""

    def microseconds(tile: Tile) -> float | None:
        return time_tile(
            tile, images, bound, num_heads, head_dim, dtype, prefix_rows, device, return_received
        )

    first = choose_tile(bound, head_dim, dtype, infers, prefix_rows, many_heads, return_received)
    tiles = list(dict.fromkeys([first, *alternatives(bound, head_dim, prefix_rows)]))
    return remembered(f"{torch.cuda.get_device_name(device)}: {kind}", lambda: fastest(tiles, microseconds))


def alternatives(length: int, head_dim: int, prefix_rows: int) -> Iterator[Tile]:
    """Yield some tiles worth a try for images of `length` rows."""
    if length <= 128 and head_dim <= 64 and prefix_rows <= 2:
        block_m = max(16, 1 << (length - 1).bit_length())
        for num_warps in {16: (1,), 32: (1, 2), 64: (2, 4), 128: (4, 8)}[block_m]:
            yield ShortTile(block_m, (block_m,), num_warps)
    for block_m, num_warps in ((64, 4), (128, 8)):
        for block_n in (32, 64):
            for num_stages in (2, 3):
                yield LongTile(block_m, block_n, num_warps, num_stages, trims=block_n >= 64)


def fastest(tiles: list[Tile], microseconds: Callable[[Tile], float | None]) -> Tile:
    """Return the tile of the shortest time; the first one if none can be timed.

    Args:
        tiles: The candidates.
        microseconds: A tile's time, or None where the GPU lacks the registers or the memory for it.
    """
    times = {tile: time for tile in tiles if (time := microseconds(tile)) is not None}
    return min(times, key=times.__getitem__) if times else tiles[0]


def remembered(key: str, find: Callable[[], Tile]) -> Tile:
    """Return the tile that the file holds under a key; if none does, find it and put it there.

    Args:
        key: What the tile is for.
        find: Finds it.
    """
    path = Path(os.environ.get("PRUNEVIT_CACHE_DIR") or Path.home() / ".cache" / "prunevit") / "tiles.json"
    if tile := _tile(_read(path).get(key)):
        return tile
    log.info("ragged_attention: timing tiles once for %s; the result is kept in %s", key, path)
    tile = find()
    try:
        _write(path, _read(path) | {key: [type(tile).__name__, tile._asdict()]})
    except OSError as error:
        log.warning(
            "ragged_attention: the tile for %s could not be kept in %s (%s)", key, path, error.strerror
        )
    return tile


def _tile(entry: Any) -> Tile | None:
    """The tile that an entry of the file describes; None if it does not, as one of another version."""
    try:
        name, values = entry
        if "pieces" in values:
            values = {**values, "pieces": tuple(values["pieces"])}
        return _KINDS[name](**values)
    except (TypeError, ValueError, KeyError):
        return None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(path: Path, content: dict[str, Any]) -> None:
    """Replace the file as a whole: another process may read it at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".tiles.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def time_tile(
    tile: Tile | None,
    images: int,
    length: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    prefix_rows: int,
    device: int,
    return_received: bool = False,
    received_tile: LongTile | None = None,
    weighted: bool = False,
) -> float | None:
    """Return the median time of a call in microseconds, on synthetic images of equal length.

    Args:
        tile: The tile; None: the one that a call would take.
        images: Images of the batch.
        length: Rows of each.
        num_heads: Heads.
        head_dim: Head size.
        dtype: Of q, k and v.
        prefix_rows: Rows that report whom they attend to.
        device: Index of the CUDA device.
        return_received: Whether each row reports what attention it receives.
        received_tile: The tile of `received_kernel`, which runs where `tile` is a `LongTile`; None: the table's.
        weighted: Whether keys have weights.

    Returns:
        The time, or None if the GPU lacks the registers or the memory for the tile.
    """
    from triton.runtime.errors import OutOfResources, PTXASError

    from prunevit.kernels.triton_forward import triton_attention

    qkv = torch.randn(images * length, 3, num_heads, head_dim, device=f"cuda:{device}", dtype=dtype)
    cu_seqlens = torch.arange(0, images * length + 1, length, device=qkv.device, dtype=torch.int32)

    key_weight = torch.ones(len(qkv), device=qkv.device) if weighted else None

    def call() -> object:
        return triton_attention(
            qkv, None, None, cu_seqlens, length, head_dim**-0.5, key_weight, None, False, 0.0, prefix_rows,
            return_received, tile, received_tile,
        )  # fmt: skip

    with torch.cuda.device(device):
        try:
            call()
        except (OutOfResources, PTXASError):
            return None
        return microseconds(call)


def microseconds(call: Callable[[], object], rounds: int = 15) -> float:
    """Return the median device time of a call that has run before.

    Args:
        call: Launches work on the current stream.
        rounds: How often `CALLS` calls, captured in a CUDA graph, are timed.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    times = []
    for _ in range(rounds):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(1000 * start.elapsed_time(stop) / CALLS)
    return statistics.median(times)
