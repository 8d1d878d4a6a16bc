"""Inputs of the tests of `join` and its oracle: a loop over the rows, as plain numbers."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from prunevit.kernels.join import join

LENGTHS = ([1], [0, 5, 0], [33, 150, 2], [3, 600])


@dataclass
class JoinCase:
    """Rows that name any row of their image, some of them one that joins another; scores of either sign, quarters."""

    similarity: Tensor
    partner: Tensor
    limit: Tensor
    score: Tensor
    cu_seqlens: Tensor

    def join(self) -> tuple[Tensor, Tensor]:
        return join(self.similarity, self.partner, self.limit, self.score, cu_seqlens=self.cu_seqlens)


def make_join_case(
    lengths: list[int],
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    dead_rows: int = 7,
    device: str = "cpu",
) -> JoinCase:
    """Draw a case; a third of the similarities equals the limit, and the scores lie head by head as they do."""
    live = sum(lengths)
    generator = torch.Generator().manual_seed(live)
    similarity = torch.randint(-1, 2, (live,), generator=generator) / 2 + 0.25
    similarity = torch.cat([similarity, torch.full((dead_rows,), -math.inf)])
    partner = torch.cat(
        [
            *(torch.randint(sum(lengths[:i]), sum(lengths[: i + 1]) or 1, (n,), generator=generator)
              for i, n in enumerate(lengths) if n),
            torch.full((dead_rows,), -1),
        ]
    )  # fmt: skip
    score = torch.randint(-20, 20, (heads, live + dead_rows), generator=generator).to(dtype).T
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    limits = torch.tensor([7.0, 0.25, 7.0])  # the one used is no multiple of 16 bytes away from the first
    on = (
        similarity.to(device),
        partner.to(device),
        limits.to(device)[1],
        score.to(device),
        bounds.to(device),
    )
    return JoinCase(*on)


def assert_joined(case: JoinCase, got: tuple[Tensor, Tensor]) -> None:
    """Hold what was found against the loop: a row that joins brings its own score, whoever has joined it."""
    keep, best = got
    mean = [math.fsum(heads) / len(heads) for heads in case.score.tolist()]
    group = [[own] for own in mean]
    stays = [not alike > case.limit.item() for alike in case.similarity.tolist()]
    for row, heir in enumerate(case.partner.tolist()):
        if not stays[row]:
            group[heir].append(mean[row])
    assert keep.tolist() == stays
    assert best.dtype == torch.promote_types(case.score.dtype, torch.float32)
    assert best.tolist() == [max(scores) for scores in group]
