"""Policies that are broken in one way each: what the conformance kit must find, and nothing else of them."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from prunevit import (
    AttentionState,
    KeepMask,
    ModelInfo,
    PruningPolicy,
    RaggedTokens,
    Trace,
    fuse,
    merge,
    rank,
    top_k,
)


class Sound(PruningPolicy):
    """Nothing is wrong: keep the patches of the largest norm. The others change one thing."""

    knob = "keep_rate"
    knob_range = (0.0, 1.0)

    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(keep_rate, layers)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return top_k(tokens, norm(tokens), self.rate(layer))


def norm(tokens: RaggedTokens) -> Tensor:
    return tokens.x.norm(dim=-1)


class RefusesAllModels(Sound):
    def setup(self, info: ModelInfo) -> None:
        raise ValueError("RefusesAllModels: no model is good enough")


class ReturnsTensor(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return super().forward(tokens, attention, layer).keep


class LosesARow(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return KeepMask(super().forward(tokens, attention, layer).keep[:-1])


class KeepsFloats(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return KeepMask(super().forward(tokens, attention, layer).keep.double())


class FoldsIntoTheNeighbour(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        keep = super().forward(tokens, attention, layer).keep
        rows = torch.arange(len(keep))
        return KeepMask(keep, merge_into=torch.where(keep, rows, (rows + tokens.max_seqlen) % len(keep)))


class FoldsWhatStays(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        mask = super().forward(tokens, attention, layer)
        return replace(mask, merge_into=tokens.start.long() + 1)


class DropsAll(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return KeepMask(norm(tokens) > 1e3)


class Miscounts(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        mask = super().forward(tokens, attention, layer)
        return replace(mask, rows_per_image=mask.rows_per_image - 1)


class ScalesPrefix(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        mask = merge(
            tokens,
            super().forward(tokens, attention, layer),
            torch.full_like(tokens.source, -1),
            tokens.sizes,
        )
        return replace(mask, merge_weight=torch.full_like(tokens.sizes, 0.5))


class ForgetsNeeds(Sound):
    def forward(self, tokens: RaggedTokens, attention: Any, layer: int) -> Any:
        return top_k(tokens, attention.prefix_attention[:, 0], self.rate(layer))


class ThrowsDice(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return top_k(tokens, torch.rand(len(tokens.source), device=tokens.source.device), self.rate(layer))


class LooksAtNeighbours(Sound):
    knob = ""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        position, score = rank(tokens, norm(tokens)), norm(tokens)
        mean = score.masked_fill(~tokens.is_patch, 0).sum() / tokens.is_patch.sum()
        return KeepMask((score > mean) | (position < 5))


class NeverKeepsAll(Sound):
    def rate(self, layer: int) -> float:
        return 0.9 * super().rate(layer)


class ChangesTokens(Sound):
    knob = ""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        mask = super().forward(tokens, attention, layer)
        tokens.x.data.mul_(1.01)
        return mask


class NeedsTheGrid(Sound):
    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1,)) -> None:
        super().__init__(keep_rate, layers)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        height, width = tokens.grid
        patches = tokens.x.view(tokens.batch_size, -1, tokens.x.shape[-1])[:, tokens.num_prefix_tokens :]
        patches.unflatten(1, (height, width))
        return super().forward(tokens, attention, layer)


class ForgetsDeadRows(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        score = norm(tokens)
        return top_k(tokens, score - tokens.mean(score)[tokens.image_id], self.rate(layer))


class HalvesOnePatch(Sound):
    knob = ""

    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1,)) -> None:
        super().__init__(keep_rate, layers)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        most = torch.cat([tokens.num_patches, tokens.num_patches.new_zeros(1)])[tokens.image_id]
        return KeepMask(rank(tokens, norm(tokens)) < most // 2)


class DividesByTwoLess(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        height, width = tokens.grid
        return top_k(tokens, norm(tokens) * (1 / (height * width - 2)), self.rate(layer))


class OnePrefixToken(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        by_place = torch.arange(tokens.grid[0] * tokens.grid[1], device=tokens.source.device)
        place = torch.where(tokens.live, tokens.position, 1) - 1
        return top_k(tokens, by_place[place].double() + norm(tokens), self.rate(layer))


class NeedsCLS(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        tokens.prefix()[:, 0]
        return super().forward(tokens, attention, layer)


class SpareParameter(Sound):
    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(keep_rate, layers)
        self.spare = nn.Parameter(torch.ones(()))


class RootOfNothing(Sound):
    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(keep_rate, layers)
        self.scale = nn.Parameter(torch.zeros(()))

    def losses(self, trace: Trace, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"scale": self.scale.sqrt()}


class InfiniteLoss(Sound):
    def losses(self, trace: Trace, teacher: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"ratio": trace.logits.sum() / 0}


class HidesItsState(Sound):
    def setup(self, info: ModelInfo) -> None:
        super().setup(info)
        self.direction = torch.randn(info.width, dtype=torch.float64)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return top_k(tokens, tokens.x.double() @ self.direction, self.rate(layer))


class HoldsAFunction(Sound):
    def __init__(self, keep_rate: float = 0.6, layers: tuple[int, ...] = (1, 2)) -> None:
        super().__init__(keep_rate, layers)
        self.flip = lambda values: -values

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        return top_k(tokens, self.flip(norm(tokens)), self.rate(layer))


class Overflows(Sound):
    knob = ""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        score = (tokens.x.abs().amax(-1) * 1000) ** 2
        total = tokens.sum(score)[tokens.image_id.clamp(max=tokens.batch_size - 1)]
        return fuse(tokens, top_k(tokens, norm(tokens), self.rate(layer)), score / total)


class Asks(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        score = norm(tokens)
        if not bool(score.isfinite().all()):
            raise ValueError("Asks: the features must be finite")
        return top_k(tokens, score, self.rate(layer))


class CountsBatches(Sound):
    def macs(self, counts: Tensor) -> Tensor:
        return counts.double().sum()


class ScoresNothing(Sound):
    """The third image has no contrast: its patches alone are numbers here."""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        some = tokens.image_index[tokens.image_id] != 6
        return top_k(tokens, norm(tokens).masked_fill(some, torch.nan), self.rate(layer))


class Exits(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        raise SystemExit("enough")


class SetsTheDefault(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        torch.set_default_dtype(torch.float64)
        return super().forward(tokens, attention, layer)


class GoesIntoTraining(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        self.train()
        return super().forward(tokens, attention, layer)


class TurnsGradientsOff(Sound):
    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        torch.set_grad_enabled(False)
        return super().forward(tokens, attention, layer)


class SeedsTheDice(Sound):
    """Its draws are the same for each image, and the same again, but so is all that is drawn after it."""

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> Any:
        torch.manual_seed(0)
        by_place = torch.rand(1000, device=tokens.source.device)
        return top_k(tokens, by_place[tokens.position], self.rate(layer))
