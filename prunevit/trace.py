"""The record of one forward pass: what was decided at each stage, for each image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask
from prunevit.tokens import RaggedTokens

Site = Literal["before_block", "after_attention"]
SITES: tuple[Site, ...] = get_args(Site)
"""Where in its blocks a policy may act."""


@dataclass(frozen=True, eq=False)
class Stage:
    """One decision of one policy.

    Attributes:
        layer: Block, 0-based.
        site: "before_block" or "after_attention".
        policy: Position of the policy in `RaggedViT.policies`.
        tokens: Layout of the rows before the stage, without features.
        mask: The decision.
        counts: Rows of each image after the stage, prefix included, int32 `[B]`.
    """

    layer: int
    site: Site
    policy: int
    tokens: RaggedTokens
    mask: KeepMask
    counts: Tensor

    def to(self, device: torch.device | str) -> Stage:
        """The stage with its tensors on another device."""
        return _moved(self, torch.device(device))


@dataclass(frozen=True, eq=False)
class Trace:
    """What one forward pass did.

    Attributes:
        stages: The decisions, in order.
        attention_rows: Rows of each image in the attention of each block, int32 `[depth, B]`.
        mlp_rows: Rows of each image in the MLP of each block, int32 `[depth, B]`.
        tokens: The rows after the final norm.
        logits: `[B, K]`; where the head gives a tuple (timm: both heads of a distilled model in distilled training) the
            mean of the two, which is what it gives in evaluation.
    """

    stages: tuple[Stage, ...]
    attention_rows: Tensor
    mlp_rows: Tensor
    tokens: RaggedTokens
    logits: Tensor

    @property
    def image_index(self) -> Tensor:
        """Position of each image in its data set, int64 `[B]`."""
        return self.tokens.image_index

    def heirs(self, stage: int = -1) -> Tensor:
        """The patch whose row holds each initial patch after a stage, int64 `[B, P]`; -1 where it was dropped.

        A patch that stays is its own heir; one that was fused or merged has the patch of the row it was folded into.

        Args:
            stage: Index into `stages`; the last by default. Without stages every patch is its own heir.
        """
        patches = self.tokens.grid[0] * self.tokens.grid[1]
        device = self.attention_rows.device
        heirs = torch.arange(patches, device=device).repeat(self.tokens.batch_size, 1)
        upto = self.stages[: range(len(self.stages))[stage] + 1] if self.stages else ()
        if self.stages:
            first = self.stages[0].tokens
            here = torch.zeros(first.batch_size + 1, patches + 1, dtype=torch.bool, device=device)
            here[first.image_id.long(), first.source.long()] = True
            heirs = heirs.masked_fill(~here[: first.batch_size, :patches], -1)
        for each in upto:
            heirs = torch.where(heirs >= 0, _step(each, patches).gather(1, heirs.clamp(min=0)), -1)
        return heirs

    def survivors(self, stage: int, image: int) -> list[int]:
        """Patches of one image that have a row after a stage, in grid order.

        Args:
            stage: Index into `stages`.
            image: Position in the batch.

        Cost:
            One read-back.
        """
        heirs = self.heirs(stage)[image]
        return heirs[heirs >= 0].unique().tolist()

    def __str__(self) -> str:
        """Table of the stages: layer, site, rows of an image before and after (mean, smallest, largest)."""
        lines = ["layer  site             rows before -> after (mean, min..max)"]
        for stage in self.stages if self.tokens.batch_size else ():
            before, after = stage.tokens.seqlens.float(), stage.counts.float()
            lines.append(
                f"{stage.layer:>5}  {stage.site:<15}  {before.mean():.1f} -> {after.mean():.1f} "
                f"({int(after.min())}..{int(after.max())})"
            )
        return "\n".join(lines)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a file that `load` reads.

        Args:
            path: Target file; its folder is made if it is not there.
        """
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"prunevit_trace": 1, **asdict(self.to("cpu"))}, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Trace:
        """Read a trace from a file; no code in it is run.

        Args:
            path: File that `save` wrote.

        Raises:
            ValueError: If the file holds no trace.
        """
        content = torch.load(path, weights_only=True, map_location="cpu")
        if not isinstance(content, dict) or content.pop("prunevit_trace", None) != 1:
            raise ValueError(f"Trace: a file written by Trace.save is needed, got {path}")
        stages = tuple(
            Stage(
                **{**stage, "tokens": RaggedTokens(**stage["tokens"]), "mask": KeepMask(**stage["mask"])},
            )
            for stage in content.pop("stages")
        )
        return cls(stages=stages, tokens=RaggedTokens(**content.pop("tokens")), **content)

    def to(self, device: torch.device | str) -> Trace:
        """The trace with its tensors on another device."""
        return _moved(self, torch.device(device))

    @classmethod
    def cat(cls, traces: Sequence[Trace]) -> Trace:
        """One trace of several batches that went through the same stages.

        Args:
            traces: At least one. What policies recorded in `aux` is left out, and dead rows are.

        Raises:
            ValueError: If their stages differ in layer, site or policy.
        """
        traces = [trace._live() for trace in traces]
        plans = {tuple((s.layer, s.site, s.policy) for s in trace.stages) for trace in traces}
        if len(plans) != 1:
            raise ValueError(
                f"Trace: traces to join must have the same stages, got {len(plans)} different plans"
            )
        stages = tuple(_join_stages(parts) for parts in zip(*(trace.stages for trace in traces)))
        return cls(
            stages=stages,
            attention_rows=torch.cat([trace.attention_rows for trace in traces], 1),
            mlp_rows=torch.cat([trace.mlp_rows for trace in traces], 1),
            tokens=_join_tokens([trace.tokens for trace in traces]),
            logits=torch.cat([trace.logits for trace in traces]),
        )

    def _live(self) -> Trace:
        """The trace without dead rows; one read-back for each stage."""
        stages = []
        for stage in self.stages:
            rows = int(stage.tokens.cu_seqlens[-1])
            tokens, mask = (_without_dead_rows(item, rows) for item in (stage.tokens, stage.mask))
            stages.append(replace(stage, tokens=tokens, mask=mask))
        tokens = _without_dead_rows(self.tokens, int(self.tokens.cu_seqlens[-1]))
        return replace(self, stages=tuple(stages), tokens=tokens)


