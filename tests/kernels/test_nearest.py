"""`nearest` and `merge`: the torch references against loops, the compiled operations, and the kernels on a GPU."""

import re
from pathlib import Path

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
from triton_without_gpu import compile_all_for_hopper, compile_for_hopper, run_interpreted

from prunevit.kernels import merge as merge_door
from prunevit.kernels import nearest as nearest_door

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_kernels_through_the_interpreter() -> None:
    run_interpreted("interpreted_merging_cases.py")


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_reference_against_a_loop(lengths: list[int], flags: str) -> None:
    for cosine in (False, True):
        case = make_merging_case(lengths, flags=flags, dtype=torch.float64)
        assert_nearest(case, case.nearest(cosine), cosine)


@pytest.mark.parametrize("num_rows", [0, 2])
def test_without_an_image_the_gradient_is_zero_and_not_missing(num_rows: int) -> None:
    features = torch.full((num_rows, 3), torch.nan, requires_grad=True)
    nobody = torch.zeros(num_rows, dtype=torch.bool)
    partner, value = nearest_door.nearest(
        features,
        nobody,
        nobody,
        image_id=nobody.int(),
        cu_seqlens=torch.zeros(1, dtype=torch.int32),
        max_seqlen=5,
    )
    (gradient,) = torch.autograd.grad(value.sum(), features)
    assert gradient.eq(0).all()
    assert partner.eq(-1).all()
    assert value.isneginf().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_mean_over_heads(dtype: torch.dtype) -> None:
    case = make_merging_case([70, 9], 64, dtype, "some", heads=3, bound=80)
    assert_nearest(case, case.nearest(cosine=True), cosine=True)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_merge_reference_against_a_loop(lengths: list[int], normalise: bool) -> None:
    case = make_merging_case(lengths)
    keep, into, weight = make_folds(case)
    folds = (keep, into, weight.double())
    assert_merged(case, folds, case.merge(*folds, normalise=normalise, eps=0.5), normalise, eps=0.5)


def test_no_rows_and_no_images() -> None:
    for lengths, dead_rows in (([0], 3), ([0, 0], 0)):
        case = make_merging_case(lengths, dead_rows=dead_rows)
        assert_nearest(case, case.nearest())
        assert_merged(case, make_folds(case), case.merge(*make_folds(case)))


def test_gradients() -> None:
    case = make_merging_case([9, 4], 3, torch.float64, "some", heads=2)
    features = case.features.requires_grad_()

    def value(features: torch.Tensor) -> torch.Tensor:
        found = nearest_door.nearest(features, case.queries, case.keys, cosine=True, **case.layout)[1]
        return found[found.isfinite()]

    assert torch.autograd.gradcheck(value, features)
    keep, into, weight = make_folds(case)
    weight = weight.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda weight: case.merge(keep, into, weight).weight, weight)


def test_operations_are_well_formed_and_compile_without_a_break() -> None:
    for dtype, heads in ((torch.float16, 2), (torch.float64, None)):
        case = make_merging_case([5, 0, 7], 4, dtype, "some", heads)
        layout = tuple(case.layout.values())
        given = (case.features, case.queries, case.keys, *layout, True)
        torch.library.opcheck(nearest_door._nearest_op, given)
        keep, into, weight = make_folds(case)
        torch.library.opcheck(
            merge_door._merge_op, (keep, into, weight.to(dtype), case.source, *layout, True, 0.5)
        )
    case = make_merging_case([5, 0, 7], flags="some")
    assert_nearest(case, torch.compile(case.nearest, fullgraph=True, backend="aot_eager")())
    folds = make_folds(case)
    assert_merged(case, folds, torch.compile(case.merge, fullgraph=True, backend="aot_eager")(*folds))


