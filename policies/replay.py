"""Replay of a recorded trace: the same decisions on another backend, precision, batch, capacity or model.

This is how the numeric effect of a backend is told from the effect of a policy, and how one model's decisions are
tried on another.
"""

from os import PathLike

import torch
from torch import Tensor

from prunevit.checks import check_whole, require
from prunevit.keepmask import KeepMask
from prunevit.policy import PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import Stage, Trace


def replay(trace: Trace) -> list[PruningPolicy]:
    """Policies that repeat a trace: one for each policy that acted in it.

    Args:
        trace: What to repeat. A batch may hold any of its images, in any order; they are found by `image_index`.
    """
    numbers = sorted({stage.policy for stage in trace.stages})
    return [Replay(trace, policy=number) for number in numbers]


class Replay(PruningPolicy):
    """Repeat what one policy did in a trace."""

    def __init__(self, trace: Trace | str | PathLike[str], policy: int = 0) -> None:
        """Take the decisions of a trace.

        Args:
            trace: A trace, or a file that `Trace.save` wrote.
            policy: Position of the policy in the model that was traced.

        Raises:
            ValueError: If the trace holds no stage of that policy.
        """
        check_whole("Replay", "policy", policy, 0)
        trace = trace if isinstance(trace, Trace) else Trace.load(trace)
        self.stages = {stage.layer: stage for stage in trace.stages if stage.policy == policy}
        if not self.stages:
            raise ValueError(f"Replay: the trace must hold a stage of policy {policy}, got none")
        super().__init__(None, sorted(self.stages))
        self.site = next(iter(self.stages.values())).site

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Repeat the recorded decision for the images of this batch.

        Raises:
            ValueError: If an image is not in the trace, or had another number of rows there (on a GPU the device
                stops with an assertion instead).
        """
        stage = self._on(tokens.x.device, layer)
        recorded, mask = stage.tokens, stage.mask
        match = tokens.image_index[:, None] == recorded.image_index
        image = match.int().argmax(1)
        same = match.any(1) & (recorded.seqlens[image] == tokens.seqlens)
        require(same.all(), "Replay: each image must be in the trace with as many rows as here")
        start = torch.cat([recorded.cu_seqlens[image], image.new_zeros(1)]).long()
        shift = start[tokens.image_id] - tokens.start
        rows = (torch.arange(shift.shape[0], device=shift.device) + shift).clamp(0, mask.keep.shape[0] - 1)

        def here(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        into = here(mask.merge_into)
        return KeepMask(
            keep=mask.keep[rows] & tokens.live,
            rows_per_image=mask.rows_per_image if tokens.uniform else None,
            merge_into=None if into is None else torch.where((into >= 0) & tokens.live, into - shift, -1),
            merge_weight=here(mask.merge_weight),
            size=here(mask.size),
            key_weight=here(mask.key_weight),
            order=here(mask.order),
            soft=here(mask.soft),
        )

    def _on(self, device: torch.device, layer: int) -> Stage:
        """The recorded stage on a device; moved there once."""
        stage = self.stages[layer]
        if stage.counts.device != device:
            stage = self.stages[layer] = stage.to(device)
        return stage
