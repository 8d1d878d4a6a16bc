"""Token-pruning policies in ragged Vision Transformers."""

from prunevit.folding import fuse, merge, nearest
from prunevit.keepmask import KeepMask, rank, sample, threshold, top_k, top_p
from prunevit.packing import pack
from prunevit.policy import ModelInfo, PruningPolicy
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
