"""The kernels of `gather` on a CPU, interpreted; bf16 is wrong there.

`test_gather.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before triton is imported.
"""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from gather_cases import (
    FOLDED,
    FOLDS,
    LISTS,
    assert_gathered,
    assert_members,
    draw_members,
    make_gather_case,
)
from hypothesis import example, given, settings, strategies
from selection_cases import poison

from prunevit import RaggedTokens, fuse, pack, threshold, top_k
from prunevit.kernels import gather as door
from prunevit.kernels.gather import gather
from prunevit.packing import plan

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "takes_triton", lambda values: True)
    poison(monkeypatch)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        ([20, 0, 33], torch.float16),
        ([20, 0, 33], torch.float32),
        ([197], torch.float16),
        ([300, 2], torch.float32),
    ],
    ids=str,
)
def test_gather(lengths: list[int], dtype: torch.dtype, fold: str) -> None:
    case = make_gather_case(lengths, 24, dtype, fold, spare=21, dead_rows=9)
    assert_gathered(gather(**case), case)


@pytest.mark.parametrize(
    "absent", [(), ("merge_weight", "size", "size_in", "key_weight_in"), ("key_weight",)]
)
def test_gather_lists_of_any_length(absent: tuple[str, ...]) -> None:
    case = make_gather_case([400, 3], 140, torch.float32, "long lists", spare=2, absent=absent)
    others = case["merge_into"][case["merge_into"] != torch.arange(403)]
    assert {0, *LISTS} <= set(others[others >= 0].bincount(minlength=403).tolist())
    assert_gathered(gather(**case), case)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    lengths=strategies.lists(strategies.sampled_from([0, 1, 2, 17, 128, 129, 300]), min_size=1, max_size=4),
    density=strategies.sampled_from([0.0, 0.1, 0.6, 1.0]),
    absent=strategies.sets(strategies.sampled_from(FOLDED)),
    seed=strategies.integers(0, 1000),
)
@example(lengths=[1100, 40], density=0.3, absent=set(), seed=0)  # several chunks
def test_lists_of_members(lengths: list[int], density: float, absent: set[str], seed: int) -> None:
    from prunevit.kernels.triton_members import list_members

    case = draw_members(lengths, density, seed) | dict.fromkeys(absent)
    assert_members(list_members(**case), case)


@pytest.mark.parametrize("fold", ["one heir", "selection"])
@pytest.mark.parametrize("channels", [1, 5, 130, 384])
def test_gather_channels(channels: int, fold: str) -> None:
    case = make_gather_case([12, 9], channels, torch.float16, fold, spare=3)
    assert_gathered(gather(**case), case)


@pytest.mark.parametrize("fold", ["none", "selection", "pairs"])
def test_gather_what_is_absent(fold: str) -> None:
    names = ("size", "key_weight", "soft", "merge_weight", "size_in", "key_weight_in")
    for here in product([True, False], repeat=len(names)):
        absent = tuple(name for name, there in zip(names, here) if not there)
        case = make_gather_case([12], 3, torch.float32, fold, spare=2, absent=absent)
        assert_gathered(gather(**case), case)


@pytest.mark.parametrize("fold", FOLDS)
def test_gather_as_for_many_images(fold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from prunevit.kernels import triton_gather

    tile = triton_gather.choose_tile(1000, 200_000, 140, fold != "none", fold == "selection")
    monkeypatch.setattr(triton_gather, "choose_tile", lambda *sizes: tile)
    case = make_gather_case([50, 1, 90], 140, torch.float32, fold, spare=70)
    assert_gathered(gather(**case), case)


@pytest.mark.parametrize("fold", ["none", "one heir", "selection"])
def test_gather_never_writes_beyond_capacity(fold: str) -> None:
    case = make_gather_case([20, 30], 8, torch.float32, fold, spare=-6)
    assert_gathered(gather(**case), case)


def test_pack_by_the_folds_of_a_selection() -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = RaggedTokens.from_padded(torch.rand(3, 31, 20, generator=generator), 1, (5, 6))
    for select in (partial(top_k, rate=0.7), partial(threshold, value=0.4), partial(top_k, rate=0.9)):
        score = torch.rand(len(tokens.x), generator=generator)
        mask = fuse(tokens, select(tokens, score), score)
        by_search, reweighted = replace(mask, selection=None), replace(mask, merge_weight=score)
        assert plan(tokens, mask).plain is not None
        assert plan(tokens, by_search).plain is None
        assert plan(tokens, reweighted).plain is None
        got, right = pack(tokens, mask), pack(tokens, by_search)
        for name in ("x", "size", "source", "image_id", "cu_seqlens"):
            torch.testing.assert_close(getattr(got, name), getattr(right, name), rtol=1e-6, atol=1e-6)
        tokens = got
    assert not tokens.uniform
