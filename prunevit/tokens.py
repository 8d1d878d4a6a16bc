"""The ragged batch: all live tokens of all images in one `[T, C]` buffer, and what attention computed on it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RaggedTokens:
    """Tokens of a batch of images, packed image after image, the prefix rows of each image first.

    `B` images, `T` rows, `C` channels. `T` may exceed `cu_seqlens[-1]` (a fixed capacity under a CUDA graph): the
    rows behind it are dead, have `image_id == B`, hold finite values and are read by nobody.

    Attributes:
        x: Token features, `[T, C]`.
        cu_seqlens: Where each image starts, and the end of the last one, int32 `[B + 1]`, on the device.
        image_id: Image of each row, int32 `[T]`; `B` for dead rows.
        max_seqlen: A bound on the rows of one image, known on the host.
        uniform: Whether every image has exactly `max_seqlen` rows. Known on the host; False may mean "not known".
        num_prefix_tokens: CLS, distillation and register rows that lead each image and are never pruned.
        grid: Height and width of the patch grid before pruning.
        image_index: Position of each image in its data set, int64 `[B]`; keys the draws of stochastic policies.
        source: Patch index in the grid of each row, int32 `[T]`; -1 for prefix rows and dead rows. A row that others
            were folded into carries its own patch.
        size: How many patches a row stands for, fp32 `[T]`, or None while each stands for itself.
        key_weight: Factor of `exp(score)` of a row as a key, fp32 `[T]`, or None for 1.
        soft: The differentiable keep-mask of training, also a factor of a key, `[T]`, or None for 1.
    """

    x: Tensor
    cu_seqlens: Tensor
    image_id: Tensor
    max_seqlen: int
    uniform: bool
    num_prefix_tokens: int
    grid: tuple[int, int]
    image_index: Tensor
    source: Tensor
    size: Tensor | None = None
    key_weight: Tensor | None = None
    soft: Tensor | None = None

    @classmethod
    def from_padded(
        cls,
        x: Tensor,
        num_prefix_tokens: int,
        grid: tuple[int, int],
        image_index: Tensor | None = None,
        source: Tensor | None = None,
    ) -> RaggedTokens:
        """Take a dense batch apart into rows, without a copy.

        Args:
            x: `[B, N, C]`, the prefix rows of each image first.
            num_prefix_tokens: Leading rows of each image that are no patches.
            grid: Height and width of the patch grid.
            image_index: int64 `[B]`; default 0 to B - 1.
            source: Patch index of each row, int32 `[B, N]`, -1 for the prefix; default all patches in grid order.

        Raises:
            ValueError: If `x` is not `[B, N, C]`, `source` is absent and the rows of `x` are not the prefix and the
                grid, or is there and not one integer a row, or `image_index` is not one integer an image.
        """
        if x.ndim != 3:
            raise ValueError(f"RaggedTokens: x must be [B, N, C], got {list(x.shape)}")
        batch, rows, channels = x.shape
        device = x.device
        images = torch.arange(batch, device=device)
        if image_index is not None and (image_index.shape != (batch,) or image_index.is_floating_point()):
            raise ValueError(
                f"RaggedTokens: image_index must be integers [{batch}], one an image, got {image_index.dtype} "
                f"{list(image_index.shape)}"
            )
        if source is None:
            if rows != num_prefix_tokens + grid[0] * grid[1]:
                raise ValueError(
                    f"RaggedTokens: x must have {num_prefix_tokens} prefix rows and {grid[0]} x {grid[1]} patches, "
                    f"got {rows} rows; pass the grid of this input or the source of each row"
                )
            patch = torch.arange(rows, device=device, dtype=torch.int32) - num_prefix_tokens
            source = patch.clamp(min=-1).expand(batch, rows)
        elif source.shape != (batch, rows) or source.is_floating_point():
            raise ValueError(
                f"RaggedTokens: source must be integers {[batch, rows]}, one a row, got {source.dtype} "
                f"{list(source.shape)}"
            )
        return cls(
            x=x.reshape(batch * rows, channels),
            cu_seqlens=torch.arange(0, (batch + 1) * rows, rows, device=device, dtype=torch.int32),
            image_id=images.to(torch.int32)[:, None].expand(batch, rows).reshape(batch * rows),
            max_seqlen=rows,
            uniform=True,
            num_prefix_tokens=num_prefix_tokens,
            grid=grid,
            image_index=images if image_index is None else image_index.to(device=device, dtype=torch.int64),
            source=source.reshape(batch * rows).to(device=device, dtype=torch.int32),
        )

    @property
    def batch_size(self) -> int:
        """Number of images `B`."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def live(self) -> Tensor:
        """Rows that belong to an image, bool `[T]`."""
        return self.image_id < self.batch_size

    @property
    def is_patch(self) -> Tensor:
        """Rows that may be pruned: neither prefix nor dead, bool `[T]`."""
        return self.source >= 0

    @property
    def start(self) -> Tensor:
        """First row of each row's image, int32 `[T]`; the live total for dead rows."""
        return self.cu_seqlens.index_select(0, self.image_id)

    @property
    def position(self) -> Tensor:
        """Row number within its image, int32 `[T]`."""
        rows = torch.arange(self.image_id.shape[0], device=self.image_id.device, dtype=torch.int32)
        return rows - self.start

    @property
    def seqlens(self) -> Tensor:
        """Rows of each image, prefix included, int32 `[B]`."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @property
    def num_patches(self) -> Tensor:
        """Patch rows of each image, int32 `[B]`."""
        return self.seqlens - self.num_prefix_tokens

    @property
    def sizes(self) -> Tensor:
        """`size`, or ones: how many patches each row stands for, at least fp32, `[T]`."""
        if self.size is not None:
            return self.size
        return self.x.new_ones(self.x.shape[0], dtype=torch.promote_types(self.x.dtype, torch.float32))

    def layout(self) -> RaggedTokens:
        """The same rows without their features (`x` has no channels), for keeping."""
        return replace(self, x=self.x.detach().new_empty(self.x.shape[0], 0))

    def to_padded(self, values: Tensor | None = None, fill: float = 0.0) -> Tensor:
        """Spread rows over a dense batch.

        Args:
            values: `[T, ...]`, one entry a row; default `x`.
            fill: What stands where an image has no row.

        Returns:
            `[B, max_seqlen, ...]`; row `i` of an image stands at `i`.

        Cost:
            One gather of `B * max_seqlen` rows; a view when `uniform`.
        """
        values = self.x if values is None else values
        if values.shape[:1] != self.image_id.shape:
            got = values.shape[0] if values.ndim else "one number"
            raise ValueError(
                f"RaggedTokens: values must have {self.image_id.shape[0]} entries, one a row, got {got}"
            )
        if self.uniform:
            return values[: self.batch_size * self.max_seqlen].unflatten(
                0, (self.batch_size, self.max_seqlen)
            )
        column = torch.arange(self.max_seqlen, device=values.device)
        rows = (self.cu_seqlens[:-1, None] + column).clamp(max=values.shape[0] - 1)
        absent = column >= self.seqlens[:, None]
        return values[rows].masked_fill(absent.view(*absent.shape, *(1,) * (values.ndim - 1)), fill)

    def to_rows(self, padded: Tensor) -> Tensor:
        """Take a dense batch apart into rows, `[T, ...]`: the inverse of `to_padded`; 0 in dead rows.

        Args:
            padded: `[B, max_seqlen, ...]`.

        Raises:
            ValueError: If it has another shape.

        Cost:
            One gather of `T` rows; a view when `uniform` and without dead rows.
        """
        if padded.shape[:2] != (self.batch_size, self.max_seqlen):
            raise ValueError(
                f"RaggedTokens: padded must be [{self.batch_size}, {self.max_seqlen}, ...], got {list(padded.shape)}"
            )
        cells = padded.flatten(0, 1)
        if self.uniform and cells.shape[0] == self.image_id.shape[0]:
            return cells
        dead = ~self.live
        if cells.shape[0] == 0:  # no image has a row: there is no cell that a dead row could look at
            cells = cells.new_zeros(1, *cells.shape[1:])
        cell = (self.image_id.long() * self.max_seqlen + self.position).masked_fill(dead, 0)
        return cells[cell].masked_fill(dead.view(-1, *(1,) * (cells.ndim - 1)), 0)

    def prefix(self) -> Tensor:
        """Features of the prefix rows, `[B, num_prefix_tokens, C]`."""
        rows = self.cu_seqlens[:-1, None] + torch.arange(self.num_prefix_tokens, device=self.x.device)
        return self.x[rows]

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `values [T, ...]` over the rows of each image, `[B, ...]`; deterministic.

        Cost:
            One padded copy.
        """
        return self.to_padded(values).sum(1)

    def mean(self, values: Tensor) -> Tensor:
        """Mean of `values [T, ...]` over the rows of each image, `[B, ...]`; 0 for an image without rows.

        Cost:
            One padded copy.
        """
        total = self.sum(values)
        return total / self.seqlens.clamp(min=1).to(total.dtype).view(-1, *(1,) * (total.ndim - 1))

    def max(self, values: Tensor) -> Tensor:
        """Maximum of `values [T, ...]` over the rows of each image, `[B, ...]`; -inf for an image without rows.

        Of integers and truth values the lowest stands for -inf.

        Cost:
            One padded copy.
        """
        low = _lowest(values.dtype)
        if self.max_seqlen == 0:
            return values.new_full((self.batch_size, *values.shape[1:]), low)
        return self.to_padded(values, fill=low).amax(1)


