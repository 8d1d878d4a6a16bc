"""The kernel of `keyed_uniform` on a CPU, interpreted.

`test_plan.py` runs this file in a process of its own: TRITON_INTERPRET=1 must be set before
triton is imported.
"""

import pytest
import torch

from prunevit.kernels import draws as door

pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1, 2**31, 2**32 - 1, -5])
def test_the_bits_of_the_reference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.arange(-300, 700, dtype=torch.int64) * 12345678901
    keys = [numbers, torch.arange(1000, dtype=torch.int32) - 1, torch.tensor([2**31 - 2])]
    expected = [door.keyed_uniform(seed, *keys[:number]) for number in (1, 2, 3)]
    monkeypatch.setattr(door, "takes_triton", lambda keys: True)
    for number, right in enumerate(expected, start=1):
        assert torch.equal(door.keyed_uniform(seed, *keys[:number]), right)
