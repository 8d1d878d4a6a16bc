"""What is trained: the pruned model that a configuration names, with the weights to start from."""

from dataclasses import replace

from prunevit.experiments.calibration import Calibration
from prunevit.experiments.class_check import check_classes
from prunevit.experiments.config import InputError
from prunevit.experiments.equal_cost import solve
from prunevit.experiments.finetuning.config import FinetuneConfig
from prunevit.experiments.finetuning.optimisation import freeze, make_optimizer, set_drop_path
from prunevit.experiments.models import build_model, check_fit, prune_model
from prunevit.experiments.policy_spec import build_policy, policy_errors
from prunevit.experiments.weights import load_policies, read_weights
from prunevit.vit import RaggedViT


def with_knob(config: FinetuneConfig) -> FinetuneConfig:
    """Put the knob that costs `policy.gmacs` in the place of that, if it is asked for.

    Args:
        config: The composed configuration.

    Raises:
        InputError: If it cannot be had.
    """
    if "gmacs" not in config.policy:
        return config
    weights = read_weights(config.weights)
    model = build_model(config.model, weights)
    return replace(
        config, policy=solve(config.policy, model, Calibration.of(config, model), config.seed, weights)
    )


def build(config: FinetuneConfig) -> RaggedViT:
    """Build the pruned model with the weights to start from.

    Args:
        config: `model`, `policy`, `weights`, and what of them learns.

    Raises:
        InputError: If they do not fit each other or the recipe.
    """
    name, weights = config.policy["name"], read_weights(config.weights)
    with policy_errors(name):
        check_fit(config.model, build_policy(config.policy, config.seed))
    check_classes(config.data, config.model)
    model = build_model(config.model, weights)
    set_drop_path(model, config.drop_path)
    with policy_errors(name):
        pruned = prune_model(model, build_policy(config.policy, config.seed), config.backend)
    load_policies(pruned, weights)
    _check_recipe(config, pruned)
    freeze(pruned, config.frozen_parameters)
    make_optimizer(pruned, config)  # refuses an unknown one before anything is written
    return pruned


def _check_recipe(config: FinetuneConfig, pruned: RaggedViT) -> None:
    """Refuse a recipe on what it was not made for."""
    recipe, width = config.recipe, pruned.info.width
    learnable = any(each.numel() for each in pruned.policies.parameters())
    name = config.policy["name"]
    problems = []
    if recipe.widths and width not in recipe.widths:
        wanted = ", ".join(map(str, recipe.widths))
        problems.append(
            f"recipe: {recipe.name} is for models of {wanted} channels, got {config.model.name} with {width}; "
            "choose another recipe, or set recipe.widths=[] and its lr, drop_path and weight_decay for your model"
        )
    if recipe.learnable and not learnable:
        problems.append(
            f"recipe: {recipe.name} trains parameters of the policy, {name} has none; choose another recipe"
        )
    elif config.frozen_epochs and not learnable:
        problems.append(
            f"frozen_epochs: needs a policy with parameters, {name} has none, so nothing would learn"
        )
    if (
        config.keep_rate_warmup_epochs or config.keep_rate_warmup_steps or config.keep_rate_start_epochs
    ) and any(policy.knob != "keep_rate" for policy in pruned.policies):
        problems.append(f"keep_rate_warmup_epochs: needs a policy with a keep_rate, got {name}")
    if problems:
        raise InputError(*problems)
