"""The Triton kernels on a CPU, interpreted; bf16 is wrong there.

`test_triton_interpreted.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

from typing import Any

import pytest
import torch
from ragged_cases import (
    HEAD_DIMS,
    OPTIONS,
    Case,
    assert_within_budget,
    loop_attention,
    make_case,
    poison_empty,
)
from torch import Tensor

from prunevit.kernels.ragged_attention import ragged_attention
from prunevit.kernels.tiles import LongTile
from prunevit.kernels.triton_forward import triton_attention

pytestmark = pytest.mark.interpret


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_empty(monkeypatch)


def check(
    lengths: list[int],
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype,
    option: dict[str, Any],
    max_seqlen: int | None = None,
) -> None:
    case = make_case(lengths, head_dim, num_heads, dtype, dead_rows=19)
    case.max_seqlen = max_seqlen or case.max_seqlen
    results = ragged_attention(case.qkv, backend="triton", **case.arguments(option))
    assert_within_budget(case, option, results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)
def test_every_option(option: dict[str, Any], dtype: torch.dtype) -> None:
    check([1, 40, 0, 70], 32, 2, dtype, option)


@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 1, 20, 200])
def test_every_head_dim(head_dim: int) -> None:
    check([17, 2, 33], head_dim, 1, torch.float16, OPTIONS["everything"])


@pytest.mark.parametrize("lengths", [[1], [0, 5, 0], [197] * 2, [1, 197, 2, 64], [63, 65, 128, 129]], ids=str)
@pytest.mark.parametrize("option", [OPTIONS["plain"], OPTIONS["everything"]], ids=["plain", "everything"])
def test_every_length(lengths: list[int], option: dict[str, Any]) -> None:
    check(lengths, 16, 3 if max(lengths) < 100 else 1, torch.float16, option)


@pytest.mark.parametrize("longest", range(16, 129, 16))
@pytest.mark.parametrize("option", [{"prefix_rows": 3}, {"return_received": True, "prefix_rows": 2}], ids=str)
def test_short_tiles(longest: int, option: dict[str, Any]) -> None:
    check([longest, 1, 0, longest - 9], 16, 2, torch.float16, {"key_weight": True, **option})


@pytest.mark.parametrize("tile", [LongTile(64, 64, 4, 2), LongTile(16, 32, 4, 2, trims=False)], ids=str)
@pytest.mark.parametrize("option", [{}, {"key_weight": True}, OPTIONS["everything"]], ids=str)
def test_tiles_of_received_attention(tile: LongTile, option: dict[str, Any]) -> None:
    """Lengths whose last queries and keys take each size of a trimmed tile, and none."""
    option = {**option, "return_received": True}
    case = make_case([16, 150, 0, 105, 128, 72], 8, 1, torch.float16, dead_rows=40)
    assert_within_budget(case, option, attend(case, option, received_tile=tile))


@pytest.mark.parametrize("lengths", [[100, 7], [150, 7]], ids=["short", "long"])
def test_received_attention_loses_nothing_that_half_precision_does_not(lengths: list[int]) -> None:
    """Of scores that fp16 holds exactly the means are as those of fp32, small ones too."""
    case = make_case(lengths, 16, 1, torch.float16)
    case.qkv = case.qkv.round()
    case.qkv[:, :2, :, 0] = torch.tensor([4.0, 0.0])[:, None].half()
    case.qkv[5, 1, :, 0] = -8  # nobody attends to this key much
    option = {"return_received": True}
    received = ragged_attention(case.qkv, backend="triton", **case.arguments(option)).received_attention
    assert received is not None
    right = loop_attention(case, option, torch.float64)[1]
    assert right.min() < right.max() / 100
    # Half the smallest step of fp16, scaled, for each query of a short image.
    floor = lengths[0] * 2**-25 / 4096
    torch.testing.assert_close(received.double(), right, rtol=2e-6, atol=floor)


def attend(case: Case, option: dict[str, Any], **tiles: Any) -> list[Tensor | None]:
    """Call the kernels with tiles of one's own; what is saved for the backward is left out."""
    given = {"key_weight": None, "soft": None, "exempt_self": False, "softmax_eps": 0.0, "prefix_rows": 0}
    arguments = given | case.arguments(option)
    scale = case.qkv.shape[-1] ** -0.5
    *results, _ = triton_attention(case.qkv, None, None, softmax_scale=scale, **arguments, **tiles)
    return results


def test_plain_calls_of_one_and_many_heads_a_program() -> None:
    for lengths in ([40, 3, 17], [70, 65]):
        check(lengths, 16, 3, torch.float16, {})


def test_long_images() -> None:
    check([300, 577], 8, 1, torch.float16, OPTIONS["everything"])


def test_more_prefix_rows_than_a_tile_or_an_image_has() -> None:
    check([5, 0, 40, 1], 16, 1, torch.float32, {"prefix_rows": 70}, max_seqlen=50)


def test_zero_weights() -> None:
    case = make_case([40, 3], 16, 1, torch.float32)
    case.key_weight[:34] = 0  # the first whole tile of keys: its running maximum is -inf
    case.soft[:] = 1
    option = {
        "key_weight": True,
        "soft": True,
        "softmax_eps": 1e-2,
        "prefix_rows": 1,
        "return_received": True,
    }
    assert_within_budget(case, option, ragged_attention(case.qkv, backend="triton", **case.arguments(option)))


def test_fp16_keeps_its_precision_below_a_soft_masked_maximum() -> None:
    case = make_case([32], 16, 1, torch.float16)
    case.qkv[:, :2] = 1
    case.qkv[7, 1] = 4.5  # score 18 against 4, and masked: relative to it the others are 8e-7
    case.soft[:] = 1
    case.soft[7] = 0
    option = {"soft": True}
    out = ragged_attention(case.qkv, backend="triton", **case.arguments(option)).out
    mean = torch.cat([case.qkv[:7, 2], case.qkv[8:, 2]]).double().mean(0)
    torch.testing.assert_close(out.double(), mean.expand(32, 1, 16), rtol=0, atol=1e-3)


def test_strides_other_than_packed() -> None:
    case = make_case([3, 21], 16, 2, torch.float32)
    q, k = (x.contiguous() for x in case.qkv[:, :2].unbind(1))
    v = case.qkv[:, 2].transpose(0, 1).contiguous().transpose(0, 1)
    results = ragged_attention(q, k, v, backend="triton", **case.arguments({}))
    assert_within_budget(case, {}, results)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        (torch.float64, 8, "computes fp16, bf16 and fp32, got torch.float64"),
        (torch.bfloat16, 8, "is wrong for bf16 under TRITON_INTERPRET"),
        (torch.float32, 257, "needs a head_dim of 1 to 256, got 257"),
    ],
)
def test_what_it_cannot_compute_is_refused(dtype: torch.dtype, head_dim: int, message: str) -> None:
    case = make_case([3], head_dim, 1, dtype)
    with pytest.raises(ValueError, match=message):
        ragged_attention(case.qkv, backend="triton", **case.arguments({}))


def test_auto_leaves_the_interpreted_kernel_alone() -> None:
    case = make_case([3], 8, 1, torch.float32)
    option = OPTIONS["prefix_rows"]
    assert_within_budget(case, option, ragged_attention(case.qkv, **case.arguments(option)))
