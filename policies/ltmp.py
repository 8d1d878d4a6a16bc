"""LTMP: merge and prune by learned thresholds (Bonnaerens and Dambre, TMLR 2023).

Differs from the authors' code: images of a batch may keep different numbers (there, evaluation needs batches of one);
a value equal to the prune threshold stays; an image always keeps a patch in evaluation; distillation and register
tokens neither merge nor leave. The authors train with SGD, the model frozen; `softmax_eps=1e-5` is theirs.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from prunevit.checks import check_number
from prunevit.folding import merge, nearest
from prunevit.keepmask import KeepMask, threshold
from prunevit.kernels.join import join
from prunevit.kernels.turns import split_by_turns
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import Trace


class LTMP(PruningPolicy):
    """Merge ToMe's pairs whose keys are alike enough, then prune what receives too little attention, in each block.

    A row that others merged into counts as the best attended of them. In training no row leaves: what would is masked
    by a step with the gradient of `sigmoid((value - threshold) / tau)`.
    """

    knob = "merge_threshold"
    needs = frozenset({"received_attention"})

    def __init__(
        self,
        merge_threshold: float | Sequence[float] = 0.9,
        prune_threshold: float | Sequence[float] = 0.0,
        layers: Layers = ":",
        tau: float = 0.1,
        target: float | None = None,
        target_weight: float = 10.0,
        softmax_eps: float = 0.0,
    ) -> None:
        """Set where the thresholds start.

        Args:
            merge_threshold: Cosine above which a pair merges: one, or one a layer.
            prune_threshold: Attention received, mean over heads and queries, below which a patch leaves; likewise.
            layers: Blocks after whose attention it acts.
            tau: Temperature of the step's gradient.
            target: Fraction of the unpruned model's FLOPs that training aims at; None: no such loss.
            target_weight: Weight of that loss.
            softmax_eps: Constant of the softmax in training.

        Raises:
            ValueError: If one of them is no finite number, negative where that makes no sense, or `tau` is 0.
        """
        super().__init__(merge_threshold, layers)
        self.prune_threshold = (
            tuple(prune_threshold) if isinstance(prune_threshold, Sequence) else prune_threshold
        )
        for each in self.prune_threshold if isinstance(self.prune_threshold, tuple) else (prune_threshold,):
            check_number("LTMP", "prune_threshold", each)
        check_number("LTMP", "tau", tau, sys.float_info.min)
        if target is not None:
            check_number("LTMP", "target", target, 0, 1)
        check_number("LTMP", "target_weight", target_weight, 0)
        check_number("LTMP", "softmax_eps", softmax_eps, 0)
        self.tau, self.target, self.target_weight = tau, target, target_weight
        self.softmax_eps = softmax_eps
        self.merge_thresholds = nn.Parameter(torch.empty(0))
        self.prune_thresholds = nn.Parameter(torch.empty(0))

    def setup(self, info: ModelInfo) -> None:
        """Make the thresholds, the first time: two a layer.

        Raises:
            ValueError: If there is not one for each layer.
        """
        super().setup(info)
        self.head_dim, self.width, self.depth = info.width // info.num_heads, info.width, info.depth
        if not self.merge_thresholds.numel():
            prune = self.prune_threshold
            start = prune if isinstance(prune, tuple) else (prune,) * len(self.layers)
            merge_start = [self.rate(layer) for layer in self.layers]
            self.merge_thresholds = nn.Parameter(torch.tensor(merge_start, dtype=torch.float32))
            self.prune_thresholds = nn.Parameter(torch.tensor(start, dtype=torch.float32))
        for thresholds in (self.merge_thresholds, self.prune_thresholds):
            if len(thresholds) != len(self.layers):
                raise ValueError(
                    f"LTMP: there must be one threshold for each of the {len(self.layers)} layers, "
                    f"got {len(thresholds)}; make a new policy for this model"
                )

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Attention that a row receives."""
        assert attention is not None
        return attention.score("received")

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Merge, then prune."""
        assert attention is not None
        stage = self.layers.index(layer)
        a, b = split_by_turns(tokens.source, tokens.image_id, tokens.cu_seqlens)
        soft = tokens.soft
        if soft is None:
            queries, keys = a, b
        else:  # what is masked joins nobody, and nobody joins it
            present = soft > 0.5
            queries, keys = a & present, b & present
        partner, similarity = nearest(tokens, attention.k, queries=queries, keys=keys, cosine=True)
        keep, received = join(
            similarity,
            partner,
            self.merge_thresholds[stage],
            attention.received_attention,
            cu_seqlens=tokens.cu_seqlens,
        )
        sizes = tokens.sizes
        mask = replace(merge(tokens, KeepMask(keep), partner, sizes), order=b, key_weight=sizes)
        if not self.training:
            return threshold(tokens, received, self.prune_thresholds[stage], within=mask)
        merging = self._step(similarity, self.merge_thresholds[stage])
        staying = self._step(received, self.prune_thresholds[stage])
        if soft is not None:
            staying = torch.where(soft > 0.5, staying, soft)
        soft = torch.where(keep, staying, 1 - merging)
        return replace(mask, soft=torch.where(tokens.is_patch, soft, 1.0))

    def losses(self, trace: Trace, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """Squared distance of the FLOPs from their target, by the mean share of the rows that each block keeps."""
        shares = {
            stage.layer: stage.tokens.mean(stage.mask.soft).mean()
            for stage in trace.stages
            if stage.layer in self.layers and stage.mask.soft is not None
        }
        if self.target is None or not shares:
            return {}
        n, width = trace.tokens.max_seqlen, self.width
        share = torch.ones_like(next(iter(shares.values())))
        flops = torch.zeros_like(share)
        for layer in range(self.depth):
            flops = flops + 2 * share * n * width**2 + (share * n) ** 2 * width
            share = shares.get(layer, share)
            flops = flops + 4 * share * n * width**2
        ratio = flops / (self.depth * (6 * n * width**2 + n**2 * width))
        return {"flops": self.target_weight * (ratio - self.target).square()}

    @torch.no_grad()
    def constrain(self) -> None:
        """Keep the thresholds between 0 and 1, as the authors do."""
        self.merge_thresholds.clamp_(0, 1)
        self.prune_thresholds.clamp_(0, 1)

    def macs(self, counts: Tensor) -> Tensor:
        """The products of A with B."""
        return (counts.double() / 2) ** 2 * self.head_dim

    def _step(self, value: Tensor, threshold: Tensor) -> Tensor:
        """1 where a value exceeds a threshold, else 0, with a sigmoid's gradient."""
        soft = ((value - threshold) / self.tau).sigmoid()
        return soft + ((value > threshold).to(soft) - soft).detach()
