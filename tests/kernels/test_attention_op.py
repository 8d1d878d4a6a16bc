"""The operator that stands for attention in graphs: its contract, and what `torch.compile` makes of the door."""

from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, Case, make_case
from torch._dynamo.testing import CompileCounter

from prunevit.kernels.attention_op import attention_op
from prunevit.kernels.ragged_attention import ragged_attention


@pytest.fixture(autouse=True)
def _forget_graphs() -> None:
    torch._dynamo.reset()  # one function has only so many of them


def finite_case(lengths: list[int], dtype: torch.dtype = torch.float64) -> Case:
    """Draw a case without NaN in the dead rows: `opcheck` compares inputs by their values."""
    case = make_case(lengths, 16, 2, dtype, dead_rows=3)
    for x in (case.qkv, case.key_weight, case.soft):
        x.nan_to_num_()
    return case


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_operator_contract(option: dict[str, Any], dtype: torch.dtype) -> None:
    case = finite_case([5, 0, 9], dtype)
    given = case.arguments(option)
    torch.library.opcheck(
        attention_op,
        (
            case.qkv, None, None, case.cu_seqlens, case.max_seqlen, 0.25, given.get("key_weight"), given.get("soft"),
            option.get("exempt_self", False), option.get("softmax_eps", 0.0), option.get("prefix_rows", 0),
            option.get("return_received", False), case.image_id, False, "padded", False,
        ),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_compiled_call_equals_the_eager_one(option: dict[str, Any], backend: str) -> None:
    case = finite_case([5, 0, 9])
    arguments = case.arguments(option) | {"backend": backend}
    compiled = torch.compile(ragged_attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(case.qkv, **arguments), ragged_attention(case.qkv, **arguments))


def test_other_lengths_need_no_new_graph() -> None:
    counter = CompileCounter()

    def attend(qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int) -> torch.Tensor:
        return ragged_attention(qkv, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen).out

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for lengths in ([5, 9], [40, 30], [20, 197], [3, 2]):
        case = finite_case(lengths)
        call = (case.qkv, case.cu_seqlens, case.max_seqlen)
        torch.testing.assert_close(compiled(*call), attend(*call))
    assert counter.frame_count == 1


def test_compiled_under_autocast() -> None:
    case = finite_case([5, 9], torch.float32)
    compiled = torch.compile(ragged_attention, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        out = compiled(case.qkv, **case.arguments({})).out
        right = ragged_attention(case.qkv, **case.arguments({})).out
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, right)
