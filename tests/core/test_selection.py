"""What selecting found out is gone on from only while it is still true of the mask and of the rows."""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests_support import dense_tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from prunevit import KeepMask, RaggedTokens, fuse, pack, top_k, top_p
from prunevit.packing import plan

MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}
SCORE = (0.0, 9.0, 4.0, 3.0, 2.0, 0.0, 1.0, 8.0, 7.0, 6.0)  # row 0 of each image of five is the prefix
AN_EDIT = {
    "keep": lambda mask: mask.keep[2].fill_(False),
    "merge_into": lambda mask: None if mask.merge_into is None else mask.merge_into[4].fill_(-1),
    "merge_weight": lambda mask: None if mask.merge_weight is None else mask.merge_weight[1].fill_(0.5),
}
"""Edits of a mask that stays valid; each that a mask has the tensor for must be carried out."""


def decide(tokens: RaggedTokens, score: Tensor, fused: bool) -> KeepMask:
    mask = replace(top_k(tokens, score, count=2), rows_per_image=None)
    return fuse(tokens, mask, score) if fused else mask


def bare(mask: KeepMask) -> KeepMask:
    """The mask as it now is, without what selecting found out."""
    return replace(mask, selection=None)


def assert_as_bare(tokens: RaggedTokens, mask: KeepMask) -> None:
    got, right = pack(tokens, mask), pack(tokens, bare(mask))
    for name in ("x", "cu_seqlens", "image_id", "source", "size"):
        torch.testing.assert_close(getattr(got, name), getattr(right, name), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("edit", AN_EDIT)
def test_an_edit_in_place_is_carried_out(edit: str, fused: bool, mode: str) -> None:
    with MODES[mode]():
        tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
        mask = decide(tokens, score, fused)
        assert plan(tokens, mask).is_sound
        AN_EDIT[edit](mask)
        assert_as_bare(tokens, mask)


@pytest.mark.parametrize("mode", ["grad", "no_grad"])
def test_an_order_edited_in_place_is_carried_out(mode: str) -> None:
    with MODES[mode]():
        tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
        order = score > 3.5
        mask = top_k(tokens, score, count=3, within=KeepMask(tokens.live, order=order))
        assert_as_bare(tokens, mask)
        order.logical_not_()
        assert_as_bare(tokens, mask)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_edited_before_it_is_fused(mode: str) -> None:
    with MODES[mode]():
        tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
        mask = decide(tokens, score, fused=False)
        mask.keep[2] = False
        right = fuse(tokens, bare(mask), score)
        got = fuse(tokens, mask, score)
        assert torch.equal(got.keep, right.keep)
        assert got.merge_into is not None
        assert right.merge_into is not None
        assert torch.equal(got.merge_into, right.merge_into)


def test_a_score_edited_before_it_fuses() -> None:
    tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
    mask = decide(tokens, score, fused=False)
    score.neg_()
    right = fuse(tokens, bare(mask), score)
    got = fuse(tokens, mask, score)
    assert got.merge_weight is not None
    assert right.merge_weight is not None
    assert torch.equal(got.keep, right.keep)
    assert torch.equal(got.merge_weight, right.merge_weight)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fused", [False, True])
def test_a_mask_laid_on_other_rows(fused: bool, mode: str) -> None:
    """As many rows, but the images have other boundaries."""
    with MODES[mode]():
        tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
        mask = decide(tokens, score, fused=False)
        image_id = torch.tensor([0] * 3 + [1] * 7, dtype=torch.int32)
        other = replace(
            tokens,
            cu_seqlens=torch.tensor([0, 3, 10], dtype=torch.int32),
            image_id=image_id,
            max_seqlen=7,
            uniform=False,
            source=torch.tensor([-1, 0, 1, -1, 0, 1, 2, 3, 4, 5], dtype=torch.int32),
        )
        if fused:
            mask = fuse(other, mask, score)
            assert mask.merge_into is not None
            live = mask.merge_into >= 0
            assert torch.equal(image_id[mask.merge_into[live]], image_id[live])
        assert pack(other, mask).cu_seqlens.tolist() == pack(other, bare(mask)).cu_seqlens.tolist()
        assert_as_bare(other, mask)


def test_a_batch_whose_boundaries_were_edited() -> None:
    tokens = dense_tokens(2, 4, 1)
    tokens = replace(tokens, uniform=False, max_seqlen=7)
    mask = decide(tokens, torch.tensor(SCORE), fused=False)
    tokens.cu_seqlens[1] = 3
    assert not plan(tokens, mask).is_sound


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_an_edited_mask(clone: Callable[[Any], Any]) -> None:
    """A copied tensor has been written to as often as a new one."""
    tokens = dense_tokens(2, 4, 1)
    mask = decide(tokens, torch.tensor(SCORE), fused=False)
    mask.keep[2] = False
    tokens, mask = clone((tokens, mask))
    assert mask.selection is None
    assert_as_bare(tokens, mask)


def test_a_weight_selected_without_a_gradient_learns_where_it_is_fused_with_one() -> None:
    tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE, requires_grad=True)
    with torch.no_grad():
        mask = top_k(tokens, score, count=2)
    weight = fuse(tokens, mask, score).merge_weight
    assert weight is not None
    (gradient,) = torch.autograd.grad(weight.sum(), score)
    assert gradient.tolist() == [0, 0, 0, 1, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("count", [2, 4])
def test_a_false_claim_of_rows_is_refused(count: int) -> None:
    """No image has more rows after packing than before; where all stay there is no fused one."""
    tokens, score = dense_tokens(2, 4, 1), torch.tensor(SCORE)
    mask = top_k(tokens, score, count=count)
    assert mask.selection is not None
    chosen = mask.selection.chosen
    fused = replace(
        mask, keep=chosen.keep_fused, merge_into=chosen.merge_into, merge_weight=chosen.merge_weight
    )
    right = min(count + 2, 5)
    assert pack(tokens, replace(fused, rows_per_image=right)).cu_seqlens.tolist() == [0, right, 2 * right]
    for claim in {6, right - 1, right + 1}:
        with pytest.raises(ValueError, match=r"rows_per_image"):
            pack(tokens, replace(fused, rows_per_image=claim))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("edited", [False, True])
def test_the_compiler_sees_edits_and_compiles_nothing_for_it(
    edited: bool, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def record(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def walk(x: Tensor, score: Tensor) -> Tensor:
        tokens = RaggedTokens.from_padded(x, 1, (1, 4))
        mask = fuse(tokens, top_k(tokens, score, count=2), score)
        if edited:
            mask.keep.logical_not_().logical_not_()
            mask = replace(mask, rows_per_image=4)
        return pack(tokens, mask).x

    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    x, score = torch.randn(2, 5, 3), torch.tensor(SCORE)
    torch._dynamo.reset()
    compiled = torch.compile(walk, fullgraph=True, backend=aot_autograd(fw_compiler=record))
    with mode():
        torch.testing.assert_close(compiled(x, score), walk(x, score), rtol=0, atol=0)
    called = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert any("prunevit.select" in name for name in called)
    assert any("prunevit.plan" in name for name in called) == edited
    assert not any("prunevit.edits" in name for name in called)


@pytest.mark.parametrize("mode", MODES)
def test_fake_tensors_are_asked_for_no_value(mode: str) -> None:
    with MODES[mode](), FakeTensorMode(allow_non_fake_inputs=True):
        tokens, score = dense_tokens(2, 4, 1), torch.randn(10)
        mask = fuse(tokens, top_k(tokens, score, count=2), score)
        assert plan(tokens, mask).is_sound
        mask.keep.logical_not_()
        assert not plan(tokens, mask).is_sound
        assert pack(tokens, top_p(tokens, score, 0.5), capacity=10).x.shape == (10, 4)
