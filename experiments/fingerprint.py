"""What results must agree in to be put side by side: the images, the weights, the code of the policy."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from torch import nn

from prunevit.experiments.config import DataConfig
from prunevit.experiments.data import EvaluationData
from prunevit.policy import PruningPolicy


def data_fingerprint(config: DataConfig, data: EvaluationData) -> dict[str, Any]:
    """Name the images that were evaluated: `name`, `files` (how many), `sha256` of their names and sizes.

    Args:
        config: The data group.
        data: The images. Those of a hub or a stream count by the name of the set, the split and their number.
    """
    reader = None if data.is_stream else data.photos.source.reader  # type: ignore[union-attr]
    if config.dataset or reader is None:
        lines = [f"{config.dataset} {config.split} {data.size}"]
    else:
        lines = [
            f"{data.photos.source.filename(position)} {_size(reader, position)}"  # type: ignore[union-attr]
            for position in data.chosen
        ]
    digest = hashlib.sha256("\n".join(lines).encode(errors="surrogateescape")).hexdigest()
    return {"name": config.name, "files": data.size, "sha256": digest}


def weights_fingerprint(model: nn.Module) -> str:
    """A hash of all parameters and buffers.

    Args:
        model: On the CPU.
    """
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


def code_fingerprint(policy: PruningPolicy, shipped: bool = True) -> str:
    """A hash of the files of a policy's class and its bases, and of those beside them in their packages.

    Args:
        policy: The policy.
        shipped: Whether this project's own files count, or the user's alone.
    """
    left_out = {"torch", "builtins"} if shipped else {"torch", "builtins", "prunevit"}
    files: set[Path] = set()
    for base in type(policy).__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__.partition(".")[0] not in left_out and getattr(module, "__file__", None):
            file = Path(str(module.__file__))  # type: ignore[union-attr]
            files.update(file.parent.glob("*.py") if module.__package__ else [file])  # type: ignore[union-attr]
    digest = hashlib.sha256()
    for file in sorted(each for each in files if each.is_file()):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _size(reader: Any, position: int) -> int:
    """Bytes of a file, or of a member of a .tar; -1 of a link to nothing."""
    place = reader.samples[position][0]
    if not isinstance(place, str):
        return place.size
    return os.path.getsize(place) if os.path.exists(place) else -1
