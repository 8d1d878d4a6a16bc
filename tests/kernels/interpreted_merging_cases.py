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
@pytest.mark.parametrize(("channels", "heads"), [(5, None), (64, 3), (130, None)])
def test_cosine_by_heads_and_channels(channels: int, heads: int | None, dtype: torch.dtype) -> None:
    case = make_merging_case([70, 9], channels, dtype, "some", heads)
    assert_nearest(case, case.nearest(cosine=True), cosine=True)


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


def test_merge_in_half_precision() -> None:
    case = make_merging_case([40, 130], bound=150)
    keep, into, weight = make_folds(case)
    folds = (keep, into, torch.stack([weight, weight], 1)[:, 0].half())
    assert_merged(case, folds, case.merge(*folds))
