"""The reference against an independent loop, closed forms and numerical differentiation."""

from typing import Any

import pytest
import torch
from ragged_cases import HEAD_DIMS, HEADS, LENGTHS, OPTIONS, loop_attention, make_case

from prunevit.kernels.ragged_attention import ragged_attention


def reference(qkv: torch.Tensor, **arguments: Any) -> list[torch.Tensor]:
    results = ragged_attention(qkv, backend="reference", **arguments)
    return [x for x in results if x is not None]


@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("index", range(len(LENGTHS)))
@pytest.mark.parametrize("dead_rows", [0, 7])
def test_equals_a_plain_loop(index: int, option: dict[str, Any], dead_rows: int) -> None:
    head_dim, num_heads = HEAD_DIMS[index], HEADS[index % 2]
    case = make_case(LENGTHS[index], head_dim, num_heads, dead_rows=dead_rows)
    for ours, theirs in zip(
        reference(case.qkv, **case.arguments(option)),
        loop_attention(case, option, torch.float64),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_rounded_once_at_the_end(dtype: torch.dtype) -> None:
    case = make_case([5, 33], 48, 2, dtype)
    option = OPTIONS["everything"]
    out, prefix, received = reference(case.qkv, **case.arguments(option))
    right = loop_attention(case, option, torch.float64)
    assert (out.dtype, prefix.dtype, received.dtype) == (dtype, torch.float32, torch.float32)
    torch.testing.assert_close(out.double(), right[0], rtol=torch.finfo(dtype).eps, atol=2e-6)
    torch.testing.assert_close(prefix.double(), right[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(received.double(), right[2], rtol=0, atol=1e-6)


def check_gradients(key_weight: torch.Tensor, soft: torch.Tensor, **arguments: Any) -> bool:
    case = make_case([0, 3, 1, 2], 3, 2, dead_rows=1)
    qkv = case.qkv.nan_to_num()

    def attend(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv, key_weight, soft = inputs
        weights = {"key_weight": key_weight, "soft": soft}
        return tuple(
            reference(
                qkv,
                cu_seqlens=case.cu_seqlens,
                max_seqlen=3,
                prefix_rows=2,
                return_received=True,
                **weights,
                **arguments,
            )
        )

    inputs = [x.detach().requires_grad_() for x in (qkv, key_weight, soft)]
    return torch.autograd.gradcheck(attend, inputs)


@pytest.mark.parametrize("exempt_self", [False, True])
@pytest.mark.parametrize("softmax_eps", [0.0, 0.1])
def test_gradients_equal_numerical_ones(exempt_self: bool, softmax_eps: float) -> None:
    key_weight = torch.tensor([0.5, 2, 1, 3, 0.7, 1.5, 1], dtype=torch.float64)
    soft = torch.tensor([0.9, 0.2, 0.6, 1, 0.4, 0.8, 1], dtype=torch.float64)
    assert check_gradients(key_weight, soft, exempt_self=exempt_self, softmax_eps=softmax_eps)


@pytest.mark.parametrize("exempt_self", [False, True])
@pytest.mark.parametrize("softmax_eps", [0.0, 0.1])
def test_gradients_at_weight_zero_equal_numerical_ones(exempt_self: bool, softmax_eps: float) -> None:
    key_weight = torch.tensor([1, 0, 1, 1, 0, 2, 1], dtype=torch.float64)
    soft = torch.tensor([1, 1, 0, 1, 1, 1, 0], dtype=torch.float64)
    assert check_gradients(key_weight, soft, exempt_self=exempt_self, softmax_eps=softmax_eps)


def test_equal_scores_give_the_weights_themselves() -> None:
    qkv = torch.zeros(3, 3, 1, 4, dtype=torch.float64)
    weights: dict[str, Any] = {
        "key_weight": torch.tensor([1.0, 2, 4], dtype=torch.float64),
        "soft": torch.tensor([1.0, 0.5, 0], dtype=torch.float64),
    }
    eps = 0.3
    _, prefix, _ = ragged_attention(
        qkv,
        cu_seqlens=torch.tensor([0, 3]).int(),
        max_seqlen=3,
        exempt_self=True,
        softmax_eps=eps,
        prefix_rows=3,
        backend="reference",
        **weights,
    )
    # Scores are 0 and the maximum is log 4, so p is the weight over 4; the diagonal keeps its key weight.
    p = torch.tensor([[1.0, 1, 0], [1, 2, 0], [1, 1, 4]], dtype=torch.float64) / 4
    expected = (p + eps / 3) / (p.sum(1, keepdim=True) + eps)
    assert prefix is not None
    torch.testing.assert_close(prefix[:, :, 0].T, expected, rtol=0, atol=1e-15)


def test_probabilities_add_up_to_one() -> None:
    case = make_case([0, 2, 65], 32, 3)
    _, prefix, received = reference(case.qkv, **case.arguments(OPTIONS["everything"] | {"prefix_rows": 3}))
    per_image = torch.stack([x.sum(0) for x in prefix.split(case.lengths)])
    expected = torch.ones(3, 3, 3, dtype=torch.float64)
    expected[0] = 0  # no row
    expected[1, 2] = 0  # no third row
    torch.testing.assert_close(per_image, expected)
    torch.testing.assert_close(received.split([2, 65])[1].sum(0), torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("bounds", "max_seqlen", "message"),
    [
        ([0, 9], 9, "must rise from 0 to at most the 4 rows"),
        ([0, 3, 2], 3, "must rise from 0"),
        ([1, 4], 3, "must rise from 0"),
        ([0, 4], 3, "max_seqlen must be at least the longest, 4, got 3"),
    ],
)
def test_impossible_bounds_are_refused(bounds: list[int], max_seqlen: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reference(torch.zeros(4, 3, 1, 8), cu_seqlens=torch.tensor(bounds).int(), max_seqlen=max_seqlen)
