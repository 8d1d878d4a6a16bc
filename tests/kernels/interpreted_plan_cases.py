"""The kernels of `plan`, `fit`, `split_by_turns` and `join` on a CPU, interpreted; bf16 is wrong there.

`test_plan.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch
from join_cases import LENGTHS as JOIN_LENGTHS
from join_cases import assert_joined, make_join_case
from plan_cases import LENGTHS, ORDERS, assert_fits, assert_plan, make_plan_case
from selection_cases import poison

from prunevit.kernels import fit as fit_door
from prunevit.kernels import join as join_door
from prunevit.kernels import plan as door
from prunevit.kernels.triton_turns import triton_split
from prunevit.kernels.turns import split_reference

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (door, fit_door, join_door):
        monkeypatch.setattr(each, "takes_triton", lambda rows: True)
    poison(monkeypatch)


@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_plan(lengths: list[int], kind: str) -> None:
    case = make_plan_case(lengths, kind, dead_rows=7)
    assert_plan(case, case.plan())


@pytest.mark.parametrize("kind", ["present", "random", "int8"])
def test_images_of_several_tiles(kind: str) -> None:
    case = make_plan_case([5, 300], kind)
    assert_plan(case, case.plan())


@pytest.mark.parametrize("kind", ["present", "tied"])
def test_keeps_all_within_a_loose_bound(kind: str) -> None:
    case = make_plan_case([9, 40], kind, prefix=2, dead_rows=300, bound=290)
    assert_plan(case, door.plan(case.source, None, case.order, **case.layout), keeps_all=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int16, torch.int32])
def test_orders_of_any_dtype(dtype: torch.dtype) -> None:
    case = make_plan_case([40, 3], "random", prefix=0)
    assert case.order is not None
    case.order = torch.stack([case.order, case.order], 1)[:, 0].to(dtype)
    assert_plan(case, case.plan())


@pytest.mark.parametrize("lengths", [*LENGTHS, [9] * 120], ids=str)
def test_fit(lengths: list[int]) -> None:
    assert_fits(make_plan_case(lengths, "random", dead_rows=7))


@pytest.mark.parametrize("lengths", [*LENGTHS, [5, 600]], ids=str)
def test_split_by_turns(lengths: list[int]) -> None:
    case = make_plan_case(lengths, "present", prefix=2, dead_rows=9)
    given = (case.source, case.layout["image_id"], case.layout["cu_seqlens"])
    for found, expected in zip(triton_split(*given), split_reference(*given), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("lengths", JOIN_LENGTHS, ids=str)
def test_join(lengths: list[int], dtype: torch.dtype) -> None:
    case = make_join_case(lengths, dtype, dead_rows=300)
    assert_joined(case, case.join())
    case.score = torch.stack([case.score, case.score], 2)[:, :, 0].contiguous()  # row by row
    assert_joined(case, case.join())
