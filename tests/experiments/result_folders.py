"""Result folders as `evaluate` and `compare` write them, with figures of one's own choice."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from prunevit.experiments.report import COLUMNS

Row = dict[str, Any]
DATA = {"name": "photos", "files": 200, "sha256": "1f" * 32}
ENVIRONMENT = {"command": "prunevit compare policies=[evit]", "torch": "2.14.1", "platform": "L", "gpus": []}
DENSE = {
    **{"dense_top1": 91.0, "dense_top1_low": 86.0, "dense_top1_high": 94.0, "dense_top5": 99.0},
    **{"dense_gmacs": 4.5, "dense_images_per_s": 10.0, "dense_latency_ms": 90.0, "dense_tokens": 197},
}


def a_row(name: str, top1: float, gmacs: float, **more: Any) -> Row:
    """One complete row."""
    blocks = [{"mean": 197.0 - 10 * block, "p5": 190.0 - 10 * block, "p95": 197.0} for block in range(12)]
    figures = {
        **{"top1": top1, "top1_low": top1 - 4, "top1_high": top1 + 3, "agreement": top1 + 2, "images": 200},
        **{"gmacs": gmacs, "images_per_s": 45 / gmacs, "speedup": 4.5 / gmacs, "latency_ms": 20 * gmacs},
        **{"logit_kl": (4.5 - gmacs) / 10, "logit_mean_abs": 0.2, "tokens_mean": 120.0, "top5": 99.0},
    }
    said = {
        **{"policy": name.partition(" ")[0], "model": "vit", "weights": "w", "seed": 0, "img_size": 196},
        **{"accelerator": "cpu", "precision": "32-true", "mode": "eager", "layers": [3, 6]},
        **{"name": name, "kind": "policy", "error": None, "data": DATA, "tokens_by_block": blocks},
    }
    difference = top1 - DENSE["dense_top1"]
    paired = {
        "difference": difference,
        "low": difference - 5,
        "high": difference + 5,
        "p": 0.2,
        "verdict": "?",
    }
    paired_with_unpruned = {f"unpruned_{key}": value for key, value in paired.items()}
    return {**dict.fromkeys(COLUMNS), **DENSE, **figures, **paired_with_unpruned, **said, **more}


def a_pair(a: Row, b: Row) -> Row:
    """Their difference, shown where it exceeds 3 points."""
    difference = a["top1"] - b["top1"]
    verdict = "no difference shown" if abs(difference) <= 3 else "higher" if difference > 0 else "lower"
    ends = {"low": difference - 3, "high": difference + 3}
    return {"a": a["name"], "b": b["name"], "difference": difference, **ends, "p": 0.04, "verdict": verdict}


def write_run(folder: Path, rows: Sequence[Row], **top: Any) -> Path:
    """Write results.json; the pairs of all rows that succeeded stand in it."""
    good = [row for row in rows if not row["error"]]
    pairs = [a_pair(a, b) for a, b in combinations(good, 2)]
    content = {"schema": 1, "environment": ENVIRONMENT, "config": {"data": {"name": "photos"}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**content, "rows": rows, "pairs": pairs, **top}))
    return folder


def two_policies(**more: Any) -> list[Row]:
    """EViT and ToMe at two costs each; EViT at 3 GMACs is beaten by ToMe at less."""
    return [
        a_row("evit keep_rate=0.7", 85.0, 3.0, **more),
        a_row("evit keep_rate=0.5", 80.0, 2.5, **more),
        a_row("tome r=8", 86.0, 2.75, **more),
        a_row("tome r=16", 70.0, 1.5, **more),
    ]
