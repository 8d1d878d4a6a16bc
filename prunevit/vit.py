"""The walk of a batch through a pruned Vision Transformer, and `prune`, which builds it from a timm model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from timm.layers import PatchDropout
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prunevit.architecture import check_architecture
from prunevit.block import attend, feed_forward
from prunevit.embedding import embed_patches
from prunevit.keepmask import KeepMask
from prunevit.kernels.ragged_attention import BACKENDS
from prunevit.packing import Foreseen, pack
from prunevit.policy import NEEDS, ModelInfo, PruningPolicy, check_made
from prunevit.pooling import pool
from prunevit.tokens import AttentionState, RaggedTokens
from prunevit.trace import SITES, Stage, Trace


def prune(
    model: nn.Module, policies: PruningPolicy | Sequence[PruningPolicy], backend: str = "auto"
) -> RaggedViT:
    """Plug pruning policies into a timm Vision Transformer, in the mode (training or evaluation) that it is in.

    Args:
        model: A timm `VisionTransformer` or `VisionTransformerDistilled`. It is not copied: the pruned model shares
            its weights, so training one trains the other, and so do `.to()`, `.half()` and `.train()`. A hook that is
            hung on a block or its attention afterwards never runs; one on their parts (norm1, attn.qkv, mlp, ...) does.
        policies: One policy, or several that act at different places.
        backend: Attention backend: "auto", "reference", "padded" or "triton".

    Raises:
        TypeError: If the architecture is not supported, or hooks hang on a block or its attention, which the walk takes
            apart; says which part and why. Or if a policy is none, or was not made completely.
        ValueError: If a policy does not fit the model or its fellow policies.
    """
    several = isinstance(policies, Iterable) and not isinstance(policies, str)
    return RaggedViT(model, list(policies) if several else [policies], backend)  # type: ignore[list-item, arg-type]


Record = Callable[[Stage | RaggedTokens], None]


class RaggedViT(nn.Module):
    """A timm Vision Transformer whose tokens are really removed where its policies say so.

    Takes and returns dense tensors, as the timm model does, and stands where it stood: `state_dict` keeps timm's names
    under the prefix `model.`, and what timm's training code asks of a model is forwarded.

    Attributes:
        model: The timm model, shared.
        policies: The policies, in order.
        backend: Attention backend.
        info: What the policies know of the model.
        needs: For each block, what its attention has to emit for the policies.
    """

    def __init__(self, model: Any, policies: Sequence[PruningPolicy], backend: str = "auto") -> None:
        """Check that all fits together and set the policies up; see `prune`."""
        super().__init__()
        check_architecture(model)
        if backend not in BACKENDS:
            raise ValueError(f"RaggedViT: backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        for policy in policies:
            check_made(policy)
        self.model: Any = model
        self.policies = nn.ModuleList(policies)
        self.backend = backend
        self.info = ModelInfo(
            width=model.embed_dim,
            depth=len(model.blocks),
            num_heads=model.blocks[0].attn.num_heads,
            grid=tuple(model.patch_embed.grid_size),
            num_prefix_tokens=model.num_prefix_tokens,
            has_class_token=model.has_class_token,
        )
        weight = next(model.parameters())
        for policy in policies:
            policy.setup(self.info)
            if not hasattr(policy, "layers"):
                raise TypeError(
                    f"{type(policy).__name__}: setup must call super().setup(info), which settles layers"
                )
            policy.to(weight.device, weight.dtype)
        self._check_policies()
        # What a policy reads before a block was emitted by the block before it.
        self.needs = [
            frozenset().union(*(p.needs for p in policies if layer + (p.site == "before_block") in p.layers))
            for layer in range(self.info.depth)
        ]
        self.train(model.training)

    def forward(self, images: Tensor, image_index: Tensor | None = None) -> Tensor:
        """Classify.

        Args:
            images: `[B, 3, height, width]`.
            image_index: Position of each image in its data set, int64 `[B]`; keys the draws of stochastic policies.
                Default 0 to B - 1.

        Returns:
            Logits `[B, K]`; those of both heads, where timm returns both: of a distilled model in distilled training.

        Raises:
            ValueError: As `pack`, if a policy's mask is not valid.
        """
        return self.forward_head(self.forward_features(images, image_index))

    def forward_features(self, images: Tensor, image_index: Tensor | None = None) -> RaggedTokens:
        """Everything before the pooling: the surviving rows after the final norm; arguments as `forward`."""
        return self.walk(self.embed(images, image_index))

    def forward_head(self, tokens: RaggedTokens, pre_logits: bool = False) -> Tensor:
        """Pool the rows as the timm model does and classify, `[B, K]`.

        Args:
            tokens: What `forward_features` returned.
            pre_logits: Return what goes into the classifier, `[B, C]`.
        """
        model = self.model
        if isinstance(model, VisionTransformerDistilled):
            return model.forward_head(tokens.prefix(), pre_logits=pre_logits)
        x = model.head_drop(model.fc_norm(pool(model, tokens)))
        return x if pre_logits else model.head(x)

    def trace(self, images: Tensor, image_index: Tensor | None = None) -> Trace:
        """Classify, and record what was decided at each stage; arguments as `forward`.

        Cost:
            That of `forward` and two small tensors a block.
        """
        rows: list[Tensor] = []
        stages: list[Stage] = []

        def record(event: Stage | RaggedTokens) -> None:
            if isinstance(event, Stage):
                stages.append(event)
            else:
                rows.append(event.seqlens)

        tokens = self.walk(self.embed(images, image_index), record)
        return Trace(
            stages=tuple(stages),
            attention_rows=torch.stack(rows[0::2]),
            mlp_rows=torch.stack(rows[1::2]),
            tokens=tokens,
            logits=self._logits(tokens),
        )

    def _logits(self, tokens: RaggedTokens) -> Tensor:
        """Logits `[B, K]`: where the head gives a tuple, the mean that timm takes of both heads in evaluation."""
        logits = self.forward_head(tokens)
        return (logits[0] + logits[1]) / 2 if isinstance(logits, tuple) else logits

    def embed(self, images: Tensor, image_index: Tensor | None = None) -> RaggedTokens:
        """Patches, prefix tokens and position embedding by the timm model itself; arguments as `forward`."""
        model = self.model
        grid = tuple(model.patch_embed.dynamic_feat_size(tuple(images.shape[-2:])))
        x = model._pos_embed(embed_patches(model.patch_embed, images))
        source = None
        if isinstance(model.patch_drop, PatchDropout) and model.training:
            x, source = _drop_patches(model.patch_drop, x, model.num_prefix_tokens)
        return RaggedTokens.from_padded(
            model.norm_pre(x), model.num_prefix_tokens, grid, image_index=image_index, source=source
        )

    def find_nan(self, images: Tensor, image_index: Tensor | None = None) -> str | None:
        """Say which part first produces a value that is not finite, or None if none does; arguments as `forward`.

        Cost:
            One forward pass with a read-back after each half-block.
        """
        culprit: list[str] = []
        halves = [
            f"block {layer}, {half}" for layer in range(self.info.depth) for half in ("attention", "mlp")
        ]
        seen = iter(["the embedding", *halves])

        def look(event: Stage | RaggedTokens) -> None:
            # Events show the rows that *enter* a half-block: what was finite there was broken by what follows.
            if isinstance(event, RaggedTokens):
                name = next(seen)
                if not culprit and not bool(event.x.isfinite().all()):
                    culprit.append(name)

        tokens = self.walk(self.embed(images, image_index), look)
        look(tokens)
        if not culprit and not bool(self._logits(tokens).isfinite().all()):
            culprit.append("the head")
        return f"the first values that are not finite come from {culprit[0]}" if culprit else None

    def walk(
        self,
        tokens: RaggedTokens,
        record: Record | None = None,
        *,
        first: int = 0,
        last: int | None = None,
        capacity: int | Foreseen | None = None,
    ) -> RaggedTokens:
        """Run half-blocks, straight down: half `2 * l` is the attention of block `l`, half `2 * l + 1` its MLP.

        The policies that act ahead of a half have moved the rows before it runs; a walk to `last` ends with those that
        act ahead of `last`, so a later walk from there goes on where this one stopped.

        Args:
            tokens: Rows that enter half `first`.
            record: Sees each stage, and the rows that enter each half.
            first: Half to begin with.
            last: Half to stop ahead of; default: run all, and the final norm.
            capacity: Rows to make room for where a policy keeps a number of rows that the host does not know; or rooms
                `Foreseen` for such stages, which may prove too small. Without it the host reads the number back.
        """
        halves = 2 * self.info.depth
        attention: AttentionState | None = None
        if first == 0:
            tokens, _ = self._prune_ahead(0, tokens, None, record, capacity)
        for half in range(first, halves if last is None else last):
            if record is not None:
                record(tokens)
            block = self.model.blocks[half // 2]
            if half % 2 == 0:
                x, attention = self._run(
                    attend,
                    block,
                    tokens,
                    backend=self.backend,
                    needs=self.needs[half // 2],
                    exempt_self=self.exempt_self,
                    softmax_eps=self.softmax_eps if self.training else 0.0,
                )
            else:
                if not self.stages_ahead(half + 1):
                    attention = None  # else q, k and v lie in memory beside the hidden rows of the MLP
                x = self._run(feed_forward, block, tokens)
            tokens = replace(tokens, x=x)
            tokens, attention = self._prune_ahead(half + 1, tokens, attention, record, capacity)
        return tokens if last is not None else replace(tokens, x=self.model.norm(tokens.x))

    def stages_ahead(self, half: int) -> list[tuple[int, PruningPolicy]]:
        """Policies that act ahead of a half-block, with their positions in `policies`."""
        site = "before_block" if half % 2 == 0 else "after_attention"
        return [(n, p) for n, p in enumerate(self._policies()) if p.site == site and half // 2 in p.layers]

    def _prune_ahead(
        self,
        half: int,
        tokens: RaggedTokens,
        attention: AttentionState | None,
        record: Record | None,
        capacity: int | Foreseen | None,
    ) -> tuple[RaggedTokens, AttentionState | None]:
        """Let the policies of one place decide and move; the attention is gone once rows have moved."""
        for number, policy in self.stages_ahead(half):
            mask = policy(tokens, attention, half // 2)
            if not isinstance(mask, KeepMask):
                name = type(policy).__name__
                raise TypeError(f"{name}: forward must return a KeepMask, got {type(mask).__name__}")
            before = tokens
            if mask.rows_per_image is not None or mask.soft is not None:
                tokens = pack(tokens, mask)
            elif isinstance(capacity, Foreseen):
                tokens = capacity.pack(tokens, mask)
            else:
                tokens = pack(tokens, mask, capacity)
            attention = None
            if record is not None:
                bare = replace(mask, selection=None)
                record(Stage(half // 2, policy.site, number, before.layout(), bare, tokens.seqlens))
        return tokens, attention

    def _run(self, half: Callable[..., Any], block: nn.Module, tokens: RaggedTokens, **settings: Any) -> Any:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return checkpoint(half, block, tokens, use_reentrant=False, **settings)
        return half(block, tokens, **settings)

    def _policies(self) -> list[PruningPolicy]:
        return list(self.policies)  # type: ignore[arg-type]

    def _check_policies(self) -> None:
        for policy in self._policies():
            name = type(policy).__name__
            if policy.site not in SITES:
                raise ValueError(f"{name}: site must be one of {', '.join(SITES)}, got {policy.site!r}")
            if isinstance(policy.needs, str) or not set(policy.needs) <= set(NEEDS):
                raise ValueError(
                    f"{name}: needs must be a set out of {', '.join(NEEDS)}, got {policy.needs!r}"
                )
        # A policy that leaves both at their defaults has no opinion.
        opinions = ((p.exempt_self, p.softmax_eps) for p in self._policies() if p.layers)
        agreed = {opinion for opinion in opinions if opinion != (False, 0.0)}
        if len(agreed) > 1:
            raise ValueError(
                "RaggedViT: policies must agree on exempt_self and softmax_eps, which act on the whole walk, "
                f"got {sorted(agreed)}; use one of them at a time"
            )
        self.exempt_self: bool
        self.softmax_eps: float
        self.exempt_self, self.softmax_eps = agreed.pop() if agreed else (False, 0.0)
        self._check_attention()

    def _check_attention(self) -> None:
        """Refuse a policy that reads an attention where, in the order of the walk, there is none on its rows."""
        mover: PruningPolicy | None = None
        for half in range(2 * self.info.depth):
            if half % 2:  # the attention of this block has just run
                mover = None
            for _, policy in self.stages_ahead(half):
                if policy.needs and (half == 0 or mover is not None):
                    reason = (
                        "no attention has run yet" if mover is None else f"{type(mover).__name__} moves rows"
                    )
                    raise ValueError(
                        f"{type(policy).__name__}: an attention on the present rows is needed at layer {half // 2}, "
                        f"but {reason} just before; choose another layer or site"
                    )
                mover = policy

    # What timm's and Lightning's training code asks of a model.

    @property
    def num_classes(self) -> int:
        """Classes `K` of the head."""
        return self.model.num_classes

    @property
    def pretrained_cfg(self) -> Any:
        """Timm's data configuration of the weights."""
        return self.model.pretrained_cfg

    @property
    def num_features(self) -> int:
        """Channels that go into the head."""
        return self.model.num_features

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay leaves alone."""
        return {f"model.{name}" for name in self.model.no_weight_decay()}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Timm's parameter groups for layer-wise learning rates, under the prefix; a policy's go with the head."""

        def prefixed(pattern: Any) -> Any:
            if isinstance(pattern, str):
                return rf"^model\.(?:{pattern.replace('^', '')})"
            return [(prefixed(each), order) for each, order in pattern]

        return {name: prefixed(pattern) for name, pattern in self.model.group_matcher(coarse).items()}

    @property
    def grad_checkpointing(self) -> bool:
        """Whether training recomputes the halves of the blocks: the timm model's own setting."""
        return self.model.grad_checkpointing

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the halves of the blocks in the backward pass; decisions are kept, not drawn again."""
        self.model.set_grad_checkpointing(enable)

    def get_classifier(self) -> Any:
        """The head, or both heads of a distilled model."""
        return self.model.get_classifier()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the head, as timm does."""
        self.model.reset_classifier(num_classes, global_pool)
        check_architecture(self.model)

    def export_backbone(self, path: str | PathLike[str]) -> None:
        """Write the timm model's weights to a file for `timm.create_model(..., checkpoint_path=path)`.

        Args:
            path: Target, `*.safetensors`; its folder is made if it is not there.

        Cost:
            A copy of the weights on the CPU.
        """
        from safetensors.torch import save_file

        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.cpu().contiguous() for name, value in self.model.state_dict().items()}, path)


def _drop_patches(module: PatchDropout, x: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
    """Timm's patch dropout, told by row numbers so that each row's patch stays known."""
    batch, rows, channels = x.shape
    numbers = torch.arange(rows, device=x.device, dtype=torch.float64).expand(batch, rows)[..., None]
    kept = module(numbers)[..., 0].long()
    source = torch.where(kept < prefix, -1, kept - prefix).int()
    return x.gather(1, kept[..., None].expand(-1, -1, channels)), source
