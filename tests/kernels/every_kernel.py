"""Start every Triton kernel a few times, on small and odd inputs, and hold what it gives against its oracle.

Made for a tool that watches a GPU and slows it down, such as `compute-sanitizer`::

    compute-sanitizer --tool memcheck python tests/kernels/every_kernel.py

It prints a line a kernel, and fails where a result is wrong or a kernel was not started. On a CPU it needs
TRITON_INTERPRET=1, and leaves out bf16, which is wrong there. No oracle multiplies matrices on the GPU, so that nearly
all that is watched is the package's own.
"""

import argparse
import contextlib
import importlib
import inspect
import io
import os
import symtable
from collections import Counter
from collections.abc import Callable, Container, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from clusters_cases import assert_medoids, assert_peaks, make_cluster_case
from gather_cases import FOLDS, assert_gathered, assert_members, draw_members, make_gather_case
from join_cases import assert_joined, make_join_case
from merging_cases import assert_merged, assert_nearest, make_folds, make_merging_case
from plan_cases import ORDERS, assert_fits, assert_plan, make_plan_case
from ragged_cases import (
    OPTIONS,
    Case,
    Gradients,
    assert_gradients_within_budget,
    assert_within_budget,
    differentiate,
    make_case,
)
from sample_cases import assert_sample, make_sample_case
from selection_cases import (
    RULES,
    assert_selection,
    draw_scores,
    make_rank_case,
    select_ragged,
    select_uniform,
)
from torch import Tensor
from triton.runtime.jit import KernelInterface

from prunevit.kernels import launch
from prunevit.kernels.draws import keyed_uniform, uniform_reference
from prunevit.kernels.gather import gather
from prunevit.kernels.plan import plan
from prunevit.kernels.ragged_attention import ragged_attention
from prunevit.kernels.select import Rule, rank
from prunevit.kernels.triton_members import list_members
from prunevit.kernels.turns import split_by_turns, split_reference

Attention = tuple[list[int], int, int, torch.dtype, dict[str, Any]]
"""Lengths, head size, heads, dtype and options of a case."""

ALL = OPTIONS["everything"]
REPORTS = {"key_weight": True, "prefix_rows": 2, "return_received": True}
"""All that short images of half precision can ask for at once."""
FORWARD: tuple[Attention, ...] = (
    ([0, 1, 2, 17], 20, 3, torch.float16, ALL),
    ([130, 17], 8, 1, torch.float16, ALL),  # all prefix rows' keys in one pass
    ([300, 1, 0], 72, 1, torch.float16, ALL),  # ... in several; tiles are trimmed
    ([300, 17], 8, 3, torch.float16, OPTIONS["prefix_rows"]),
    ([130, 2], 40, 1, torch.float16, {}),
    ([130, 0, 17], 8, 1, torch.float32, ALL),
    ([1, 17], 20, 3, torch.float32, {}),
    ([300, 130, 1], 64, 3, torch.bfloat16, ALL),
    # Short images, all keys of a head at once.
    ([40, 3, 17], 16, 3, torch.float16, {}),
    ([70, 1], 20, 1, torch.float16, REPORTS),
    ([17, 0, 2], 72, 3, torch.float16, {"key_weight": True, "prefix_rows": 1}),
    ([2, 65, 0], 24, 3, torch.bfloat16, {"key_weight": True}),
    ([128, 1], 64, 3, torch.bfloat16, REPORTS),
    # So many heads that a program takes several, or a large tile.
    ([40, *[2, 0, 17] * 115], 64, 3, torch.bfloat16, {}),
    ([400, *[2, 0, 17] * 115], 64, 3, torch.bfloat16, {}),
)
BACKWARD: tuple[Attention, ...] = (
    ([1, 17, 0], 20, 2, torch.float16, ALL),  # one kernel does it all
    ([70, 2], 8, 1, torch.float16, ALL),
    ([40, 17], 20, 1, torch.float16, {"prefix_rows": 2}),
    ([65, 2, 0], 20, 2, torch.float32, ALL),
    ([130, 1, 0], 8, 1, torch.float32, {}),
    ([300, 17], 64, 3, torch.bfloat16, ALL),
)


def dtypes(device: str) -> list[torch.dtype]:
    """Return the dtypes that the kernels take on this device."""
    return [torch.float16, torch.float32, *([torch.bfloat16] if device != "cpu" else [])]


def drawn(cases: tuple[Attention, ...], device: str) -> Iterator[tuple[Case, Case, dict[str, Any]]]:
    """Draw cases of attention twice, here and on the device, and their options."""
    for lengths, head_dim, num_heads, dtype, option in cases:
        if dtype in dtypes(device):
            here, there = (make_case(lengths, head_dim, num_heads, dtype, 19, on) for on in ("cpu", device))
            yield here, there, option


