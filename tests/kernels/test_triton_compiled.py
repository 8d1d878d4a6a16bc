"""Compiles shipped tiles for Hopper, ahead of time and without a GPU: registers, shared memory, wgmma, no atomics."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, make_case
from triton_without_gpu import Compiled, compile_all_for_hopper, unwritten_registers

from prunevit.kernels.tiles import LongTile, choose_tile

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper
CLS = {"prefix_rows": 1}
WEIGHTED = {"key_weight": True, "prefix_rows": 5}
RECEIVED = {"key_weight": True, "prefix_rows": 2, "return_received": True}
DEFAULTS: dict[str, Any] = {
    "key_weight": None,
    "soft": None,
    "exempt_self": False,
    "softmax_eps": 0.0,
    "prefix_rows": 0,
    "return_received": False,
}


@pytest.mark.parametrize(
    ("max_seqlen", "head_dim", "dtype", "option"),
    [
        (16, 64, torch.float16, CLS),
        (32, 64, torch.bfloat16, CLS),
        (48, 64, torch.bfloat16, OPTIONS["plain"]),
        (64, 64, torch.bfloat16, CLS),
        (64, 72, torch.float16, WEIGHTED),
        (80, 64, torch.bfloat16, CLS),
        (96, 64, torch.float16, WEIGHTED),
        (112, 64, torch.bfloat16, CLS),
        (128, 64, torch.float16, CLS),
        (48, 64, torch.bfloat16, RECEIVED),
        (64, 128, torch.float16, RECEIVED),
        (96, 64, torch.bfloat16, RECEIVED),
        (128, 64, torch.bfloat16, OPTIONS["received"]),
        (128, 64, torch.float16, RECEIVED),
        (197, 64, torch.bfloat16, OPTIONS["received"]),
        (197, 64, torch.bfloat16, {"key_weight": True, "return_received": True}),
        (197, 64, torch.float16, RECEIVED),
        (577, 256, torch.float16, RECEIVED),
        (128, 128, torch.float16, WEIGHTED),
        (197, 64, torch.bfloat16, OPTIONS["plain"]),
        (197, 64, torch.float16, CLS),
        (197, 64, torch.float16, OPTIONS["everything"]),
        (577, 64, torch.bfloat16, CLS),
        (577, 128, torch.bfloat16, WEIGHTED),
        (577, 256, torch.float16, WEIGHTED),
        (577, 64, torch.float32, CLS),
        (577, 128, torch.float32, OPTIONS["plain"]),
        (577, 256, torch.float32, OPTIONS["plain"]),
    ],
)
def test_shipped_tile_fits_hopper(
    max_seqlen: int,
    head_dim: int,
    dtype: torch.dtype,
    option: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from prunevit.kernels import triton_forward

    case = make_case([max_seqlen], head_dim, 6, dtype)
    call = {"softmax_scale": head_dim**-0.5} | DEFAULTS | case.arguments(option)
    kernels = compile_all_for_hopper(
        monkeypatch,
        triton_forward,
        lambda: triton_forward.triton_attention(case.qkv, None, None, **call),
        tmp_path,
    )
    assert len(kernels) == (2 if option.get("return_received") and max_seqlen > 128 else 1)
    # Weights asked for a tile ahead cost some scalars where registers are bounded for a fourth program; it is worth it.
    tile = choose_tile(max_seqlen, head_dim, dtype, True, option.get("prefix_rows", 0), True, weighted=True)
    bounded = option.get("key_weight") is True and isinstance(tile, LongTile) and tile.registers > 0
    for compiled in kernels:
        assert compiled.spilled <= (32 if bounded else 0)
    check(kernels, tmp_path, uses_wgmma=dtype != torch.float32 and max_seqlen > 32)


def check(kernels: list[Compiled], folder: Path, uses_wgmma: bool) -> None:
    for compiled in kernels:
        assert compiled.shared <= SHARED_MEMORY
        assert ("wgmma.mma_async" in compiled.ptx) == uses_wgmma
        assert not re.findall(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)
    for binary in folder.glob("*.cubin"):
        assert unwritten_registers(binary) == []


@pytest.mark.parametrize(
    ("max_seqlen", "head_dim", "dtype", "name", "num_kernels"),
    [
        (32, 64, torch.bfloat16, "plain", 1),
        (64, 64, torch.bfloat16, "plain", 1),
        (64, 64, torch.float16, "prefix_rows", 1),
        (128, 64, torch.bfloat16, "plain", 1),
        (197, 64, torch.bfloat16, "prefix_rows", 2),
        (197, 64, torch.float16, "soft_exempt_self", 2),
        (577, 72, torch.bfloat16, "plain", 2),
        (577, 256, torch.float16, "plain", 2),
        (577, 64, torch.float32, "plain", 2),
    ],
)
def test_shipped_tile_of_the_backward_fits_hopper(
    max_seqlen: int,
    head_dim: int,
    dtype: torch.dtype,
    name: str,
    num_kernels: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from prunevit.kernels import triton_backward, triton_forward

    option = OPTIONS[name]
    case = make_case([max_seqlen], head_dim, 6, dtype)
    given = DEFAULTS | case.arguments(option)
    rows = torch.zeros(max_seqlen, 6, head_dim, dtype=dtype)
    prefix = torch.zeros(max_seqlen, given["prefix_rows"], 6) if given["prefix_rows"] else None
    monkeypatch.setattr(triton_backward, "bind", triton_forward.bind.__wrapped__)
    monkeypatch.setattr(triton_backward, "_plan", triton_backward._plan.__wrapped__)
    kernels = compile_all_for_hopper(
        monkeypatch,
        triton_forward,
        lambda: triton_backward.triton_backward(
            rows, prefix, None, case.qkv, None, None, case.cu_seqlens, max_seqlen, 0.125, given["key_weight"],
            given["soft"], given["exempt_self"], given["softmax_eps"], rows, torch.zeros(1, 6, max_seqlen),
            given["key_weight"] is not None, given["soft"] is not None,
        ),
        tmp_path,
    )  # fmt: skip
    assert len(kernels) == num_kernels
    assert all(compiled.spilled <= 128 for compiled in kernels)  # outside of the loop
    check(kernels, tmp_path, uses_wgmma=dtype != torch.float32 and max_seqlen > 32)
