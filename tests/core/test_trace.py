"""What a trace remembers, and that it can be saved, joined and replayed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import small_vit

import prunevit
from prunevit import KeepMask, Trace
from prunevit.policies import EViT, RandomPruning, ThresholdL2, ToMe, TopK, TopP, replay
from prunevit.testing import check_policy

IMAGES = torch.randn(4, 3, 96, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def test_heirs_follow_a_patch_through_all_stages() -> None:
    pruned = prunevit.prune(small_vit(), EViT(0.5, (1, 2, 3)))
    trace = pruned.trace(IMAGES)
    for image in range(4):
        holders = torch.arange(36)
        for number, stage in enumerate(trace.stages):
            rows = torch.where(stage.tokens.image_id == image)[0].tolist()
            moved = {-1: -1}
            for row in rows:
                heir = int(stage.mask.merge_into[row])  # type: ignore[index]
                if stage.tokens.source[row] >= 0:
                    moved[int(stage.tokens.source[row])] = int(stage.tokens.source[heir]) if heir >= 0 else -1
            holders = torch.tensor([moved[int(patch)] for patch in holders])
            assert trace.heirs(number)[image].tolist() == holders.tolist()
            # Every patch lives on: in itself or in the fused row.
            assert (holders >= 0).all()
            assert trace.survivors(number, image) == sorted(set(holders.tolist()))
            assert len(trace.survivors(number, image)) == int(stage.counts[image]) - 1
    final = trace.tokens
    assert final.sizes.sum() == 4 * 37
    assert final.source[1:].sort().values.tolist()[3:] == sorted(final.source[1:].tolist())[3:]


def test_dropped_patches_have_no_heir() -> None:
    trace = prunevit.prune(small_vit(), TopK(0.25, (1,))).trace(IMAGES)
    assert (trace.heirs() >= 0).sum(1).tolist() == [9] * 4


def test_without_stages_every_patch_is_its_own_heir() -> None:
    trace = prunevit.prune(small_vit(), []).trace(IMAGES)
    assert trace.heirs()[2].tolist() == list(range(36))
    assert trace.mlp_rows.tolist() == [[37] * 4] * 4


@pytest.mark.parametrize(
    "policies",
    [
        [EViT(0.5, (1, 2))],
        [ToMe(5)],
        [TopP(0.6, (0, 2))],
        [ThresholdL2(0.1, (1, 3)), TopK(0.5, (2,))],
        [RandomPruning(0.4, (1,))],
    ],
    ids=lambda policies: "+".join(type(policy).__name__ for policy in policies),
)
def test_replay_repeats_a_trace_for_any_batch(policies, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    model = small_vit()
    pruned = prunevit.prune(model, policies)
    parts = [
        pruned.trace(IMAGES[:1], torch.tensor([10])),
        pruned.trace(IMAGES[1:], torch.tensor([11, 12, 13])),
    ]
    Trace.cat(parts).save(tmp_path / "new" / "trace.pt")
    trace = Trace.load(tmp_path / "new" / "trace.pt")
    torch.testing.assert_close(trace.logits, torch.cat([part.logits for part in parts]))

    again = prunevit.prune(model, replay(trace), backend="reference")
    shuffled = torch.tensor([3, 0, 2])
    repeated = again.trace(IMAGES[shuffled], 10 + shuffled)
    torch.testing.assert_close(repeated.logits, trace.logits[shuffled], rtol=0, atol=1e-11)
    assert repeated.heirs().tolist() == trace.heirs()[shuffled].tolist()
    assert repeated.mlp_rows.tolist() == trace.mlp_rows[:, shuffled].tolist()


def test_replay_refuses_what_it_has_not_seen() -> None:
    model = small_vit()
    trace = prunevit.prune(model, TopK(0.5, (1,))).trace(IMAGES)
    with pytest.raises(ValueError, match="each image must be in the trace"):
        prunevit.prune(model, replay(trace))(IMAGES, torch.tensor([0, 1, 2, 9]))


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(2)}, tmp_path / "weights.pt")
    with pytest.raises(ValueError, match=r"a file written by Trace\.save is needed"):
        Trace.load(tmp_path / "weights.pt")


def test_traces_of_different_plans_do_not_join() -> None:
    model = small_vit()
    one = prunevit.prune(model, TopK(0.5, (1,))).trace(IMAGES)
    other = prunevit.prune(model, TopK(0.5, (2,))).trace(IMAGES)
    with pytest.raises(ValueError, match="must have the same stages"):
        Trace.cat([one, other])


def test_a_trace_prints_its_stages() -> None:
    text = str(prunevit.prune(small_vit(), EViT(0.5, (1, 2))).trace(IMAGES))
    assert "37.0 -> 20.0 (20..20)" in text


def test_traces_join_where_only_some_batches_fold() -> None:
    """Rate 1 folds nothing and leaves the fields of folding out; beside rate 0.5 they mean what their absence meant."""
    model = small_vit()
    one = prunevit.prune(model, [EViT(0.5, (1,)), ToMe(4, layers=(2, 3))]).trace(
        IMAGES[:2], torch.tensor([0, 1])
    )
    other = prunevit.prune(model, [EViT(1.0, (1,)), ToMe(0, layers=(2, 3))]).trace(
        IMAGES[2:], torch.tensor([2, 3])
    )
    for parts, order in (((one, other), [0, 1, 2, 3]), ((other, one), [2, 3, 0, 1])):
        joined = Trace.cat(parts)
        repeated = prunevit.prune(model, replay(joined)).trace(IMAGES[order], torch.tensor(order))
        torch.testing.assert_close(repeated.logits, joined.logits, rtol=0, atol=1e-11)
        assert repeated.heirs().tolist() == joined.heirs().tolist()


def test_dead_rows_are_left_out_of_a_join() -> None:
    pruned = prunevit.prune(small_vit(), TopP(0.6, (1,)))
    tokens = pruned.walk(pruned.embed(IMAGES), capacity=4 * 37)
    assert tokens.x.shape[0] > int(tokens.cu_seqlens[-1])
    trace = pruned.trace(IMAGES)
    roomy = replace(trace, tokens=tokens)
    joined = Trace.cat([roomy, roomy])
    assert joined.tokens.seqlens.tolist() == trace.tokens.seqlens.tolist() * 2
    assert joined.tokens.x.shape[0] == int(joined.tokens.cu_seqlens[-1])


def test_a_trace_of_no_images_can_be_printed() -> None:
    trace = prunevit.prune(small_vit(), EViT(0.5, (1,))).trace(IMAGES[:0])
    assert str(trace).splitlines() == ["layer  site             rows before -> after (mean, min..max)"]


class NarrowHeirs(ToMe):
    """ToMe, which says in as few bytes as will do who joins whom."""

    def forward(self, *arguments: Any) -> KeepMask:
        mask = super().forward(*arguments)
        assert mask.merge_into is not None
        narrow = torch.int8 if len(mask.keep) < 128 else torch.int16
        return replace(mask, merge_into=mask.merge_into.to(narrow))


def test_heirs_of_any_integers_join_and_are_followed() -> None:
    """The rows of a joined trace have numbers that one byte cannot hold, and PyTorch takes no such index."""
    images = IMAGES[:3]  # 111 rows: a byte holds them
    model = small_vit()
    wide, narrow = prunevit.prune(model, ToMe(4, (1, 2))), prunevit.prune(model, NarrowHeirs(4, (1, 2)))
    right = Trace.cat([wide.trace(images)] * 3)
    joined = Trace.cat([narrow.trace(images)] * 3)
    for stage, expected in zip(joined.stages, right.stages, strict=True):
        assert stage.mask.merge_into is not None
        assert expected.mask.merge_into is not None
        assert torch.equal(stage.mask.merge_into, expected.mask.merge_into)
    assert torch.equal(joined.heirs(), right.heirs())
    assert torch.equal(narrow.trace(images).heirs(), wide.trace(images).heirs())
    check_policy(lambda: NarrowHeirs(4, (1, 2)))
