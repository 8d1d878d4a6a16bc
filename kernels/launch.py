"""Starts Triton kernels without Triton's per-call binding, which costs an eager call more than the launch does."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

log = logging.getLogger("prunevit")

Argument = Tensor | int | None


class Bound:
    """A Triton kernel with its `constexpr` parameters fixed, started at the cost of the launch alone.

    Triton binds, specialises and looks up anew on each launch. Here its launch is used once for each
    specialisation, to compile; from then on what it compiled is started directly::

        bound = Bound(kernel, BLOCK=128, num_warps=4)  # once for each set of constants; keep it
        bound(programs, x, cu_seqlens, None, num_rows)

    Each call looks at all that Triton specialises on (see `specialise`), so a kernel bound for one batch is
    never started on another for which it would be wrong. It runs on the device of the first argument, in the
    current stream of that device.

    Triton's own launch remains for interpreted kernels, while a profiler hooks launches, and, said once in
    the log, where the installed triton starts kernels in a way that is not known here.

    Args:
        kernel: A `triton.jit` function whose `constexpr` parameters stand behind all others.
        **constants: The value of each `constexpr` parameter, and options such as `num_warps`.

    Raises:
        ValueError: If a `constexpr` parameter lacks a value or stands before another parameter.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel, self.constants = kernel, constants
        self._is_interpreted = not isinstance(kernel, triton.JITFunction)
        self._loaded: dict[tuple[Any, ...], _Loaded] = {}
        if self._is_interpreted:
            return
        free = [parameter for parameter in kernel.params if not parameter.is_constexpr]
        fixed = kernel.arg_names[len(free) :]
        if free != kernel.params[: len(free)] or not constants.keys() >= set(fixed):
            raise ValueError(
                f"Bound: {kernel.__name__} must end with its constexpr parameters, each with a value; "
                f"got the parameters {kernel.arg_names} and values for {list(constants)}"
            )
        self._loose = [parameter.do_not_specialize for parameter in free]
        self._fixed = [constants[name] for name in fixed]

    def __call__(self, programs: int, *arguments: Argument) -> None:
        """Start the kernel.

        Args:
            programs: How many of them.
            *arguments: The other parameters, in order: tensors (the first argument is one), integers, and None
                for a tensor that is absent.
        """
        if self._is_interpreted:
            self._launch(programs, arguments)
            return
        device = arguments[0].get_device()  # type: ignore[union-attr]
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(programs, *arguments)
            return
        key, values = specialise(arguments, self._loose)
        loaded = self._loaded.get((device, *key))
        if loaded is None or _is_hooked():
            loaded = load(self._launch(programs, arguments))
            if loaded is not None:
                self._loaded[(device, *key)] = loaded
            return
        values += self._fixed
        stream = loaded.current_stream(device)
        if loaded.takes_one_tuple:
            loaded.start(programs, 1, 1, stream, loaded.function, *loaded.settings, tuple(values))
        else:
            loaded.start(programs, 1, 1, stream, loaded.function, *loaded.settings, *values)

    def _launch(self, programs: int, arguments: Sequence[Argument]) -> Any:
        """Launch as Triton does, and return what it compiled."""
        return self.kernel[(programs,)](*arguments, **self.constants)


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


class _Loaded(NamedTuple):
    """One specialisation in the memory of one device, and how triton's C code starts it."""

    start: Callable[..., None]
    function: int
    settings: tuple[Any, ...]  # between the function and the kernel's own arguments
    takes_one_tuple: bool  # ... which are one argument
    current_stream: Callable[[int], int]
    compiled: Any  # its code stays loaded as long as it lives


# How `CudaLauncher.__call__` begins: in triton 3.6, the metadata being the first of *args, and in 3.8.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_METADATA = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")


def load(compiled: Any) -> _Loaded | None:
    """Return how to start directly what Triton compiled, None if this is not known."""
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
    settings: tuple[Any, ...] = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    scratch, hooks = (None, None), (None, None, None)
    takes_one_tuple = parameters != _GRID
    if takes_one_tuple:
        settings += (compiled.packed_metadata, *hooks, *scratch)
        settings += (launcher.arg_annotations, launcher.kernel_signature)
    else:
        settings += (*scratch, compiled.packed_metadata, *hooks)
    stream = triton.runtime.driver.active.get_current_stream
    return _Loaded(launcher.launch, compiled.function, settings, takes_one_tuple, stream, compiled)


def _parameters(launcher: type) -> tuple[str, ...]:
    code = getattr(launcher.__call__, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def _is_hooked() -> bool:
    """Whether a profiler wants to see each launch."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@functools.cache
def _say_plain() -> None:
    log.info(
        f"Bound: triton {triton.__version__} starts kernels in a way that is not known here; its own launch is "
        "used, which takes the host longer"
    )
