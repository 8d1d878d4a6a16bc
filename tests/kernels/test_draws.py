"""`keyed_uniform`: its numbers, the compiled operation, and the kernel on a GPU."""

from pathlib import Path

import pytest
import torch
from triton_without_gpu import compile_for_hopper

from prunevit.kernels import draws as door
from prunevit.kernels.draws import keyed_uniform


def by_hand(seed: int, *keys: int) -> float:
    """One number by Python's own integers."""

    def mix(value: int) -> int:
        for _ in range(2):
            value = ((value >> 16) ^ value) * 0x45D9F3B % 2**32
        return (value >> 16) ^ value

    state = seed % 2**32
    for key in keys:
        state = mix((mix(state) + key * 0x1E3779B1) % 2**32)
    return (mix(state) >> 8) / 2**24


def test_numbers_by_hand() -> None:
    first, second = torch.tensor([5, -1, 2**40 + 3]), torch.tensor([[7], [2**31]])
    got = keyed_uniform(-9, first, second)
    assert got.tolist() == [[by_hand(-9, a, b) for a in first.tolist()] for b in (7, 2**31)]


def test_numbers_are_uniform() -> None:
    count = torch.histc(keyed_uniform(3, torch.arange(200)[:, None], torch.arange(500)), 20, 0, 1)
    assert (count - 5000).square().sum() / 5000 < 43.8  # chi-squared with 19 degrees of freedom, 0.1 %


def test_operation_is_well_formed_and_compiles_without_a_break() -> None:
    keys = (torch.arange(9), torch.tensor([2]))
    torch.library.opcheck(door._uniform_op, (7, keys))
    compiled = torch.compile(keyed_uniform, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(7, *keys), keyed_uniform(7, *keys))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_kernel_compiles_for_hopper(number: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from prunevit.kernels import triton_draws

    keys = [torch.arange(1000), torch.arange(1000).int(), torch.tensor([2])][:number]
    compiled = compile_for_hopper(
        monkeypatch, triton_draws, lambda: triton_draws.triton_uniform(7, keys), tmp_path
    )
    assert compiled.spilled == 0


@pytest.mark.gpu
def test_the_bits_of_the_reference_on_a_gpu() -> None:
    keys = [torch.arange(-300, 70000) * 12345678901, torch.arange(70300).int(), torch.tensor([2**31 - 2])]
    for seed in (0, 2**31, 2**32 - 1, -5):
        for number in (1, 2, 3):
            on_gpu = keyed_uniform(seed, *(key.cuda() for key in keys[:number]))
            assert torch.equal(on_gpu.cpu(), keyed_uniform(seed, *keys[:number]))
