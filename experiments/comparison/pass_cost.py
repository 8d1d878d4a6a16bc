"""What a comparison costs beside the forward passes in it: the one pass over many rows, timed against its parts.

    python -m prunevit.experiments.comparison.pass_cost --output DIR --repeats 10 batch_size=100 data.num_workers=8

The pass is that of `prunevit compare`: it reads and decodes the photos once, runs the unpruned model and every row on
each batch, and measures all that a row holds, but for the speed and the check against the reference, which are no part
of it. Its parts are timed alone, warm, in the same process: one reading of the photos, and the forward passes of the
unpruned model and of the rows on the same batches, on the device already. The pass runs its models eagerly, so its
ratio is taken to eager forward passes; those in another mode stand beside. A ratio below 1 means that reading went on
meanwhile.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prunevit.execution import MODES, accelerate
from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.rows import plan_rows
from prunevit.experiments.comparison.shared import build_contenders
from prunevit.experiments.compose import compose
from prunevit.experiments.contender import Contender
from prunevit.experiments.data import EvaluationData, load_data
from prunevit.experiments.one_pass import OnePass
from prunevit.experiments.progress import Bar
from prunevit.experiments.report import environment
from prunevit.experiments.trainer import make_trainer, run_test

# Five policies at four rates on the 300 photos; what belongs to no pass is left out.
WORDS = (
    *("data=sample", "keep_rates=[0.8,0.7,0.5,0.3]"),
    *("timing_s=0", "numeric_images=0", "pictures=0", "progress=false"),
)
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class PassCost:
    """Seconds of a pass and of its parts.

    Attributes:
        rows: In the pass, the unpruned model not counted.
        images: Read, each once.
        pass_s: The pass.
        read_s: Reading, decoding and transforming alone.
        forward_s: The forward passes of the unpruned model and of all rows alone, by execution mode.
        ratios: `pass_s` over `read_s` plus `forward_s`, by execution mode.
    """

    rows: int
    images: int
    pass_s: float
    read_s: float
    forward_s: dict[str, float]
    ratios: dict[str, float]

    def markdown(self) -> str:
        """One line of a table."""
        parts = [
            f"{mode} {self.forward_s[mode]:.2f} s, ratio {self.ratios[mode]:.3f}" for mode in self.ratios
        ]
        figures = f"{self.rows} rows | {self.images} images | {self.pass_s:.2f} s | {self.read_s:.2f} s"
        return f"| {figures} | {'; '.join(parts)} |"


def measure(config: CompareConfig, repeats: int, modes: Sequence[str]) -> PassCost:
    """Time a pass and its parts.

    Args:
        config: Of the comparison.
        repeats: How often each photo is read, so that the pass is long enough to time.
        modes: Of `accelerate`, in which the forward passes are timed alone.

    Cost:
        Holds all photos on the device: 0.5 MB for each of 196 px.
    """
    contenders, views = build_contenders(plan_rows(config), config)
    found = load_data(config.data, contenders[0].dense, views)
    chosen = [*found.chosen] * repeats
    data = replace(found, chosen=chosen, size=len(chosen))
    _run_pass(contenders, replace(data, chosen=chosen[: config.batch_size], size=config.batch_size), config)
    contenders, _ = build_contenders(
        plan_rows(config), config
    )  # counts begin at zero again; kernels are warm
    pass_s = _seconds(partial(_run_pass, contenders, data, config))
    device = torch.device("cuda" if config.on_gpu else "cpu")
    read_s = _seconds(partial(_read, data, config))
    batches = _read(data, config, device)
    forward_s = {mode: _forward_seconds(contenders, batches, mode) for mode in modes}
    ratios = {mode: pass_s / (read_s + seconds) for mode, seconds in forward_s.items()}
    return PassCost(len(contenders), len(chosen), pass_s, read_s, forward_s, ratios)


def _run_pass(contenders: Sequence[Contender], data: EvaluationData, config: CompareConfig) -> None:
    bar = Bar()
    run_test(make_trainer(config, bar), OnePass(contenders, data, config, bar))


def _read(data: EvaluationData, config: CompareConfig, device: torch.device | None = None) -> list[Inputs]:
    """Read all batches; those that go to a device are kept, as copies: a reader's own memory is not for keeping."""
    loader = data.loader(config.batch_size, config.data.num_workers)
    read = ((batch.images, batch.positions) for batch in loader)
    if device is None:
        for _ in read:
            pass
        return []
    return [tuple(each.to(device, copy=True) for each in inputs) for inputs in read]


@torch.inference_mode()
def _forward_seconds(contenders: Sequence[Contender], batches: Sequence[Inputs], mode: str) -> float:
    """Seconds of the forward passes of the unpruned model and of all rows on all batches, warm."""
    device = batches[0][0].device
    dense = accelerate(contenders[0].dense.to(device), mode)
    rows = [accelerate(each.pruned.to(device), mode) for each in contenders]

    def forward() -> None:
        for images, positions in batches:
            dense(images)
            for row in rows:
                row(images, positions)

    for _ in range(
        3
    ):  # a graph is captured at the second call of a shape, and the last batch may have its own
        forward()
    return _seconds(forward)


def _seconds(call: Callable[[], object]) -> float:
    """Seconds of a call, from an idle device until it is idle again."""
    _wait()
    started = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> PassCost:
    """Read the command line; print a line of Markdown, and write it and a JSON object.

    Args:
        arguments: Words after the program's name; those of the process by default.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of pass_cost.json and pass_cost.md"
    )
    parser.add_argument("--mode", choices=MODES, help="beside eager; graph on a GPU, else none")
    parser.add_argument("--repeats", type=int, default=1, help="how often each photo is read; %(default)s")
    parser.add_argument("words", nargs="*", help="keys of prunevit compare, for example batch_size=64")
    given = parser.parse_args(arguments)
    said = {word.partition("=")[0] for word in given.words}
    words = [word for word in WORDS if word.partition("=")[0] not in said]
    config: Any = compose("compare", CompareConfig, [*words, *given.words])
    beside = given.mode or ("graph" if config.on_gpu else "eager")
    cost = measure(config, given.repeats, [*dict.fromkeys(["eager", beside])])
    given.output.mkdir(parents=True, exist_ok=True)
    content = {"environment": environment(), "config": asdict(config), **asdict(cost)}
    (given.output / "pass_cost.json").write_text(json.dumps(content, indent=1, default=str), encoding="utf-8")
    (given.output / "pass_cost.md").write_text(cost.markdown() + "\n", encoding="utf-8")
    print(cost.markdown())
    return cost


if __name__ == "__main__":
    main()
