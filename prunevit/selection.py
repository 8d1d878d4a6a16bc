"""What a verb that selected has found out besides the mask, and whether that still holds of a mask and a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prunevit.kernels.select import Selection
from prunevit.tokens import RaggedTokens


@dataclass(frozen=True, eq=False)
class Selected:
    """A selection, and what it was made from: `fuse` and `pack` go on from it where that is still what they are given.

    Tensors are known by identity and by how often they were written to in place, which asks nothing of the device. In
    inference mode PyTorch counts that for no tensor made there: an edit of the score is not seen then. What is selected
    is made outside of it, and its edits are. Compiled code sees the edits of its own graph, not those that other code
    makes where the compiler breaks off between selecting and packing.

    Attributes:
        chosen: What selecting found out.
        score: What was selected by.
        cu_seqlens: Of the batch selected from, as the next two.
        num_prefix_tokens: Leading rows of each image, which always stay.
        max_seqlen: Bound on the rows of an image.
        rows: Rows of each image that stay, prefix included, if the host knows them.
        order: Which patches go behind the others, bool `[T]`; None: all keep their order.
        among_all: Whether all patches could be selected; only then are counts known to be sound.
        edits: How often each tensor had been written to by then.
    """

    chosen: Selection
    score: Tensor
    cu_seqlens: Tensor
    num_prefix_tokens: int
    max_seqlen: int
    rows: int | None = None
    order: Tensor | None = None
    among_all: bool = True
    edits: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        """Look at the tensors while they are what was selected."""
        object.__setattr__(self, "edits", self._edits())

    @classmethod
    def of(
        cls,
        tokens: RaggedTokens,
        score: Tensor,
        chosen: Selection,
        rows: int | None = None,
        order: Tensor | None = None,
        among_all: bool = True,
    ) -> Selected:
        """What was selected from a batch, without holding on to its features."""
        layout = (tokens.cu_seqlens, tokens.num_prefix_tokens, tokens.max_seqlen)
        return cls(chosen, score, *layout, rows, order, among_all)

    def holds_for(self, tokens: RaggedTokens) -> bool:
        """Whether all is as it was, and these rows lie as those that were selected from."""
        return (
            tokens.cu_seqlens is self.cu_seqlens
            and tokens.num_prefix_tokens == self.num_prefix_tokens
            and self._edits() == self.edits
        )

    def fused_rows(self) -> int | None:
        """Rows of each image with the fused one; there is none where all rows stay."""
        return None if self.rows is None else min(self.rows + 1, self.max_seqlen)

    def _edits(self) -> tuple[int, ...]:
        chosen = self.chosen
        return count_edits(
            self.cu_seqlens,
            self.score,
            chosen.keep,
            chosen.keep_fused,
            chosen.merge_into,
            chosen.merge_weight,
            *(() if self.order is None else (self.order,)),
        )

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave nothing in a copy or a pickle: how often the tensors there were written to tells of other tensors."""
        return type(None), ()


def count_edits(*tensors: Tensor) -> tuple[int, ...]:
    """How often each tensor was written to in place, as the host knows it; 0 where PyTorch does not count."""
    if torch.compiler.is_compiling():
        # The compiler takes a tensor's `_version` for a number that only running tells; the shape of a result it knows.
        return tuple(_edits_op(list(tensors)).shape)
    return tuple(0 if each.is_inference() else each._version for each in tensors)


def _edits_as_shape(tensors: list[Tensor]) -> Tensor:
    edits = [0 if each.is_inference() else each._version for each in tensors]
    return torch.empty(edits, device="meta")


# Nobody reads its result, so that no compiled code calls it.
_edits_op = torch.library.custom_op("prunevit::edits", _edits_as_shape, mutates_args=())
_edits_op.register_fake(_edits_as_shape)
