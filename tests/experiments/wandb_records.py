"""Reads back what wandb wrote offline."""

import json
import struct
from pathlib import Path
from typing import Any


def records(folder: Path) -> list[Any]:
    """Those of the only run."""
    (found,) = all_records(folder)
    return found


def all_records(folder: Path) -> list[list[Any]]:
    """Those of each run."""
    return [_read(file) for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb"))]


def _read(file: Path) -> list[Any]:
    """A 7-byte header, then blocks of 32 KiB with records of (checksum, length, kind, bytes)."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

    data, place, pieces = file.read_bytes(), 7, b""
    found: list[Any] = []
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            found.append(Record.FromString(pieces))
            pieces = b""
    return found


def updates(found: list[Any], kind: str) -> dict[str, Any]:
    parts = [record.summary if kind == "summary" else record.run.config for record in found]
    return {item.key: json.loads(item.value_json) for part in parts for item in part.update if item.key}


def history(found: list[Any]) -> list[dict[str, Any]]:
    """What was logged, a step each, by dotted key."""
    lines = [record.history for record in found if record.WhichOneof("record_type") == "history"]
    return [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in line.item}
        for line in lines
    ]
