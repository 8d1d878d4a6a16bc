"""One row on its way: what was asked for, the model that answers it, and what has been measured of it so far."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from prunevit import RaggedViT
from prunevit.experiments.config import ImagesConfig, ModelConfig
from prunevit.experiments.measures import Measures
from prunevit.experiments.report import Row

GUESSES = ("index", "target", "dense", "own")  # what is kept of each image; the last three are classes
State = dict[str, Any]


@dataclass(frozen=True)
class RowSpec:
    """What is asked of one row.

    Attributes:
        name: Its label, unique in the table.
        policy: `name` and the arguments of the constructor, or `gmacs` in place of the knob.
        model: The model group.
        weights: A weights file, or None.
        seed: Of all draws.
        kind: "policy", or what the unpruned model was made smaller by: "resize" or "model".
    """

    name: str
    policy: dict[str, Any]
    model: ModelConfig
    weights: str | None = None
    seed: int = 0
    kind: str = "policy"


@dataclass(eq=False)
class Contender:
    """A row that is being measured; all counts are those of this process.

    Attributes:
        spec: What was asked for.
        pruned: The model, which shares its weights with the others of the same weights.
        dense: The unpruned timm model that it stands beside.
        provenance: The columns `weights`, `trained`, `predictors`, and of `dense` `dense_model`, `dense_weights`.
        view: Which of the batch's views it takes: 0 for `images`, `n` for `views[n - 1]`.
        key: What a result of an earlier run must agree in to count as this one.
        batches: Batches of this process's share that are done.
        numeric_images: Images that were compared with the reference.
        backend: Attention backends that the blocks chose.
        error: Why it failed, or None.
        measures: What is measured.
        guesses: Rows `GUESSES` of each batch, int32 `[4, B]`.
        results: The measured part of the row, once it is complete.
    """

    spec: RowSpec
    pruned: RaggedViT
    dense: Any
    provenance: Mapping[str, str | None]
    view: int = 0
    key: str = ""
    batches: int = 0
    numeric_images: int = 0
    backend: str | None = None
    error: str | None = None
    measures: Measures = field(init=False)
    guesses: list[Tensor] = field(default_factory=list)
    results: Row = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start the measures at zero."""
        info = self.pruned.info
        self.measures = Measures(info.depth, info.grid[0] * info.grid[1] + info.num_prefix_tokens)

    def guessed(self) -> Tensor:
        """The rows `GUESSES` of all images so far, int32 `[4, n]` on the CPU."""
        if not self.guesses:
            return torch.empty(len(GUESSES), 0, dtype=torch.int32)
        self.guesses = [torch.cat(self.guesses, 1)]
        return self.guesses[0].cpu()

    def state(self) -> State:
        """What a later process needs to go on from here, on the CPU."""
        for metric in self.measures.children():
            metric.persistent(True)  # type: ignore[operator]
        return {
            "batches": self.batches,
            "numeric_images": self.numeric_images,
            "backend": self.backend,
            "error": self.error,
            "measures": {name: value.cpu() for name, value in self.measures.state_dict().items()},
            "guesses": self.guessed(),
        }

    def resume(self, state: State) -> None:
        """Go on from a state.

        Args:
            state: From `state`, of a contender with the same key.
        """
        for metric in self.measures.children():
            metric.persistent(True)  # type: ignore[operator]
        self.measures.load_state_dict(state["measures"])
        self.guesses = [state["guesses"]]
        for name in ("batches", "numeric_images", "backend", "error"):
            setattr(self, name, state[name])


def describe(config: ImagesConfig, contender: Contender) -> Row:
    """The part of a row that is not measured.

    Args:
        config: The configuration of the run.
        contender: The row.
    """
    spec, pruned = contender.spec, contender.pruned
    policy: Any = pruned.policies[0]
    value = list(policy.knob_value) if isinstance(policy.knob_value, tuple) else policy.knob_value
    return {
        "name": spec.name,
        "kind": spec.kind,
        "error": contender.error,
        "policy": spec.policy["name"],
        "keep_rate": value if policy.knob == "keep_rate" else None,
        "knob": policy.knob or None,
        "knob_value": value,
        "layers": list(policy.layers),
        "model": spec.model.name,
        **contender.provenance,
        "seed": spec.seed,
        "img_size": _img_size(pruned.model),
        "dense_img_size": _img_size(contender.dense),
        "batch_size": config.batch_size,
        "mode": config.execution,
        "accelerator": "gpu" if config.on_gpu else "cpu",
        "precision": config.precision,
        "config": asdict(spec),
    }


def _img_size(model: Any) -> int | list[int]:
    height, width = model.patch_embed.img_size
    return height if height == width else [height, width]