def _step(stage: Stage, patches: int) -> Tensor:
    """Heir of each patch across one stage alone, int64 `[B, P]`; -1 for a patch that has no row after it."""
    tokens, mask = stage.tokens, stage.mask
    source = tokens.source.long()
    keep = mask.keep if mask.soft is None else tokens.live
    heir = torch.where(keep, source, -1)
    if mask.merge_into is not None:
        into = mask.merge_into.long().clamp(min=0)
        heir = torch.where((mask.merge_into >= 0) & keep[into], source[into], heir)
    table = heir.new_full((tokens.batch_size + 1, patches + 1), -1)
    table[tokens.image_id.long(), source] = torch.where(tokens.is_patch, heir, -1)
    return table[: tokens.batch_size, :patches]


def _join_stages(parts: Sequence[Stage]) -> Stage:
    """One stage of several batches; where only some have a field, the others get what its absence means."""
    tokens = _join_tokens([part.tokens for part in parts])
    masks = [part.mask for part in parts]
    joined: dict[str, Any] = {"keep": torch.cat([mask.keep for mask in masks])}
    if any(mask.merge_into is not None for mask in masks):
        first = torch.tensor([0, *(part.tokens.x.shape[0] for part in parts)]).cumsum(0).tolist()
        into = [_heirs(mask) for mask in masks]
        joined["merge_into"] = torch.cat([torch.where(i >= 0, i + n, -1) for i, n in zip(into, first)])
    defaults: dict[str, Callable[[Stage], Tensor]] = {
        "merge_weight": lambda part: torch.ones_like(part.tokens.sizes),
        "size": lambda part: part.tokens.sizes,
        "key_weight": _own_key_weight,
        "order": lambda part: part.tokens.position,
        "soft": lambda part: torch.ones_like(part.tokens.sizes),
    }
    for name, default in defaults.items():
        values = [getattr(mask, name) for mask in masks]
        if any(value is not None for value in values):
            joined[name] = torch.cat([default(p) if v is None else v for p, v in zip(parts, values)])
    rows = {mask.rows_per_image for mask in masks}
    joined["rows_per_image"] = rows.pop() if len(rows) == 1 and tokens.uniform else None
    counts = torch.cat([part.counts for part in parts])
    return replace(parts[0], tokens=tokens, mask=KeepMask(**joined), counts=counts)


def _heirs(mask: KeepMask) -> Tensor:
    """`merge_into`, wide enough for the rows of all batches; without it, what stays is its own heir."""
    here = torch.arange(mask.keep.shape[0], device=mask.keep.device)
    return torch.where(mask.keep, here, -1) if mask.merge_into is None else mask.merge_into.long()


def _own_key_weight(part: Stage) -> Tensor:
    """What each row must add for every heir to keep its own key weight."""
    own = torch.ones_like(part.tokens.sizes) if part.tokens.key_weight is None else part.tokens.key_weight
    here = torch.arange(own.shape[0], device=own.device)
    return torch.where(_heirs(part.mask) == here, own, torch.zeros_like(own))


def _join_tokens(parts: Sequence[RaggedTokens]) -> RaggedTokens:
    """Join batches without dead rows; the host-side bounds are the loosest."""
    images, rows = 0, 0
    boundaries, image_id = [parts[0].cu_seqlens[:1]], []
    for part in parts:
        boundaries.append(part.cu_seqlens[1:] + rows)
        image_id.append(part.image_id + images)
        images, rows = images + part.batch_size, rows + part.x.shape[0]
    joined: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts]) for name in ("x", "image_index", "source")
    }
    for name in ("size", "key_weight", "soft"):
        values = [getattr(part, name) for part in parts]
        if any(value is not None for value in values):
            ones = (torch.ones_like(part.sizes) for part in parts)
            joined[name] = torch.cat([one if value is None else value for one, value in zip(ones, values)])
    return replace(
        parts[0],
        cu_seqlens=torch.cat(boundaries),
        image_id=torch.cat(image_id),
        max_seqlen=max(part.max_seqlen for part in parts),
        uniform=all(part.uniform for part in parts) and len({part.max_seqlen for part in parts}) == 1,
        **joined,
    )


def _without_dead_rows(item: Any, rows: int) -> Any:
    """Tokens or a mask with the rows behind the last image cut off."""
    per_row = [f.name for f in fields(item) if f.name not in ("cu_seqlens", "image_index")]
    values = {name: getattr(item, name) for name in per_row}
    return replace(
        item, **{name: value[:rows] for name, value in values.items() if isinstance(value, Tensor)}
    )


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        return item.detach().to(device)
    if isinstance(item, RaggedTokens | KeepMask | Stage | Trace):
        return replace(item, **{f.name: _moved(getattr(item, f.name), device) for f in fields(item)})
    if isinstance(item, Mapping):
        return {name: _moved(value, device) for name, value in item.items()}
    if isinstance(item, tuple) and any(isinstance(each, Stage | Tensor) for each in item):
        return tuple(_moved(each, device) for each in item)
    return item
