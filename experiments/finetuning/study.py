"""What fine-tuning wins back: policies at several keep rates, off the shelf and fine-tuned, several seeds.

    python -m prunevit.experiments.finetuning.study --photos PHOTOS --output docs/results

Every row is what the commands beside it give; the study runs them in several processes that share the GPU. Held-out
photos are looked at once, at the end: the weights are those of the last step. Finished rows are kept in
`finetuning.jsonl`; the same command goes on where it was interrupted.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prunevit.experiments.finetuning.study_report import JOURNAL, read_journal, write_report

POLICIES = ("evit", "topk", "random", "dynamicvit")
KEEP_RATES = (0.7, 0.5, 0.3)
SEEDS = (0, 1, 2)
SEEDED = ("random", "dynamicvit")  # off the shelf, the others give the same with every seed
# The predictors learn from nothing, so they learn faster than what is trained already.
LEARNABLE = {
    "dynamicvit": ("lr=1e-3", "backbone_lr_scale=0.1", "distillation_weight=0")
}  # it distils by itself
SHOWN = (Path("clothing10"), Path("outputs/study"))  # places that the commands name, wherever they really are
ENVIRONMENT = ("prunevit", "commit", "python", "torch", "triton", "timm", "lightning", "cuda", "gpus")
FIGURES = (
    *(
        "policy",
        "keep_rate",
        "layers",
        "trained",
        "predictors",
        "images",
        "top1",
        "top1_low",
        "top1_high",
        "dense_top1",
    ),
    *(
        "agreement",
        "logit_kl",
        "tokens_mean",
        "tokens_p5",
        "tokens_p95",
        "gmacs",
        "policy_gmacs",
        "dense_gmacs",
        "backend",
    ),
)


@dataclass(frozen=True)
class Task:
    """A row: a policy at a keep rate, with a seed, off the shelf or fine-tuned."""

    policy: str
    keep_rate: float | None
    seed: int
    tuned: bool

    @property
    def name(self) -> str:
        """Of the row, unique."""
        rate = "" if self.keep_rate is None else f"_{self.keep_rate:g}"
        return f"{self.policy}{rate}_{'finetuned' if self.tuned else 'shelf'}_seed{self.seed}"

    @property
    def words(self) -> tuple[str, ...]:
        """The policy and the seed on the command line."""
        rate = () if self.keep_rate is None else (f"policy.keep_rate={self.keep_rate:g}",)
        return (f"policy={self.policy}", *rate, f"seed={self.seed}")


def tasks() -> list[Task]:
    """All rows, those that tell most first; `none` says what the training alone does."""
    shelf = [Task("none", None, 0, False)]
    shelf += [
        Task(policy, rate, seed, False)
        for rate in KEEP_RATES
        for policy in POLICIES
        for seed in (SEEDS if policy in SEEDED else SEEDS[:1])
    ]
    order = sorted(KEEP_RATES, key=lambda rate: abs(rate - 0.5))
    tuned = [Task(policy, rate, seed, True) for seed in SEEDS for rate in order for policy in POLICIES]
    return [*shelf, *tuned, *(Task("none", None, seed, True) for seed in SEEDS)]


def commands(task: Task, photos: Path, work: Path, more: Sequence[str]) -> list[list[str]]:
    """The command lines of a row, without the program's name.

    Args:
        task: The row.
        photos: Folder with `train` and `val`.
        work: Where weights and results go.
        more: Further words, such as the epochs.
    """
    where = ["data=folder", f"data.root={photos}"]
    tuned, evaluated = work / task.name, work / f"{task.name}_evaluated"
    evaluate = [
        "evaluate",
        *where,
        f"output_dir={evaluated}",
        "timing_s=0",
        "numeric_images=0",
        "batch_size=128",
    ]
    if not task.tuned:
        return [[*evaluate, *task.words]]
    train = ["finetune", "recipe=clothing10", *task.words, *LEARNABLE.get(task.policy, ()), *where, *more]
    return [
        [*train, f"output_dir={tuned}"],
        [*evaluate, f"weights={tuned / 'last.safetensors'}", f"seed={task.seed}"],
    ]


def run_task(
    task: Task, photos: Path, work: Path, more: Sequence[str], quiet: Sequence[str]
) -> dict[str, Any]:
    """Run the commands of a row, and give the row.

    Args:
        task: The row.
        photos: Folder with `train` and `val`.
        work: Where weights and results go; they are removed again.
        more: Further words of the training.
        quiet: Words that change no result.

    Raises:
        RuntimeError: If a command fails.
    """
    from prunevit.experiments.cli import main

    start = time.perf_counter()
    work.mkdir(parents=True, exist_ok=True)
    with (work / f"{task.name}.log").open("w") as log, redirect_stdout(log), redirect_stderr(log):
        for words in commands(task, photos, work, more):
            if code := main([*words, *quiet]):
                raise RuntimeError(f"prunevit {' '.join(words)} ended with {code}; {log.name} says why")
    results = json.loads((work / f"{task.name}_evaluated" / "results.json").read_text())
    (row,) = results["rows"]
    for folder in work.glob(f"{task.name}*/"):
        shutil.rmtree(folder)
    shown = commands(task, *SHOWN, more)
    return {
        "name": task.name,
        "tuned": task.tuned,
        "commands": [f"prunevit {' '.join(words)}" for words in shown],
        "seconds": time.perf_counter() - start,
        "environment": {name: results["environment"][name] for name in ENVIRONMENT},
        "row": {name: row[name] for name in FIGURES} | {"seed": task.seed},
    }


def _share_cores(workers: int) -> None:
    """Let each process compute on its share of the cores: more threads than cores wait for each other."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def study(photos: Path, output: Path, work: Path, workers: int, more: Sequence[str], loaders: int) -> None:
    """Run what is not yet done, then write the report.

    Args:
        photos: Folder with `train` and `val`.
        output: Of the journal, the tables and the plot.
        work: For weights and results in between.
        workers: Processes that share the GPU.
        more: Further words of the training.
        loaders: Reading processes of each.
    """
    output.mkdir(parents=True, exist_ok=True)
    done = {entry["name"] for entry in read_journal(output / JOURNAL)}
    left = [task for task in tasks() if task.name not in done]
    quiet = ("progress=false", "overwrite=true", f"data.num_workers={loaders}")
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    failures: list[str] = []
    pool = ProcessPoolExecutor(workers, context, _share_cores, (workers,))
    with pool, (output / JOURNAL).open("a") as journal:
        futures = [pool.submit(run_task, task, photos, work, more, quiet) for task in left]
        for number, future in enumerate(as_completed(futures), 1):
            if error := future.exception():
                failures.append(str(error))
                print(f"{number}/{len(left)} failed: {error}", flush=True)
                continue
            entry = future.result()
            journal.write(json.dumps(entry) + "\n")
            journal.flush()
            seconds = time.perf_counter() - start
            print(
                f"{number}/{len(left)} {entry['name']}: {entry['row']['top1']:.2f} % in {entry['seconds']:.1f} s "
                f"({seconds:.0f} s so far)",
                flush=True,
            )
    write_report(output)
    if failures:
        raise SystemExit(f"study: {len(failures)} rows failed; the same command tries them again")


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--photos", type=Path, default=SHOWN[0], help="folder with train/<class> and val/<class>"
    )
    parser.add_argument(
        "--output", type=Path, required=True, help="folder of the journal, the tables and the plot"
    )
    parser.add_argument("--work", type=Path, default=Path("outputs/study"), help="for weights; %(default)s")
    parser.add_argument("--workers", type=int, default=5, help="processes that share the GPU; %(default)s")
    parser.add_argument("--loaders", type=int, default=3, help="reading processes of each; %(default)s")
    parser.add_argument("--report", action="store_true", help="run nothing, write what the journal holds")
    parser.add_argument("words", nargs="*", help="further words of the training, such as max_epochs=3")
    given = parser.parse_args(arguments)
    if given.report:
        return write_report(given.output)
    study(given.photos, given.output, given.work, given.workers, given.words, given.loaders)


if __name__ == "__main__":
    main()
