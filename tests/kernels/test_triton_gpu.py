"""The Triton kernels on a GPU against the fp64 oracle, within the error budget.

A compilation takes about a second, so the product of all axes is covered and not enumerated: each head size
meets each list of lengths in fp16, each option meets each dtype, and the options rotate over the rest.
"""

import contextlib
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from ragged_cases import HEAD_DIMS, HEADS, LENGTHS, OPTIONS, assert_within_budget, make_case, poison_empty

from prunevit.kernels import backends
from prunevit.kernels.ragged_attention import ragged_attention

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@contextlib.contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def covering_set() -> list[Any]:
    option, num_heads = cycle(OPTIONS), cycle(HEADS)
    cases = [
        (lengths, head_dim, next(num_heads), torch.float16, next(option))
        for lengths in LENGTHS
        for head_dim in HEAD_DIMS
    ]
    cases += [
        (lengths, 64, 3, dtype, name)
        for name in OPTIONS
        for dtype in DTYPES
        for lengths in ([1, 197, 2, 64], [577])
        if dtype != torch.float32 or lengths != [577]
    ]
    cases += [
        ([63, 65, 128, 129], head_dim, 6, dtype, next(option))
        for head_dim in HEAD_DIMS
        for dtype in DTYPES[1:]
    ]
    cases += [([40] * 3, 64, 6, torch.bfloat16, "everything"), ([30, 9], 256, 2, torch.float16, "everything")]
    cases += [([100, 3], 128, 2, dtype, "everything") for dtype in DTYPES]
    cases += [
        ([longest, longest - 9, 1, 0, 5], 64, 3, dtype, name)
        for longest in range(16, 129, 16)
        for dtype, name in (
            (torch.float16, "plain"),
            (torch.float16, "prefix_rows"),
            (torch.bfloat16, "key_weight"),
            (torch.bfloat16, "received"),
        )
    ]
    return [pytest.param(*case, id="-".join(str(x).removeprefix("torch.") for x in case)) for case in cases]


