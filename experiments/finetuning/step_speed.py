"""The training step of a pruned model beside the unpruned one's, each in its best mode, in one process on a GPU.

    python -m prunevit.experiments.finetuning.step_speed

Eager, compiled, and compiled into CUDA graphs. Forward, backward, clipping and AdamW in bf16 autocast, on random images
that stay on the device. Peak memory includes weights, gradients and the optimiser's state.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from prunevit import prune
from prunevit.experiments.finetuning.config import MODES
from prunevit.experiments.finetuning.module import compiled
from prunevit.experiments.policy_spec import build_policy
from prunevit.experiments.report import environment
from prunevit.experiments.timing import interleaved, peak_mb
from prunevit.vit import RaggedViT


@dataclass(frozen=True)
class StepSpeed:
    """What a training step costs.

    Attributes:
        model: "dense" or "pruned".
        mode: One of `MODES`.
        step_ms: Median.
        images_per_s: Of the batch, at the median.
        peak_mb: Largest allocation of a step.
    """

    model: str
    mode: str
    step_ms: float
    images_per_s: float
    peak_mb: float


def training_step(
    model: nn.Module, forward: Callable[[Tensor], Tensor], images: Tensor, targets: Tensor, opt: Any
) -> None:
    """Take one step.

    Args:
        model: Its parameters.
        forward: From images to logits, the model or compiled code of it.
        images: `[B, 3, H, W]`.
        targets: `[B]`.
        opt: The optimiser.
    """
    torch.compiler.cudagraph_mark_step_begin()
    with torch.autocast(images.device.type, torch.bfloat16):
        logits = forward(images)
    loss = cross_entropy(logits.float(), targets)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    opt.step()


def measure(
    name: str, policy: str, keep_rate: float, batch: int, seconds: float, device: str
) -> list[StepSpeed]:
    """Time the steps of both models in every mode, interleaved.

    Args:
        name: timm architecture.
        policy: Name of a policy with a keep rate.
        keep_rate: Its knob.
        batch: Images of a step.
        seconds: For each.
        device: Where.
    """
    torch.set_float32_matmul_precision("high")
    steps: dict[tuple[str, str], Callable[[], None]] = {}
    peaks: dict[tuple[str, str], float] = {}
    for kind in ("dense", "pruned"):
        for mode in MODES if device == "cuda" else MODES[:2]:
            run = _step(kind, mode, name, policy, keep_rate, batch, device)
            run()  # compiles, and makes the optimiser's state
            # The next one captures: a CUDA graph takes its memory then, and none when it is replayed.
            peak = peak_mb(partial(_repeat, run, 3), torch.device(device), _state(run))
            steps[kind, mode], peaks[kind, mode] = run, peak or float("nan")
    spreads = interleaved([*steps.values()], seconds, torch.device(device))
    return [
        StepSpeed(*key, spread.median, 1000 * batch / spread.median, peaks[key])
        for key, spread in zip(steps, spreads)
    ]


def _step(
    kind: str, mode: str, name: str, policy: str, keep_rate: float, batch: int, device: str
) -> partial[None]:
    torch.manual_seed(0)
    model: Any = timm.create_model(name).to(device).train()
    if kind == "pruned":
        model = prune(model, build_policy({"name": policy, "keep_rate": keep_rate}))
    size = (model.model if isinstance(model, RaggedViT) else model).patch_embed.img_size
    images = torch.randn(batch, 3, *size, device=device)
    targets = torch.randint(model.num_classes, (batch,), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=device == "cuda" or None)
    return partial(training_step, model, compiled(model, mode), images, targets, optimizer)


def _repeat(run: Callable[[], None], times: int) -> None:
    for _ in range(times):
        run()


def _state(run: partial[None]) -> Iterator[Tensor]:
    """What a model keeps between steps: parameters, gradients, the optimiser's moments."""
    model, optimizer = run.args[0], run.args[-1]
    for parameter in model.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
        yield from (each for each in optimizer.state[parameter].values() if isinstance(each, Tensor))


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line; print a JSON object."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="deit_small_patch16_224", help="%(default)s")
    parser.add_argument("--policy", default="evit", help="%(default)s")
    parser.add_argument("--keep-rate", type=float, default=0.7, help="%(default)s")
    parser.add_argument("--batch-size", type=int, default=256, help="%(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each; %(default)s")
    parser.add_argument("--device", default="cuda", help="%(default)s")
    given = parser.parse_args(arguments)
    found = measure(given.model, given.policy, given.keep_rate, given.batch_size, given.seconds, given.device)
    best = {
        kind: min((each for each in found if each.model == kind), key=lambda each: each.step_ms)
        for kind in ("dense", "pruned")
    }
    ratios = {
        "speedup": best["dense"].step_ms / best["pruned"].step_ms,
        "peak_memory": best["pruned"].peak_mb / best["dense"].peak_mb,
    }
    content = {
        "settings": vars(given),
        "environment": environment(),
        "rows": [asdict(each) for each in found],
    }
    print(json.dumps(content | ratios, indent=1))


if __name__ == "__main__":
    main()
