"""One policy on real images: accuracy, logit deviation, cost and speed, pruned and unpruned."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning.pytorch import seed_everything

from prunevit.experiments.calibration import Calibration
from prunevit.experiments.class_check import check_classes
from prunevit.experiments.config import EvaluateConfig, InputError, LoggerConfig, MeasureConfig
from prunevit.experiments.contender import Contender, RowSpec, describe
from prunevit.experiments.data import EvaluationData, load_data
from prunevit.experiments.equal_cost import solve
from prunevit.experiments.fingerprint import data_fingerprint
from prunevit.experiments.models import build_model, check_fit, prune_model
from prunevit.experiments.one_pass import OnePass
from prunevit.experiments.policy_spec import build_policy, policy_errors
from prunevit.experiments.progress import Bar
from prunevit.experiments.ranks import is_first_process
from prunevit.experiments.report import Row, choose_output_dir, finite, origin, print_report, write_results
from prunevit.experiments.tracking import tracked
from prunevit.experiments.trainer import make_trainer, run_test
from prunevit.experiments.weights import load_policies, provenance, read_weights, weights_name


def run(config: EvaluateConfig) -> list[Row]:
    """Evaluate, report and write what `prunevit evaluate` promises.

    Args:
        config: The composed configuration.

    Returns:
        The row, on the first process; nothing on the others.

    Raises:
        InputError: If the input is wrong; nothing is written then.
    """
    output = choose_output_dir(config)
    spec = RowSpec(config.policy["name"], config.policy, config.model, config.weights, config.seed)
    check_spec(spec)
    check_classes(config.data, config.model)
    contender = build_contender(spec, config)
    data = load_data(config.data, contender.dense)
    check_processes(config, data)
    bar = Bar()
    module, trainer = OnePass([contender], data, config, bar), make_trainer(config, bar)
    with tracked(config.logger if trainer.is_global_zero else LoggerConfig(), asdict(config)) as records:
        run_test(trainer, module)
        if not trainer.is_global_zero:
            return []
        (row,) = complete_rows([contender], data, config)
        write_results(output, config, [row])
        print_report(row)
        records.append(row)
    print(f"results in {output}")
    return [row]


def check_spec(spec: RowSpec) -> None:
    """Refuse a policy that does not fit the architecture, before any weights are fetched.

    Args:
        spec: What is asked for.

    Raises:
        InputError: Says what does not fit.
    """
    with policy_errors(spec.policy["name"]):
        check_fit(spec.model, build_policy(spec.policy, spec.seed))


def build_contender(
    spec: RowSpec,
    config: MeasureConfig,
    model: Any = None,
    dense: Any = None,
    calibration: Calibration | None = None,
) -> Contender:
    """Build the model of a row, with its weights and its policy.

    Args:
        spec: What is asked for.
        config: `backend`.
        model: The timm model with the weights asked for, to be shared; None: it is built.
        dense: The unpruned model that the row stands beside; None: its own.
        calibration: Training photos for this model, where rows share them.

    Raises:
        InputError: If the model, the weights or the policy cannot be had or do not fit.
    """
    seed_everything(spec.seed, workers=True, verbose=False)
    weights = read_weights(spec.weights)
    model = model or build_model(spec.model, weights)
    photos = calibration or Calibration.of(config, model)
    policy = solve(spec.policy, model, photos, spec.seed, weights)
    with policy_errors(policy["name"]):
        pruned = prune_model(model, build_policy(policy, spec.seed), config.backend)
    if spec.kind == "policy":
        load_policies(pruned, weights)
    where = provenance(spec.model, weights, pruned)
    beside = (
        {"dense_model": spec.model.name, "dense_weights": where["weights"]}
        if dense is None
        else {
            "dense_model": config.model.name,
            "dense_weights": weights_name(config.model, config.weights, dense),
        }
    )
    if where["predictors"] and is_first_process():
        name = spec.policy["name"]
        print(
            f"prunevit: policy {name} has random predictors: there are no weights for them", file=sys.stderr
        )
    return Contender(spec, pruned, model if dense is None else dense, where | beside)


def check_processes(config: MeasureConfig, data: EvaluationData) -> None:
    """Refuse more processes than can share the images.

    Args:
        config: `devices`.
        data: The images.

    Raises:
        InputError: Says what to do.
    """
    if data.is_stream and config.devices > 1:
        raise InputError(
            f"devices: a stream like {config.data.dataset} is read by one process; use devices=1"
        )
    if config.devices > data.size:
        raise InputError(f"devices: must be at most the {data.size} images, got {config.devices}")


def complete_rows(contenders: Sequence[Contender], data: EvaluationData, config: MeasureConfig) -> list[Row]:
    """Put the rows together, after the pass.

    Args:
        contenders: The rows.
        data: The images.
        config: The configuration of the run.
    """
    said = {"data": data_fingerprint(config.data, data), **origin()}
    return [finite(describe(config, each) | each.results | said) for each in contenders]
