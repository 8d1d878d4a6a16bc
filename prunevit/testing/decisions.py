"""Checks of each decision by itself: what `pack` would refuse, and what it could not see. All others build on them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask
from prunevit.packing import pack
from prunevit.policy import PruningPolicy
from prunevit.testing.candidate import Candidate, CheckFailure, Decision, NotApplicable, images, index
from prunevit.vit import RaggedViT

PER_ROW = ("keep", "merge_into", "merge_weight", "size", "key_weight", "order", "soft")


def check_setup(candidate: Candidate) -> str:
    """It is a policy, can be made, and meets a model."""
    return f"on {candidate.depth} blocks, it acts at {list(candidate.pruned().policies[0].layers)}"  # type: ignore[arg-type]


def check_mask(candidate: Candidate) -> None:
    """Each decision is a `KeepMask` with one entry a row, of the right types, that folds rows into rows that stay."""
    for decision in _decisions(candidate):
        mask, where = decision.mask, f"at layer {decision.layer}"
        if not isinstance(mask, KeepMask):
            raise CheckFailure(f"forward must return a KeepMask, got {type(mask).__name__} {where}")
        rows = decision.tokens.x.shape[0]
        for name in PER_ROW:
            values = getattr(mask, name)
            if values is not None and values.shape != (rows,):
                raise CheckFailure(f"{name} must have shape [{rows}], got {list(values.shape)} {where}")
        if mask.keep.dtype != torch.bool:
            raise CheckFailure(f"keep must be bool, got {mask.keep.dtype} {where}")
        if mask.rows_per_image is not None and not decision.tokens.uniform:
            raise CheckFailure(f"rows_per_image must be None where images differ in rows, got one {where}")
        if mask.merge_into is not None:
            _check_folds(decision, where)


def check_one_patch_stays(candidate: Candidate) -> None:
    """Every image keeps a patch."""
    for decision in _decisions(candidate):
        left = decision.tokens.sum((decision.kept & decision.tokens.is_patch).int())
        if not bool(left.all()):
            image = int((left == 0).int().argmax())
            raise CheckFailure(
                f"image {image} keeps no patch at layer {decision.layer}; the verbs keep the best one"
            )


def check_known_count(candidate: Candidate) -> str:
    """Where the policy says how many rows each image keeps, that is what each keeps."""
    promised = [each for each in _decisions(candidate) if each.mask.rows_per_image is not None]
    if not promised:
        raise NotApplicable("the number of rows depends on the data")
    for decision in promised:
        rows, said = decision.tokens.sum(decision.kept.int()), decision.mask.rows_per_image
        if not bool((rows == said).all()):
            raise CheckFailure(
                f"rows_per_image is {said} at layer {decision.layer}, but the images keep {rows.tolist()}"
            )
    return ", ".join(str(each.mask.rows_per_image) for each in promised) + " rows"


def check_prefix(candidate: Candidate) -> None:
    """CLS, distillation and register tokens come through each stage as they were."""
    for decision in _decisions(candidate):
        before, after = decision.tokens, pack(decision.tokens, decision.mask)
        if not torch.equal(before.prefix(), after.prefix()):
            raise CheckFailure(
                f"the prefix rows are changed at layer {decision.layer}; they have weight 1, and nothing is folded "
                "into them"
            )


def check_score(candidate: Candidate) -> None:
    """What patches are ranked by is a number: NaN ranks behind every number, in the order of the rows."""
    policy: PruningPolicy = candidate.pruned().policies[0]  # type: ignore[assignment]
    seen = False
    for decision in _decisions(candidate):
        score = _score(policy, decision)
        if score is None:
            continue
        seen = True
        missing = int((score.isnan().flatten(1).any(1) & decision.tokens.is_patch).sum())
        if missing:
            raise CheckFailure(
                f"the score of {missing} of {int(decision.tokens.is_patch.sum())} patches is NaN at layer "
                f"{decision.layer}; such patches are taken in the order of the rows"
            )
    if not seen:
        raise NotApplicable("it shows no score by which it ranks patches")


def check_forward(candidate: Candidate) -> str:
    """A forward pass runs and gives finite logits."""
    _, error = candidate.decisions
    if error is not None:
        raise error
    with torch.no_grad():
        trace = candidate.pruned().trace(images(), index())
    if not bool(trace.logits.isfinite().all()):
        raise CheckFailure("the logits are not finite")
    return f"{int(trace.attention_rows[0, 0])} -> {trace.mlp_rows[-1].double().mean():.1f} rows"


def check_leaves_alone(candidate: Candidate) -> None:
    """Deciding changes neither what torch keeps for the whole process, nor the policy's mode."""
    pruned = candidate.pruned()
    for is_graded in (False, True):
        with torch.set_grad_enabled(is_graded):
            torch.rand(())  # whoever seeds as the kit did goes back by this number
            before = _surroundings(pruned)
            pruned(images(), index())
            after = _surroundings(pruned)
        for name, value in before.items():
            if after[name] != value:
                raise CheckFailure(f"forward must leave {name} at {value}, got {after[name]} after it")


def check_repeats(candidate: Candidate) -> None:
    """The same images give the same logits again: draws in evaluation are keyed by seed and image."""
    pruned = candidate.pruned()
    with torch.no_grad():
        first, again = pruned(images(), index()), pruned(images(), index())
    if not torch.equal(first, again):
        raise CheckFailure(
            "two forward passes of the same images differ; draw by prunevit.draws, and keep no state in evaluation"
        )


def _score(policy: PruningPolicy, decision: Decision) -> Tensor | None:
    """What the patches were ranked by, `[T, heads or 1]`, if the decision or the policy says so."""
    if decision.mask.selection is not None:
        score = decision.mask.selection.score
    elif type(policy).score is not PruningPolicy.score:
        score = policy.score(decision.tokens, decision.attention, decision.layer)
    else:
        return None
    return score.reshape(len(score), -1)


def _surroundings(pruned: RaggedViT) -> dict[str, object]:
    """What a policy could change besides its answer, by name."""
    modes = {
        f"the training mode of {name or 'the policy'}": module.training
        for name, module in pruned.policies[0].named_modules()
    }
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's grad mode": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch's autocast": torch.is_autocast_enabled("cpu"),
        "torch's next random number": _next_draw(),
        **modes,
    }


def _next_draw() -> float:
    """The number that torch would draw now, which it still will."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return torch.rand((), generator=generator).item()


def _decisions(candidate: Candidate) -> Iterator[Decision]:
    made, error = candidate.decisions
    if error is not None and not made:
        raise NotApplicable("forward decides nothing: see its own check")
    yield from made


def _check_folds(decision: Decision, where: str) -> None:
    into, image = decision.mask.merge_into.long(), decision.tokens.image_id
    rows = torch.arange(len(into))
    inside = (into >= -1) & (into < len(into))
    if not bool((inside & ((into < 0) | (image[into.clamp(0, len(into) - 1)] == image))).all()):
        raise CheckFailure(f"merge_into must be -1 or a row of the same image, got others {where}")
    if not bool((into == rows)[decision.kept].all()):
        raise CheckFailure(f"merge_into of a row that stays must be that row, got others {where}")
