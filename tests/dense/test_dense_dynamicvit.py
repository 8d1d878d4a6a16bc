"""DynamicViT's training forward and losses against its evaluation, torch's own functions and closed forms."""

import math

import pytest
import torch
import torch.nn.functional as F
from dense_dynamicvit import decisions, dynamicvit, dynamicvit_training, losses, masked_softmax, predict
from dense_models import build, photos
from dense_walk import Tokens, embed
from test_dense_walk import predictors
from torch import Tensor


def gumbel(stages: int, batch: int, seed: int = 2, patches: int = 16) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(stages, batch, patches, 2, generator=generator, dtype=torch.float64)
    return -(-uniform.log()).log()


@pytest.mark.parametrize("name", ["plain", "distilled", "registers"])
def test_training_without_noise_is_ragged_evaluation(name: str) -> None:
    model = build(name)
    images = photos(model, batch=3)
    with torch.no_grad():
        trained, record = dynamicvit_training(
            model, images, predictors(2), torch.zeros(2, 3, 16, 2).double(), (1, 3), eps=0.0
        )
        ragged, other = dynamicvit(model, images, predictors(2), None, (1, 3))
    torch.testing.assert_close(trained, ragged, rtol=0, atol=1e-10)
    for stage, kept in zip(other.stages, decisions(record)):
        for row, patches in zip(kept, stage.kept):
            assert row.round().nonzero()[:, 0].tolist() == sorted(patches.tolist())
    assert len(set(other.stages[0].counts)) > 1


def test_ragged_evaluation_keeps_one_patch() -> None:
    model = build("plain")
    images = photos(model)
    features, classify = predictors(1)[0]
    with torch.no_grad():
        [*classify.parameters()][-1].copy_(torch.tensor([-50.0, 50.0]))
        scores = [predict((features, classify), embed(model, image, 0))[:, 0] for image in images]
        _, record = dynamicvit(model, images, [(features, classify)], None, (0,))
    assert [kept.tolist() for kept in record.stages[0].kept] == [[int(score.argmax())] for score in scores]


def test_what_is_dropped_stays_dropped() -> None:
    model = build("plain")
    images = photos(model)
    with torch.no_grad():
        _, record = dynamicvit_training(model, images, predictors(3), gumbel(3, 2), (0, 1, 2))
    kept = decisions(record).round()
    assert ((kept == 0) | (kept == 1)).all()
    assert (kept[1:] <= kept[:-1]).all()
    assert (kept.sum(2) < 16).all()


def test_sampling_is_torchs_hard_gumbel_softmax() -> None:
    model = build("plain")
    image = photos(model, batch=1)
    predictor = predictors(1)[0]
    parameters = [*predictor[0].parameters(), *predictor[1].parameters()]
    weights = torch.randn(16, dtype=torch.float64)
    torch.manual_seed(7)
    noise = -torch.empty(16, 2, dtype=torch.float64).exponential_().log()
    _, record = dynamicvit_training(model, image, [predictor], noise[None, None], (0,))
    ours = decisions(record)[0, 0]
    torch.manual_seed(7)
    theirs = F.gumbel_softmax(predict(predictor, embed(model, image[0], 0)), hard=True)[:, 0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-15)
    gradients = torch.autograd.grad((weights * ours).sum(), parameters)
    expected = torch.autograd.grad((weights * theirs).sum(), parameters)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-14)


def test_masked_softmax_by_hand() -> None:
    tokens = Tokens(
        torch.zeros(3, 1).double(), torch.arange(3), torch.tensor([1.0, 0.0, 1.0]).double(), 1, 2, 0
    )
    scores = torch.tensor([[[0.0, 5.0, 1.0], [2.0, 1.0, 0.0], [1.0, 4.0, 3.0]]]).double()
    p = masked_softmax(scores, tokens, 0.0)[0]
    one, e = torch.zeros(()).double(), math.e
    torch.testing.assert_close(p[0], torch.tensor([1 / (1 + e), 0, e / (1 + e)]).double())
    # The dropped row sees itself besides the kept ones; the kept ones do not see it.
    torch.testing.assert_close(p[1], scores[0, 1].softmax(-1))
    assert p[2, 1] == one
    # With eps the masked key of row 0 gets its third of it; the maximum, 5, is that of the masked key.
    eps = masked_softmax(scores, tokens, 1e-2)[0]
    total = math.exp(-5) + math.exp(-4) + 1e-2
    expected = [(math.exp(-5) + 1e-2 / 3) / total, 1e-2 / 3 / total, (math.exp(-4) + 1e-2 / 3) / total]
    torch.testing.assert_close(eps[0], torch.tensor(expected).double())