def _lowest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -torch.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


class AttentionState:
    """What the attention that has just run can tell a policy.

    Attributes:
        q: Queries, `[T, H, D]`, after any q-norm.
        k: Keys, `[T, H, D]`, after any k-norm.
        v: Values, `[T, H, D]`.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        prefix_attention: Tensor | None = None,
        received_attention: Tensor | None = None,
    ) -> None:
        """Take what the attention computed."""
        self.q, self.k, self.v = q, k, v
        self._prefix, self._received = prefix_attention, received_attention

    @property
    def prefix_attention(self) -> Tensor:
        """Probability with which each prefix row of the image attends to a row, fp32 `[T, P, H]`, CLS first.

        Raises:
            ValueError: If the policy's `needs` does not name it, so that it is not computed.
        """
        return _computed("prefix_attention", self._prefix)

    @property
    def received_attention(self) -> Tensor:
        """Mean over the image's queries of the probability on a row, fp32 `[T, H]`.

        Raises:
            ValueError: If the policy's `needs` does not name it, so that it is not computed.
        """
        return _computed("received_attention", self._received)

    def by_head(self, source: str) -> Tensor:
        """How much attention each row gets in each head, `[T, H]`: what the verbs take as a score, without a copy.

        Args:
            source: A key of `SCORE_SOURCES`: "cls" (from the CLS token), "prefix" (mean over all prefix rows) or
                "received" (mean over all queries of the image).
        """
        if source == "received":
            return self.received_attention
        return self.prefix_attention.mean(1) if source == "prefix" else self.prefix_attention[:, 0]

    def score(self, source: str) -> Tensor:
        """How much attention each row gets, mean over heads, `[T]`; `source` as in `by_head`."""
        return self.by_head(source).mean(-1)


def _computed(name: str, values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError(f"AttentionState: {name} is not computed; name it in needs of the policy")
    return values


SCORE_SOURCES = {
    "cls": "prefix_attention",
    "prefix": "prefix_attention",
    "received": "received_attention",
}
"""What each source of attention reads."""


def score_needs(owner: str, source: str) -> frozenset[str]:
    """What a policy that scores by `source` must put into its `needs`.

    Args:
        owner: Name of the policy, for the error.
        source: A key of `SCORE_SOURCES`.

    Raises:
        ValueError: If `source` is another word.
    """
    if source not in SCORE_SOURCES:
        raise ValueError(f"{owner}: score_source must be one of {', '.join(SCORE_SOURCES)}, got {source!r}")
    return frozenset({SCORE_SOURCES[source]})
