"""The kernels of `nearest` and `merge` on a CPU, interpreted; bf16 is wrong there.

`test_nearest.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from merging_cases import (
    FLAGS,
    LENGTHS,
    assert_merged,
    assert_nearest,
    make_folds,
    make_merging_case,
)
from selection_cases import poison

from prunevit.kernels import merge as merge_door
from prunevit.kernels import nearest as nearest_door

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for door in (nearest_door, merge_door):
        monkeypatch.setattr(door, "takes_triton", lambda values: True)
    poison(monkeypatch)


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_nearest(lengths: list[int], flags: str) -> None:
    case = make_merging_case(lengths, flags=flags)
    assert_nearest(case, case.nearest())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("channels", "heads"), [(5, None), (64, 3), (72, 2), (130, None)])
def test_cosine_by_heads_and_channels(channels: int, heads: int | None, dtype: torch.dtype) -> None:
    case = make_merging_case([70, 9], channels, dtype, "some", heads)
    assert_nearest(case, case.nearest(cosine=True), cosine=True)


def test_images_of_more_rows_than_are_listed_at_a_time() -> None:
    for heads in (None, 2):
        case = make_merging_case([3, 300], flags="some", heads=heads)
        assert_nearest(case, case.nearest())


def test_nearest_by_strides_within_a_loose_bound() -> None:
    case = make_merging_case([9, 40], 16, heads=2, dead_rows=300, bound=290)
    case.features = torch.stack([case.features, case.features + 1], 1)[:, 0]
    assert_nearest(case, case.nearest())
    case.features = case.features[:, 1]
    assert_nearest(case, case.nearest())
    case.features = case.features.t().contiguous().t()
    assert_nearest(case, case.nearest())


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_merge(lengths: list[int], normalise: bool) -> None:
    case = make_merging_case(lengths, dead_rows=150)
    folds = make_folds(case)
    merged = case.merge(*folds, normalise=normalise, eps=0.5)
    assert_merged(case, folds, merged, normalise, eps=0.5)


@pytest.mark.parametrize("leaving", [0, 260])
def test_merge_where_few_leave(leaving: int) -> None:
    """Nothing is added up where no patch leaves; one that leaves is found wherever it lies."""
    case = make_merging_case([300, 40], dead_rows=3)
    keep, into, weight = make_folds(case)
    keep[:] = True
    if leaving:
        keep[leaving], into[leaving] = False, 5
    folds = (keep, into, weight)
    assert_merged(case, folds, case.merge(*folds, eps=0.5), eps=0.5)


def test_merge_in_half_precision() -> None:
    case = make_merging_case([40, 130], bound=150)
    keep, into, weight = make_folds(case)
    folds = (keep, into, torch.stack([weight, weight], 1)[:, 0].half())
    assert_merged(case, folds, case.merge(*folds))
