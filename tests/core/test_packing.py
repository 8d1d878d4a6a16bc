"""`pack` against a re-statement that walks image by image over Python lists."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from prunevit import KeepMask, RaggedTokens, fuse, merge, pack, threshold, top_k, top_p
from prunevit.packing import Room, pack_into, plan

PREFIX = 2


def ragged(counts: list[int], dead: int = 0, channels: int = 3, **fields: Tensor) -> RaggedTokens:
    """Images of PREFIX + count rows with distinct random features, then dead rows."""
    lengths = torch.tensor([PREFIX + count for count in counts])
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
    image_id = torch.arange(len(counts)).repeat_interleave(lengths)
    source = torch.cat([torch.cat([torch.full((PREFIX,), -1), torch.arange(count)]) for count in counts])
    total = int(lengths.sum())
    x = torch.randn(total + dead, channels, dtype=torch.float64)
    x[total:] = 7.0
    return RaggedTokens(
        x=x,
        cu_seqlens=cu_seqlens,
        image_id=torch.cat([image_id, torch.full((dead,), len(counts))]).int(),
        max_seqlen=int(lengths.max()),
        uniform=len(set(counts)) == 1,
        num_prefix_tokens=PREFIX,
        grid=(1, max(counts)),
        image_index=torch.arange(len(counts)),
        source=torch.cat([source, torch.full((dead,), -1)]).int(),
        **fields,
    )


def pack_by_hand(tokens: RaggedTokens, mask: KeepMask) -> list[list[tuple[Tensor, int, float, float]]]:
    """For each image the rows (features, source, size, key weight) in their new order."""
    images = []
    for image in range(tokens.batch_size):
        rows = [row for row in range(len(tokens.image_id)) if tokens.image_id[row] == image]
        stay = [row for row in rows if mask.keep[row] or tokens.source[row] < 0]
        order = mask.order
        if order is not None:
            place = order.tolist()
            patches = [row for row in stay if tokens.source[row] >= 0]
            stay = [row for row in stay if tokens.source[row] < 0] + sorted(patches, key=place.__getitem__)
        out = []
        for row in stay:
            members = [row]
            if mask.merge_into is not None:
                members = [other for other in rows if mask.merge_into[other] == row]
            weight = mask.merge_weight if mask.merge_weight is not None else torch.ones(len(tokens.image_id))
            features = sum(
                (float(weight[m]) * tokens.x[m] for m in members), torch.zeros(3, dtype=torch.float64)
            )
            own = mask.size if mask.size is not None else tokens.sizes
            key = 1.0 if mask.key_weight is None else sum(float(mask.key_weight[m]) for m in members)
            out.append((features, int(tokens.source[row]), sum(float(own[m]) for m in members), key))
        images.append(out)
    return images


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pack_equals_walking_over_lists(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    dead = data.draw(st.integers(0, 3))
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    tokens = ragged(counts, dead)
    rows = len(tokens.image_id)
    keep = torch.rand(rows) < 0.5
    first_patch = tokens.position == PREFIX
    keep = (keep | first_patch | ~tokens.is_patch) & tokens.live
    mask = KeepMask(keep)
    if data.draw(st.booleans()):
        mask = replace(mask, order=torch.rand(rows))
    if data.draw(st.booleans()):
        first = tokens.start + PREFIX
        into = torch.where(keep, torch.arange(rows), torch.where(torch.rand(rows) < 0.7, first, -1))
        into = torch.where(tokens.live, into, -1)
        mask = replace(
            mask, merge_into=into, merge_weight=torch.rand(rows).double(), key_weight=torch.rand(rows)
        )
    capacity = data.draw(st.sampled_from([None, int(keep.sum()), int(keep.sum()) + 3]))

    packed = pack(tokens, mask, capacity)

    expected = pack_by_hand(tokens, mask)
    assert packed.seqlens.tolist() == [len(image) for image in expected]
    assert packed.x.shape[0] == (capacity or int(keep.sum()))
    for image, out in enumerate(expected):
        start = int(packed.cu_seqlens[image])
        for offset, (features, source, size, key) in enumerate(out):
            torch.testing.assert_close(packed.x[start + offset], features)
            assert int(packed.source[start + offset]) == source
            assert int(packed.image_id[start + offset]) == image
            assert float(packed.sizes[start + offset]) == pytest.approx(size)
            if mask.key_weight is not None:
                assert packed.key_weight is not None
                assert float(packed.key_weight[start + offset]) == pytest.approx(key)
    total = int(packed.cu_seqlens[-1])
    assert (packed.x[total:] == 0).all()
    assert (packed.image_id[total:] == len(counts)).all()
    assert (packed.source[total:] == -1).all()
    assert packed.max_seqlen >= int(packed.seqlens.max())


def test_prefix_rows_survive_a_mask_that_drops_them() -> None:
    tokens = ragged([3, 4])
    packed = pack(tokens, KeepMask(tokens.position == PREFIX))
    assert packed.seqlens.tolist() == [PREFIX + 1, PREFIX + 1]
    assert packed.uniform


def test_soft_mask_moves_nothing_but_folds_into_heirs() -> None:
    tokens = ragged([3])
    rows = torch.arange(5)
    into = torch.where(rows == 4, 3, rows)
    soft = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.25]).double()
    mask = KeepMask(
        keep=rows != 4,
        merge_into=into,
        merge_weight=torch.full((5,), 0.5).double(),
        key_weight=torch.ones(5),
        soft=soft,
        order=-rows.double(),
    )
    packed = pack(tokens, mask)
    moved = [0, 1, 4, 3, 2]  # the order is that of the patches alone
    expected = tokens.x.clone()
    expected[3] = 0.5 * tokens.x[3] + 0.5 * tokens.x[4]
    for row in range(3):
        expected[row] = 0.5 * tokens.x[row]
    torch.testing.assert_close(packed.x, expected[moved])
    assert packed.soft is not None
    torch.testing.assert_close(packed.soft, soft[moved])
    assert packed.sizes.tolist() == [1.0, 1.0, 1.0, 2.0, 1.0]
    assert packed.key_weight is not None
    assert packed.key_weight.tolist() == [1.0, 1.0, 1.0, 2.0, 1.0]


@pytest.mark.parametrize("soft", [False, True])
def test_sums_of_half_precision_are_wide_and_heirs_may_be_narrow(soft: bool) -> None:
    rows = 4001
    tokens = RaggedTokens.from_padded(torch.rand(1, rows, 2), num_prefix_tokens=1, grid=(1, rows - 1))
    keep = torch.arange(rows) == 1
    into = torch.ones(rows, dtype=torch.int16)
    into[0] = 0
    ones = torch.ones(rows, dtype=torch.float16)
    mask = KeepMask(keep, merge_into=into, size=ones, key_weight=ones, soft=keep.float() if soft else None)
    packed = pack(tokens, mask)
    assert packed.size is not None
    assert packed.key_weight is not None
    assert packed.size[1] == packed.key_weight[1] == 4000


def test_gradients_reach_kept_and_folded_rows_only() -> None:
    tokens = ragged([3])
    x = tokens.x.clone().requires_grad_()
    weight = torch.tensor([1.0, 1.0, 1.0, 0.3, 1.0]).double().requires_grad_()
    mask = KeepMask(
        torch.tensor([True, True, True, False, False]),
        merge_into=torch.tensor([0, 1, 2, 2, -1]),
        merge_weight=weight,
    )
    pack(replace(tokens, x=x), mask).x.sum().backward()
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [1.0, 1.0, 1.0, pytest.approx(0.3), 0.0]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[3], tokens.x[3].sum())
    assert weight.grad[4] == 0


def rows_but_the_last(tokens: RaggedTokens) -> Tensor:
    return torch.arange(len(tokens.image_id)) < len(tokens.image_id) - 1


def into(tokens: RaggedTokens, last: int) -> Tensor:
    """Each row is its own heir but the last, which is folded into row `last`."""
    rows = torch.arange(len(tokens.image_id))
    rows[-1] = last
    return rows


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda t: KeepMask(~t.is_patch), "at least one patch"),
        (lambda t: KeepMask(t.live[:-1]), "one entry a row"),
        (lambda t: KeepMask(t.live.float()), "keep must be bool"),
        (lambda t: KeepMask(t.live, rows_per_image=4), "tokens that are not uniform"),
        (lambda t: KeepMask(t.live, order=torch.zeros(3)), "order must have shape"),
        (lambda t: None, "must return a KeepMask, got NoneType"),
        (lambda t: KeepMask(t.live, merge_weight=torch.ones(11)), "merge_weight needs merge_into"),
        (lambda t: KeepMask(rows_but_the_last(t), merge_into=into(t, 2)), "a row of the same image"),
        (lambda t: KeepMask(rows_but_the_last(t), merge_into=into(t, 11)), "a row of the same image"),
        (lambda t: KeepMask(t.live, merge_into=into(t, -1)), "of a row that stays must be the row itself"),
    ],
)
def test_wrong_masks_are_refused(mask, message: str) -> None:  # type: ignore[no-untyped-def]
    tokens = ragged([3, 4])
    with pytest.raises(ValueError, match=message):
        pack(tokens, mask(tokens))


def test_a_wrong_promise_of_the_count_is_refused() -> None:
    tokens = ragged([3, 3])
    keep = tokens.live & (torch.arange(10) != 4)
    with pytest.raises(ValueError, match=r"mask\.rows_per_image"):
        pack(tokens, KeepMask(keep, rows_per_image=4))


def test_a_capacity_too_small_is_refused() -> None:
    tokens = ragged([3, 4])
    with pytest.raises(ValueError, match="must fit into capacity=10"):
        pack(tokens, KeepMask(tokens.live), capacity=10)
    uniform = ragged([3, 3])
    with pytest.raises(ValueError, match="at least the 10 rows kept, got 9"):
        pack(uniform, KeepMask(uniform.live, rows_per_image=5), capacity=9)


def test_order_never_moves_the_prefix() -> None:
    tokens = ragged([3, 2])
    for order in (-torch.arange(9.0), -torch.arange(9)):
        packed = pack(tokens, KeepMask(tokens.live, order=order))
        assert packed.source.tolist() == [-1, -1, 2, 1, 0, -1, -1, 1, 0]
        torch.testing.assert_close(packed.prefix(), tokens.prefix())


@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_count_changed_after_the_selection_is_not_trusted(fuses: bool, wrong: int) -> None:
    tokens = RaggedTokens.from_padded(torch.randn(3, 11, 4), 1, (2, 5))
    score = torch.randn(33)
    mask = top_k(tokens, score, 0.5)
    mask = fuse(tokens, mask, score) if fuses else mask
    assert mask.rows_per_image is not None
    assert mask.rows_per_image == 6 + fuses
    assert pack(tokens, mask).seqlens.tolist() == [6 + fuses] * 3
    lie = replace(mask, rows_per_image=mask.rows_per_image + wrong)
    with pytest.raises(ValueError, match=f"each image must keep the {6 + fuses + wrong} rows"):
        pack(tokens, lie)


@pytest.mark.parametrize("order", [None, "bool", "float"])
def test_a_selection_within_a_mask_is_carried_out_as_any_mask(order: str | None) -> None:
    tokens = ragged([7, 3, 5], dead=2)
    score, rows = torch.rand(len(tokens.image_id)), torch.arange(len(tokens.image_id))
    turns = {None: None, "bool": rows % 3 == 0, "float": torch.rand(len(rows))}[order]
    first = merge(tokens, KeepMask(rows % 4 != 1), rows - 1, torch.ones_like(score))
    mask = threshold(tokens, score, 0.4, within=replace(first, order=turns))
    assert mask.order is turns
    layout, bare = plan(tokens, mask), plan(tokens, replace(mask, selection=None))
    assert not layout.is_sound
    for name in ("destination", "cu_seqlens", "extent"):
        assert torch.equal(getattr(layout, name), getattr(bare, name))
    expected = pack(tokens, replace(mask, selection=None))
    torch.testing.assert_close(pack(tokens, mask).x, expected.x, rtol=0, atol=0)
    other = replace(mask, order=torch.rand(len(rows)))
    assert torch.equal(
        plan(tokens, other).destination, plan(tokens, replace(other, selection=None)).destination
    )


def test_a_selection_among_nothing_is_refused() -> None:
    """A verb keeps a patch of each image, if the mask that it selects within has one."""
    tokens = ragged([3, 2])
    score = torch.rand(len(tokens.image_id))
    first = KeepMask(tokens.image_id == 0, order=tokens.is_patch)
    mask = threshold(tokens, score, 0.0, within=first)
    with pytest.raises(ValueError, match="each image must keep at least one patch"):
        pack(tokens, mask)
    _, need = pack_into(tokens, mask, Room(len(score), tokens.max_seqlen))
    assert need.tolist() == [PREFIX + 3 + PREFIX, PREFIX + 3, PREFIX]
    uniform = RaggedTokens.from_padded(torch.randn(2, 6, 4), 1, (1, 5))
    wrong = KeepMask(torch.arange(12) != 3, rows_per_image=6)  # of the first image one leaves
    mask = top_k(uniform, torch.rand(12), 1.0, within=wrong)
    with pytest.raises(ValueError, match="each image must keep the 6 rows"):
        pack(uniform, mask)


def test_what_could_not_be_selected_is_fused_too() -> None:
    tokens = RaggedTokens.from_padded(torch.randn(2, 9, 4), 1, (2, 4))
    score = torch.rand(18)
    mask = top_k(tokens, score, count=2, within=KeepMask(torch.arange(18) % 9 < 5))
    fused, bare = fuse(tokens, mask, score), fuse(tokens, replace(mask, selection=None), score)
    for name in ("keep", "merge_into", "merge_weight"):
        assert torch.equal(getattr(fused, name), getattr(bare, name))
    assert fused.merge_into is not None
    assert fused.merge_into.min() == 0  # none is dropped


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_room_holds_what_fits_and_tells_what_does_not(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    torch.manual_seed(data.draw(st.integers(0, 10_000)))
    tokens = ragged(counts, data.draw(st.integers(0, 3)))
    score, least = torch.rand(len(tokens.image_id)), PREFIX + 1
    mask = top_p(tokens, score, data.draw(st.sampled_from([0.3, 0.7, 1.0])))
    if data.draw(st.booleans()):
        mask = fuse(tokens, mask, score)
    if data.draw(st.booleans()):
        mask = replace(mask, order=torch.rand(len(score)))
    rows = data.draw(st.integers(len(counts) * least, len(score) + 2))
    room = Room(rows, data.draw(st.integers(least, tokens.max_seqlen)))

    packed, need = pack_into(tokens, mask, room)

    expected = pack(tokens, mask)
    truth = Room(expected.x.shape[0], expected.max_seqlen)
    assert need.tolist() == [*truth, int(expected.seqlens.min())]
    assert (packed.x.shape[0], packed.max_seqlen, packed.uniform) == (*room, False)
    total = int(packed.cu_seqlens[-1])
    if not room.holds(truth):
        assert packed.seqlens.tolist() == [least] * len(counts)
        kept = expected.position < least
        expected = pack(expected, KeepMask(kept))
    assert packed.cu_seqlens.tolist() == expected.cu_seqlens.tolist()
    for name in ("x", "image_id", "source", "sizes"):
        torch.testing.assert_close(getattr(packed, name)[:total], getattr(expected, name), rtol=0, atol=0)
    assert (packed.x[total:] == 0).all()
    assert (packed.image_id[total:] == len(counts)).all()
    assert (packed.source[total:] == -1).all()


@pytest.mark.parametrize("room", [Room(2 * PREFIX + 1, 5), Room(7, PREFIX)])
def test_a_room_for_no_batch_at_all_is_refused(room: Room) -> None:
    tokens = ragged([3, 2])
    with pytest.raises(ValueError, match="must be for at least 3 rows of each of 2 images, got Room"):
        pack_into(tokens, KeepMask(tokens.live), room)


def test_a_mask_that_leaves_out_the_prefix_is_fused_as_one_that_has_it() -> None:
    """A user's `score > t` says nothing of the prefix; it stays, as it is."""
    tokens = ragged([3, 5], dead=2)
    score = torch.rand(len(tokens.x), dtype=torch.float64)
    keep = (score > 0.6) & tokens.is_patch
    packed = pack(tokens, fuse(tokens, KeepMask(keep), score))
    right = pack(tokens, fuse(tokens, KeepMask(keep | (tokens.source < 0) & tokens.live), score))
    assert torch.equal(packed.x, right.x)
    assert torch.equal(packed.prefix(), tokens.prefix())