@pytest.mark.parametrize(
    ("channels", "heads", "dtype", "cosine", "rows"),
    [
        (64, 6, torch.bfloat16, True, 197),
        (64, 6, torch.bfloat16, True, 577),
        (64, 12, torch.float32, True, 197),
        (80, 16, torch.float16, True, 197),
        (5, None, torch.float16, True, 197),
        (384, None, torch.bfloat16, True, 197),
        (384, None, torch.bfloat16, False, 197),
        (1664, None, torch.float32, True, 197),
        (64, None, torch.float32, False, 197),
    ],
)
def test_nearest_kernel_compiles_for_hopper(
    channels: int,
    heads: int | None,
    dtype: torch.dtype,
    cosine: bool,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from prunevit.kernels import triton_nearest

    case = make_merging_case([rows], channels, dtype, heads=heads)
    given = (case.features, case.queries, case.keys, case.layout["cu_seqlens"], rows, cosine)
    kernels = compile_all_for_hopper(
        monkeypatch, triton_nearest, lambda: triton_nearest.triton_nearest(*given), tmp_path
    )
    # Few programs read a row of a short image: each takes the mean over the heads itself.
    assert len(kernels) == (1 if heads is None or (rows == 197 and channels == 64) else 2)
    for compiled in kernels:
        assert compiled.spilled == 0
    reads_heads = len(kernels) == 1 and heads is not None and dtype != torch.float32
    assert (
        kernels[-1].shared <= (113 if reads_heads else 64) * 1024
    )  # two programs at a time, or at least three
    assert "wgmma.mma_async" in kernels[-1].ptx
    # A product of fp32 takes three of tf32.
    operand = {torch.float32: "tf32", torch.float16: "f16", torch.bfloat16: "bf16"}[
        kernels_dtype(dtype, heads)
    ]
    assert f".f32.{operand}.{operand}" in kernels[-1].ptx


def kernels_dtype(dtype: torch.dtype, heads: int | None) -> torch.dtype:
    return dtype if heads is None else torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_kernel_compiles_for_hopper(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_merge

    case = make_merging_case([197])
    keep, into, weight = make_folds(case)
    given = (keep, into, weight.to(dtype), case.source, case.layout["cu_seqlens"], 197, True, 0.0)
    compiled = compile_for_hopper(
        monkeypatch, triton_merge, lambda: triton_merge.triton_merge(*given), tmp_path
    )
    assert compiled.spilled == 0
    assert not re.search(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "heads"), [(5, None), (64, None), (384, None), (1664, None), (64, 6), (64, 3), (80, 16)]
)
def test_nearest_on_a_gpu(channels: int, heads: int | None, dtype: torch.dtype, flags: str) -> None:
    for lengths in (*LENGTHS, [197] * 2, [130, 577, 2]):
        for cosine in (False, True):
            case = make_merging_case(lengths, channels, dtype, flags, heads, dead_rows=150, device="cuda")
            assert_nearest(case, case.nearest(cosine), cosine)


@pytest.mark.gpu
def test_nearest_in_long_images_and_large_batches_on_a_gpu() -> None:
    for lengths in ([1025, 3], [5, 9] * 300):
        case = make_merging_case(lengths, 64, torch.bfloat16, "some", 6, bound=1030, device="cuda")
        assert_nearest(case, case.nearest(cosine=True), cosine=True)


@pytest.mark.gpu
def test_nearest_of_views_of_packed_rows_on_a_gpu() -> None:
    case = make_merging_case([197, 50], 64, torch.bfloat16, heads=18, device="cuda")
    case.features = case.features[:, 6:12]
    assert_nearest(case, case.nearest(cosine=True), cosine=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalise", [True, False])
def test_merge_on_a_gpu(normalise: bool, dtype: torch.dtype) -> None:
    for lengths in (*LENGTHS, [197] * 3, [1025, 0, 577], [5, 9] * 300):
        case = make_merging_case(lengths, dead_rows=150, device="cuda")
        keep, into, weight = make_folds(case)
        for stays in (keep, keep | True):  # where none leaves nothing is added up
            folds = (stays, into, weight.to(dtype))
            assert_merged(case, folds, case.merge(*folds, normalise=normalise, eps=0.5), normalise, eps=0.5)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_merging_case([5, 0, 60], 64, torch.bfloat16, heads=3, device="cuda")
    folds = make_folds(case)
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            case.nearest(cosine=True)
            case.merge(*folds)
        finally:
            torch.cuda.set_sync_debug_mode("default")
