"""The models of a comparison: those with the same weights exist once."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from typing import Any

from timm.data import resolve_model_data_config

from prunevit.experiments.calibration import Calibration
from prunevit.experiments.comparison.baselines import baseline_rows, resized
from prunevit.experiments.comparison.config import CompareConfig
from prunevit.experiments.config import InputError, ModelConfig
from prunevit.experiments.contender import Contender, RowSpec
from prunevit.experiments.equal_cost import check_reach
from prunevit.experiments.evaluation import build_contender
from prunevit.experiments.fingerprint import code_fingerprint, weights_fingerprint
from prunevit.experiments.models import build_model
from prunevit.experiments.report import origin
from prunevit.experiments.weights import read_weights


class SharedModels:
    """Builds each model once, and lets one at another input size share the weights of its original."""

    def __init__(self) -> None:
        """Start without any."""
        self._built: dict[str, Any] = {}

    def get(self, config: ModelConfig, weights: str | None, of: ModelConfig) -> Any:
        """The model of a row.

        Args:
            config: Its model group.
            weights: Its weights file, or None.
            of: The model group of the comparison; a row that differs by the input size only is the same model resized.
        """
        key = json.dumps([asdict(config), weights])
        if key not in self._built:
            only_resized = config != of and replace(config, img_size=of.img_size) == of
            self._built[key] = (
                resized(self.get(of, weights, of), config.img_size)
                if only_resized
                else build_model(config, read_weights(weights))
            )
        return self._built[key]


def build_contenders(rows: Sequence[RowSpec], config: CompareConfig) -> tuple[list[Contender], list[Any]]:
    """Build every row, the baselines behind the others.

    Args:
        rows: The rows with a policy.
        config: The configuration of the comparison.

    Returns:
        The rows, and a model for each view of the photos beyond the unpruned model's own.

    Raises:
        InputError: If a model, its weights or a policy cannot be had or do not fit.
    """
    models = SharedModels()
    contenders: list[Contender] = []
    photos: dict[int, Calibration] = {}
    dense: Any = models.get(config.model, config.weights, config.model) if config.baselines else None
    baselines = baseline_rows(config, dense)
    names = {row.name for row in baselines}
    if taken := [row.name for row in rows if row.name in names]:
        raise InputError(
            f"rows: a row may not be called {taken[0]!r}, which a baseline is; give it another name"
        )
    own = [models.get(row.model, row.weights, config.model) for row in rows]
    for model in own:
        # Rows that are set to a cost on training photos read these once.
        photos.setdefault(id(model), Calibration.of(config, model))
    if len(rows) > 1:
        _check_costs(rows, own, photos)
    for row, model in zip(rows, own):
        contenders.append(build_contender(row, config, model, calibration=photos[id(model)]))
    for row in baselines:
        smaller = models.get(row.model, row.weights, config.model)
        if smaller.num_classes != dense.num_classes:
            raise InputError(
                f"baselines: {row.name} must have the {dense.num_classes} classes of {config.model.name}, "
                f"got {smaller.num_classes}; use baselines=[resize]"
            )
        contenders.append(build_contender(row, config, smaller, dense))
    return contenders, _views(contenders)


def _check_costs(rows: Sequence[RowSpec], models: Sequence[Any], photos: dict[int, Calibration]) -> None:
    """Refuse all costs that cannot be had, before minutes go into the search for any."""
    problems: list[str] = []
    for row, model in zip(rows, models):
        try:
            check_reach(row.policy, model, photos[id(model)], row.seed, read_weights(row.weights))
        except InputError as error:
            # Only where its cost is the problem does another one help.
            remedy = (
                f", or leave {row.policy['name']} out" if error.problems[0].startswith("policy.gmacs") else ""
            )
            problems += [f"{line}{remedy} (row {row.name})" for line in error.problems]
    if problems:
        raise InputError(*problems)


def set_keys(contenders: Sequence[Contender], config: CompareConfig, data: dict[str, Any]) -> None:
    """Give each row the key under which an interrupted comparison finds it again.

    It changes with whatever could change a figure: what was asked for, weights, images, numbers, versions, the code
    of the policy.

    Args:
        contenders: The rows, on the CPU.
        config: The configuration of the comparison.
        data: Of `data_fingerprint`.
    """
    hashes: dict[int, str] = {}
    settings = ("batch_size", "precision", "backend", "numeric_images", "accelerator")
    run = [data, origin(), *(getattr(config, name) for name in settings), asdict(config.data)]
    for each in contenders:
        for model in (each.pruned.model, each.dense):
            if id(model) not in hashes:
                hashes[id(model)] = weights_fingerprint(model)
        weights = [
            hashes[id(each.pruned.model)],
            hashes[id(each.dense)],
            weights_fingerprint(each.pruned.policies),
        ]
        asked = {name: value for name, value in asdict(each.spec).items() if name != "name"}
        knob = each.pruned.policies[0].knob_value  # where a cost was asked for, photos have decided it
        code = code_fingerprint(each.pruned.policies[0])  # type: ignore[arg-type]
        said = json.dumps([run, weights, asked, knob, code], default=str)
        each.key = sha256(said.encode()).hexdigest()


def _views(contenders: Sequence[Contender]) -> list[Any]:
    """Number the views: photos that two models want alike are transformed once."""
    wishes: list[dict[str, Any]] = [_wish(contenders[0].dense)]
    models = []
    for each in contenders:
        wish = _wish(each.pruned.model)
        if wish not in wishes:
            wishes.append(wish)
            models.append(each.pruned.model)
        each.view = wishes.index(wish)
    return models


def _wish(model: Any) -> dict[str, Any]:
    return resolve_model_data_config(model, args={"input_size": (3, *model.patch_embed.img_size)})
