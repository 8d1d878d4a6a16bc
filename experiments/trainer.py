"""Lightning's Trainer as this project uses it: no sampler of its own, no chatter."""

import logging
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, RichProgressBar

from prunevit.experiments.config import ImagesConfig
from prunevit.experiments.ranks import processes

Value = TypeVar("Value")

# Said of every short run, of a metric without images, and by Lightning of its own use of torch.
EXPECTED_WARNINGS = (
    *(".*does not have many workers.*", ".*method of metric .* was called before.*", ".*LeafSpec.*"),
)


def make_trainer(config: ImagesConfig, bar: Callback | None = None, **settings: Any) -> Trainer:
    """Build the trainer of an evaluation, or of something else.

    Args:
        config: `accelerator`, `devices`, `precision`.
        bar: Progress bar; Lightning's by default.
        settings: Further arguments of Lightning's, which win.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    # The bar goes to stderr: stdout holds the report alone.
    bars = [bar or RichProgressBar(console_kwargs={"stderr": True})] if config.progress else []
    devices, machines = processes(config.devices)
    defaults: dict[str, Any] = {
        "accelerator": "gpu" if config.on_gpu else "cpu",
        "devices": devices,
        "num_nodes": machines,
        "precision": config.precision,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": config.progress,
        "use_distributed_sampler": False,
    }
    callbacks = [*settings.pop("callbacks", []), *bars]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*available but not used.*")  # as was asked for
        return Trainer(**{**defaults, **settings, "callbacks": callbacks})


def run_test(trainer: Trainer, module: LightningModule) -> None:
    """Run the module's test.

    Args:
        trainer: From `make_trainer`.
        module: Its `test_dataloader` gives the images.

    Raises:
        KeyboardInterrupt: On Ctrl-C, which Lightning would turn into exit code 1.
    """
    run_quietly(lambda: trainer.test(module, verbose=False))


def run_quietly(loop: Callable[[], Any], expected: tuple[str, ...] = ()) -> None:
    """Run one of Lightning's loops without the warnings that are known to mean nothing.

    Args:
        loop: Calls `fit` or `test`.
        expected: Patterns of further such warnings.

    Raises:
        KeyboardInterrupt: On Ctrl-C, which Lightning would turn into exit code 1.
    """
    with warnings.catch_warnings():
        for message in (*EXPECTED_WARNINGS, *expected):
            warnings.filterwarnings("ignore", message)
        try:
            loop()
        except BaseException as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def gathered(value: Value) -> list[Value]:
    """Collect a value from every process, in the order of their ranks.

    Args:
        value: This process's.
    """
    if not dist.is_initialized():
        return [value]
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
