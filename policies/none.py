"""The unpruned model on the ragged walk: what the kernels and the execution mode give without any pruning."""

from prunevit.keepmask import KeepMask
from prunevit.policy import PruningPolicy
from prunevit.tokens import AttentionState, RaggedTokens


class NoPruning(PruningPolicy):
    """Prune nowhere."""

    def __init__(self) -> None:
        """Act at no layer."""
        super().__init__(None, None)

    def forward(self, tokens: RaggedTokens, attention: AttentionState | None, layer: int) -> KeepMask:
        """Keep every row."""
        return KeepMask(tokens.live)
