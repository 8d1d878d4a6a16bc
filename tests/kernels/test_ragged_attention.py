"""The public door: what it refuses, what it chooses, and what it can be imported without."""

import logging
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, assert_within_budget, loop_attention, make_case

from prunevit.kernels import backends
from prunevit.kernels.ragged_attention import ragged_attention

BACKENDS = ["reference", "padded"]


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": ones(4, 2, 8)}, r"packed as \[T, 3, H, D\] when k or v is missing, got q \[4, 2, 8\]"),
        ({"q": ones(4, 2, 8), "k": ones(4, 2, 8)}, "pass k and v, or neither"),
        ({"q": ones(4, 2, 8), "k": ones(4, 2, 8), "v": ones(3, 2, 8)}, r"one shape \[T, H, D\]"),
        ({"q": ones(4, 3, 2, 8).int()}, r"fp16, bf16, fp32 or fp64, got torch.int32"),
        ({"q": ones(4, 2, 8), "k": ones(4, 2, 8), "v": ones(4, 2, 8).double()}, "must have one dtype"),
        ({"q": ones(4, 3, 8, 2).transpose(2, 3)}, "last dimension of q, k, v must be contiguous"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"contiguous int32 \[B \+ 1\], got torch.int64 \[2\]"),
        ({"cu_seqlens": torch.zeros(0, dtype=torch.int32)}, "at least the one element 0"),
        ({"key_weight": ones(3)}, r"key_weight must be floating \[4\], got torch.float32 \[3\]"),
        ({"soft": ones(4).bool()}, r"soft must be floating \[4\], got torch.bool \[4\]"),
        ({"image_id": torch.zeros(4)}, r"image_id must be int32 \[4\]"),
        ({"soft": ones(4).to("meta")}, "soft must be on the device of q, cpu, got meta"),
        (
            {"image_id": torch.zeros(4, device="meta").int()},
            "image_id must be on the device of q, cpu, got meta",
        ),
        ({"softmax_eps": -1.0}, "softmax_eps must be finite and not be negative, got -1.0"),
        ({"softmax_eps": float("nan")}, "softmax_eps must be finite and not be negative, got nan"),
        ({"softmax_eps": float("inf")}, "softmax_eps must be finite and not be negative, got inf"),
        ({"max_seqlen": 4.0}, r"max_seqlen and prefix_rows must be whole numbers, got \(4.0, 0\)"),
        ({"prefix_rows": True}, r"max_seqlen and prefix_rows must be whole numbers, got \(4, True\)"),
        ({"max_seqlen": 3, "backend": "padded"}, "max_seqlen must be at least the longest, 4, got 3"),
        ({"max_seqlen": 3, "backend": "reference"}, "max_seqlen must be at least the longest, 4, got 3"),
        ({"cu_seqlens": torch.tensor([0, 5]).int(), "backend": "padded"}, "at most the 4 rows, got"),
        (
            {"cu_seqlens": torch.tensor([0, 3]).int(), "uniform": True, "backend": "padded"},
            "uniform needs 4 rows",
        ),
        ({"prefix_rows": -1}, "must not be negative"),
        ({"uniform": True, "max_seqlen": 5}, "uniform needs 1 x 5 rows, got 4"),
        ({"backend": "flash"}, "backend must be one of auto, reference, padded, triton, got 'flash'"),
    ],
)
def test_bad_input_gets_one_line(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "q": ones(4, 3, 2, 8),
        "cu_seqlens": torch.tensor([0, 4]).int(),
        "max_seqlen": 4,
    }
    with pytest.raises(ValueError, match=message) as error:
        ragged_attention(**arguments | change)
    assert str(error.value).startswith("ragged_attention: ")
    assert "\n" not in str(error.value)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreted kernel runs on a CPU")
def test_triton_on_a_cpu_is_refused_and_never_replaced() -> None:
    with pytest.raises(ValueError, match="ragged_attention") as error:
        ragged_attention(
            ones(4, 3, 2, 8), cu_seqlens=torch.tensor([0, 4]).int(), max_seqlen=4, backend="triton"
        )
    assert str(error.value) == (
        'ragged_attention: backend="triton" needs CUDA tensors, got cpu; use "padded" or "auto"'
    )


