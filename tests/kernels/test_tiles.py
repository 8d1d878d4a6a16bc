"""The table of tiles: whatever the longest image, there is a tile that holds it."""

import pytest
import torch

from prunevit.experiments.benchmark.tune_attention import candidates, pieces_of
from prunevit.kernels.tiles import (
    LongTile,
    ShortTile,
    Tile,
    choose_backward_tiles,
    choose_received_tile,
    choose_tile,
    dense_is_faster,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 16, 48, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("return_received", [False, True])
@pytest.mark.parametrize("prefix_rows", [0, 1, 5])
def test_every_length_has_a_tile(
    head_dim: int, dtype: torch.dtype, infers: bool, prefix_rows: int, return_received: bool
) -> None:
    for max_seqlen in range(1, 1100):
        many_heads = max_seqlen % 2 == 0
        given = (max_seqlen, head_dim, dtype, infers, prefix_rows, many_heads, return_received)
        tile = choose_tile(*given, weighted=max_seqlen % 3 == 0)
        sizes = [tile.block_m]
        if isinstance(tile, ShortTile):
            assert infers
            assert prefix_rows < 3
            assert tile.block_m >= max_seqlen
            assert sum(tile.pieces) >= max_seqlen
            assert sum(tile.pieces[:-1]) < max_seqlen  # no piece for nothing
            assert (tile.num_stages > 1) == (tile.resident > 0)
            sizes += tile.pieces
        else:
            sizes += [tile.block_n, tile.block_n // 4 if tile.trims else 16]
        assert all(size >= 16 and size & (size - 1) == 0 for size in sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 48, 64, 72, 128, 256])
@pytest.mark.parametrize("plain", [False, True])
def test_every_length_has_tiles_for_its_backward(head_dim: int, dtype: torch.dtype, plain: bool) -> None:
    for max_seqlen in range(1, 700):
        keys, queries = choose_backward_tiles(max_seqlen, head_dim, dtype, plain)
        if queries is None:
            assert keys.block_n >= max_seqlen  # it makes dq too, so it needs all keys of an image
        for tile in (keys, queries or keys):
            assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.block_m, tile.block_n))
            if dtype != torch.float32 and tile.block_n > 32:
                assert tile.num_stages > 1  # see there


def test_short_images_take_whole_heads_and_long_ones_do_not() -> None:
    def kind(max_seqlen: int, infers: bool) -> type:
        return type(choose_tile(max_seqlen, 64, torch.bfloat16, infers, 0, many_heads=False))

    assert [kind(50, True), kind(50, False), kind(197, True)] == [ShortTile, LongTile, LongTile]


def test_received_attention_takes_the_tiles_of_inference() -> None:
    def tile(max_seqlen: int, received: bool) -> Tile:
        return choose_tile(max_seqlen, 64, torch.bfloat16, True, 0, True, received)

    for max_seqlen in (1, 16, 50, 90, 128):
        short = tile(max_seqlen, True)
        assert isinstance(short, ShortTile)
        assert len(set(short.pieces)) == 1
    for max_seqlen in (129, 197, 577):
        assert tile(max_seqlen, True) == tile(max_seqlen, False)


def test_weights_leave_room_for_as_many_programs() -> None:
    def tile(max_seqlen: int, weighted: bool) -> Tile:
        return choose_tile(max_seqlen, 64, torch.bfloat16, True, 0, True, weighted=weighted)

    assert (tile(197, False).num_stages, tile(197, True).num_stages) == (3, 2)
    short = [tile(64, weighted) for weighted in (False, True)]
    assert [each.resident for each in short if isinstance(each, ShortTile)] == [4, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 64, 72, 128, 256])
def test_the_tile_of_received_attention_can_be_trimmed(head_dim: int, dtype: torch.dtype) -> None:
    tile = choose_received_tile(head_dim, dtype)
    assert min(tile.block_m, tile.block_n) // (4 if tile.trims else 1) >= 16


def test_dense_attention_is_left_to_torch_where_it_is_faster() -> None:
    half = torch.bfloat16
    assert dense_is_faster(197, 72, half)
    assert not dense_is_faster(197, 64, half)
    assert not dense_is_faster(50, 128, half)


@pytest.mark.parametrize(("length", "pieces"), [(1, (16,)), (39, (32, 16)), (64, (64,)), (98, (64, 32, 16))])
def test_pieces_cover_the_keys_with_little_to_spare(length: int, pieces: tuple[int, ...]) -> None:
    assert pieces_of(length) == pieces


@pytest.mark.parametrize("length", [1, 39, 100, 197, 1025])
def test_the_tuner_tries_tiles_that_hold_the_image(length: int) -> None:
    tiles = list(candidates(length, 64))
    assert len(tiles) == len(set(tiles)) > 1
    for tile in tiles:
        if isinstance(tile, ShortTile):
            assert min(tile.block_m, sum(tile.pieces)) >= length
        else:
            assert tile.block_n // 4 >= 16 or not tile.trims
