"""What results must agree in to be put side by side: the images, and the weights."""

import hashlib
import os
from typing import Any

from torch import nn

from prunevit.experiments.config import DataConfig
from prunevit.experiments.data import EvaluationData


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


def _size(reader: Any, position: int) -> int:
    """Bytes of a file, or of a member of a .tar; -1 of a link to nothing."""
    place = reader.samples[position][0]
    if not isinstance(place, str):
        return place.size
    return os.path.getsize(place) if os.path.exists(place) else -1