def test_auto_says_once_what_it_takes_and_why(caplog: pytest.LogCaptureFixture) -> None:
    backends._say_choice.cache_clear()
    with caplog.at_level(logging.INFO, "prunevit"):
        for _ in range(2):
            ragged_attention(ones(4, 3, 2, 8), cu_seqlens=torch.tensor([0, 4]).int(), max_seqlen=4)
    assert caplog.messages == [
        'ragged_attention: backend="auto" takes "padded": "triton" needs CUDA tensors, got cpu'
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("bounds", "num_rows"), [([0], 0), ([0], 2), ([0, 0], 0), ([0, 0], 2)])
@pytest.mark.parametrize("max_seqlen", [0, 5])
def test_without_a_live_row_gradients_are_zero_and_not_missing(
    max_seqlen: int, bounds: list[int], num_rows: int, apart: bool, backend: str
) -> None:
    """And nothing of a dead row gets into them."""
    rows = torch.full((num_rows, 3, 2, 4), torch.nan)
    given = [part.clone().requires_grad_() for part in (rows.unbind(1) if apart else [rows])]
    key_weight, soft = (ones(num_rows).requires_grad_() for _ in range(2))
    results = ragged_attention(
        *given,
        cu_seqlens=torch.tensor(bounds).int(),
        max_seqlen=max_seqlen,
        prefix_rows=1,
        return_received=True,
        backend=backend,
        key_weight=key_weight,
        soft=soft,
    )
    wanted = [*given, key_weight, soft]
    for result in results:
        assert result is not None
        assert result.eq(0).all()
        assert result.requires_grad
    assert results.out.shape == (num_rows, 2, 4)
    for gradient in torch.autograd.grad(results.out.sum(), wanted, allow_unused=True):
        assert gradient is not None
        assert gradient.eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bounds", "num_rows", "max_seqlen"), [([0], 3, 5), ([0, 0, 0], 0, 5), ([0, 0], 3, 0), ([0, 0], 3, 2)]
)
def test_a_batch_without_a_live_row_gives_zeros(
    backend: str, bounds: list[int], num_rows: int, max_seqlen: int
) -> None:
    qkv = torch.full((num_rows, 3, 2, 8), float("nan"))
    results = ragged_attention(
        qkv,
        cu_seqlens=torch.tensor(bounds).int(),
        max_seqlen=max_seqlen,
        prefix_rows=3,
        return_received=True,
        backend=backend,
    )
    for x, shape in zip(results, [(num_rows, 2, 8), (num_rows, 3, 2), (num_rows, 2)], strict=True):
        assert x is not None
        torch.testing.assert_close(x, torch.zeros(shape))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_weightless_key_far_above_the_others_leaves_everything_finite(backend: str) -> None:
    scale = torch.tensor([1.0, 400.0, 1.0])[:, None, None, None]  # scores 1.4, 570 and 230,000
    qkv = (torch.ones(3, 3, 1, 2) * scale).requires_grad_()
    key_weight = torch.tensor([1.0, 0.0, 1.0], requires_grad=True)
    results = ragged_attention(
        qkv,
        cu_seqlens=torch.tensor([0, 3]).int(),
        max_seqlen=3,
        key_weight=key_weight,
        return_received=True,
        backend=backend,
    )
    assert results.received_attention is not None
    torch.testing.assert_close(results.received_attention, torch.tensor([[0.5], [0.0], [0.5]]))
    (results.out.sum() + results.received_attention.square().sum()).backward()
    for x in (qkv, key_weight):
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_mixed_inputs_and_keeps_scores_in_fp32(backend: str) -> None:
    case = make_case([5, 33], 16, 2, torch.bfloat16)
    q, k, v = case.qkv.unbind(1)
    option = OPTIONS["everything"]
    with torch.autocast("cpu", torch.bfloat16):  # q and k as a norm leaves them, v as a linear layer does
        results = ragged_attention(q.float(), k.float(), v, backend=backend, **case.arguments(option))
    assert results.out.dtype == torch.bfloat16
    assert_within_budget(case, option, results)
    right = loop_attention(case, option, torch.float64)
    assert results.prefix_attention is not None
    torch.testing.assert_close(results.prefix_attention.double(), right[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_defaults_to_the_real_head_dim_and_can_be_set(backend: str) -> None:
    case = make_case([7], 72, 1)

    def attend(softmax_scale: float | None) -> torch.Tensor:
        arguments = case.arguments({}) | {"softmax_scale": softmax_scale, "backend": backend}
        return ragged_attention(case.qkv, **arguments).out

    torch.testing.assert_close(attend(None), attend(72**-0.5), rtol=0, atol=0)
    mean = case.qkv[:, 2].mean(0).expand(7, 1, 72)
    torch.testing.assert_close(attend(0.0), mean, rtol=0, atol=1e-14)


def test_imports_and_runs_without_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from prunevit.kernels.ragged_attention import ragged_attention\n"
        "call = dict(cu_seqlens=torch.tensor([0, 4]).int(), max_seqlen=4)\n"
        "assert ragged_attention(torch.ones(4, 3, 2, 8), **call).out.eq(1).all()\n"
        "try:\n"
        "    ragged_attention(torch.ones(4, 3, 2, 8), backend='triton', **call)\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "needs the package triton, which is not installed" in done.stdout
