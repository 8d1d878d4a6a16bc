"""`prunevit compare`: any number of rows in one pass over the images, then what they tell of each other."""

import io
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import NDArray

from prunevit.experiments.class_check import check_classes
from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.comparison.gallery import choose, clear
from prunevit.experiments.comparison.report_run import write_report
from prunevit.experiments.comparison.rows import plan_rows
from prunevit.experiments.comparison.screen import print_comparison
from prunevit.experiments.comparison.shared import build_contenders, set_keys
from prunevit.experiments.comparison.statistics import all_pairs, compared, seed_groups
from prunevit.experiments.config import LoggerConfig
from prunevit.experiments.contender import GUESSES, Contender
from prunevit.experiments.data import load_data
from prunevit.experiments.evaluation import check_processes, complete_rows
from prunevit.experiments.fingerprint import data_fingerprint
from prunevit.experiments.journal import Journal, unfinished
from prunevit.experiments.one_pass import OnePass
from prunevit.experiments.progress import Bar
from prunevit.experiments.ranks import is_first_process
from prunevit.experiments.report import COLUMNS, FILES, Row, choose_output_dir, finite, write_results
from prunevit.experiments.tracking import tracked_comparison
from prunevit.experiments.trainer import make_trainer, run_test

PREDICTIONS = "predictions.npz"
TABLE = ("name", "kind", *COLUMNS, "error")


def run(config: CompareConfig) -> list[Row]:
    """Compare, report and write what `prunevit compare` promises.

    Args:
        config: The composed configuration.

    Returns:
        The rows, on the first process; nothing on the others.

    Raises:
        InputError: If the input is wrong; no results are written then.
    """
    rows = plan_rows(config)
    settings = finite(asdict(config))
    output = _output_dir(config, settings)
    journal = Journal(output, settings)
    check_classes(config.data, config.model)
    contenders, views = build_contenders(rows, config)
    data = load_data(config.data, contenders[0].dense, views)
    check_processes(config, data)
    set_keys(contenders, config, data_fingerprint(config.data, data))
    bar = Bar()
    module, trainer = OnePass(contenders, data, config, bar, journal), make_trainer(config, bar)
    logger = config.logger if is_first_process() else LoggerConfig()
    with tracked_comparison(logger, settings, output.name) as records:
        with journal.interruptible():
            run_test(trainer, module)
        if not trainer.is_global_zero:
            return []
        done = complete_rows(contenders, data, config)
        told, arrays = tell(contenders, done, config.seed)
        write_results(output, config, done, TABLE, told, {PREDICTIONS: _npz(arrays)})
        journal.remove()
        print_comparison(done, told["seeds"])
        clear(output / "pictures")
        gallery = choose(contenders, data, config.pictures)
        if gallery is not None:
            gallery.write(output / "pictures")
        if arrays:
            write_report([output], output / "report.html")
        if records is not None:
            records.record(done, TABLE, gallery.by_row() if gallery is not None else {})
    print(f"results in {output}; the page is report.html" if arrays else f"results in {output}")
    return done


def tell(
    contenders: Sequence[Contender], rows: Sequence[Row], seed: int
) -> tuple[dict[str, Any], dict[str, NDArray[np.int32]]]:
    """Compare the rows image by image; each row gets its difference from the unpruned model.

    Args:
        contenders: After the pass.
        rows: Of them; those that did not fail get `unpruned_difference`, `_low`, `_high`, `_p` and `_verdict`.
        seed: Of the bootstrap.

    Returns:
        `pairs` and `seeds`; and `index`, `target`, `dense` and the class that each row, by its name, gave each image.
    """
    arrays: dict[str, NDArray[np.int32]] = {}
    hits = {}
    for each, row in zip(contenders, rows):
        if each.error is not None:
            continue
        guesses = each.guessed().numpy()
        index, target, dense, own = guesses[:, guesses[0].argsort()]
        arrays = arrays or dict(zip(GUESSES, (index, target, dense)))
        arrays[row["name"]] = own
        hits[row["name"]] = own == target
        row |= {
            f"unpruned_{name}": value
            for name, value in vars(compared(own == target, dense == target, seed)).items()
        }
    return {"pairs": all_pairs(hits, seed), "seeds": seed_groups(rows)}, arrays


def _output_dir(config: CompareConfig, settings: dict[str, Any]) -> Path:
    """The folder of the same command that was interrupted, or a new one."""
    files = (*FILES, PREDICTIONS)
    begun = unfinished(settings) if config.output_dir is None else None
    return choose_output_dir(replace(config, output_dir=str(begun)) if begun else config, files)


def _npz(arrays: dict[str, NDArray[np.int32]]) -> bytes:
    """What `numpy.savez_compressed` writes; that takes the names as keywords and has some of its own."""
    content = io.BytesIO()
    with ZipFile(content, "w", ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w") as file:
                np.lib.format.write_array(file, array)
    return content.getvalue()
