"""DPC-KNN: merge clusters around density peaks (Du et al., 2016; Haurum et al., "Which Tokens to Use?", ICCVW 2023).

As in the code of Haurum et al. the five neighbours include the patch itself and a mean divides by the sum of weights
+ 1e-6. Differs from it: the noise that breaks ties between densities is keyed by (seed, image, layer, patch), so batch
order changes nothing; distillation and register tokens take no part; a rate of 1 leaves the tokens alone.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prunevit.checks import check_counting, check_seed, check_whole
from prunevit.draws import keyed_uniform
from prunevit.folding import merge
from prunevit.keepmask import KeepMask, keep_everything, top_k
from prunevit.kernels.clusters import density_peaks, nearest_kept
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class DPCKNN(PruningPolicy):
    """Keep patches of high density that are far from denser ones; each other patch joins its nearest centre.

    The density is `exp(-mean of d^2 over the nearest neighbours)` with distances divided by `sqrt(C)`; a cluster
    becomes the mean of its members, weighted by `exp(linear(x))` if the weights are learned.
    """

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    site = "before_block"
    stochastic = True

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        neighbours: int = 5,
        learned_weight: bool = False,
        seed: int = 0,
        rounding: str = "floor",
        of: str = "initial",
        compound: bool = True,
    ) -> None:
        """Choose the count and the weights.

        Args:
            keep_rate: Fraction of the patches kept at each layer: one, or one a layer.
            layers: Blocks before which it acts.
            neighbours: Patches whose distance makes the density, itself included.
            learned_weight: Weigh the members of a cluster by a linear layer of each stage, which training must have
                learned; off the shelf all weigh the same.
            seed: Of the noise that breaks ties.
            rounding: "ceil" or "floor".
            of: Fraction of the "current" or of the "initial" patches.
            compound: Whether the rates of the stages multiply; goes with `of="initial"`.

        Raises:
            ValueError: If a setting is not one of those, or contradicts another.
        """
        super().__init__(keep_rate, layers, compound)
        check_counting("DPCKNN", rounding, of, compound)
        check_whole("DPCKNN", "neighbours", neighbours, 1)
        check_seed("DPCKNN", seed)
        self.neighbours, self.learned_weight, self.seed = neighbours, learned_weight, seed
        self.rounding, self.of = rounding, of
        self.scorers = nn.ModuleList()

    def setup(self, info: ModelInfo) -> None:
        """Build the linear layers, the first time.

        Raises:
            ValueError: If those there are do not fit the model.
        """
        super().setup(info)
        self.width = info.width
        if not self.learned_weight:
            return
        if not self.scorers:
            self.scorers.extend(nn.Linear(info.width, 1) for _ in self.layers)
        built = [scorer.in_features for scorer in self.scorers]
        if built != [info.width] * len(self.layers):
            raise ValueError(
                f"DPCKNN: its linear layers must fit {len(self.layers)} layers of width {info.width}, got widths "
                f"{built}; make a new policy for this model"
            )

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Density times the distance to a denser patch."""
        return self._peaks(tokens, layer)[0]

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Merge each cluster into its centre."""
        if self.rate(layer) >= 1:
            return keep_everything(tokens)
        peaks, distance = self._peaks(tokens, layer)
        mask = top_k(tokens, peaks, self.rate(layer), rounding=self.rounding, of=self.of)
        centre = nearest_kept(
            distance, mask.keep, tokens.source, cu_seqlens=tokens.cu_seqlens, max_seqlen=tokens.max_seqlen
        )
        return merge(tokens, mask, centre, self._weight(tokens, layer), eps=1e-6)

    def macs(self, counts: Tensor) -> Tensor:
        """The distances."""
        return counts.double() ** 2 * self.width

    def _peaks(self, tokens: RaggedTokens, layer: int) -> tuple[Tensor, Tensor]:
        images = torch.cat([tokens.image_index, tokens.image_index.new_zeros(1)])
        noise = keyed_uniform(self.seed * 1009 + layer, images[tokens.image_id], tokens.source)
        return density_peaks(
            tokens.x,
            noise,
            tokens.source,
            cu_seqlens=tokens.cu_seqlens,
            max_seqlen=tokens.max_seqlen,
            neighbours=self.neighbours,
        )

    def _weight(self, tokens: RaggedTokens, layer: int) -> Tensor:
        wide = torch.promote_types(tokens.x.dtype, torch.float32)
        if not self.learned_weight:
            return tokens.x.new_ones(tokens.x.shape[0], dtype=wide)
        return self.scorers[self.layers.index(layer)](tokens.x)[:, 0].to(wide).exp()
