"""One pass over the images for any number of rows: each image is read once, the unpruned model runs once."""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from prunevit import Trace, prune
from prunevit.experiments.config import InputError, MeasureConfig, first_line
from prunevit.experiments.contender import Contender, describe
from prunevit.experiments.data import Batch, EvaluationData
from prunevit.experiments.journal import Journal
from prunevit.experiments.measures import backend_of
from prunevit.experiments.policy_spec import policy_errors
from prunevit.experiments.progress import Bar
from prunevit.experiments.report import SPEED_COLUMNS
from prunevit.experiments.speed import UNTIMED, Pair, Racer, speeds
from prunevit.experiments.trainer import gathered
from prunevit.macs import dense_macs, model_macs, policy_macs
from prunevit.policies import replay

log = logging.getLogger("prunevit")
Logits = dict[int, Tensor]  # of the unpruned models, by `id`


class OnePass(LightningModule):
    """Runs the unpruned models and then every row on each batch; a row's `results` are complete after the test.

    Attributes:
        warm: The first batch, on the device: what speed is measured on.
    """

    def __init__(
        self,
        contenders: Sequence[Contender],
        data: EvaluationData,
        config: MeasureConfig,
        bar: Bar,
        journal: Journal | None = None,
    ) -> None:
        """Take what is measured.

        Args:
            contenders: The rows. They may share models; what does costs its memory once.
            data: The images.
            config: Batch size, number of images of the numeric check, seconds of timing.
            bar: Shows how far the pass is.
            journal: Where the state of an interrupted pass is kept. With it, a row that fails leaves the others alone.
        """
        super().__init__()
        self.contenders, self.data, self.config = contenders, data, config
        self.bar, self.journal = bar, journal
        self.models = nn.ModuleList([each for c in contenders for each in (c.pruned, c.dense)])
        self.warm: Batch | None = None
        self.problem: str | None = None

    def setup(self, stage: str) -> None:
        """Go on from where an earlier run was interrupted."""
        if self.journal is not None:
            self.journal.restore(self.contenders, self.trainer.global_rank, self.trainer.world_size)

    def test_dataloader(self) -> DataLoader[Any]:
        """Load this process's share of the images, but for the batches that every row has behind it.

        The first batch is read in any case: speed is measured on it.
        """
        config, rank, world = self.config, self.trainer.global_rank, self.trainer.world_size
        if self.data.is_stream:
            self.skipped_batches = 0
            return self.data.loader(config.batch_size, config.data.num_workers, rank, world)
        share = self.data.chosen[rank::world]
        done = min(each.batches for each in self.contenders)
        self.skipped_batches = max(done - 1, 0)
        left = [*share[: config.batch_size], *share[config.batch_size * (1 + self.skipped_batches) :]]
        return replace(self.data, chosen=left).loader(config.batch_size, config.data.num_workers)

    def on_test_start(self) -> None:
        """Bring the counts to the device, apart from the models: precisions of these would round their sums."""
        for each in self.contenders:
            each.measures.to(self.device)
            each.guesses = [guess.to(self.device) for guess in each.guesses]
        images = len(range(self.trainer.global_rank, self.data.size, self.trainer.world_size))
        if self.trainer.is_global_zero:
            self._say_what_runs(images)
        done = sum(min(each.batches * self.config.batch_size, images) for each in self.contenders)
        self.bar.begin(images, len(self.contenders), done)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Measure one batch."""
        number = batch_idx + (self.skipped_batches if batch_idx else 0)
        due = [each for each in self.contenders if each.error is None and each.batches <= number]
        self._count_failures(batch.failures, due)
        if self.problem:
            return
        if len(batch.targets):
            self.warm = self.warm or batch
            self._run(due, batch)
        for each in due:
            each.batches = number + 1
        if self.journal is not None:
            self.journal.keep(self.contenders)

    def on_test_epoch_end(self) -> None:
        """Add the processes up; then the first one measures speed."""
        if self.journal is not None:
            self.journal.keep(self.contenders, at_once=True)
        problems = [line for line in gathered(self.problem) if line]
        if problems:
            raise InputError(problems[0])
        for each in self.contenders:
            each.error = next((error for error in gathered(each.error) if error), None)
            if each.error is None:
                self._add_up(each)
        if self.journal is not None and self.trainer.is_global_zero:
            self.journal.note([describe(self.config, each) | each.results for each in self.contenders])
        if self.trainer.is_global_zero and self.config.timing_s and self.warm is not None:
            with self.trainer.precision_plugin.forward_context():
                self._race(self.warm)
        if self.problem:
            raise InputError(self.problem)

    def _say_what_runs(self, images: int) -> None:
        """Say in a line what an earlier run did of it, or, where no terminal shows the bar, just what it is."""
        rows, size = self.contenders, self.config.batch_size
        what = rows[0].spec.name if len(rows) == 1 else f"{len(rows)} rows"
        what = f"{what} on {self.config.model.name}, {self.data.size} images"
        kept = sum(each.batches for each in rows)
        if self.journal is not None and kept:
            done = f"{kept} of {len(rows) * -(-images // size)} batches done"
            print(f"prunevit: going on in {self.journal.folder.parent}, {done}: {what}", file=sys.stderr)
        elif self.config.progress and not sys.stderr.isatty():
            print(f"prunevit: {what}", file=sys.stderr)

    def _run(self, due: Sequence[Contender], batch: Batch) -> None:
        dense: Logits = {}
        finite: dict[Contender, Tensor] = {}
        for each in due:
            images = _seen_by(each, batch)
            if id(each.dense) not in dense:
                dense[id(each.dense)] = each.dense(batch.images)
            with self._failing(each):
                trace = each.pruned.trace(images, batch.positions)
                self._measure(each, trace, dense[id(each.dense)], batch)
                finite[each] = (
                    dense[id(each.dense)].isfinite().all(1) & trace.logits.isfinite().all(1)
                ).all()
            self.bar.advance(each.spec.name, len(batch.targets) + len(batch.failures))
        if not finite:
            return
        # One read-back for all rows: a device that is asked after each of them idles.
        for each, fine in zip(finite, torch.stack([*finite.values()]).tolist()):
            if not fine:
                with self._failing(each):
                    raise InputError(_nan(each, batch))

    def _measure(self, each: Contender, trace: Trace, dense: Tensor, batch: Batch) -> None:
        if each.backend is None:
            each.backend = backend_of(each.pruned, self.config, trace)
        spent = policy_macs(each.pruned, trace)
        walked = model_macs(each.pruned.model, trace.attention_rows, trace.mlp_rows)
        each.measures.add(dense, trace, batch.targets, walked, spent)
        if self.data.real is not None:
            labels = [self.data.real[position] for position in batch.positions.tolist()]
            each.measures.add_real(dense, trace.logits, labels)
        guesses = (batch.positions, batch.targets, dense.argmax(1), trace.logits.argmax(1))
        each.guesses.append(torch.stack([guess.int() for guess in guesses]))
        rank, world = self.trainer.global_rank, self.trainer.world_size
        wanted = len(range(rank, self.config.numeric_images, world)) - each.numeric_images
        if wanted > 0:
            self._compare_with_reference(
                each, trace, _seen_by(each, batch)[:wanted], batch.positions[:wanted]
            )

    def _compare_with_reference(self, each: Contender, trace: Trace, images: Tensor, index: Tensor) -> None:
        """Repeat the same decisions on the reference backend, in the same precision."""
        each.numeric_images += len(images)
        if len(images) < len(trace.logits):
            trace = each.pruned.trace(images, index)
        reference = prune(each.pruned.model, replay(trace), backend="reference").eval()
        each.measures.numeric.update(trace.logits, reference(images, index))

    def _count_failures(self, failures: tuple[str, ...], due: Sequence[Contender]) -> None:
        if failures and self.config.data.on_error == "raise":
            return self._refuse(
                f"data: {failures[0]}; remove it, or count such images with data.on_error=skip"
            )
        for line in failures:
            log.warning("left out: %s", line)
        for each in due:
            each.measures.skipped.update(len(failures))

    @contextmanager
    def _failing(self, each: Contender) -> Iterator[None]:
        """Where a row may fail: alone if there is a journal, else with the run."""
        try:
            with policy_errors(each.spec.policy["name"]):
                yield
        except InputError as error:
            if self.journal is None:
                return self._refuse(error.problems[0])
            each.error = error.problems[0]
        except RuntimeError as error:  # out of memory, and what else the device refuses
            if self.journal is None:
                raise
            each.error = f"{type(error).__name__}: {first_line(error)}"
        if each.error is not None:
            log.warning("row %s failed: %s", each.spec.name, each.error)

    def _refuse(self, problem: str) -> None:
        """Stop; of several processes none may leave alone, or the others would wait for it."""
        if self.trainer.world_size == 1:
            raise InputError(problem)
        self.problem = self.problem or problem

    def _add_up(self, each: Contender) -> None:
        each.guesses = [guess.to(self.device) for guess in gathered(each.guessed())]
        dense_rows = each.dense.patch_embed.num_patches + each.dense.num_prefix_tokens
        each.results = each.measures.results() | {
            "dense_tokens": dense_rows,
            "dense_gmacs": dense_macs(each.dense) / 1e9,
            "backend": each.backend,
            "passed_over": self.data.passed_over,
            "empty_folders": self.data.empty_folders,
            **dict.fromkeys(SPEED_COLUMNS),
            "mode": UNTIMED,
        }
        if not each.results["images"]:
            raise InputError("data: at least one image must be readable, got none")

    def _race(self, warm: Batch) -> None:
        """Time all rows in turn; each is warmed up alone first, so that one that cannot run leaves the others."""
        mode, dense = self.config.execution, {}
        pairs: dict[Contender, Pair] = {}
        for each in self.contenders:
            if each.error is not None:
                continue
            self.bar.say(f"timing {each.spec.name}")
            images = _seen_by(each, warm)
            unpruned = each.spec.kind != "policy"
            with self._failing(each):
                if id(each.dense) not in dense:
                    racer = Racer(each.dense, (warm.images,), mode)
                    racer.warm_up()
                    dense[id(each.dense)] = racer
                own = (images,) if unpruned else (images, warm.positions)
                pair = Pair(
                    Racer(each.pruned.model if unpruned else each.pruned, own, mode), dense[id(each.dense)]
                )
                pair.pruned.warm_up()
                pairs[each] = pair
        if pairs:
            for each, row in zip(pairs, speeds([*pairs.values()], mode, self.config.timing_s)):
                each.results |= row


def _seen_by(each: Contender, batch: Batch) -> Tensor:
    return (batch.images, *batch.views)[each.view]


def _nan(each: Contender, batch: Batch) -> str:
    images, index = _seen_by(each, batch), batch.positions
    dense, logits = each.dense(batch.images), each.pruned(images, index)
    bad = ~(dense.isfinite().all(1) & logits.isfinite().all(1))
    where = each.pruned.find_nan(images[bad], index[bad]) or "only the unpruned model's are not"
    return f"logits: must be finite, got others for image {int(index[bad][0])}; {where}"
