"""`clusters`: the torch references against loops, the compiled operations, and the kernels on a GPU."""

from pathlib import Path

import pytest
import torch
from clusters_cases import LENGTHS, assert_medoids, assert_peaks, make_cluster_case
from triton_without_gpu import compile_all_for_hopper

from prunevit.kernels import clusters as door

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_references_against_loops(lengths: list[int]) -> None:
    for prefix, dtype in ((1, torch.float64), (2, torch.float64)):
        case = make_cluster_case(lengths, prefix=prefix, bound=max(lengths) + prefix, dtype=dtype)
        for turns in (0, 1, 3):
            assert_medoids(case, turns)
        for neighbours in (1, 5):
            assert_peaks(case, neighbours)


def test_operations_are_well_formed_and_compile_without_a_break() -> None:
    case = make_cluster_case([5, 0, 7])
    case.x = case.x.nan_to_num()
    bounds = case.layout["cu_seqlens"], case.layout["max_seqlen"]
    medoids = (case.x, case.weight, case.keep, case.source, *bounds, 2)
    peaks = (case.x, case.weight.nan_to_num(), case.source, *bounds, 3)
    nearest = (door.choose_peaks(*peaks)[1], case.keep, case.source, *bounds)
    for operation, arguments in (
        (door._medoids_op, medoids),
        (door._peaks_op, peaks),
        (door._nearest_op, nearest),
    ):
        torch.library.opcheck(operation, arguments)

    def all_three(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = door.medoids(x, case.weight, case.keep, case.source, **case.layout, turns=2)
        found, distance = door.density_peaks(x, peaks[1], case.source, **case.layout, neighbours=3)
        return chosen, found, door.nearest_kept(distance, chosen, case.source, **case.layout)

    compiled = torch.compile(all_three, fullgraph=True, backend="aot_eager")(case.x)
    for got, right in zip(compiled, all_three(case.x), strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        (197, torch.bfloat16),
        (197, torch.float32),
        (50, torch.float16),
        (577, torch.float32),
        (1025, torch.bfloat16),
    ],
)
def test_kernels_compile_for_hopper(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from prunevit.kernels import triton_clusters

    case = make_cluster_case([rows], channels=384, dtype=dtype)
    bounds = case.layout["cu_seqlens"], case.layout["max_seqlen"]

    def call() -> None:
        triton_clusters.triton_medoids(case.x, case.weight, case.keep, case.source, *bounds, 1)
        _, distance = triton_clusters.triton_peaks(case.x, case.weight, case.source, *bounds, 5)
        triton_clusters.triton_nearest(distance, case.keep, case.source, *bounds)

    kernels = compile_all_for_hopper(monkeypatch, triton_clusters, call, tmp_path)
    assert len(kernels) == 6
    for compiled in kernels:
        assert compiled.spilled == 0
        assert compiled.shared <= SHARED_MEMORY


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [5, 384, 1664])
def test_clusters_on_a_gpu(channels: int, dtype: torch.dtype) -> None:
    for lengths in (*LENGTHS, [130, 0, 90]):
        case = make_cluster_case(lengths, channels, dtype=dtype, bound=max(lengths) + 3, device="cuda")
        assert_medoids(case, 3)
        assert_peaks(case, 5)


@pytest.mark.gpu
def test_never_synchronises() -> None:
    case = make_cluster_case([5, 0, 60], device="cuda")
    for mode in ("default", "error"):  # the first round compiles, and loading a kernel may synchronise
        torch.cuda.set_sync_debug_mode(mode)
        try:
            door.medoids(case.x, case.weight, case.keep, case.source, **case.layout, turns=2)
            _, distance = door.density_peaks(case.x, case.weight, case.source, **case.layout, neighbours=5)
            door.nearest_kept(distance, case.keep, case.source, **case.layout)
        finally:
            torch.cuda.set_sync_debug_mode("default")
