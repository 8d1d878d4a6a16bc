"""Inputs and the independent oracle of the kernel tests."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

LENGTHS = ([1], [0, 5, 0], [197] * 4, [577], [1, 197, 2, 64], [63, 65, 128, 129])
HEAD_DIMS = (32, 48, 64, 72, 80, 88, 104, 128)
HEADS = (1, 3, 6, 12)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "key_weight": {"key_weight": True},
    "soft_exempt_self": {"soft": True, "exempt_self": True},
    "softmax_eps": {"key_weight": True, "soft": True, "softmax_eps": 1e-2},
    "prefix_rows": {"prefix_rows": 5},
    "received": {"return_received": True},
    "everything": {
        "key_weight": True,
        "soft": True,
        "exempt_self": True,
        "softmax_eps": 1e-2,
        "prefix_rows": 2,
        "return_received": True,
    },
}


@dataclass
class Case:
    """Packed rows of some images: standard normal q, k, v, and NaN wherever no backend may look."""

    lengths: list[int]
    qkv: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    key_weight: Tensor
    soft: Tensor

    def arguments(self, option: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `ragged_attention` for an entry of OPTIONS."""
        chosen = {name: getattr(self, name) for name in ("key_weight", "soft") if option.get(name)}
        return {"cu_seqlens": self.cu_seqlens, "max_seqlen": self.max_seqlen, **option, **chosen}

    @property
    def image_id(self) -> Tensor:
        counts = [*self.lengths, len(self.qkv) - sum(self.lengths)]
        return torch.arange(len(counts)).repeat_interleave(torch.tensor(counts)).int().to(self.qkv.device)


def make_case(
    lengths: list[int],
    head_dim: int,
    num_heads: int,
    dtype: torch.dtype = torch.float64,
    dead_rows: int = 0,
    device: str = "cpu",
) -> Case:
    """Draw a case; a third of the soft mask is 0, each image keeps its first row."""
    generator = torch.Generator().manual_seed(sum(lengths) + head_dim)
    live = sum(lengths)

    def with_dead_rows(values: Tensor) -> Tensor:
        dead = torch.full((dead_rows, *values.shape[1:]), float("nan"), dtype=values.dtype)
        return torch.cat([values, dead]).to(device)

    qkv = torch.randn(live, 3, num_heads, head_dim, generator=generator, dtype=torch.float64)
    key_weight = torch.empty(live, dtype=torch.float64).uniform_(0.2, 20, generator=generator)
    soft = (torch.rand(live, generator=generator) > 1 / 3).double()
    starts = torch.tensor([0, *lengths]).cumsum(0)
    soft[starts[:-1][torch.tensor(lengths) > 0]] = 1
    weight_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return Case(
        lengths=lengths,
        qkv=with_dead_rows(qkv.to(dtype)),
        cu_seqlens=starts.int().to(device),
        max_seqlen=max(lengths),
        key_weight=with_dead_rows(key_weight.to(weight_dtype)),
        soft=with_dead_rows(soft.to(weight_dtype)),
    )


def loop_attention(case: Case, option: dict[str, Any], dtype: torch.dtype) -> list[Tensor]:
    """Attend one image and one head at a time, all of it in `dtype`: the oracle in fp64, eager otherwise.

    Written apart from every backend, and with a plain logarithm: no `key_weight` may be 0.
    """
    num_rows, _, num_heads, head_dim = case.qkv.shape
    prefix_rows = option.get("prefix_rows", 0)
    eps = option.get("softmax_eps", 0.0)
    out = torch.zeros(num_rows, num_heads, head_dim, dtype=dtype, device=case.qkv.device)
    prefix = out.new_zeros(num_rows, prefix_rows, num_heads)
    received = out.new_zeros(num_rows, num_heads)
    stop = 0
    for length in case.lengths:
        start, stop = stop, stop + length
        rows = slice(start, stop)
        ones = torch.ones(length, dtype=dtype, device=out.device)
        key_weight = case.key_weight[rows].to(dtype) if option.get("key_weight") else ones
        soft = case.soft[rows].to(dtype) if option.get("soft") else ones
        weight = (key_weight * soft).repeat(length, 1)
        if option.get("exempt_self"):
            weight.fill_diagonal_(0)
            weight += torch.diag(key_weight)
        for head in range(num_heads if length else 0):
            q, k, v = case.qkv[rows, :, head].to(dtype).unbind(1)
            score = q @ k.T * head_dim**-0.5
            top = (score + key_weight.log()).amax(1, keepdim=True)
            p = weight * (score - top).exp()
            probability = (p + eps / length) / (p.sum(1, keepdim=True) + eps)
            out[rows, head] = probability @ v
            prefix[rows, : min(prefix_rows, length), head] = probability[:prefix_rows].T
            received[rows, head] = probability.sum(0) / length
    results = [out]
    if prefix_rows:
        results.append(prefix)
    if option.get("return_received"):
        results.append(received)
    return results


