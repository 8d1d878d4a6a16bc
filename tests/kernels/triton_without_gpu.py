"""What tests of Triton kernels use where there is no GPU: the interpreter, and compilation ahead of time."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.bool: "*i1",
}


def run_interpreted(*cases: str) -> None:
    """Run files of this folder where TRITON_INTERPRET=1 stands before the first import of triton."""
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6.") and tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of triton 3.6 cannot take a loop bound under numpy 2.4 and newer")
    files = [Path(__file__).with_name(name) for name in cases]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *map(str, files), "-q", "-n", "0", "-p", "no:cacheprovider"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=files[0].parent,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


class Compiled(NamedTuple):
    """Of a compiled kernel: its PTX, bytes of stack and local memory a thread, bytes of shared memory a program."""

    ptx: str
    spilled: int
    shared: int


def compile_for_hopper(
    monkeypatch: pytest.MonkeyPatch, module: Any, call: Callable[[], object], folder: Path
) -> Compiled:
    """Compile the one kernel that `call` binds and starts through `module.Bound`, without starting it."""
    [compiled] = compile_all_for_hopper(monkeypatch, module, call, folder)
    return compiled


def compile_all_for_hopper(
    monkeypatch: pytest.MonkeyPatch, module: Any, call: Callable[[], object], folder: Path
) -> list[Compiled]:
    """Compile the kernels that `call` binds and starts through `module.Bound`, without starting them."""
    started: list[tuple[Any, dict[str, Any], tuple[Any, ...]]] = []

    def bound(kernel: Any, **constants: Any) -> Callable[..., None]:
        return lambda programs, *arguments: started.append((kernel, constants, arguments))

    with monkeypatch.context() as patched:
        patched.setattr(module, "Bound", bound)
        for name, function in vars(module).items():  # none of the kernels that it has bound already
            if hasattr(function, "cache_clear"):
                patched.setattr(module, name, function.__wrapped__)
        call()
    return [_compile(*each, folder) for each in started]


def _compile(kernel: Any, constants: dict[str, Any], arguments: tuple[Any, ...], folder: Path) -> Compiled:
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "OVERLAP" in kernel.arg_names:
        constants |= {"OVERLAP": True, "launch_pdl": True}
    constexprs = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = dict.fromkeys(constexprs, "constexpr")
    attributes = {}
    for index, (name, value) in enumerate(zip(kernel.arg_names, arguments)):
        signature[name] = "i32"
        if value is None:
            signature[name], constexprs[name] = "constexpr", None
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
    options = {name: value for name, value in constants.items() if name not in constexprs}
    source = ASTSource(kernel, signature, constexprs, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    binary = folder / f"{kernel.__name__}.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(binary)]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    found = re.search(r"STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    return Compiled(compiled.asm["ptx"], int(found[1]) + int(found[2]), compiled.metadata.shared)


def unwritten_registers(binary: Path) -> list[str]:
    """Return the instructions of a cubin that are the first to name a uniform register, and read it.

    ptxas has been seen to lose the writes when it ran out of these 63: matrix instructions then take their
    operands from anywhere. Theirs are described in four, of which the first two lie idle if a register holds A.
    """
    triton = pytest.importorskip("triton")
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-sass", str(binary)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    written, found = {63}, []  # 63 is zero
    for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", listing, re.MULTILINE):
        name, _, operands = re.sub(r"^@!?U?P\w+\s+", "", line).partition(" ")
        target, _, sources = operands.strip().partition(",")
        writes = re.fullmatch(r"UR(\d+)", target)
        described = re.search(r"gdesc\[UR(\d+)\]", operands)
        reads = {int(register) for register in re.findall(r"UR(\d+)", sources if writes else operands)}
        if described:
            first = int(described[1])
            reads = {first + 2, first + 3} if re.match(r"\s*R\d+", sources) else {*range(first, first + 4)}
        if reads - written:
            found.append(line)
            written |= reads
        if writes:
            first = int(writes[1])
            written |= {first, first + 1} if ".64" in name or "WIDE" in name else {first}
    return found
