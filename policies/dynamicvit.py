"""DynamicViT: learned predictors say which patches stay (Rao et al., NeurIPS 2021).

Differs from the authors' code: distillation and register tokens are never pruned; any grid (theirs is 14 x 14); an
image that has lost every patch in training gets a mean of 0 instead of NaN; in evaluation the predictors can also
decide the number (`rule="threshold"`), as they do in training. `softmax_eps=1e-6` is theirs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import gumbel_softmax, kl_div

from prunevit.checks import check_number, check_word
from prunevit.keepmask import KeepMask, threshold, top_k
from prunevit.policy import Layers, ModelInfo, PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import Stage, Trace


class DynamicViT(PruningPolicy):
    """Keep the patches that a predictor rates best: `int(P * keep_rate^stage)` of the `P` initial ones.

    In training all rows stay, and what the predictors drop is masked: their decisions are Gumbel-softmax samples with a
    straight-through gradient, and what is dropped once stays dropped. A masked row still attends to itself.
    """

    knob = "keep_rate"
    knob_range = (0.0, 1.0)
    site = "before_block"
    exempt_self = True

    def __init__(
        self,
        keep_rate: float | Sequence[float] = 0.7,
        layers: Layers = (3, 6, 9),
        rule: str = "count",
        threshold: float = 0.5,
        ratio_weight: float = 2.0,
        distill_weight: float = 0.5,
        softmax_eps: float = 0.0,
    ) -> None:
        """Choose the count, and what training minimises.

        Args:
            keep_rate: Fraction of the patches kept at each layer, compounding: one, or one a layer. Training's target.
            layers: Blocks before which it acts.
            rule: In evaluation, "count" keeps the same number in every image, "threshold" what is probable enough.
            threshold: Probability from which a patch stays under `rule="threshold"`.
            ratio_weight: Weight of the squared distance between the share kept and its target.
            distill_weight: Weight of each of the two distances from the unpruned model.
            softmax_eps: Constant of the softmax in training.

        Raises:
            ValueError: If the rule is another word, the threshold lies outside [0, 1], or another number is negative.
        """
        super().__init__(keep_rate, layers, compound=True)
        check_word("DynamicViT", "rule", rule, ("count", "threshold"))
        check_number("DynamicViT", "threshold", threshold, 0, 1)
        for name, value in (
            ("ratio_weight", ratio_weight),
            ("distill_weight", distill_weight),
            ("softmax_eps", softmax_eps),
        ):
            check_number("DynamicViT", name, value, 0)
        self.rule, self.threshold = rule, threshold
        self.ratio_weight, self.distill_weight = ratio_weight, distill_weight
        self.softmax_eps = softmax_eps
        self.predictors = nn.ModuleList()

    def setup(self, info: ModelInfo) -> None:
        """Build a predictor a layer, the first time.

        Raises:
            ValueError: If those there are do not fit the model.
        """
        super().setup(info)
        self.width = info.width
        if not self.predictors:
            self.predictors.extend(Predictor(info.width) for _ in self.layers)
        built = [predictor.width for predictor in self.predictors]
        if built != [info.width] * len(self.layers):
            raise ValueError(
                f"DynamicViT: its predictors must fit {len(self.layers)} layers of width {info.width}, got widths "
                f"{built}; make a new policy for this model"
            )

    def score(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Tensor:
        """Log-probability that a patch stays."""
        return self.predictors[self.layers.index(layer)](tokens)[:, 0]

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep the best in evaluation; sample a mask in training."""
        if self.training:
            return self._sampled(tokens, layer)
        score = self.score(tokens, attention, layer)
        if self.rule == "threshold":
            return threshold(tokens, score.exp(), self.threshold)
        return top_k(tokens, score, self.rate(layer), rounding="floor", of="initial")

    def losses(self, trace: Trace, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        """Distance of the shares kept from their targets, of the logits and of the kept patches from the teacher's.

        "ratio" is the squared error of each image's share, "logits" the divergence KL(student || teacher) as torch's
        `kl_div` takes it, "features" the mean squared error after the final norm, patches matched by their place.
        """
        stages = [
            stage for stage in trace.stages if stage.layer in self.layers and stage.mask.soft is not None
        ]
        if not stages:
            return {}
        ratio = torch.stack([self._ratio_error(stage) for stage in stages]).mean()
        student, target = _wide(trace.logits).log_softmax(-1), _wide(teacher["logits"]).log_softmax(-1)
        divergence = kl_div(student, target, reduction="batchmean", log_target=True)
        return {
            "ratio": self.ratio_weight * ratio,
            "logits": self.distill_weight * divergence,
            "features": self.distill_weight * _feature_error(trace.tokens, teacher["features"]),
        }

    def macs(self, counts: Tensor) -> Tensor:
        """The linear layers of a predictor, on every row."""
        width = self.width
        return counts.double() * (width**2 + width * (width // 2) + (width // 2 + 2) * (width // 4))

    def _sampled(self, tokens: RaggedTokens, layer: int) -> KeepMask:
        log_probability = self.predictors[self.layers.index(layer)](tokens)
        decision = gumbel_softmax(log_probability, hard=True)[:, 0]
        soft = decision if tokens.soft is None else tokens.soft * decision
        return KeepMask(tokens.live, soft=torch.where(tokens.is_patch, soft, 1.0))

    def _ratio_error(self, stage: Stage) -> Tensor:
        assert stage.mask.soft is not None
        tokens = stage.tokens
        kept = tokens.sum(stage.mask.soft.masked_fill(~tokens.is_patch, 0))
        share = kept / (tokens.grid[0] * tokens.grid[1])
        return (share - self.rate(stage.layer)).square().mean()


class Predictor(nn.Module):
    """Rates patches by their own features and by the mean over the patches kept so far."""

    def __init__(self, width: int) -> None:
        """Build for a model of that many channels."""
        super().__init__()
        self.width = width
        self.features = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.classify = nn.Sequential(
            nn.Linear(width, width // 2),
            nn.GELU(),
            nn.Linear(width // 2, width // 4),
            nn.GELU(),
            nn.Linear(width // 4, 2),
        )
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, tokens: RaggedTokens) -> Tensor:
        """Log-probabilities of keeping and of dropping each row, at least fp32 `[T, 2]`."""
        own, shared = self.features(tokens.x).chunk(2, -1)
        kept = tokens.is_patch.to(shared.dtype)
        if tokens.soft is not None:
            kept = tokens.soft.masked_fill(~tokens.is_patch, 0)
        # Counts are whole: a half tells none from one and leaves the gradient of one alone.
        number = tokens.sum(kept).clamp(min=0.5)[:, None]
        mean = (tokens.sum(shared * kept[:, None]) / number).to(own.dtype)
        mean = torch.cat([mean, mean.new_zeros(1, mean.shape[1])])[tokens.image_id]
        return _wide(self.classify(torch.cat([own, mean], -1))).log_softmax(-1)


def _wide(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _feature_error(tokens: RaggedTokens, features: Tensor) -> Tensor:
    """Mean squared error of the patches kept against `features [B, N, C]`, matched by their place in the grid."""
    kept = tokens.is_patch if tokens.soft is None else tokens.is_patch & (tokens.soft > 0.5)
    image = tokens.image_id.clamp(max=tokens.batch_size - 1)
    target = features[image, tokens.num_prefix_tokens + tokens.source]
    error = (_wide(tokens.x) - target).square().mean(-1)
    return error.masked_fill(~kept, 0).sum() / kept.sum().clamp(min=1)
