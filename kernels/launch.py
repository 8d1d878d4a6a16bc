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

# What the `run` of a compiled kernel takes ahead of the kernel's own arguments. Triton 3.6 hands all that follows
# the function on to its C launcher, which wants the same things that 3.8 names.
_GRID = ("self", "gridX", "gridY", "gridZ", "stream", "function")
_KNOWN = (_GRID, (*_GRID, "kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"))


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
        self._fixed = [constants[name] for name in fixed]
        self._loose = [parameter.do_not_specialize for parameter in free]

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
            compiled = self._launch(programs, arguments)
            if _starts_directly(type(compiled.run), compiled.metadata.target.backend):
                self._loaded[(device, *key)] = _Loaded.of(compiled)
            return
        loaded.run(
            programs, 1, 1, loaded.current_stream(device), loaded.function, loaded.metadata, None, None, None,
            *values, *self._fixed,
        )  # fmt: skip

    def _launch(self, programs: int, arguments: Sequence[Argument]) -> Any:
        """Launch as Triton does, and return what it compiled."""
        return self.kernel[(programs,)](*arguments, **self.constants)


def specialise(arguments: Sequence[Argument], loose: Sequence[bool]) -> tuple[list[Any], list[int | None]]:
    """Return all that Triton specialises these arguments on, and the values to start the kernel with.

    For a tensor: whether it is there, its dtype, whether its address is a multiple of 16. For an integer: its
    width and, unless it is `loose` (named in the kernel's `do_not_specialize`), whether it is 1 and whether it
    is a multiple of 16.
    """
    key: list[Any] = []
    values: list[int | None] = []
    for argument, is_loose in zip(arguments, loose):
        if argument is None:
            key.append(None)
            values.append(None)
        elif isinstance(argument, int):
            width = 32 if -(2**31) <= argument < 2**31 else 64 if argument < 2**63 else 65
            key.append(width if is_loose else (width, argument == 1, argument % 16 == 0))
            values.append(argument)
        else:
            address = argument.data_ptr()
            key.append((argument.dtype, address % 16 == 0))
            values.append(address)
    return key, values


class _Loaded(NamedTuple):
    """One specialisation in the memory of one device."""

    run: Callable[..., None]
    function: int
    metadata: Any
    current_stream: Callable[[int], int]
    compiled: Any  # its code stays loaded as long as it lives

    @classmethod
    def of(cls, compiled: Any) -> "_Loaded":
        current_stream = triton.runtime.driver.active.get_current_stream
        return cls(compiled.run, compiled.function, compiled.packed_metadata, current_stream, compiled)


def _is_hooked() -> bool:
    """Whether a profiler wants to see each launch."""
    runtime = triton.knobs.runtime
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


@functools.cache
def _starts_directly(launcher: type, backend: str) -> bool:
    """Whether kernels that this class of triton starts can be started as `Bound` does; if not, say so once."""
    code = getattr(launcher.__call__, "__code__", None)
    known = backend == "cuda" and code is not None and code.co_varnames[: code.co_argcount] in _KNOWN
    if not known:
        log.info(
            f"Bound: kernels are started by triton {triton.__version__} itself, which takes the host longer"
        )
    return known