@pytest.mark.parametrize("counts", [[], [-PREFIX, -PREFIX], [3, 1]], ids=str)
def test_reductions_of_any_dtype_and_of_batches_without_rows(counts: list[int]) -> None:
    """`max` of integers, too; an image without rows has the lowest value there is; dead rows are not looked at."""
    lengths = [PREFIX + count for count in counts]
    tokens = RaggedTokens(
        x=torch.full((sum(lengths) + 3, 2), torch.nan),
        cu_seqlens=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        image_id=torch.arange(len(counts) + 1).repeat_interleave(torch.tensor([*lengths, 3])).int(),
        max_seqlen=max(lengths, default=0),
        uniform=False,
        num_prefix_tokens=PREFIX,
        grid=(1, 3),
        image_index=torch.arange(len(counts)),
        source=torch.zeros(sum(lengths) + 3, dtype=torch.int32),
    )
    for dtype, low in ((torch.float64, -torch.inf), (torch.int32, -(2**31)), (torch.bool, False)):
        values = torch.arange(len(tokens.x)).remainder(2).neg().to(dtype)
        found = tokens.max(values).tolist()
        ends = tokens.cu_seqlens.tolist()
        assert found == [max(values[start:end].tolist(), default=low) for start, end in pairwise(ends)], dtype
    there = tokens.live
    values = torch.arange(len(tokens.x))
    assert tokens.to_rows(tokens.to_padded(values)).tolist() == values.masked_fill(~there, 0).tolist()


def test_a_capacity_is_a_whole_number() -> None:
    tokens = ragged([3, 1])
    for wrong in (8.0, True, "8"):
        with pytest.raises(ValueError, match="pack: capacity must be a whole number, got"):
            pack(tokens, KeepMask(tokens.live), capacity=wrong)  # type: ignore[arg-type]
