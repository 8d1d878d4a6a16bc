"""Token-pruning policies in ragged Vision Transformers.

A name is looked up when it is first asked for: torch and timm are imported then, not before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunevit.execution import accelerate
    from prunevit.folding import fuse, merge, nearest
    from prunevit.keepmask import KeepMask, rank, threshold, top_k, top_p
    from prunevit.packing import pack
    from prunevit.policy import ModelInfo, PruningPolicy
    from prunevit.sampling import sample
    from prunevit.tokens import AttentionState, RaggedTokens
    from prunevit.trace import Stage, Trace
    from prunevit.vit import RaggedViT, prune

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "KeepMask",
    "ModelInfo",
    "PruningPolicy",
    "RaggedTokens",
    "RaggedViT",
    "Stage",
    "Trace",
    "accelerate",
    "fuse",
    "merge",
    "nearest",
    "pack",
    "prune",
    "rank",
    "sample",
    "threshold",
    "top_k",
    "top_p",
]

_HOMES = {
    "execution": ("accelerate",),
    "folding": ("fuse", "merge", "nearest"),
    "keepmask": ("KeepMask", "rank", "threshold", "top_k", "top_p"),
    "packing": ("pack",),
    "policy": ("ModelInfo", "PruningPolicy"),
    "sampling": ("sample",),
    "tokens": ("AttentionState", "RaggedTokens"),
    "trace": ("Stage", "Trace"),
    "vit": ("RaggedViT", "prune"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name from its module (PEP 562)."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"prunevit.{_HOME_OF[name]}"), name)
    return value


def __dir__() -> list[str]:
    """Everything public, imported or not."""
    return sorted({*globals(), *__all__})
