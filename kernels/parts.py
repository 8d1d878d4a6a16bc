"""Several results one behind the other in one tensor: one allocation, and few outputs of a kernel and an operator."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pitches(lengths: Sequence[int], multiple: int) -> list[int]:
    """How far the next part starts behind each: its length, rounded up to a multiple."""
    return [length + -length % multiple for length in lengths]


def split_parts(joined: Tensor, lengths: Sequence[int], multiple: int) -> list[Tensor]:
    """Views of the parts.

    What is left of a pitch is cut off a part, never a part by itself: whether that is empty a compiler would have to
    know, and to compile anew where it is not.
    """
    parts = joined.split_with_sizes(pitches(lengths, multiple))
    return [part[:length] for part, length in zip(parts, lengths)]


def join_parts(parts: Sequence[Tensor], multiple: int) -> Tensor:
    """Put parts one behind the other, as `split_parts` takes them apart."""
    return torch.cat([F.pad(part, (0, -part.shape[0] % multiple)) for part in parts])
