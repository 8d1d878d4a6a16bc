"""Tiles found at first use: the fastest is taken, kept on disk, and found there again."""

import json
from pathlib import Path

import pytest
import torch

from prunevit.kernels import tuning
from prunevit.kernels.tiles import LongTile, ShortTile, Tile, choose_tile
from prunevit.kernels.tuning import alternatives, fastest, find_tile, remembered

A, B, C = LongTile(64, 64, 4, 3), LongTile(128, 64, 8, 3), ShortTile(64, (32, 16), 4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRUNEVIT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_fastest_tile_that_runs_is_taken() -> None:
    times: dict[Tile, float | None] = {A: 3.0, B: None, C: 2.0}
    assert fastest([A, B, C], times.__getitem__) == C
    assert fastest([B, A], times.__getitem__) == A
    assert fastest([B], times.__getitem__) == B


def test_a_tile_is_found_once_and_kept(folder: Path) -> None:
    found: list[str] = []

    def find(tile: Tile) -> Tile:
        found.append(str(tile))
        return tile

    assert [remembered("a", lambda: find(C)), remembered("b", lambda: find(A))] == [C, A]
    assert [remembered("a", lambda: find(B)), remembered("b", lambda: find(B))] == [C, A]
    assert len(found) == 2
    assert [path.name for path in folder.iterdir()] == ["tiles.json"]


@pytest.mark.parametrize(
    "content", ["", "[1]", '{"a": 3}', '{"a": ["OtherTile", {}]}', '{"a": ["LongTile", {"x": 1}]}']
)
def test_a_file_of_another_version_is_no_obstacle(folder: Path, content: str) -> None:
    folder.mkdir()
    (folder / "tiles.json").write_text(content)
    assert remembered("a", lambda: B) == B
    assert json.loads((folder / "tiles.json").read_text())["a"] == ["LongTile", B._asdict()]


def test_a_folder_that_cannot_be_written_is_said_and_no_obstacle(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    with caplog.at_level("WARNING", logger="prunevit"):
        assert remembered("a", lambda: B) == B
    assert "could not be kept" in caplog.text


@pytest.mark.parametrize("length", [16, 48, 128, 256, 1088])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_alternatives_hold_the_image(length: int, head_dim: int) -> None:
    tiles = list(alternatives(length, head_dim, 1))
    assert 8 <= len(tiles) == len(set(tiles)) <= 10
    for tile in tiles:
        assert not isinstance(tile, ShortTile) or min(tile.block_m, sum(tile.pieces)) >= length


def look(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], capturing: bool = False) -> list[Tile]:
    """Pretend to have a GPU on which more warps are always better, and note what is timed."""
    timed: list[Tile] = []

    def time_tile(tile: Tile, *shape: object) -> float:
        timed.append(tile)
        return 10.0 - tile.num_warps

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(tuning, "time_tile", time_tile)
    return timed


def find(
    max_seqlen: int = 50, dtype: torch.dtype = torch.bfloat16, infers: bool = True, device: int = 0
) -> Tile:
    return find_tile(max_seqlen, 6, 64, dtype, infers, 1, True, device)


def table(max_seqlen: int = 50, dtype: torch.dtype = torch.bfloat16, infers: bool = True) -> Tile:
    return choose_tile(max_seqlen, 64, dtype, infers, 1, True)


def test_another_gpu_is_tuned_once_for_each_kind_of_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = look(monkeypatch, (8, 0))
    assert find(50).num_warps == 8
    assert table() in timed
    first = len(timed)
    assert find(60) == find(50)  # the same tile holds both
    assert len(timed) == first
    find(70)
    assert len(timed) > first
    first = len(timed)
    find_tile(50, 6, 64, torch.bfloat16, True, 1, True, 0, return_received=True)
    assert len(timed) > first


def test_the_table_serves_where_it_was_found_and_where_nothing_can_be_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert look(monkeypatch, (9, 0)) == []
    assert find() == table()
    timed = look(monkeypatch, (8, 0), capturing=True)
    assert find() == table()
    timed = look(monkeypatch, (8, 0))
    assert find(dtype=torch.float32) == table(dtype=torch.float32)
    assert find(infers=False) == table(infers=False)
    assert find(5000) == table(5000)
    assert find(device=-1) == table()
    assert timed == []


@pytest.mark.gpu
def test_a_gpu_finds_a_tile_that_computes_the_same(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from prunevit.kernels.triton_forward import triton_attention

    monkeypatch.setattr(tuning, "MEASURED", (0, 0))
    tile = find_tile(50, 3, 64, torch.float16, True, 1, False, 0)
    assert str(tile.block_m) in (folder / "tiles.json").read_text()
    qkv = torch.randn(100, 3, 3, 64, device="cuda", dtype=torch.float16)
    bounds = torch.tensor([0, 50, 100], device="cuda", dtype=torch.int32)
    arguments = (qkv, None, None, bounds, 50, 0.125, None, None, False, 0.0, 1, False)
    for got, expected in zip(triton_attention(*arguments, tile)[:2], triton_attention(*arguments)[:2]):
        assert got is not None
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)
