"""Lightning's Trainer as this project uses it: no checkpoints, no sampler of its own, no chatter."""

import logging
import warnings

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar

from prunevit.experiments.config import RunConfig

# Said of every short run, of a metric without images, and by Lightning of its own use of torch.
EXPECTED_WARNINGS = (
    *(".*does not have many workers.*", ".*method of metric .* was called before.*", ".*LeafSpec.*"),
)


def make_trainer(config: RunConfig) -> Trainer:
    """Build the trainer of an evaluation.

    Args:
        config: `accelerator`, `devices`, `precision`, `progress`.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    return Trainer(
        accelerator="gpu" if config.on_gpu else "cpu",
        devices=config.devices,
        precision=config.precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=config.progress,
        # The bar goes to stderr: stdout holds the report alone.
        callbacks=[RichProgressBar(console_kwargs={"stderr": True})] if config.progress else [],
        use_distributed_sampler=False,
    )


def run_test(trainer: Trainer, module: LightningModule) -> None:
    """Run the module's test.

    Args:
        trainer: From `make_trainer`.
        module: Its `test_dataloader` gives the images.

    Raises:
        KeyboardInterrupt: On Ctrl-C, which Lightning would turn into exit code 1.
    """
    with warnings.catch_warnings():
        for message in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message)
        try:
            trainer.test(module, verbose=False)
        except SystemExit as error:
            if isinstance(error.__context__, KeyboardInterrupt):
                raise KeyboardInterrupt from None
            raise


def gathered(value: str | None) -> list[str | None]:
    """Collect a value from every process, in the order of their ranks.

    Args:
        value: This process's.
    """
    if not dist.is_initialized():
        return [value]
    values: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