def attend(case: Case, option: dict[str, Any]) -> list[Tensor]:
    results = ragged_attention(case.qkv, backend="triton", **case.arguments(option))
    return [x for x in results if x is not None]


def start_attention(device: str) -> None:
    for here, there, option in drawn(FORWARD, device):
        assert_within_budget(here, option, [x.cpu() for x in attend(there, option)])


def start_attention_backward(device: str) -> None:
    for here, there, option in drawn(BACKWARD, device):
        found = differentiate(there, option, partial(attend, option=option))
        found = Gradients(found.names, *([x.cpu() for x in each] for each in found[1:]))
        assert_gradients_within_budget(here, option, found)


def start_select(device: str) -> None:
    lengths = [21, 0, 1, 130]
    score = draw_scores("nan", sum(lengths) + 6).to(device)
    for rule in {rule.kind: rule for rule in RULES.values()}.values():
        on_device = rule._replace(each=None if rule.each is None else rule.each.to(device))
        assert_selection(select_ragged(score, on_device, lengths, 2), score, rule, lengths, 2)
    eligible, rule = draw_scores("random", len(score)) < 0.3, RULES["mass"]
    for order in (None, ~eligible, eligible):
        turns = None if order is None else order.to(device)
        selection = select_ragged(
            score, rule, lengths, 1, bound=290, eligible=eligible.to(device), order=turns
        )
        assert_selection(selection, score, rule, lengths, 1, eligible, order)
    for dtype in dtypes(device):
        emitted = draw_scores("random", 3, 2 * 150 + 3, 2).to(device, dtype)
        score, rule = emitted.permute(1, 2, 0)[:, 0], Rule("count", 20)
        assert_selection(select_uniform(score, rule, 2, 150, 2), score, rule, [150, 150], 2)


def start_rank(device: str) -> None:
    for lengths in ([1], [0, 17, 0], [130, 2, 300]):
        case = make_rank_case(lengths, "nan", dead_rows=150, device=device)
        assert rank(case.score, case.eligible, **case.layout).tolist() == case.expected


def start_gather(device: str) -> None:
    for fold in FOLDS:
        case = make_gather_case(
            [17, 0, 130, 1], 37, torch.float16, fold, spare=21, dead_rows=9, device=device
        )
        assert_gathered(gather(**case), case)
    for fold, dtype in zip(("none", "pairs", "selection"), dtypes(device)):
        case = make_gather_case([20, 300], 140, dtype, fold, spare=-6, absent=("size", "soft"), device=device)
        assert_gathered(gather(**case), case)


def start_members(device: str) -> None:
    for lengths, absent in (([17, 0, 130], []), ([300, 2], ["size", "key_weight"])):
        case = draw_members(lengths, 0.6, 0) | dict.fromkeys(absent)
        given: dict[str, Any] = {
            name: None if values is None else values.to(device) for name, values in case.items()
        }
        assert_members(list_members(**given), case)


def start_plan_and_fit(device: str) -> None:
    for kind in ORDERS:
        case = make_plan_case([17, 0, 130, 1], kind, dead_rows=7, device=device)
        assert_plan(case, case.plan())
    assert_fits(case)
    for order in (torch.float16, torch.float64, torch.int16, torch.int32):
        case = make_plan_case([2, 300], "tied", prefix=2, dead_rows=300, bound=310, device=device)
        assert case.order is not None
        case.order = case.order.to(order)
        assert_plan(case, plan(case.source, None, case.order, **case.layout), keeps_all=True)


def start_turns(device: str) -> None:
    case = make_plan_case([1, 0, 300, 17], "present", prefix=2, dead_rows=9, device=device)
    given = (case.source, case.layout["image_id"], case.layout["cu_seqlens"])
    for found, expected in zip(split_by_turns(*given), split_reference(*given), strict=True):
        assert torch.equal(found, expected)


def start_nearest_and_merge(device: str) -> None:
    for dtype in dtypes(device):
        for lengths, channels, heads in (([17, 0, 130], 5, None), ([2, 300, 1], 20, 3)):
            case = make_merging_case(lengths, channels, dtype, "some", heads, dead_rows=150, device=device)
            assert_nearest(case, case.nearest(cosine=heads is not None), cosine=heads is not None)
        for normalise in (False, True):
            keep, into, weight = make_folds(case)
            folds = (keep, into, weight.to(dtype))
            assert_merged(case, folds, case.merge(*folds, normalise=normalise, eps=0.5), normalise, eps=0.5)


