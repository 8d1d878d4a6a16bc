"""The backward of the Triton kernels: interpreted here, and on a GPU against the differentiated fp64 oracle."""

from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from ragged_cases import (
    HEAD_DIMS,
    HEADS,
    LENGTHS,
    OPTIONS,
    Case,
    assert_gradients_within_budget,
    differentiate,
    make_case,
    poison_empty,
)
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from triton_without_gpu import run_interpreted

from prunevit.kernels.ragged_attention import ragged_attention

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def test_kernels_through_the_interpreter() -> None:
    run_interpreted("interpreted_backward_cases.py")


def triton(option: dict[str, Any]) -> Callable[[Case], list[Tensor]]:
    def attend(case: Case) -> list[Tensor]:
        results = ragged_attention(case.qkv, backend="triton", **case.arguments(option))
        return [x for x in results if x is not None]

    return attend


def covering_set() -> list[Any]:
    """Each head size meets each list of lengths in fp16, each option each dtype; options rotate over the rest."""
    option, num_heads = cycle(OPTIONS), cycle(HEADS)
    cases = [
        (lengths, head_dim, next(num_heads), torch.float16, next(option))
        for lengths in LENGTHS
        for head_dim in HEAD_DIMS
    ]
    cases += [([1, 197, 2, 64], 64, 3, dtype, name) for name in OPTIONS for dtype in DTYPES]
    cases += [
        ([63, 65, 128, 129], head_dim, 6, dtype, next(option))
        for head_dim in HEAD_DIMS
        for dtype in DTYPES[1:]
    ]
    cases += [
        ([longest, longest - 9, 1, 0, 5], 64, 3, torch.bfloat16, next(option))
        for longest in (16, 32, 48, 128)
    ]
    cases += [([577], 64, 2, torch.bfloat16, name) for name in ("plain", "everything")]
    cases += [([30, 90], 256, 2, dtype, "everything") for dtype in DTYPES]
    return [pytest.param(*case, id="-".join(str(x).removeprefix("torch.") for x in case)) for case in cases]


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "head_dim", "num_heads", "dtype", "name"), covering_set())
def test_error_budget(
    lengths: list[int], head_dim: int, num_heads: int, dtype: torch.dtype, name: str
) -> None:
    case = make_case(lengths, head_dim, num_heads, dtype, dead_rows=77, device="cuda")
    with pytest.MonkeyPatch.context() as patched:
        poison_empty(patched)
        found = differentiate(case, OPTIONS[name], triton(OPTIONS[name]))
    assert_gradients_within_budget(case, OPTIONS[name], found)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[197, 2, 65], [577, 30]], ids=str)
def test_same_input_same_bits(lengths: list[int]) -> None:
    option = OPTIONS["everything"]
    case = make_case(lengths, 64, 6, torch.bfloat16, dead_rows=3, device="cuda")
    first, second = (differentiate(case, option, triton(option)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first.values, second.values, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_never_synchronises(name: str) -> None:
    case = make_case([5, 0, 60], 64, 3, torch.float16, dead_rows=4, device="cuda")
    found = differentiate(case, OPTIONS[name], triton(OPTIONS[name]))  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(case, OPTIONS[name], triton(OPTIONS[name]), found.cotangents)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("wrapped", ["compiled", "checkpointed"])
def test_wrapped_calls_have_the_same_gradients(wrapped: str) -> None:
    option = OPTIONS["everything"]
    case = make_case([5, 197, 40], 64, 6, torch.bfloat16, device="cuda")

    def attend(qkv: Tensor, key_weight: Tensor, soft: Tensor) -> tuple[Tensor | None, ...]:
        arguments = case.arguments(option) | {"key_weight": key_weight, "soft": soft}
        return tuple(ragged_attention(qkv * 2, backend="triton", **arguments))

    def call(*inputs: Tensor) -> tuple[Tensor | None, ...]:
        if wrapped == "checkpointed":
            return checkpoint(attend, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return torch.compile(attend, fullgraph=True)(*inputs)

    def by_attributes(function: Callable[..., Any], copy: Case) -> list[Tensor]:
        return list(function(copy.qkv, copy.key_weight, copy.soft))

    plain, other = (differentiate(case, option, partial(by_attributes, each)) for each in (attend, call))
    torch.testing.assert_close(plain.values, other.values, rtol=0, atol=0)


@pytest.mark.gpu
def test_under_autocast_gradients_have_the_dtype_of_the_parameters() -> None:
    case = make_case([5, 197], 64, 3, torch.float32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        found = differentiate(case, {}, triton({}))
    assert [x.dtype for x in (*found.values, *found.cotangents)] == [torch.float32, torch.bfloat16]
    case.qkv = case.qkv.bfloat16()
    assert_gradients_within_budget(case, {}, found)


@pytest.mark.gpu
def test_graph_replay_reads_new_boundaries() -> None:
    case = make_case([30, 34], 64, 3, torch.float16, dead_rows=8, device="cuda")
    case.max_seqlen = 64
    option = OPTIONS["prefix_rows"]
    found = differentiate(case, option, triton(option))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiate(case, option, triton(option), found.cotangents)
    for lengths in ([30, 34], [10, 50], [0, 64], [7, 20]):
        case.lengths = lengths
        case.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        assert_gradients_within_budget(case, option, captured)
