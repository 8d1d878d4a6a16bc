"""A data-dependent policy: plain images keep few patches, busy ones many.

uv run prunevit check docs/examples/top_mass.py:TopMass
"""

import prunevit


class TopMass(prunevit.PruningPolicy):
    """Keep the fewest patches that hold the share `mass` of the squared distances from the image's mean token."""

    knob = "mass"
    knob_range = (0.0, 1.0)

    def __init__(self, mass: float = 0.8, layers: tuple[int, ...] = (3, 6, 9)) -> None:
        super().__init__(mass, layers)

    def forward(self, tokens, attention, layer):
        x = tokens.x.float()
        # Rows behind the last image, which a CUDA graph makes room for, have image_id == batch_size.
        mean = tokens.mean(x)[tokens.image_id.clamp(max=tokens.batch_size - 1)]
        return prunevit.top_p(tokens, (x - mean).square().sum(-1), self.rate(layer))
