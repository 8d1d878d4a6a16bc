"""Results read back from disk: the rows of one or several runs, sorted by the data that they were measured on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from prunevit.experiments.comparison.paths import told_apart
from prunevit.experiments.comparison.shape import CONTENT, FAILED, ROW, misfit
from prunevit.experiments.config import InputError
from prunevit.experiments.finetuning.files import BEST, LAST, weights_in
from prunevit.experiments.report import COLUMNS, RESULTS, SCHEMA

Row = dict[str, Any]
UNPRUNED = "the unpruned model"  # in pairs: each row's own


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        folder: Its folder, as it was given.
        environment: Machine, versions and command.
        config: Its configuration.
        rows: `COLUMNS` and more; `name` is unique over all runs that were read together, `run` names the folder.
        pairs: Paired differences of two rows, or of a row and `UNPRUNED`: `a`, `b`, `difference` of a minus b, `low`,
            `high`, `p`, `verdict`.
        seeds: Rows that differ only by their seed: `rows` (names), `top1_mean`, `top1_std`.
    """

    folder: Path
    environment: Row
    config: Row
    rows: list[Row]
    pairs: list[Row]
    seeds: list[Row]


@dataclass(frozen=True)
class Measured:
    """The rows that were measured on the same images, whichever run they come from.

    Attributes:
        title: "200 images of sample".
        rows: Those that succeeded.
        failed: Those with an error.
        pairs: Paired differences between the rows.
        seeds: Rows that differ only by their seed.
    """

    title: str
    rows: list[Row]
    failed: list[Row]
    pairs: list[Row]
    seeds: list[Row]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read result folders. A row name that stands in several runs gets its folder's name behind it.

    That name is as short as tells the folders apart.

    Args:
        folders: What `prunevit evaluate` or `prunevit compare` wrote, each once.

    Raises:
        InputError: With a line for each folder that is given twice, empty, half-written or of another schema.
    """
    problems: list[str] = []
    runs: list[Run] = []
    seen: set[Path] = set()
    for folder in folders:
        try:
            if folder.resolve() in seen:
                raise InputError(f"runs: each folder must be given once, got {folder} again")
            seen.add(folder.resolve())
            runs.append(_read(folder))
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(*problems)
    names = [row["name"] for run in runs for row in run.rows]
    twice = {name for name in names if names.count(name) > 1}
    return [
        _renamed(replace(run, rows=[{**row, "run": label} for row in run.rows]), label, twice)
        for run, label in zip(runs, told_apart([run.folder for run in runs]))
    ]


def by_data(runs: Sequence[Run]) -> list[Measured]:
    """Sort the rows of all runs by the images that they were measured on.

    The images are the same if number and hash of the files and the number that was evaluated are.

    Args:
        runs: At least one.
    """
    found: dict[str, list[Row]] = {}
    for run in runs:
        for row in run.rows:
            found.setdefault(_fingerprint(row, run), []).append(row)
    titles = {key: _title(rows) for key, rows in found.items()}
    measured = []
    for key, rows in found.items():
        twin = [*titles.values()].count(titles[key]) > 1
        title = (
            f"{titles[key]} (files {rows[0]['data'].get('sha256', 'unknown')[:8]})" if twin else titles[key]
        )
        names = {UNPRUNED, *(row["name"] for row in rows)}
        pairs = [pair for run in runs for pair in run.pairs if {pair["a"], pair["b"]} <= names]
        seeds = [group for run in runs for group in run.seeds if {*group["rows"]} <= names]
        failed = [row for row in rows if row["error"]]
        measured.append(Measured(title, [row for row in rows if not row["error"]], failed, pairs, seeds))
    return measured


def _read(folder: Path) -> Run:
    path = folder / RESULTS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(f"runs: {_what_is_missing(folder)}") from error
    except OSError as error:
        raise InputError(f"runs: {path} must be readable ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"runs: {path} must be whole, got half a file or no JSON; repeat the run") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise InputError(
            f"runs: {path} must be of schema {SCHEMA}, got {schema}; read it with the version that wrote it"
        )
    if wrong := misfit(content, CONTENT):
        raise InputError(
            f"runs: {path} must hold environment, config and at least one row as this version writes them, got "
            f"something else as {wrong}; repeat the run"
        )
    environment, config, rows = (content[name] for name in ("environment", "config", "rows"))
    complete = [_complete(row, config) for row in rows]
    pairs = [*_unpruned_pairs(complete), *(content.get("pairs") or [])]
    run = Run(folder, environment, config, complete, pairs, content.get("seeds") or [])
    if lacking := [name for row in run.rows if not row["error"] for name in COLUMNS if name not in row]:
        raise InputError(f"runs: {path} must have all columns in each row, got none named {lacking[0]}")
    for number, row in enumerate(run.rows, 1):
        if wrong := misfit(row, FAILED if row["error"] else ROW):
            raise InputError(
                f"runs: {path} must hold what this version writes, got {row.get(wrong)!r:.40} as {wrong} of row "
                f"{number}; repeat the run"
            )
    return run


def _unpruned_pairs(rows: Sequence[Row]) -> list[Row]:
    """The paired difference of each row from its unpruned model, as a pair."""
    fields = ("difference", "low", "high", "p", "verdict")
    return [
        {"a": row["name"], "b": UNPRUNED, **{name: row[f"unpruned_{name}"] for name in fields}}
        for row in rows
        if row.get("unpruned_verdict") is not None
    ]


def _what_is_missing(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} must be a folder of results, got {'a file' if folder.exists() else 'none'}"
    if weights := weights_in(folder):
        return (
            f"{folder} must be a folder of results, got one of prunevit finetune; evaluate what it trained, "
            f"prunevit evaluate weights={weights}, and report on that"
        )
    if (folder / LAST).is_file():
        return (
            f"{folder} must be a folder of results, got one of prunevit finetune, which has not validated yet; let it "
            f"go on with ckpt_path={folder / LAST}, then evaluate {folder / BEST}"
        )
    if inside := sorted(folder.glob(f"*/{RESULTS}")):
        return f"{folder} must be a folder of results, got one with {len(inside)} of them inside; give {folder}/*"
    if any(folder.iterdir()):
        return f"{folder} must hold {RESULTS}, which is written last; finish the run by repeating its command"
    return f"{folder} must hold results, got an empty folder"


def _complete(row: Row, config: Row) -> Row:
    """Give a row of `evaluate` what only a comparison has; a row that failed has no figures."""
    knob = f" {row['knob']}={row.get('knob_value')}" if row.get("knob") else ""
    data = {"name": config.get("data", {}).get("name", "unknown")}
    more: Row = {"name": f"{row.get('policy')}{knob}", "kind": "policy", "error": None, "data": data}
    figures = dict.fromkeys(COLUMNS) if row.get("error") else {}
    return figures | more | row


def _renamed(run: Run, label: str, twice: set[str]) -> Run:
    names = {name: f"{name} ({label})" for name in twice}
    rows = [{**row, "name": names.get(row["name"], row["name"])} for row in run.rows]
    pairs = [{**pair, **{end: names.get(pair[end], pair[end]) for end in ("a", "b")}} for pair in run.pairs]
    seeds = [{**group, "rows": [names.get(each, each) for each in group["rows"]]} for group in run.seeds]
    return replace(run, rows=rows, pairs=pairs, seeds=seeds)


def _fingerprint(row: Row, run: Run) -> str:
    """Hash of the files and number of images; a row without a hash is known by what its run says of the data."""
    data, chosen = row["data"], run.config.get("data", {})
    known = {name: data[name] for name in ("files", "sha256") if name in data}
    settings = {name: chosen.get(name) for name in ("name", "dataset", "root", "split")}
    images = next((each["images"] for each in run.rows if not each["error"]), None)  # one number in a run
    return json.dumps([known or settings, images])


def _title(rows: Sequence[Row]) -> str:
    counted = next((row["images"] for row in rows if row.get("images")), 0)
    return f"{counted} images of {PurePath(str(rows[0]['data']['name'])).name}"
