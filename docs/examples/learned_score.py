"""A learnable policy: a linear layer for each stage scores the patches, and is trained through a soft mask.

uv run prunevit check docs/examples/learned_score.py:LearnedScore
"""

import torch
from torch import nn

import prunevit


class LearnedScore(prunevit.PruningPolicy):
    """Keep the patches of the best learned score; in training mask what it thinks little of."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    exempt_self = True  # in training a masked row still attends to itself

    def __init__(
        self, keep_rate: float = 0.7, layers: tuple[int, ...] = (3, 6, 9), weight: float = 2.0
    ) -> None:
        super().__init__(keep_rate, layers, compound=True)  # rate(layer): keep_rate, keep_rate^2, ...
        self.weight = weight
        self.heads = nn.ModuleList()

    def setup(self, info):
        super().setup(info)
        if not self.heads:  # set up again, as for a copy, it keeps what it has learned
            self.heads.extend(
                nn.Sequential(nn.LayerNorm(info.width), nn.Linear(info.width, 1)) for _ in self.layers
            )
        self.width = info.width

    def forward(self, tokens, attention, layer):
        score = self.heads[self.layers.index(layer)](tokens.x)[:, 0]
        if not self.training:
            return prunevit.top_k(tokens, score, self.rate(layer), of="initial")
        chance = score.float().sigmoid()
        keep = (chance > 0.5).float() + chance - chance.detach()  # 0 or 1, with the gradient of the chance
        if tokens.soft is not None:
            keep = keep * tokens.soft  # what was dropped once stays dropped
        return prunevit.KeepMask(tokens.live, soft=torch.where(tokens.is_patch, keep, 1.0))

    def losses(self, trace, teacher):
        stages = [stage for stage in trace.stages if stage.mask.soft is not None]
        errors = [stage.tokens.mean(stage.mask.soft) - self.rate(stage.layer) for stage in stages]
        return {"share": self.weight * sum(error.square().mean() for error in errors)}

    def macs(self, counts):
        return counts.double() * self.width
