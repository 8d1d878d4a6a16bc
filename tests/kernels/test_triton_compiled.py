"""Compiles each shipped tile for Hopper, ahead of time and without a GPU: no spills, shared memory, wgmma."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, make_case
from triton_without_gpu import compile_all_for_hopper

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)

SHARED_MEMORY = 227 * 1024  # bytes that a program may have on Hopper
CLS = {"prefix_rows": 1}
WEIGHTED = {"key_weight": True, "prefix_rows": 5}
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
        (128, 64, torch.bfloat16, OPTIONS["received"]),
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

    monkeypatch.setattr(triton_forward, "_overlap", lambda device: {"OVERLAP": True, "launch_pdl": True})
    case = make_case([max_seqlen], head_dim, 6, dtype)
    call = {"softmax_scale": head_dim**-0.5} | DEFAULTS | case.arguments(option)
    kernels = compile_all_for_hopper(
        monkeypatch,
        triton_forward,
        lambda: triton_forward.triton_attention(case.qkv, None, None, **call),
        tmp_path,
    )
    assert len(kernels) == (2 if option.get("return_received") else 1)
    for compiled in kernels:
        assert compiled.spilled == 0
        assert compiled.shared <= SHARED_MEMORY
        uses_wgmma = "wgmma.mma_async" in compiled.ptx
        assert uses_wgmma == (dtype != torch.float32 and max_seqlen > 32)
        assert not re.findall(r"^\s*(atom|red)\b", compiled.ptx, re.MULTILINE)
