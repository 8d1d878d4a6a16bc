"""`compare` against forks as people write them: a loop of blocks that gather tokens, padded or in another order."""

import copy
from typing import Any

import pytest
import torch
from tests_support import small_vit
from torch import Tensor, nn

import prunevit
from prunevit.policies import DynamicViT, EViT, NoPruning, TopK, TopP
from prunevit.testing import Divergence, compare


class ForkedBlock(nn.Module):
    """A timm block that keeps the `keep` patches with most attention of CLS, best first, after its attention."""

    def __init__(self, block: Any, keep: int | None) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2, self.mlp, self.keep = (
            block.attn,
            block.norm1,
            block.norm2,
            block.mlp,
            keep,
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        qkv = (
            self.attn.qkv(self.norm1(x)).view(batch, rows, 3, self.attn.num_heads, -1).permute(2, 0, 3, 1, 4)
        )
        attention = (qkv[0] @ qkv[1].transpose(-2, -1) * self.attn.scale).softmax(-1)
        x = x + self.attn.proj((attention @ qkv[2]).transpose(1, 2).reshape(batch, rows, width))
        if self.keep is not None:
            best = attention[:, :, 0, 1:].mean(1).topk(self.keep).indices + 1
            x = torch.cat([x[:, :1], x.gather(1, best[..., None].expand(-1, -1, width))], 1)
        return x + self.mlp(self.norm2(x))


class Fork(nn.Module):
    """A timm ViT whose blocks prune."""

    def __init__(self, model: Any, keeps: list[int | None]) -> None:
        super().__init__()
        self.model = model
        self.blocks = nn.ModuleList(ForkedBlock(block, keep) for block, keep in zip(model.blocks, keeps))

    def forward(self, images: Tensor) -> Tensor:
        x = self.model.norm_pre(self.model._pos_embed(self.model.patch_embed(images)))
        for block in self.blocks:
            x = block(x)
        return self.model.forward_head(self.model.norm(x))


def images_of(model: Any, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, *model.patch_embed.img_size, dtype=torch.float64)


def test_a_fork_that_orders_rows_otherwise_is_the_same() -> None:
    model = small_vit()
    pruned = prunevit.prune(model, TopK(0.5, (1, 2)))
    # ceil of halves of 36 patches
    assert compare(pruned, Fork(model, [None, 18, 9, None]), images_of(model)) is None


def test_the_unpruned_timm_model_is_the_walk_without_policies() -> None:
    for settings in ({}, {"class_token": False, "global_pool": "avg"}, {"reg_tokens": 4}):
        model = small_vit(**settings)
        assert compare(prunevit.prune(model, NoPruning()), model, images_of(model)) is None


def test_another_count_is_found_at_its_block() -> None:
    model = small_vit()
    pruned = prunevit.prune(model, TopK(0.5, (1, 2)))
    images = images_of(model)
    found = compare(pruned, Fork(model, [None, 18, 8, None]), images)
    assert found is not None
    assert (found.block, found.place, found.counts) == (2, "block 2, attention; TopK after it", (10, 9))
    assert found.images == (0, 1, 2)
    trace = pruned.trace(images)
    for image in range(3):
        lost = [patch for each, patch in found.rows if each == image]
        assert len(lost) == 1
        assert set(lost) <= set(trace.survivors(1, image))
    text = str(found)
    assert "they part in block 2, attention; TopK after it: images 0, 1, 2 differ by up to" in text
    assert "image 0 has 10 rows here, 9 in the other model" in text
    assert f"image 1: 1 rows without a counterpart, patches {found.rows[1][1]}" in text


@pytest.mark.parametrize(
    ("change", "block", "place"),
    [
        (lambda model: model.blocks[2].mlp.fc1, 2, "block 2, MLP"),
        (lambda model: model.blocks[1].attn.proj, 1, "block 1, attention; TopK after it"),
        (lambda model: model.patch_embed.proj, -1, "the embedding"),
        (lambda model: model.head, 4, "the norm and the head"),
        (lambda model: model.norm, 4, "the norm and the head"),
    ],
)
def test_another_weight_is_found_where_it_works(change: Any, block: int, place: str) -> None:
    model = small_vit()
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other).bias[3] += 0.01
    found = compare(
        prunevit.prune(model, TopK(0.5, (1,))), prunevit.prune(other, TopK(0.5, (1,))), images_of(model)
    )
    assert found is not None
    assert (found.block, found.place) == (block, place)
    assert 0 < found.max_abs < 1


