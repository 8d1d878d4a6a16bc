"""The kernels of `clusters` on a CPU, interpreted.

`test_plan.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from clusters_cases import LENGTHS, assert_medoids, assert_peaks, make_cluster_case
from selection_cases import poison

from prunevit.kernels import clusters as door

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "takes_triton", lambda values: True)
    poison(monkeypatch)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_clusters(lengths: list[int]) -> None:
    case = make_cluster_case(lengths)
    for turns in (0, 1, 3):
        assert_medoids(case, turns)
    for neighbours in (1, 5):
        assert_peaks(case, neighbours)


def test_many_channels_in_half_precision_within_a_loose_bound() -> None:
    case = make_cluster_case([70, 3], channels=70, prefix=2, bound=90, dtype=torch.float16)
    assert_medoids(case, 3)
    assert_peaks(case, 5)


def test_medoids_alike_stay_apart() -> None:
    assert_medoids(make_cluster_case([40, 25], channels=2), 2)
