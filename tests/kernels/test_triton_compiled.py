"""Compiles each shipped tile for Hopper, ahead of time and without a GPU: no spills, shared memory, wgmma."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_cases import OPTIONS, make_case

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels cannot be compiled"
)

POINTERS = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32"}
SHARED_MEMORY = 99 * 1024  # bytes a program may have on sm_86 and sm_89, the least of the common GPUs


class Recorder:
    """Stands in for a kernel and keeps what it is launched with."""

    launch: tuple[tuple[Any, ...], dict[str, Any]]

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **kwargs: setattr(self, "launch", (args, kwargs))


def launches(
    monkeypatch: pytest.MonkeyPatch,
    max_seqlen: int,
    head_dim: int,
    dtype: torch.dtype,
    option: dict[str, Any],
) -> list[tuple[Any, Recorder]]:
    """Return the kernels that a call launches on Hopper, with their arguments."""
    from prunevit.kernels import triton_forward

    kernels = [triton_forward.forward_kernel]
    if option.get("return_received"):
        kernels.append(triton_forward.received_kernel)
    recorders = [Recorder() for _ in kernels]
    for kernel, recorder in zip(kernels, recorders):
        monkeypatch.setattr(triton_forward, kernel.__name__, recorder)
    case = make_case([max_seqlen], head_dim, 6, dtype)
    defaults = {
        "key_weight": None,
        "soft": None,
        "exempt_self": False,
        "softmax_eps": 0.0,
        "prefix_rows": 0,
        "return_received": False,
    }
    arguments = defaults | case.arguments(option)
    triton_forward.triton_attention(*case.qkv.unbind(1), softmax_scale=head_dim**-0.5, **arguments)
    return list(zip(kernels, recorders))


def compile_launch(kernel: Any, recorder: Recorder) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    positional, keywords = recorder.launch
    values = dict(zip(kernel.arg_names, positional)) | keywords
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "i32"
    options = {name: keywords[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(compiled: Any, folder: Path) -> int:
    """Return the bytes of stack and local memory that a thread of the machine code uses."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    return int(found[1]) + int(found[2])


WITH_WEIGHT_AND_PREFIX = {"key_weight": True, "prefix_rows": 5}


@pytest.mark.parametrize(
    ("max_seqlen", "head_dim", "dtype", "option"),
    [
        (16, 64, torch.float16, OPTIONS["plain"]),
        (32, 64, torch.bfloat16, OPTIONS["prefix_rows"]),
        (64, 64, torch.float16, OPTIONS["plain"]),
        (64, 72, torch.bfloat16, WITH_WEIGHT_AND_PREFIX),
        (128, 64, torch.bfloat16, OPTIONS["received"]),
        (128, 128, torch.float16, WITH_WEIGHT_AND_PREFIX),
        (197, 64, torch.bfloat16, OPTIONS["plain"]),
        (197, 64, torch.float16, OPTIONS["everything"]),
        (197, 80, torch.float16, WITH_WEIGHT_AND_PREFIX),
        (577, 64, torch.float16, OPTIONS["everything"]),
        (577, 128, torch.bfloat16, WITH_WEIGHT_AND_PREFIX),
        (577, 256, torch.float16, WITH_WEIGHT_AND_PREFIX),
        (577, 64, torch.float32, OPTIONS["plain"]),
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
    for kernel, recorder in launches(monkeypatch, max_seqlen, head_dim, dtype, option):
        compiled = compile_launch(kernel, recorder)
        assert spilled_bytes(compiled, tmp_path) == 0, kernel.__name__
        assert compiled.metadata.shared <= SHARED_MEMORY, kernel.__name__
        uses_wgmma = "wgmma.mma_async" in compiled.asm["ptx"]
        assert uses_wgmma == (dtype != torch.float32 and max_seqlen > 32), kernel.__name__
        assert "atom" not in re.findall(r"^\s*(atom|red)\b", compiled.asm["ptx"], re.MULTILINE)