def test_only_the_images_that_differ_are_named() -> None:
    model = small_vit()
    images = images_of(model)

    class OtherImage(nn.Module):
        """The walk itself, with one image disturbed."""

        def __init__(self) -> None:
            super().__init__()
            self.fork = Fork(model, [None, 18, None, None])
            self.blocks = self.fork.blocks

        def forward(self, batch: Tensor) -> Tensor:
            return self.fork(batch + torch.tensor([0.0, 0.1, 0.0], dtype=batch.dtype)[:, None, None, None])

    found = compare(prunevit.prune(model, TopK(0.5, (1,))), OtherImage(), images)
    assert found is not None
    assert (found.place, found.images) == ("the embedding", (1,))
    # All patches, and CLS not: it has not seen them yet.
    assert sorted(found.rows) == [(1, patch) for patch in range(36)]


def test_padding_and_uneven_rows_are_seen_through() -> None:
    model = small_vit()
    pruned = prunevit.prune(model, TopP(0.6, (1,)))

    class Padded(nn.Module):
        """Hands the blocks' rows on as a padded batch."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Identity() for _ in model.blocks)

        def forward(self, batch: Tensor) -> Tensor:
            seen: list[Tensor] = []
            tokens = pruned.walk(
                pruned.embed(batch),
                lambda event: (
                    seen.append(event.to_padded()) if isinstance(event, prunevit.RaggedTokens) else None
                ),
            )
            for block, rows in zip(self.blocks, seen[::2]):
                block(rows)
            return pruned.forward_head(tokens)

    found = compare(pruned, Padded(), images_of(model))
    # The stand-in's last block returns what it got, ours does not.
    assert found is not None
    assert found.place == "block 3, MLP"


def test_policies_before_blocks_are_named_at_the_rows_they_leave() -> None:
    model = small_vit()
    torch.manual_seed(0)
    one = DynamicViT(0.7, (2,))
    other = copy.deepcopy(one)
    other.knob_value = 0.5
    found = compare(prunevit.prune(model, one), prunevit.prune(model, other), images_of(model))
    assert found is not None
    assert (found.block, found.place) == (1, "block 1, MLP; DynamicViT after it")


def test_models_without_the_same_blocks_are_refused() -> None:
    model = small_vit()
    pruned = prunevit.prune(model, EViT(0.5, (1,)))
    with pytest.raises(ValueError, match=r"must have 4 blocks in \.blocks, got none"):
        compare(pruned, nn.Identity(), images_of(model))
    with pytest.raises(ValueError, match=r"must have 4 blocks in \.blocks, got 3"):
        compare(pruned, small_vit(depth=3), images_of(model))
    with pytest.raises(ValueError, match=r"must be a RaggedViT, as prunevit\.prune gives it, got Vision"):
        compare(model, pruned, images_of(model))

    class Elsewhere(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.blocks = [model], nn.ModuleList(nn.Identity() for _ in range(4))

        def forward(self, batch: Tensor) -> Tensor:
            return self.inner[0](batch)

    with pytest.raises(ValueError, match=r"must call its \.blocks, got no call"):
        compare(pruned, Elsewhere(), images_of(model))


def test_half_precision_has_its_own_tolerance() -> None:
    model = small_vit().to(torch.bfloat16)
    pruned = prunevit.prune(model, TopK(0.5, (1,)))
    images = images_of(model).to(torch.bfloat16)
    assert compare(pruned, pruned, images) is None
    assert isinstance(compare(pruned, prunevit.prune(model, TopK(0.4, (1,))), images), Divergence)
