"""DynamicViT (Rao et al., NeurIPS 2021), written out densely.

Before a block a predictor reads the patches: half of its channels local, the other half averaged over the
patches kept so far; it gives the log-probabilities of (keep, drop). In evaluation patches leave; in
training all rows stay, decisions are Gumbel-softmax samples with a straight-through gradient, and attention
is masked.

A predictor is a pair of modules: `features` [n, C] -> [n, C'] and `classify` [n, C'] -> [n, 2] (logits or
log-probabilities of keep and drop). Differs from the authors' code in nothing but the protection of all
prefix tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from dense_walk import Attended, Record, Tokens, kept_count, walk
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

Predictor = tuple[nn.Module, nn.Module]


def predict(predictor: Predictor, tokens: Tokens) -> Tensor:
    """Log-probabilities of (keep, drop) for each patch [n, 2]; the row weights are the decisions so far."""
    features, classify = predictor
    local, shared = features(tokens.patches).chunk(2, -1)
    decision = tokens.weight[tokens.num_prefix :, None]
    mean = (shared * decision).sum(0) / decision.sum()
    return classify(torch.cat([local, mean.expand_as(shared)], -1)).log_softmax(-1)


def dynamicvit(
    model: VisionTransformer,
    images: Tensor,
    predictors: Sequence[Predictor],
    keep_rate: float | None = 0.7,
    layers: Sequence[int] = (3, 6, 9),
) -> tuple[Tensor, Record]:
    """Evaluate: keep the best int(P * rate^stage) patches, or with no rate each patch with p(keep) > 0.5.

    Without a rate the count differs from image to image; the best patch stays at least.
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        score = predict(predictors[stage], tokens)[:, 0]
        order = score.argsort(descending=True)
        if keep_rate is None:
            count = max(int((score.exp() > 0.5).sum()), 1)
        else:
            count = kept_count(tokens, keep_rate, stage, "floor", "initial", compound=True)
        return tokens.keep(order[:count])

    return walk(model, images, layers, rule, "before_block")


def masked_softmax(scores: Tensor, tokens: Tokens, eps: float) -> Tensor:
    """Softmax over the kept keys and each row's own; the maximum is taken over all keys, masked ones too."""
    own = torch.eye(len(tokens.x), dtype=scores.dtype)
    mask = tokens.weight + (1 - tokens.weight) * own
    p = (scores - scores.amax(-1, keepdim=True)).exp() * mask
    return (p + eps / len(tokens.x)) / (p.sum(-1, keepdim=True) + eps)


def dynamicvit_training(
    model: VisionTransformer,
    images: Tensor,
    predictors: Sequence[Predictor],
    gumbel: Tensor,
    layers: Sequence[int] = (3, 6, 9),
    eps: float = 1e-6,
) -> tuple[Tensor, Record]:
    """Train: sample decisions with the given Gumbel noise [stages, B, P, 2] at temperature 1; no row leaves.

    What is dropped stays dropped. Each stage's decisions are `decisions(record)`.
    """

    def rule(stage: int, tokens: Tokens, attended: Attended | None) -> Tokens:
        soft = (predict(predictors[stage], tokens) + gumbel[stage, tokens.image]).softmax(-1)[:, 0]
        sample = (soft > 0.5).to(soft) + soft - soft.detach()
        prefix, before = tokens.weight.split([tokens.num_prefix, tokens.count])
        return replace(tokens, weight=torch.cat([prefix, before * sample]))

    return walk(model, images, layers, rule, "before_block", lambda s, t: masked_softmax(s, t, eps))


def decisions(record: Record) -> Tensor:
    """Cumulative decisions of a training forward [stages, B, P], differentiable."""
    return torch.stack([torch.stack([t.weight[t.num_prefix :] for t in s.after]) for s in record.stages])


class Losses(NamedTuple):
    """The weighted parts; their sum is what the authors minimise."""

    classification: Tensor
    ratio: Tensor
    logits: Tensor
    features: Tensor


def losses(
    logits: Tensor,
    record: Record,
    labels: Tensor,
    keep_rate: float,
    teacher_logits: Tensor,
    teacher_features: Tensor,
    ratio_weight: float = 2.0,
    distill_weight: float = 0.5,
) -> Losses:
    """Compare with labels [B] or [B, K] and the teacher's logits and patch features after its final norm.

    The teacher's shapes are [B, K] and [B, P, C]. If no image keeps a patch the last part is NaN.
    """
    kept = decisions(record)
    target = torch.tensor([keep_rate ** (stage + 1) for stage in range(len(kept))], dtype=kept.dtype)
    ratio = (kept.mean(2) - target[:, None]).square().mean(1).sum() / len(kept)
    student = torch.stack([t.patches for t in record.final])
    alive = kept[-1] > 0.5
    # The authors' kl_div(student, teacher) is sum of teacher * (log teacher - log student).
    teacher_log = teacher_logits.log_softmax(-1)
    kl = (teacher_log.exp() * (teacher_log - logits.log_softmax(-1))).sum() / len(logits)
    mse = (student[alive] - teacher_features[alive]).square().mean()
    return Losses(
        F.cross_entropy(logits, labels), ratio_weight * ratio, distill_weight * kl, distill_weight * mse
    )
