"""The padded backend against the reference: fp64 values and gradients, the error budget in other dtypes."""

from typing import Any

import pytest
import torch
from ragged_cases import LENGTHS, OPTIONS, Case, assert_within_budget, loop_attention, make_case

from prunevit.kernels.ragged_attention import ragged_attention


def values_and_gradients(
    case: Case, option: dict[str, Any], backend: str, differentiate_weights: bool, **hints: Any
) -> list[torch.Tensor]:
    """Return the outputs and the gradients of a fixed random functional of them."""
    arguments = case.arguments(option)
    qkv = case.qkv.clone().requires_grad_()
    inputs = [qkv]
    for name in ("key_weight", "soft"):
        if differentiate_weights and option.get(name):
            arguments[name] = arguments[name].clone().requires_grad_()
            inputs.append(arguments[name])
    results = [x for x in ragged_attention(qkv, backend=backend, **arguments, **hints) if x is not None]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in results]
    functional = torch.stack([(x * weight).sum() for x, weight in zip(results, weights)]).sum()
    return [*results, *torch.autograd.grad(functional, inputs)]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("differentiate_weights", [False, True])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [1, 197, 2, 64], [63, 65, 128, 129]], ids=str)
def test_equals_the_reference(
    lengths: list[int], option: dict[str, Any], differentiate_weights: bool
) -> None:
    case = make_case(lengths, 24, 2, dead_rows=3)
    theirs = values_and_gradients(case, option, "reference", differentiate_weights)
    ours = values_and_gradients(case, option, "padded", differentiate_weights)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("option", [OPTIONS["plain"], OPTIONS["everything"]], ids=["plain", "everything"])
def test_layout_hints_and_a_loose_bound_change_nothing(option: dict[str, Any]) -> None:
    case = make_case([3, 0, 6, 1], 8, 2, dead_rows=4)
    theirs = values_and_gradients(case, option, "padded", True)
    case.max_seqlen = 11
    ours = values_and_gradients(case, option, "padded", True, image_id=case.image_id)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("dead_rows", [0, 5])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_uniform_images_are_reshaped(option: dict[str, Any], dead_rows: int) -> None:
    case = make_case([17] * 3, 16, 3, dead_rows=dead_rows)
    theirs = values_and_gradients(case, option, "reference", True)
    ours = values_and_gradients(case, option, "padded", True, uniform=True)
    assert_equal(ours, theirs)


@pytest.mark.parametrize("softmax_eps", [0.0, 0.1])
def test_zero_weights_have_the_gradient_of_the_reference(softmax_eps: float) -> None:
    case = make_case([4, 1, 7], 8, 2)
    case.key_weight[[1, 5]] = 0
    option = OPTIONS["everything"] | {"softmax_eps": softmax_eps}
    theirs = values_and_gradients(case, option, "reference", True)
    ours = values_and_gradients(case, option, "padded", True)
    assert_equal(ours, theirs)
    assert all(torch.isfinite(x).all() for x in ours)


def test_a_zero_weight_excludes_a_key_in_the_fused_form_too() -> None:
    case = make_case([4, 6], 8, 2)
    case.key_weight[[1, 5]] = 0
    arguments = case.arguments(OPTIONS["key_weight"])
    with torch.no_grad():
        ours = ragged_attention(case.qkv, backend="padded", **arguments).out
        theirs = ragged_attention(case.qkv, backend="reference", **arguments).out
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_error_budget(dtype: torch.dtype, option: dict[str, Any]) -> None:
    for lengths in ([0, 5, 0], [1, 197, 2, 64]):
        case = make_case(lengths, 64, 2, dtype, dead_rows=2)
        results = ragged_attention(case.qkv, backend="padded", **case.arguments(option))
        assert_within_budget(case, option, results)


def test_key_weights_are_not_rounded_to_the_dtype_of_the_input() -> None:
    case = make_case([5, 60], 64, 2, torch.bfloat16)
    out = ragged_attention(case.qkv, backend="padded", **case.arguments(OPTIONS["key_weight"])).out
    right = loop_attention(case, OPTIONS["key_weight"], torch.float64)[0]
    torch.testing.assert_close(out.double(), right, rtol=2**-8 * 1.001, atol=1e-6)  # half a step of bf16


def test_more_prefix_rows_than_the_longest_image_has() -> None:
    case = make_case([2, 0, 1], 8, 2)
    arguments = case.arguments({"prefix_rows": 4})
    for x, y in zip(
        ragged_attention(case.qkv, backend="padded", **arguments)[:2],
        ragged_attention(case.qkv, backend="reference", **arguments)[:2],
        strict=True,
    ):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lengths", LENGTHS[2:4], ids=str)
def test_packed_and_separate_inputs_agree(lengths: list[int]) -> None:
    case = make_case(lengths, 8, 1)
    q, k, v = (x.contiguous() for x in case.qkv.unbind(1))
    layout: dict[str, Any] = {
        "cu_seqlens": case.cu_seqlens,
        "max_seqlen": case.max_seqlen,
        "backend": "padded",
    }
    torch.testing.assert_close(
        ragged_attention(q, k, v, **layout).out, ragged_attention(case.qkv, **layout).out, rtol=0, atol=1e-14
    )