@pytest.mark.parametrize(("lengths", "head_dim", "num_heads", "dtype", "name"), covering_set())
def test_error_budget(
    lengths: list[int],
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = make_case(lengths, head_dim, num_heads, dtype, dead_rows=77, device="cuda")
    poison_empty(monkeypatch)
    results = ragged_attention(case.qkv, backend="triton", **case.arguments(OPTIONS[name]))
    assert_within_budget(case, OPTIONS[name], results)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("longest", [16, 32, 64, 96, 128, 197, 577])
def test_weighted_keys_and_two_kinds_of_reports(
    longest: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_empty(monkeypatch)
    case = make_case([longest, longest - 9, 1, 0, 5], 64, 3, dtype, dead_rows=77, device="cuda")
    for prefix_rows in (0, 2):
        option = {"key_weight": True, "prefix_rows": prefix_rows, "return_received": True}
        assert_within_budget(
            case, option, ragged_attention(case.qkv, backend="triton", **case.arguments(option))
        )


def test_without_dead_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case([197, 50], 64, 6, torch.float16, device="cuda")
    poison_empty(monkeypatch)
    option = OPTIONS["everything"]
    assert_within_budget(case, option, ragged_attention(case.qkv, backend="triton", **case.arguments(option)))


def test_bound_kernel_takes_other_batches_and_other_memory() -> None:
    """One kernel, bound by a batch of one, then given more images, addresses that 16 does not divide, a stream."""
    option = OPTIONS["prefix_rows"]
    for lengths in ([60], [64] * 16, [1], [50, 64] * 40):
        case = make_case(lengths, 64, 3, torch.float16, device="cuda")
        results = ragged_attention(case.qkv, backend="triton", **case.arguments(option) | {"max_seqlen": 64})
        assert_within_budget(case, option, results)
        shifted = torch.empty(case.qkv.numel() + 1, dtype=case.qkv.dtype, device="cuda")[1:]
        shifted = shifted.view_as(case.qkv).copy_(case.qkv)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            again = ragged_attention(shifted, backend="triton", **case.arguments(option) | {"max_seqlen": 64})
        torch.cuda.current_stream().wait_stream(stream)
        assert_within_budget(case, option, again)


def test_same_input_same_bits() -> None:
    case = make_case([197, 2, 65], 64, 6, torch.bfloat16, dead_rows=3, device="cuda")
    arguments = case.arguments(OPTIONS["everything"])
    first = ragged_attention(case.qkv, backend="triton", **arguments)
    second = ragged_attention(case.qkv, backend="triton", **arguments)
    for x, y in zip(first, second, strict=True):
        assert x is not None
        assert y is not None
        assert torch.equal(x, y)


def test_rows_beyond_two_to_the_31_elements() -> None:
    length, num_images, num_heads, head_dim = 256, 4000, 12, 64
    qkv = torch.randn(num_images * length, 3, num_heads, head_dim, dtype=torch.float16, device="cuda")
    assert qkv.numel() > 2**31
    cu_seqlens = torch.arange(0, len(qkv) + 1, length, dtype=torch.int32, device="cuda")
    out = ragged_attention(qkv, cu_seqlens=cu_seqlens, max_seqlen=length, backend="triton").out
    last = ragged_attention(qkv[-length:], cu_seqlens=cu_seqlens[:2], max_seqlen=length, backend="triton").out
    assert torch.equal(out[-length:], last)


@pytest.mark.parametrize("backend", ["triton", "padded"])
@pytest.mark.parametrize("name", OPTIONS)
def test_never_synchronises(backend: str, name: str) -> None:
    case = make_case([5, 0, 60], 64, 3, torch.float16, dead_rows=4, device="cuda")
    arguments = case.arguments(OPTIONS[name])
    ragged_attention(case.qkv, backend=backend, **arguments)  # compiles, and loading a kernel may synchronise
    with synchronising_is_an_error():
        ragged_attention(case.qkv, backend=backend, **arguments)


@pytest.mark.parametrize("dtype", DTYPES)
def test_padded_gradients_stay_finite_beside_empty_images(dtype: torch.dtype) -> None:
    case = make_case([5, 0, 60], 64, 3, dtype, dead_rows=4, device="cuda")
    qkv = case.qkv.requires_grad_()
    for option in (OPTIONS["plain"], OPTIONS["everything"]):
        results = ragged_attention(qkv, backend="padded", **case.arguments(option))
        if dtype != torch.float32 or option:  # torch's own fp32 attention has errors of its own
            assert_within_budget(case, option, [None if x is None else x.detach() for x in results])
        (gradient,) = torch.autograd.grad(results.out.float().square().sum(), qkv)
        assert torch.isfinite(gradient).all()


def test_auto_takes_triton_where_it_can(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_choice.cache_clear()
    case = make_case([5, 60], 64, 3, torch.float16, device="cuda")
    with caplog.at_level("INFO", "prunevit"):
        automatic = ragged_attention(case.qkv, **case.arguments({}))
        assert ragged_attention(case.qkv.clone().requires_grad_(), **case.arguments({})).out.requires_grad
    explicit = ragged_attention(case.qkv, backend="triton", **case.arguments({}))
    assert torch.equal(automatic.out, explicit.out)
    assert caplog.messages == ['ragged_attention: backend="auto" takes "triton"']


def test_auto_takes_dense_attention_where_it_is_faster(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_choice.cache_clear()
    case = make_case([100, 100], 80, 3, torch.float16, device="cuda")
    with caplog.at_level("INFO", "prunevit"):
        results = ragged_attention(case.qkv, uniform=True, **case.arguments({}))
    assert_within_budget(case, {}, results)
    assert "dense attention" in caplog.messages[0]


def test_graph_replay_reads_new_boundaries() -> None:
    case = make_case([30, 34], 64, 3, torch.float16, dead_rows=8, device="cuda")
    arguments = case.arguments(OPTIONS["prefix_rows"])
    arguments["max_seqlen"] = 64
    ragged_attention(case.qkv, backend="triton", **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = ragged_attention(case.qkv, backend="triton", **arguments)
    for lengths in ([30, 34], [10, 50], [0, 64], [7, 20]):
        case.lengths = lengths
        case.cu_seqlens.copy_(torch.tensor([0, *lengths]).cumsum(0))
        graph.replay()
        assert_within_budget(case, OPTIONS["prefix_rows"], results)
