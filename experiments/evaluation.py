"""One pass over real images: accuracy, logit deviation, cost and speed, pruned and unpruned."""

import logging
import math
import os
import sys
from dataclasses import asdict
from typing import Any

from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from prunevit import RaggedViT, Trace, prune
from prunevit.experiments.config import EvaluateConfig, InputError, LoggerConfig
from prunevit.experiments.data import Batch, EvaluationData, load_data
from prunevit.experiments.measures import Measures, backend_of, describe, untrained
from prunevit.experiments.models import build_model, check_fit, prune_model
from prunevit.experiments.policy_spec import build_policy, policy_errors
from prunevit.experiments.report import (
    SPEED_COLUMNS,
    Row,
    choose_output_dir,
    finite,
    print_report,
    write_results,
)
from prunevit.experiments.speed import UNTIMED, speed
from prunevit.experiments.tracking import tracked
from prunevit.experiments.trainer import gathered, make_trainer, run_test
from prunevit.macs import dense_macs, model_macs, policy_macs
from prunevit.policies import replay

log = logging.getLogger("prunevit")


def run(config: EvaluateConfig) -> list[Row]:
    """Evaluate, report and write what `prunevit evaluate` promises.

    Args:
        config: The composed configuration.

    Returns:
        The row, on the first process; nothing on the others.

    Raises:
        InputError: If the input is wrong; nothing is written then.
    """
    output = choose_output_dir(config)
    seed_everything(config.seed, workers=True, verbose=False)
    name = config.policy["name"]
    with policy_errors(name):
        check_fit(config.model, build_policy(config.policy, config.seed))
    model = build_model(config.model, config.weights)
    with policy_errors(name):
        pruned = prune_model(model, build_policy(config.policy, config.seed), config.backend)
    data = load_data(config.data, model)
    if data.is_stream and config.devices > 1:
        raise InputError(
            f"devices: a stream like {config.data.dataset} is read by one process; use devices=1"
        )
    if config.devices > data.size:
        raise InputError(f"devices: must be at most the {data.size} images, got {config.devices}")
    if untrained(pruned) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(
            f"prunevit: policy {name} has random predictors: there are no weights for them", file=sys.stderr
        )
    module, trainer = EvaluationModule(pruned, data, config), make_trainer(config)
    with tracked(config.logger if trainer.is_global_zero else LoggerConfig(), asdict(config)) as records:
        run_test(trainer, module)
        if not trainer.is_global_zero:
            return []
        row = finite(describe(config, pruned) | module.results)
        print_report(row)
        write_results(output, config, [row])
        records.append(row)
    print(f"results in {output}")
    return [row]


class EvaluationModule(LightningModule):
    """Runs the unpruned and the pruned model on each batch and collects what `Measures` holds.

    Attributes:
        results: The measured part of the row, after the test.
    """

    def __init__(self, pruned: RaggedViT, data: EvaluationData, config: EvaluateConfig) -> None:
        """Take what is evaluated.

        Args:
            pruned: The pruned model; the unpruned one is inside.
            data: The images.
            config: Batch size, number of images of the numeric check, seconds of timing.
        """
        super().__init__()
        self.pruned, self.data, self.config = pruned, data, config
        self.results: Row = {}

    def test_dataloader(self) -> DataLoader[Any]:
        """Load this process's share of the images."""
        config, trainer = self.config, self.trainer
        return self.data.loader(
            config.batch_size, config.data.num_workers, trainer.global_rank, trainer.world_size
        )

    def on_test_start(self) -> None:
        """Make the metrics: only now, for Lightning's conversion to half precision would round their sums."""
        rows = math.prod(self.pruned.info.grid) + self.pruned.info.num_prefix_tokens
        self.measures = Measures(self.pruned.info.depth, rows).to(self.device)
        rank, world = self.trainer.global_rank, self.trainer.world_size
        self.numeric_left = len(range(rank, self.config.numeric_images, world))
        self.warm: tuple[Tensor, Tensor] | None = None
        self.problem: str | None = None
        self.backend = self.config.backend

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure one batch."""
        self._count_failures(batch.failures)
        if self.problem or not len(batch.targets):
            return
        try:
            with policy_errors(self.config.policy["name"]):
                self._measure(batch)
        except InputError as error:
            self._refuse(error.problems[0])

    def _measure(self, batch: Batch) -> None:
        images, index = batch.images, batch.positions
        dense, trace = self.pruned.model(images), self.pruned.trace(images, index)
        if self.warm is None:
            self.warm = images, index
            self.backend = backend_of(self.pruned, self.config, trace)
        if not (dense.isfinite().all() and trace.logits.isfinite().all()):
            raise InputError(self._nan(dense, trace.logits, images, index))
        spent = policy_macs(self.pruned, trace)
        walked = model_macs(self.pruned.model, trace.attention_rows, trace.mlp_rows)
        self.measures.add(dense, trace, batch.targets, walked, spent)
        if self.data.real is not None:
            self.measures.add_real(dense, trace.logits, [self.data.real[each] for each in index.tolist()])
        if self.numeric_left > 0:
            self._compare_with_reference(trace, images[: self.numeric_left], index[: self.numeric_left])

    def on_test_epoch_end(self) -> None:
        """Add the processes up; then the first one measures speed."""
        problems = [line for line in gathered(self.problem) if line]
        if problems:
            raise InputError(problems[0])
        self.results = self.measures.results()
        if not self.results["images"]:
            raise InputError("data: at least one image must be readable, got none")
        self.results["dense_gmacs"] = dense_macs(self.pruned.model) / 1e9
        self.results["backend"] = self.backend
        self.results["passed_over"] = self.data.passed_over
        self.results["empty_folders"] = self.data.empty_folders
        if self.trainer.is_global_zero:
            name = self.config.policy["name"]
            with self.trainer.precision_plugin.forward_context(), policy_errors(name):
                self.results |= self._speed()

    def _count_failures(self, failures: tuple[str, ...]) -> None:
        if failures and self.config.data.on_error == "raise":
            return self._refuse(
                f"data: {failures[0]}; remove it, or count such images with data.on_error=skip"
            )
        for line in failures:
            log.warning("left out: %s", line)
        self.measures.skipped.update(len(failures))

    def _nan(self, dense: Tensor, logits: Tensor, images: Tensor, index: Tensor) -> str:
        bad = ~(dense.isfinite().all(1) & logits.isfinite().all(1))
        where = self.pruned.find_nan(images[bad], index[bad]) or "only the unpruned model's are not"
        return f"logits: must be finite, got others for image {int(index[bad][0])}; {where}"

    def _refuse(self, problem: str) -> None:
        """Stop; of several processes none may leave alone, or the others would wait for it."""
        if self.trainer.world_size == 1:
            raise InputError(problem)
        self.problem = self.problem or problem

    def _compare_with_reference(self, trace: Trace, images: Tensor, index: Tensor) -> None:
        """Repeat the same decisions on the reference backend, in the same precision."""
        self.numeric_left -= len(images)
        if len(images) < len(trace.logits):
            trace = self.pruned.trace(images, index)
        reference = prune(self.pruned.model, replay(trace), backend="reference").eval()
        self.measures.numeric.update(trace.logits, reference(images, index))

    def _speed(self) -> Row:
        if self.warm is None or self.config.timing_s == 0:
            return dict.fromkeys(SPEED_COLUMNS) | {"mode": UNTIMED}
        return speed(self.pruned, *self.warm, self.config.execution, self.config.timing_s)
