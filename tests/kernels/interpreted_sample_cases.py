"""The kernel of `sample` on a CPU, interpreted.

`test_plan.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from sample_cases import LENGTHS, SCORES, assert_sample, make_sample_case
from selection_cases import poison

from prunevit.kernels import sample as door

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "takes_triton", lambda score: True)
    poison(monkeypatch)


@pytest.mark.parametrize("kind", SCORES)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_sample(lengths: list[int], kind: str) -> None:
    case = make_sample_case(lengths, kind, 17)
    assert_sample(case, case.sample())


@pytest.mark.parametrize("kind", ["random", "tied"])
def test_points_of_each_image_among_some_patches(kind: str) -> None:
    case = make_sample_case([40, 3, 21], kind, 30, prefix=2, differ=True, some=True, bound=70)
    assert_sample(case, case.sample())


def test_half_precision_by_strides_and_one_point() -> None:
    case = make_sample_case([40, 3], "random", 1)
    case.score = torch.stack([case.score, case.score], 1)[:, 0].half()
    assert_sample(case, case.sample())
