"""The bound launch without a GPU: what a specialisation depends on, and what is started with what."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from launch_kernel import copy_kernel, mixed_up_kernel  # noqa: E402

from prunevit.kernels import launch  # noqa: E402
from prunevit.kernels.launch import Bound, specialise  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(copy_kernel, triton.JITFunction),
    reason="interpreted kernels are launched by triton itself",
)

STORAGE = torch.zeros(4096, dtype=torch.int8)
POINTERS = [None] + [
    STORAGE[offset : offset + 64].view(dtype)
    for dtype, offset in itertools.product((torch.float16, torch.bfloat16, torch.float32), (0, 4, 16, 24))
]
INTEGERS = [
    0,
    1,
    2,
    15,
    16,
    17,
    48,
    -1,
    -16,
    2**31 - 1,
    2**31,
    2**31 + 15,
    -(2**31),
    -(2**31) - 1,
    2**40,
    2**63,
]


def triton_specialises(argument: Any, loose: bool) -> Any:
    """Ask triton itself what it compiles an argument as."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    return native_specialize_impl(BaseBackend, argument, False, not loose, True)


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("arguments", [POINTERS, INTEGERS], ids=["pointers", "integers"])
def test_equal_keys_are_compiled_alike(arguments: list[Any], loose: bool) -> None:
    """The key may tell apart what triton does not, never the other way round."""
    for x, y in itertools.combinations(arguments, 2):
        keys = [specialise([argument], [loose])[0] for argument in (x, y)]
        if keys[0] == keys[1]:
            assert triton_specialises(x, loose) == triton_specialises(y, loose), (x, y)


def test_what_varies_from_call_to_call_shares_a_key() -> None:
    x, y = torch.zeros(64), torch.ones(640)
    assert (
        specialise([x, None, 5], [False, False, True])[0]
        == specialise([y, None, 64], [False, False, True])[0]
    )
    assert specialise([x, None, 17], [False] * 3)[0] == specialise([y, None, 35], [False] * 3)[0]


def test_values_are_addresses_and_integers() -> None:
    x = torch.zeros(64)
    assert specialise([x, None, 5], [False] * 3)[1] == [x.data_ptr(), None, 5]


class LauncherOf36:
    """Has the shape of triton 3.6's `CudaLauncher`."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, started: list[Any]) -> None:
        self.launch = lambda *arguments: started.append(arguments)

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None: ...


class LauncherOf38(LauncherOf36):
    """Has the shape of triton 3.8's."""

    arg_annotations, kernel_signature = "annotations", b"signature"

    def __call__(  # type: ignore[override]
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, kernel_metadata: Any,
        launch_metadata: Any, launch_enter_hook: Any, launch_exit_hook: Any, *args: Any,
    ) -> None: ...  # fmt: skip


class UnknownLauncher(LauncherOf36):
    def __call__(self, grid: tuple[int, ...], *args: Any) -> None: ...  # type: ignore[override]


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give a function that binds `copy_kernel` on an imagined GPU, and record what is compiled and started."""
    monkeypatch.setattr(launch, "current_device", lambda: -1)  # where CPU tensors are
    driver = SimpleNamespace(get_current_stream=lambda device: 77)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    compiled: list[Any] = []
    started: list[Any] = []

    def compile_and_launch(bound: Bound, programs: int, arguments: Any) -> Any:
        compiled.append(arguments)
        return SimpleNamespace(
            run=bound.launcher(started),  # type: ignore[attr-defined]
            function=1000 + len(compiled),
            packed_metadata=(4, 1, 0),
            metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda")),
        )

    monkeypatch.setattr(Bound, "_launch", compile_and_launch)

    def bind(launcher: type) -> Bound:
        bound = Bound(copy_kernel, BLOCK=64, num_warps=4)
        bound.launcher = launcher  # type: ignore[attr-defined]
        return bound

    return SimpleNamespace(bind=bind, compiled=compiled, started=started)


def test_one_compilation_for_each_specialisation(compiles: Any) -> None:
    bound = compiles.bind(LauncherOf36)
    x, y = torch.zeros(64), torch.zeros(65)
    for source, size in (
        (x, 16),
        (x, 32),
        (y, 48),
        (y[1:], 16),
        (y[1:], 32),
        (x, 17),
        (x, 33),
        (x, 1),
        (x, 16),
    ):
        bound(3, source, y, size)
    # Aligned and a multiple of 16; not aligned; aligned and no multiple; 1.
    assert [(source.data_ptr() % 16, size) for source, _, size in compiles.compiled] == [
        (0, 16),
        (4, 16),
        (0, 17),
        (0, 1),
    ]
    assert [arguments[4] for arguments in compiles.started] == [1001, 1001, 1002, 1003, 1001]


def test_starts_as_triton_3_6_does(compiles: Any) -> None:
    bound = compiles.bind(LauncherOf36)
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(2):
        bound(3, x, y, 16)
    pointers = (x.data_ptr(), y.data_ptr(), 16)
    scratch, hooks = (None, None), (None, None, None)
    assert compiles.started == [(3, 1, 1, 77, 1001, False, True, *scratch, (4, 1, 0), *hooks, *pointers, 64)]


def test_starts_as_triton_3_8_does(compiles: Any) -> None:
    bound = compiles.bind(LauncherOf38)
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(2):
        bound(3, x, y, 16)
    behind = (None, None, None, None, None, "annotations", b"signature", (x.data_ptr(), y.data_ptr(), 16, 64))
    assert compiles.started == [(3, 1, 1, 77, 1001, False, True, (4, 1, 0), *behind)]


def test_unknown_launcher_is_left_to_triton_and_said_once(
    compiles: Any, caplog: pytest.LogCaptureFixture
) -> None:
    launch._say_plain.cache_clear()
    bound = compiles.bind(UnknownLauncher)
    with caplog.at_level(logging.INFO, "prunevit"):
        for _ in range(3):
            bound(3, torch.zeros(64), torch.zeros(64), 16)
    assert len(compiles.compiled) == 3
    assert not compiles.started
    assert len(caplog.messages) == 1
    assert "starts kernels in a way that is not known here" in caplog.messages[0]


def test_profiled_launches_are_left_to_triton(compiles: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = compiles.bind(LauncherOf36)
    hook = SimpleNamespace(calls=[print])
    bound(3, torch.zeros(64), torch.zeros(64), 16)
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", hook)
    bound(3, torch.zeros(64), torch.zeros(64), 16)
    assert len(compiles.compiled) == 2
    assert not compiles.started


@pytest.mark.parametrize("kernel", [copy_kernel, mixed_up_kernel])
def test_constants_are_complete_and_last(kernel: Any) -> None:
    constants = {"num_warps": 4} if kernel is copy_kernel else {"BLOCK": 64}
    with pytest.raises(ValueError, match="must end with its constexpr parameters, each with a value"):
        Bound(kernel, **constants)


@pytest.mark.parametrize("module", ["triton.backends.nvidia.driver"])
def test_the_installed_triton_is_known(module: str) -> None:
    driver = pytest.importorskip(module)
    assert launch._parameters(driver.CudaLauncher) in (launch._GRID, launch._GRID + launch._METADATA)
