"""All that is measured for one row: a pruned model beside the unpruned one."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prunevit import RaggedViT, Trace
from prunevit.experiments.config import ImagesConfig
from prunevit.experiments.metrics import Accuracy, Average, Count, LogitDeviation, RealAccuracy, RowCounts
from prunevit.experiments.report import Row
from prunevit.kernels.backends import choose_backend


class Measures(nn.Module):
    """The metrics of one pruned model beside the unpruned one."""

    def __init__(self, depth: int, most_rows: int) -> None:
        """Start at zero.

        Args:
            depth: Blocks of the model.
            most_rows: Rows of an unpruned image, prefix included.
        """
        super().__init__()
        self.most_rows = most_rows
        self.accuracy, self.dense_accuracy = Accuracy(), Accuracy()
        self.real, self.dense_real = RealAccuracy(), RealAccuracy()
        self.effect, self.numeric = LogitDeviation(), LogitDeviation()
        self.rows, self.macs, self.policy_macs = RowCounts(depth, most_rows), Average(), Average()
        self.skipped = Count()

    def add(self, dense: Tensor, trace: Trace, targets: Tensor, walk: Tensor, policy: Tensor) -> None:
        """Count a batch.

        Args:
            dense: Logits of the unpruned model, `[B, K]`.
            trace: What the pruned model did.
            targets: Class indices, int64 `[B]`.
            walk: MACs of the pruned model, `[B]`.
            policy: MACs of its policies, `[B]`.
        """
        self.accuracy.update(trace.logits, targets)
        self.dense_accuracy.update(dense, targets)
        self.effect.update(trace.logits, dense)
        self.rows.update(trace.mlp_rows)
        self.macs.update(walk + policy)
        self.policy_macs.update(policy)

    def add_real(self, dense: Tensor, logits: Tensor, labels: Sequence[Sequence[int]]) -> None:
        """Count a batch by its ReaL labels.

        Args:
            dense: Logits of the unpruned model, `[B, K]`.
            logits: Logits of the pruned model, `[B, K]`.
            labels: The right classes of each image, possibly none.
        """
        self.real.update(logits, labels)
        self.dense_real.update(dense, labels)

    def results(self) -> Row:
        """Add the processes up and name the figures."""
        dense, effect, numeric, rows = (
            each.compute() for each in (self.dense_accuracy, self.effect, self.numeric, self.rows)
        )
        names = ("max_abs", "mean_abs", "kl", "cosine")
        return {
            **self.accuracy.compute(),
            "skipped": self.skipped.compute(),
            **{f"dense_{name}": value for name, value in dense.items() if name != "images"},
            "real_top1": self.real.compute(),
            "dense_real_top1": self.dense_real.compute(),
            "agreement": effect["agreement"],
            **{f"logit_{name}": effect[name] for name in names},
            "numeric_max_abs": numeric["max_abs"],
            "numeric_agreement": numeric["agreement"],
            **{f"tokens_{name}": rows[name] for name in ("mean", "p5", "p95")},
            "tokens_by_block": rows["by_block"],
            "dense_tokens": self.most_rows,
            "gmacs": self.macs.compute() / 1e9,
            "policy_gmacs": self.policy_macs.compute() / 1e9,
        }


def backend_of(pruned: RaggedViT, config: ImagesConfig, trace: Trace) -> str:
    """The attention backends that the blocks chose, joined by "+" where they differ.

    Args:
        pruned: The pruned model, on the device of the run.
        config: `backend` and `precision`.
        trace: Of a batch; says how the rows lay in each block.
    """
    weight = next(pruned.model.parameters())
    dtype = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(config.precision, weight.dtype)
    heads, width = pruned.info.num_heads, pruned.info.width
    q = weight.new_empty(1, heads, width // heads, dtype=dtype)
    chosen = []
    for layer, needs in enumerate(pruned.needs):
        later = (s.tokens for s in trace.stages if (s.layer, s.site == "after_attention") > (layer, False))
        tokens = next(later, trace.tokens)
        plain = not needs and tokens.key_weight is None and tokens.soft is None
        dense_rows = tokens.max_seqlen if tokens.uniform and plain else None
        chosen.append(choose_backend(config.backend, q, dense_rows))
    return "+".join(sorted(set(chosen)))
