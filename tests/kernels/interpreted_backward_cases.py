"""The backward of the Triton kernels on a CPU, interpreted, and how torch differentiates through it.

`test_backward.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before triton is imported.
fp32 takes tiles of 32 keys and so, from 33 rows on, both kernels; fp16 up to 64 rows the one that does it all.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, Case, assert_gradients_within_budget, differentiate, make_case, poison_empty
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prunevit.kernels.attention_op import attention_op
from prunevit.kernels.ragged_attention import ragged_attention

pytestmark = pytest.mark.interpret


def triton(option: dict[str, Any], **changes: Any) -> Callable[[Case], list[Tensor]]:
    def attend(case: Case) -> list[Tensor]:
        results = ragged_attention(case.qkv, backend="triton", **case.arguments(option) | changes)
        return [x for x in results if x is not None]

    return attend


def check(
    lengths: list[int], head_dim: int, num_heads: int, dtype: torch.dtype, option: dict[str, Any]
) -> None:
    case = make_case(lengths, head_dim, num_heads, dtype, dead_rows=19)
    with pytest.MonkeyPatch.context() as patched:
        poison_empty(patched)
        found = differentiate(case, option, triton(option))
    assert_gradients_within_budget(case, option, found)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in OPTIONS]
    + [(name, torch.float16) for name in ("plain", "prefix_rows", "everything")],
)
def test_every_option(name: str, dtype: torch.dtype) -> None:
    check([1, 35, 0, 2], 32, 2, dtype, OPTIONS[name])


@pytest.mark.parametrize("head_dim", [1, 72, 200])
def test_head_dims(head_dim: int) -> None:
    check([17, 2, 33], head_dim, 1, torch.float16, OPTIONS["everything"])


@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [1, 197, 2, 64], [65, 129]], ids=str)
@pytest.mark.parametrize("option", [OPTIONS["plain"], OPTIONS["everything"]], ids=["plain", "everything"])
def test_lengths(lengths: list[int], option: dict[str, Any]) -> None:
    check(lengths, 16, 1, torch.float16, option)


def test_more_prefix_rows_than_a_tile_or_an_image_has() -> None:
    check([5, 0, 40, 1], 16, 1, torch.float32, {"prefix_rows": 70})


def test_strides_other_than_packed() -> None:
    case = make_case([3, 21], 16, 2, torch.float32)

    def attend(copy: Case) -> list[Tensor]:
        q, k, v = copy.qkv.unbind(1)
        v = v.transpose(0, 1).contiguous().transpose(0, 1)
        return [ragged_attention(q.contiguous(), k, v, backend="triton", **copy.arguments({})).out]

    assert_gradients_within_budget(case, {}, differentiate(case, {}, attend))


@pytest.mark.parametrize(("exempt_self", "softmax_eps"), [(False, 0.0), (True, 0.1)])
def test_gradients_at_weight_zero_are_those_of_the_reference(exempt_self: bool, softmax_eps: float) -> None:
    option = OPTIONS["everything"] | {"exempt_self": exempt_self, "softmax_eps": softmax_eps}
    case = make_case([4, 1, 40], 16, 2, torch.float32)
    case.key_weight[[1, 6]] = 0
    found = differentiate(case, option, triton(option))
    right = differentiate(
        case,
        option,
        lambda copy: list(ragged_attention(copy.qkv, backend="reference", **copy.arguments(option))),  # type: ignore[arg-type]
        found.cotangents,
    )
    for x, y in zip(found.values, right.values, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=2e-5)


def test_a_single_result_may_have_a_gradient() -> None:
    option = OPTIONS["prefix_rows"]
    case = make_case([9, 40], 16, 2, torch.float32)

    def last(backend: str) -> Callable[[Case], list[Tensor]]:
        def attend(copy: Case) -> list[Tensor]:
            prefix = ragged_attention(copy.qkv, backend=backend, **copy.arguments(option)).prefix_attention
            assert prefix is not None
            return [prefix[:, :1].mean(2)]  # its gradient arrives expanded over the heads

        return attend

    found = differentiate(case, option, last("triton"))
    right = differentiate(case, option, last("reference"), found.cotangents)
    torch.testing.assert_close(found.values, right.values, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bounds", [[0], [0, 0, 0]])
def test_a_batch_without_a_live_row_has_zero_gradients(bounds: list[int]) -> None:
    qkv = torch.full((3, 3, 2, 16), float("nan"), requires_grad=True)
    call: dict[str, Any] = {"cu_seqlens": torch.tensor(bounds).int(), "max_seqlen": 5, "prefix_rows": 1}
    results = ragged_attention(qkv, backend="triton", **call)
    assert results.prefix_attention is not None
    (gradient,) = torch.autograd.grad(results.out.sum() + results.prefix_attention.sum(), qkv)
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # opcheck itself looks at it
def test_operator_contract() -> None:
    option = OPTIONS["everything"]
    case = make_case([5, 0, 9], 16, 2, torch.float32, dead_rows=3)
    for name in ("qkv", "key_weight", "soft"):  # it compares inputs by their values
        setattr(case, name, getattr(case, name).nan_to_num().requires_grad_())
    given = case.arguments(option)
    torch.library.opcheck(
        attention_op,
        (
            case.qkv, None, None, case.cu_seqlens, case.max_seqlen, 0.25, given.get("key_weight"), given.get("soft"),
            option.get("exempt_self", False), option.get("softmax_eps", 0.0), option.get("prefix_rows", 0),
            option.get("return_received", False), case.image_id, False, "triton", True,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("wrapped", ["compiled", "checkpointed"])
def test_wrapped_calls_have_the_same_gradients(wrapped: str) -> None:
    option = OPTIONS["everything"]
    case = make_case([5, 40], 16, 2, torch.float32)

    def attend(qkv: Tensor, key_weight: Tensor, soft: Tensor) -> tuple[Tensor | None, ...]:
        arguments = case.arguments(option) | {"key_weight": key_weight, "soft": soft}
        return tuple(ragged_attention(qkv * 2, backend="triton", **arguments))

    def call(*inputs: Tensor) -> tuple[Tensor | None, ...]:
        if wrapped == "checkpointed":
            return checkpoint(attend, *inputs, use_reentrant=False)  # type: ignore[no-any-return]
        return torch.compile(attend, fullgraph=True, backend="aot_eager")(*inputs)

    def by_attributes(function: Callable[..., Any], copy: Case) -> list[Tensor]:
        return list(function(copy.qkv, copy.key_weight, copy.soft))

    plain, other = (differentiate(case, option, partial(by_attributes, each)) for each in (attend, call))
    torch.testing.assert_close(plain.values, other.values, rtol=0, atol=0)


def test_under_autocast_gradients_have_the_dtype_of_the_parameters() -> None:
    case = make_case([5, 20], 16, 2, torch.float32)
    with torch.autocast("cpu", torch.float16):
        found = differentiate(case, {}, triton({}))
    assert [x.dtype for x in (*found.values, *found.cotangents)] == [torch.float32, torch.float16]
    case.qkv = case.qkv.half()
    assert_gradients_within_budget(case, {}, found)


@pytest.mark.parametrize("needs_grad", [False, True])
def test_the_log_sum_exp_is_stored_for_gradients_only(
    needs_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case([5, 20], 16, 2, torch.float32)
    allocated = []
    allocate = Tensor.new_empty_strided

    def record(self: Tensor, size: tuple[int, ...], *args: Any, **kwargs: Any) -> Tensor:
        allocated.append(tuple(size))
        return allocate(self, size, *args, **kwargs)

    monkeypatch.setattr(Tensor, "new_empty_strided", record)
    ragged_attention(case.qkv.requires_grad_(needs_grad), backend="triton", **case.arguments({}))
    assert ((1, 2, 25) in allocated) == needs_grad


def test_only_the_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    from prunevit.kernels import triton_backward

    case = make_case([5, 20], 16, 2, torch.float32)
    option = OPTIONS["softmax_eps"]
    found = differentiate(case, option, triton(option)).values
    given = case.arguments(option)
    soft = given["soft"].requires_grad_()
    seen = []
    backward = triton_backward.triton_backward

    def record(*args: Any) -> triton_backward.AttentionGradients:
        seen.append(backward(*args))
        return seen[-1]

    monkeypatch.setattr(triton_backward, "triton_backward", record)
    out = ragged_attention(case.qkv, backend="triton", **given).out
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(0)).to(out)
    (gradient,) = torch.autograd.grad(out, soft, cotangent)
    assert torch.equal(gradient, found[2])
    assert seen[0].key_weight is None
