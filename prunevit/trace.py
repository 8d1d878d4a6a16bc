"""The record of one forward pass: what was decided at each stage, for each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from prunevit.keepmask import KeepMask
from prunevit.policy import Site
from prunevit.tokens import RaggedTokens


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
        logits: `[B, K]`.
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
        for stage in self.stages:
            before, after = stage.tokens.seqlens.float(), stage.counts.float()
            lines.append(
                f"{stage.layer:>5}  {stage.site:<15}  {before.mean():.1f} -> {after.mean():.1f} "
                f"({int(after.min())}..{int(after.max())})"
            )
        return "\n".join(lines)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a file that `load` reads.

        Args:
            path: Target file.
        """
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
            traces: At least one.

        Raises:
            ValueError: If their stages differ in layer, site or policy.
        """
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


def _step(stage: Stage, patches: int) -> Tensor:
    """Heir of each patch across one stage alone, int64 `[B, P]`; -1 for a patch that has no row after it."""
    tokens, mask = stage.tokens, stage.mask
    source = tokens.source.long()
    keep = mask.keep if mask.soft is None else tokens.live
    heir = torch.where(keep, source, -1)
    if mask.merge_into is not None:
        into = mask.merge_into.clamp(min=0)
        heir = torch.where((mask.merge_into >= 0) & keep[into], source[into], heir)
    table = heir.new_full((tokens.batch_size + 1, patches + 1), -1)
    table[tokens.image_id.long(), source] = torch.where(tokens.is_patch, heir, -1)
    return table[: tokens.batch_size, :patches]


def _join_stages(parts: Sequence[Stage]) -> Stage:
    tokens = _join_tokens([part.tokens for part in parts])
    first = torch.tensor([0, *(part.tokens.x.shape[0] for part in parts)]).cumsum(0).tolist()
    joined: dict[str, Any] = {}
    for name in ("keep", "merge_weight", "size", "key_weight", "order", "soft"):
        values = [getattr(part.mask, name) for part in parts]
        joined[name] = None if values[0] is None else torch.cat(values)
    into = [part.mask.merge_into for part in parts]
    # An image batch that had nothing to fold has no `merge_into`: there, what stays is its own heir.
    if any(each is not None for each in into):
        joined["merge_into"] = torch.cat([_shifted(part.mask, offset) for part, offset in zip(parts, first)])
        weights = [part.mask.merge_weight for part in parts]
        joined["merge_weight"] = torch.cat(
            [
                torch.ones_like(part.mask.keep, dtype=torch.float32) if w is None else w
                for part, w in zip(parts, weights)
            ]
        )
    rows = {part.mask.rows_per_image for part in parts}
    joined["rows_per_image"] = rows.pop() if len(rows) == 1 and tokens.uniform else None
    return replace(
        parts[0], tokens=tokens, mask=KeepMask(**joined), counts=torch.cat([part.counts for part in parts])
    )


def _shifted(mask: KeepMask, offset: int) -> Tensor:
    here = torch.arange(mask.keep.shape[0], device=mask.keep.device)
    into = torch.where(mask.keep, here, -1) if mask.merge_into is None else mask.merge_into
    return torch.where(into >= 0, into + offset, -1)


def _join_tokens(parts: Sequence[RaggedTokens]) -> RaggedTokens:
    """Join batches without dead rows; the host-side bounds are the loosest."""
    images, rows = 0, 0
    boundaries, image_id = [parts[0].cu_seqlens[:1]], []
    for part in parts:
        boundaries.append(part.cu_seqlens[1:] + rows)
        image_id.append(part.image_id + images)
        images, rows = images + part.batch_size, rows + part.x.shape[0]
    joined: dict[str, Any] = {
        name: None if getattr(parts[0], name) is None else torch.cat([getattr(part, name) for part in parts])
        for name in ("x", "image_index", "source", "size", "key_weight", "soft")
    }
    return replace(
        parts[0],
        cu_seqlens=torch.cat(boundaries),
        image_id=torch.cat(image_id),
        max_seqlen=max(part.max_seqlen for part in parts),
        uniform=all(part.uniform for part in parts) and len({part.max_seqlen for part in parts}) == 1,
        **joined,
    )


def _moved(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        return item.detach().to(device)
    if isinstance(item, RaggedTokens | KeepMask | Stage | Trace):
        return replace(item, **{f.name: _moved(getattr(item, f.name), device) for f in fields(item)})
    if isinstance(item, tuple) and any(isinstance(each, Stage) for each in item):
        return tuple(_moved(each, device) for each in item)
    return item
