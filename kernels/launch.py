"""Starts Triton kernels without Triton's per-call binding, which costs an eager call more than the launch does."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

log = logging.getLogger("prunevit")

Argument = Tensor | int | None
Start = Callable[[int, tuple[Any, ...]], None]
"""Takes the number of programs, and of each argument its address, its value, or anything if it is absent."""

# What `torch.cuda.current_device` asks once CUDA runs, as it does where there is a tensor on a GPU.
current_device = getattr(torch._C, "_cuda_getDevice", torch.accelerator.current_device_index)
_hooks = triton.knobs.runtime


class Bound:
    """A Triton kernel with its `constexpr` parameters fixed, started at the cost of the launch alone.

    Triton binds, specialises and looks up anew on each launch. Here its launch is used once for each
    specialisation, to compile; from then on what it compiled is started directly::

        bound = Bound(kernel, BLOCK=128, num_warps=4)  # once for each set of constants; keep it
        bound(programs, x, cu_seqlens, None, num_rows)

    Each call looks at all that Triton specialises on (see `specialise`), so a kernel bound for one batch is
    never started on another for which it would be wrong. It runs on the device of the first argument, in the
    current stream of that device.

    A kernel that takes `OVERLAP` and calls `wait_for_previous` starts while the kernel before it ends, where the GPU
    can.

    Triton's own launch remains for interpreted kernels, while a profiler hooks launches, and, said once in
    the log, where the installed triton starts kernels in a way that is not known here.

    Args:
        kernel: A `triton.jit` function whose `constexpr` parameters stand behind all others.
        **constants: The value of each `constexpr` parameter but `OVERLAP`, and options such as `num_warps`.

    Raises:
        ValueError: If a `constexpr` parameter lacks a value or stands before another parameter.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self._is_interpreted = not isinstance(kernel, triton.JITFunction)
        self._starts: dict[tuple[Any, ...], Start] = {}
        self._overlaps = "OVERLAP" in kernel.arg_names
        if self._is_interpreted:
            return
        free = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        fixed = kernel.arg_names[len(free) :]
        if free != kernel.params[: len(free)] or not constants.keys() | {"OVERLAP"} >= set(fixed):
            raise ValueError(
                f"Bound: {kernel.__name__} must end with its constexpr parameters, each with a value; "
                f"got the parameters {kernel.arg_names} and values for {list(constants)}"
            )
        self._loose = [parameter.do_not_specialize for parameter in free]
        self._fixed_names = fixed

    def __call__(self, programs: int, *arguments: Argument) -> Start | None:
        """Start the kernel.

        Args:
            programs: How many of them.
            *arguments: The other parameters, in order: tensors (the first argument is one), integers, and None
                for a tensor that is absent.

        Returns:
            What starts it again on arguments that `specialise` does not tell from these, where `is_direct`;
            None if only Triton can.
        """
        if self._is_interpreted:
            self._launch(programs, arguments)
            return None
        device = arguments[0].get_device()  # type: ignore[union-attr]
        if device != current_device():
            with torch.cuda.device(device):
                return self(programs, *arguments)
        key, values = specialise(arguments, self._loose)
        start = self._starts.get((device, *key))
        if start is None or not is_direct(device):
            constants = self._all_constants(device)
            fixed = tuple(constants[name] for name in self._fixed_names)
            start = load(self._launch(programs, arguments), device, fixed)
            if start is not None:
                self._starts[(device, *key)] = start
        else:
            start(programs, tuple(values))
        return start

    def _all_constants(self, device: int) -> dict[str, Any]:
        return self.constants | (overlap(device) if self._overlaps else {})

    def _launch(self, programs: int, arguments: Sequence[Argument]) -> Any:
        """Launch as Triton does, and return what it compiled."""
        device = arguments[0].get_device()  # type: ignore[union-attr]
        return self.kernel[(programs,)](*arguments, **self._all_constants(device))


def is_direct(device: int) -> bool:
    """Whether a kernel of this device can be started past Triton now: the device is current, no profiler looks on."""
    return device == current_device() and not (
        _hooks.launch_enter_hook.calls or _hooks.launch_exit_hook.calls
    )


def specialise(arguments: Sequence[Argument], loose: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Return all that Triton specialises these arguments on, and the values to start the kernel with.

    For a tensor: whether it is there, its dtype, whether its address is a multiple of 16. For an integer: its
    width and, unless it is `loose` (named in the kernel's `do_not_specialize`), whether it is 1 and whether it
    is a multiple of 16.
    """
    key: list[Any] = []
    values: list[Any] = []
    for argument, is_loose in zip(arguments, loose):
        if argument is None:
            key.append(None)
            values.append(None)
        elif argument.__class__ is int:
            width = 32 if -(2**31) <= argument < 2**31 else 64 if argument < 2**63 else 65  # type: ignore[operator]
            key.append(width if is_loose else (width, argument == 1, argument % 16 == 0))  # type: ignore[operator]
            values.append(argument)
        else:
            address = argument.data_ptr()  # type: ignore[union-attr]
            dtype = argument.dtype  # type: ignore[union-attr]
            key.append((dtype,) if address % 16 else dtype)
            values.append(address)
    return key, values


@functools.cache
def overlap(device: int) -> dict[str, bool]:
    """Return the constants with which a kernel's start overlaps the end of the one before, where the GPU can."""
    overlaps = (
        device >= 0 and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    )
    return {"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False}


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for what the kernel before has written, then let the next one be launched while this one runs."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


# How `CudaLauncher.__call__` begins: in triton 3.6, the metadata being the first of *args, and in 3.8.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_METADATA = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def load(compiled: Any, device: int, fixed: tuple[Any, ...]) -> Start | None:
    """Return what starts directly what Triton compiled for a device, None if it is not known how.

    Args:
        compiled: What Triton's launch returned; its code stays loaded as long as it lives.
        device: Index of the device.
        fixed: The values of the `constexpr` parameters, which stand behind the other arguments.
    """
    launcher = compiled.run
    parameters = _parameters(type(launcher))
    if compiled.metadata.target.backend != "cuda" or parameters not in (_GRID, _GRID + _METADATA):
        _say_plain()
        return None
    if (
        launcher.global_scratch_size
        or launcher.profile_scratch_size
        or getattr(launcher, "gsan_enabled", False)
    ):
        return None  # memory for each launch: triton's business
    launch, function = launcher.launch, compiled.function
    stream_of = triton.runtime.driver.active.get_current_stream
    settings: tuple[Any, ...] = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)
    if parameters == _GRID:
        settings += (*scratch, compiled.packed_metadata, *hooks)

        def start(programs: int, values: tuple[Any, ...]) -> None:
            launch(programs, 1, 1, stream_of(device), function, *settings, *values, *fixed)

    else:
        settings += (compiled.packed_metadata, *hooks, *scratch)
        settings += (launcher.arg_annotations, launcher.kernel_signature)

        def start(programs: int, values: tuple[Any, ...]) -> None:
            launch(programs, 1, 1, stream_of(device), function, *settings, values + fixed)

    start.compiled = compiled  # type: ignore[attr-defined]
    return start


def _parameters(launcher: type) -> tuple[str, ...]:
    code = getattr(launcher.__call__, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


@functools.cache
def _say_plain() -> None:
    log.info(
        f"Bound: triton {triton.__version__} starts kernels in a way that is not known here; its own launch is "
        "used, which takes the host longer"
    )