def start_join(device: str) -> None:
    for dtype in dtypes(device):
        case = make_join_case([1, 0, 130, 300], dtype, dead_rows=300, device=device)
        assert_joined(case, case.join())


def start_clusters(device: str) -> None:
    for dtype in dtypes(device):
        case = make_cluster_case([0, 1, 17, 40], channels=70, bound=60, dtype=dtype, device=device)
        assert_medoids(case, 2)
        assert_peaks(case, 5)


def start_sample(device: str) -> None:
    for lengths, kind, points in (([1], "random", 17), ([0, 2, 130], "nan", 30), ([17, 40], "tied", 1)):
        case = make_sample_case(lengths, kind, points, differ=points > 1, some=points == 30, device=device)
        assert_sample(case, case.sample())


def start_draws(device: str) -> None:
    keys = [torch.arange(-300, 700) * 12345678901, torch.arange(1000).int() - 1, torch.tensor([7])]
    for number in (1, 2, 3):
        found = keyed_uniform(2**32 - 5, *(key.to(device) for key in keys[:number]))
        assert torch.equal(found.cpu(), uniform_reference(2**32 - 5, keys[:number]))


STARTS: tuple[Callable[[str], None], ...] = (
    start_attention, start_attention_backward, start_select, start_rank, start_gather, start_members,
    start_plan_and_fit, start_turns, start_nearest_and_merge, start_join, start_clusters, start_sample, start_draws,
)  # fmt: skip


def modules() -> list[ModuleType]:
    """Import all modules of the kernels."""
    folder = Path(inspect.getfile(launch)).parent
    return [importlib.import_module(f"prunevit.kernels.{path.stem}") for path in sorted(folder.glob("*.py"))]


def name_of(kernel: Any) -> str:
    """Return module and name of a kernel; the name alone may occur twice."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__name__}"


def launched_kernels() -> set[str]:
    """Find the kernels that are no parts of others: all that host code names, and all that no device code does.

    Host code can name one only to launch it, whatever it is that binds it; the second half finds those that it
    reaches in ways that its names do not tell.
    """
    everything, by_host, by_device = set(), set(), set()
    for module in modules():
        table = symtable.symtable(inspect.getsource(module), module.__file__ or "", "exec")
        kernels = {name: name_of(v) for name, v in vars(module).items() if isinstance(v, KernelInterface)}
        named = [
            (kernels[name], on_device) for name, on_device in references(table, kernels) if name in kernels
        ]
        everything |= set(kernels.values())
        by_host |= {kernel for kernel, on_device in named if not on_device}
        by_device |= {kernel for kernel, on_device in named if on_device}
    return by_host | (everything - by_device)


def references(
    table: symtable.SymbolTable, kernels: Container[str], on_device: bool = False
) -> Iterator[tuple[str, bool]]:
    """Yield the names of a module's own that its code reads, and whether device code does; no local names."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
            yield symbol.get_name(), on_device
    for child in table.get_children():
        yield from references(child, kernels, on_device or child.get_name() in kernels)


def count_starts() -> Counter[str]:
    """Count the starts of each kernel from now on; those that repeat an attention just prepared go past it."""
    started: Counter[str] = Counter()
    start = launch.Bound.__call__

    def counted(self: launch.Bound, programs: int, *arguments: launch.Argument) -> launch.Start | None:
        started[name_of(self.kernel)] += 1
        return start(self, programs, *arguments)

    launch.Bound.__call__ = counted  # type: ignore[method-assign]
    return started


def take_triton_on_a_cpu() -> None:
    """Let each door choose its interpreted kernel."""
    for module in modules():
        if hasattr(module, "takes_triton"):
            module.takes_triton = lambda values: True  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description="Start every Triton kernel on small and odd inputs.")
    parser.add_argument("--device", default="cuda", help='"cpu" needs TRITON_INTERPRET=1')
    device = parser.parse_args().device
    # Each tensor in memory of its own: within one large block a tool sees no access beyond a tensor's end.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    if device == "cpu":
        take_triton_on_a_cpu()
    started = count_starts()
    for each in STARTS:
        with contextlib.redirect_stdout(io.StringIO()):  # the checks print their errors
            each(device)
    report(started)


def report(started: Counter[str]) -> None:
    """Print what was started; end the program where a kernel was not."""
    for name, count in sorted(started.items()):
        print(f"{name}: {count}")
    print(f"{len(started)} kernels, {started.total()} starts")
    missing = sorted(launched_kernels() - started.keys())
    if missing:
        raise SystemExit(
            f"every_kernel: all kernels must be started, {', '.join(missing)} not; start them too"
        )


if __name__ == "__main__":
    main()
