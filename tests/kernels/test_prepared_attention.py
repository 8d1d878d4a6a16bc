"""What a repeated call of "triton" takes from the first, on an imagined GPU: never more than is the same."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from launch_kernel import copy_kernel  # noqa: E402

from prunevit.kernels import backends, launch, triton_forward  # noqa: E402
from prunevit.kernels import ragged_attention as door  # noqa: E402
from prunevit.kernels.launch import Bound  # noqa: E402
from prunevit.kernels.ragged_attention import ragged_attention  # noqa: E402

pytestmark = pytest.mark.skipif(
    not isinstance(copy_kernel, triton.JITFunction),
    reason="interpreted kernels are launched by triton itself",
)


class Launcher:
    """Has the shape of triton 3.6's `CudaLauncher`."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid, launch_pdl = False, True

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(
        self, gridX: int, gridY: int, gridZ: int, stream: int, function: int, *args: Any
    ) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Record what is compiled and what is started; the device is that of CPU tensors."""
    found = SimpleNamespace(compiled=[], started=[], device=-1)

    def compile_and_launch(bound: Bound, programs: int, arguments: Any) -> Any:
        found.compiled.append((bound.kernel.__name__, programs, arguments))
        return SimpleNamespace(
            run=Launcher(lambda *values: found.started.append(values)),
            function=len(found.compiled),
            packed_metadata=(),
            metadata=SimpleNamespace(target=SimpleNamespace(backend="cuda")),
        )

    monkeypatch.setattr(backends, "_triton_obstacle", lambda q, interpret: None)
    monkeypatch.setattr(launch, "current_device", lambda: found.device)
    monkeypatch.setattr(
        triton.runtime.driver, "_active", SimpleNamespace(get_current_stream=lambda device: 77)
    )
    monkeypatch.setattr(Bound, "_launch", compile_and_launch)
    monkeypatch.setattr(door, "_prepared", {})
    for function in (triton_forward._prepare, triton_forward.bind):
        function.cache_clear()
    yield found
    for function in (triton_forward._prepare, triton_forward.bind):
        function.cache_clear()


def attend(num_rows: int = 12, images: int = 2, qkv: Tensor | None = None, **settings: Any) -> Any:
    if qkv is None:
        qkv = torch.zeros(num_rows, 3, 2, 32, dtype=torch.float16)
    bounds = torch.linspace(0, len(qkv), images + 1).int()
    call: dict[str, Any] = {"cu_seqlens": bounds, "max_seqlen": 200, "backend": "triton"} | settings
    return ragged_attention(qkv, **call)


def integers(values: tuple[Any, ...]) -> tuple[int, ...]:
    """Rows, images and tiles that `forward_kernel` was started with by the launcher above."""
    return values[13 + 3 : 13 + 6]


def test_other_batches_start_what_the_first_compiled(gpu: Any) -> None:
    for num_rows in (12, 12, 34, 300):
        out = attend(num_rows).out
        assert out.shape == (num_rows, 2, 32)
    assert [name for name, _, _ in gpu.compiled] == ["forward_kernel"]
    tiles = gpu.compiled[0][2][5]
    assert [integers(values) for values in gpu.started] == [(12, 2, tiles), (34, 2, tiles), (300, 2, tiles)]
    assert {values[0] for values in gpu.started} == {2 * (2 + 1) * tiles}  # heads x (images and dead rows)
    attend(12, images=5)
    assert integers(gpu.started[-1])[1] == 5
    assert len(gpu.compiled) == 1
    assert len(door._prepared) == 2


def test_a_direct_start_takes_the_arguments_that_triton_took(gpu: Any) -> None:
    qkv = torch.zeros(12, 3, 2, 32, dtype=torch.float16)
    weights = {"key_weight": torch.ones(12), "soft": torch.ones(12)}
    cases: list[dict[str, Any]] = [
        {},
        {"prefix_rows": 2},
        weights,
        {"max_seqlen": 16, **weights, "soft": None},
    ]
    for settings in cases:
        gpu.compiled.clear()
        gpu.started.clear()
        for _ in range(2):
            attend(qkv=qkv, **settings)
        [(name, programs, arguments)] = gpu.compiled
        assert name == ("short_kernel" if settings.get("max_seqlen") else "forward_kernel")
        [started] = gpu.started
        assert started[0] == programs
        assert started[3] == 77
        values = started[13 : 13 + len(arguments)]
        for given, value in zip(arguments, values, strict=True):
            if given is None:
                assert not value
            elif isinstance(given, int):
                assert value == given
            elif given.data_ptr() != qkv.data_ptr():
                assert value % 16 == 0  # bounds and results lie elsewhere each time
            else:
                assert value == qkv.data_ptr()
        for weight in (settings.get("key_weight"), settings.get("soft")):
            assert weight is None or weight.data_ptr() in values


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_weight": torch.ones(11)}, r"key_weight must be floating \[12\]"),
        ({"key_weight": torch.ones(12).bool()}, r"key_weight must be floating \[12\]"),
        ({"key_weight": torch.ones(12, 1)}, r"key_weight must be floating \[12\]"),
        ({"key_weight": torch.ones(12, device="meta")}, "key_weight must be on the device of q"),
        ({"image_id": torch.zeros(11).int()}, r"image_id must be int32 \[12\]"),
        ({"cu_seqlens": torch.tensor([0, 6, 12])}, "cu_seqlens must be contiguous int32"),
        ({"cu_seqlens": torch.tensor([0, 1, 6, 1, 12, 1]).int()[::2]}, "cu_seqlens must be contiguous int32"),
        ({"cu_seqlens": torch.zeros(3, device="meta").int()}, "cu_seqlens must be on the device of q"),
        ({"max_seqlen": -1}, "not be negative"),
        ({"softmax_eps": -1.0}, "not be negative"),
        ({"uniform": True, "max_seqlen": 7}, "uniform needs 2 x 7 rows, got 12"),
        ({"qkv": torch.zeros(12, 2, 2, 32).half()}, "q must be packed"),
        ({"qkv": torch.zeros(12, 3, 2, 32).int()}, "q must be fp16, bf16, fp32 or fp64"),
        ({"qkv": torch.zeros(12, 3, 32, 2).half().mT}, "last dimension of q, k, v must be contiguous"),
        ({"k": torch.zeros(12, 2, 32).half()}, "q must be packed"),
        ({"backend": "flash"}, "backend must be one of"),
    ],
)
def test_what_is_wrong_is_refused_after_a_right_call_too(gpu: Any, change: Any, message: str) -> None:
    right = {"key_weight": torch.ones(12), "image_id": torch.zeros(12).int(), "max_seqlen": 6}
    for settings in ({**right, "uniform": True}, right, {"max_seqlen": 6}):
        attend(**settings)
        with pytest.raises(ValueError, match=message):
            attend(**settings | change)


def test_uniform_images_are_counted_in_each_call(gpu: Any) -> None:
    attend(12, uniform=True, max_seqlen=6)
    attend(13, uniform=True, max_seqlen=6)
    with pytest.raises(ValueError, match="uniform needs 2 x 6 rows, got 11"):
        attend(11, uniform=True, max_seqlen=6)


def test_separate_tensors_are_compared_with_the_queries_of_each_call(gpu: Any) -> None:
    for rows in (12, 20):
        q, k, v = torch.zeros(3, rows, 2, 32).half()
        for _ in range(2):
            attend(qkv=q, k=k, v=v)
        for wrong in ({"k": k[1:]}, {"v": v[:, :1]}, {"v": v.float()}):
            with pytest.raises(ValueError, match="q, k, v must have one"):
                attend(qkv=q, **{"k": k, "v": v} | wrong)
    assert len(gpu.compiled) == 1


def test_what_triton_specialises_on_is_looked_at_in_each_call(gpu: Any) -> None:
    memory = torch.zeros(12 * 3 * 64 + 1, dtype=torch.float16)
    aligned, shifted = (memory[i : i + 12 * 3 * 64].view(12, 3, 2, 32) for i in (0, 1))
    for qkv, function in ((aligned, None), (shifted, None), (aligned, 1), (shifted, 2), (aligned, 1)):
        gpu.started.clear()
        attend(qkv=qkv)
        assert [values[4] for values in gpu.started] == ([] if function is None else [function])
    attend(qkv=aligned.float())
    attend(qkv=aligned, key_weight=torch.ones(12))
    attend(qkv=aligned, key_weight=torch.ones(12).half())
    attend(qkv=aligned.transpose(0, 2).contiguous().transpose(0, 2))
    assert len(gpu.compiled) == 6


def test_a_row_of_its_own_says_nothing_of_a_stride(gpu: Any) -> None:
    """One row is contiguous whatever its stride: `Q_ROW` is not taken over from it."""
    wide = torch.zeros(4, 5, 2, 32, dtype=torch.float16)[::2, :3]
    single = wide[1:]
    assert single.is_contiguous()
    attend(qkv=single, images=1)
    attend(12, images=1)
    row_strides = [prepared.__self__.plan.forward.constants["Q_ROW"] for prepared in door._prepared.values()]  # type: ignore[attr-defined]
    assert row_strides == [2 * 5 * 64, 3 * 64]


def test_weights_are_read_without_a_stride(gpu: Any) -> None:
    weight = torch.arange(24.0).view(12, 2)[:, 1]
    for _ in range(2):
        attend(key_weight=weight)
    for _, _, arguments in gpu.compiled:
        assert torch.equal(arguments[8], weight)
        assert arguments[8].is_contiguous()
    assert not door._prepared


def test_gradients_empty_batches_and_tensors_as_numbers_go_the_long_way(gpu: Any) -> None:
    attend(softmax_scale=torch.tensor(0.5))
    attend(qkv=torch.zeros(0, 3, 2, 32).half())
    attend(max_seqlen=0)
    assert not door._prepared
    qkv = torch.zeros(12, 3, 2, 32).half().requires_grad_()
    with torch.no_grad():
        assert not attend(qkv=qkv).out.requires_grad
    assert len(door._prepared) == 1
    assert attend(qkv=qkv).out.requires_grad
    assert len(door._prepared) == 1


def test_another_current_device_is_left_to_bound(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attend()
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)
            gpu.device = self.index

        def __exit__(self, *_: object) -> None:
            gpu.device = 3

    monkeypatch.setattr(torch.cuda, "device", Device)
    gpu.device = 3
    attend()
    assert entered == [-1]
    assert len(gpu.started) == 1


def test_a_profiler_sees_remembered_calls(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        attend()
    monkeypatch.setattr(triton.knobs.runtime, "launch_exit_hook", SimpleNamespace(calls=[print]))
    attend()
    assert (len(gpu.compiled), len(gpu.started)) == (2, 1)


def test_what_is_remembered_is_bounded(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "_MOST_PREPARED", 3)
    for images in range(1, 9):
        attend(images=images)
        assert len(door._prepared) <= 3