def test_the_predictor_averages_the_kept_patches_only() -> None:
    model = build("registers")
    features, classify = predictors(1)[0]
    tokens = embed(model, photos(model)[0], 0)
    keep = torch.tensor([0, 3, 5, 11])
    some = tokens.weight.clone()
    some[5:] = 0
    some[5 + keep] = 1
    masked = Tokens(tokens.x, tokens.source, some, 5, 16, 0)
    with torch.no_grad():
        all_rows = predict((features, classify), masked)
        alone = predict((features, classify), tokens.keep(keep))
    torch.testing.assert_close(all_rows[keep], alone, rtol=0, atol=1e-14)
    torch.testing.assert_close(all_rows.exp().sum(1), torch.ones(16).double())


def test_losses_against_torch() -> None:
    model, teacher = build("plain"), build("plain", seed=9)
    images = photos(model, batch=3)
    labels = torch.tensor([1, 4, 0])
    logits, record = dynamicvit_training(model, images, predictors(2), gumbel(2, 3), (1, 3))
    with torch.no_grad():
        tokens = teacher.forward_features(images)
        teacher_logits, teacher_features = teacher.forward_head(tokens), tokens[:, 1:]
    parts = losses(logits, record, labels, 0.7, teacher_logits, teacher_features)
    first, second = decisions(record).round()
    ratio = ((first.mean(1) - 0.7) ** 2).mean() + ((second.mean(1) - 0.7**2) ** 2).mean()
    kl = F.kl_div(
        logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="batchmean", log_target=True
    )
    student = torch.cat([after.patches[kept > 0.5] for after, kept in zip(record.final, second)])
    wanted = torch.cat([patches[kept > 0.5] for patches, kept in zip(teacher_features, second)])
    torch.testing.assert_close(parts.classification, F.cross_entropy(logits, labels))
    torch.testing.assert_close(parts.ratio, 2.0 * ratio / 2)
    torch.testing.assert_close(parts.logits, 0.5 * kl)
    torch.testing.assert_close(parts.features, 0.5 * F.mse_loss(student, wanted))


def test_losses_vanish_against_oneself_when_all_is_kept() -> None:
    model = build("plain")
    images = photos(model)
    sure = gumbel(2, 2)
    sure[..., 0] += 1e3
    logits, record = dynamicvit_training(model, images, predictors(2), sure, (1, 3), eps=0.0)
    tokens = model.forward_features(images)
    parts = losses(logits, record, torch.tensor([0, 1]), 0.5, model(images), tokens[:, 1:], ratio_weight=3.0)
    torch.testing.assert_close(parts.ratio, torch.tensor(3 * (0.5**2 + 0.75**2) / 2).double())
    for part in (parts.logits, parts.features):
        torch.testing.assert_close(part, torch.zeros(()).double(), rtol=0, atol=1e-12)


def test_gradients_reach_every_predictor() -> None:
    model = build("plain")
    images = photos(model)
    pairs = predictors(2)
    logits, record = dynamicvit_training(model, images, pairs, gumbel(2, 2), (1, 3))
    parts = losses(
        logits, record, torch.tensor([0, 1]), 0.7, logits.detach(), torch.zeros(2, 16, 48).double()
    )
    sum(parts, torch.zeros(())).backward()
    for features, classify in pairs:
        for parameter in [*features.parameters(), *classify.parameters()]:
            assert parameter.grad is not None
            assert parameter.grad.isfinite().all()
            assert parameter.grad.abs().sum() > 0
