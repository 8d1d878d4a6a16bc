"""`split_by_turns`: the torch reference against lists, and the kernel compiled and on a GPU."""

from pathlib import Path

import pytest
import torch
from plan_cases import LENGTHS, PlanCase, make_plan_case
from torch import Tensor
from triton_without_gpu import compile_for_hopper

from prunevit.kernels.turns import split_by_turns


def split(case: PlanCase) -> tuple[Tensor, Tensor]:
    return split_by_turns(case.source, case.layout["image_id"], case.layout["cu_seqlens"])


def assert_split(case: PlanCase, found: tuple[Tensor, Tensor]) -> None:
    """Hold what was found against the places of the rows in their images, counted."""
    source = case.source.tolist()
    place = [place for length in case.lengths for place in range(length)]
    place += [0] * (len(source) - len(place))
    for turn, flags in enumerate(found):
        assert flags.dtype == torch.bool
        expected = [patch >= 0 and at % 2 == turn for patch, at in zip(source, place, strict=True)]
        assert flags.tolist() == expected


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_reference_against_lists(lengths: list[int], prefix: int) -> None:
    case = make_plan_case(lengths, "present", prefix, dead_rows=7)
    assert_split(case, split(case))


def test_one_image_of_four_patches() -> None:
    case = make_plan_case([5], "present")
    even, odd = split(case)
    assert (even.nonzero().flatten().tolist(), odd.nonzero().flatten().tolist()) == ([2, 4], [1, 3])


def test_compiles_without_a_break() -> None:
    case = make_plan_case([5, 0, 7], "present", dead_rows=3)
    assert_split(case, torch.compile(split, fullgraph=True, backend="aot_eager")(case))


def test_kernel_compiles_for_hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prunevit.kernels import triton_turns

    case = make_plan_case([197], "present")
    given = (case.source, case.layout["image_id"], case.layout["cu_seqlens"])
    compiled = compile_for_hopper(
        monkeypatch, triton_turns, lambda: triton_turns.triton_split(*given), tmp_path
    )
    assert compiled.spilled == 0


@pytest.mark.gpu
@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_on_a_gpu(prefix: int) -> None:
    for lengths in (*LENGTHS, [197] * 9, [5, 9] * 700):
        case = make_plan_case(lengths, "present", prefix, dead_rows=150, device="cuda")
        assert_split(case, split(case))