def assert_within_budget(case: Case, option: dict[str, Any], results: Any) -> None:
    """Hold the error below twice that of the eager formula in the same dtype, plus one rounding step."""
    with torch.no_grad():
        oracle = loop_attention(case, option, torch.float64)
        eager = loop_attention(case, option, case.qkv.dtype)
    present = [x for x in results if x is not None]
    assert len(present) == len(oracle)
    for name, kernel, right, plain in zip(("out", "probability", "probability"), present, oracle, eager):
        if right.numel() == 0:
            continue
        step = torch.finfo(kernel.dtype).eps * right.abs().max().item()
        kernel_error = (kernel.double() - right).abs().max().item()
        eager_error = (plain.double() - right).abs().max().item()
        print(f"{name}: kernel {kernel_error:.3g}, eager {eager_error:.3g}, step {step:.3g}")
        assert kernel_error <= 2 * eager_error + step, f"{name} {case.lengths} {option}"
        dead = kernel[sum(case.lengths) :]
        assert torch.equal(dead, torch.zeros_like(dead))


class Gradients(NamedTuple):
    """Names of what was differentiated by, the gradients, and the cotangents of the results that they belong to."""

    names: list[str]
    values: list[Tensor]
    cotangents: list[Tensor]


def differentiate(
    case: Case,
    option: dict[str, Any],
    attend: Callable[[Case], list[Tensor]],
    cotangents: list[Tensor] | None = None,
) -> Gradients:
    """Differentiate `attend` by qkv and the weights that the option uses; the cotangents are drawn if not given."""
    names = ["qkv", *(name for name in ("key_weight", "soft") if option.get(name))]
    inputs = [getattr(case, name).detach().clone().requires_grad_() for name in names]
    results = attend(replace(case, **dict(zip(names, inputs))))
    if cotangents is None:
        generator = torch.Generator().manual_seed(0)
        cotangents = [torch.randn(x.shape, generator=generator).to(x) for x in results]
    cotangents = [cotangent.to(x.dtype) for cotangent, x in zip(cotangents, results, strict=True)]
    return Gradients(names, list(torch.autograd.grad(results, inputs, cotangents)), cotangents)


def assert_gradients_within_budget(case: Case, option: dict[str, Any], found: Gradients) -> None:
    """Hold the error below three times that of the eager formula in the same dtype, plus one rounding step."""
    oracle, eager = (
        differentiate(
            case, option, partial(loop_attention, option=option, dtype=dtype), found.cotangents
        ).values
        for dtype in (torch.float64, case.qkv.dtype)
    )
    live = sum(case.lengths)
    for name, kernel, right, plain in zip(found.names, found.values, oracle, eager, strict=True):
        assert torch.equal(kernel[live:], torch.zeros_like(kernel[live:])), f"dead rows of {name}"
        if live == 0:
            continue
        kernel, right, plain = (x[:live].double() for x in (kernel, right, plain))
        step = torch.finfo(case.qkv.dtype).eps * right.abs().max().item()
        kernel_error = (kernel - right).abs().max().item()
        eager_error = (plain - right).abs().max().item()
        print(f"d {name}: kernel {kernel_error:.3g}, eager {eager_error:.3g}, step {step:.3g}")
        assert kernel_error <= 3 * eager_error + step, f"{name} {case.lengths} {option}"


def poison_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `torch.empty` and its kin give NaN, so that an output that is not written fails its test."""

    def poisoned(allocate: Any) -> Any:
        def allocate_poisoned(*args: Any, **kwargs: Any) -> Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocate_poisoned

    for owner, name in ((torch, "empty"), (Tensor, "new_empty_strided")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
