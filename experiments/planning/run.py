"""`prunevit plan`: tokens by block and GMACs of a policy on a model, without running it where counts allow."""

import io
import json
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from prunevit.experiments.calibration import Calibration
from prunevit.experiments.config import InputError
from prunevit.experiments.cost import Cost, cost_of, known_cost
from prunevit.experiments.equal_cost import solve
from prunevit.experiments.help_text import in_yaml
from prunevit.experiments.knob_text import in_short
from prunevit.experiments.models import architecture, build_model, check_fit
from prunevit.experiments.planning import papers
from prunevit.experiments.planning.config import PlanConfig
from prunevit.experiments.planning.picture import picture
from prunevit.experiments.policy_spec import Spec, build_policy, knob_of, policy_errors
from prunevit.experiments.report import choose_output_dir, environment, refuse_results, replace_files
from prunevit.experiments.weights import read_weights
from prunevit.macs import dense_macs

FILES = ("plan.json", "plan.png")
LONGEST = 40  # characters of a knob that is a list, in a title that stays on one line
PAPERS = ("papers.json", "papers.md")


def run(config: PlanConfig) -> Cost | None:
    """Show what a policy will cost, and write it to `output_dir` if there is one.

    Args:
        config: The composed configuration.

    Returns:
        The cost; None for the figures of the papers.

    Raises:
        InputError: If the input is wrong; nothing is written then.
    """
    files = FILES if config.suite == "policy" else PAPERS
    output = None if config.output_dir is None else choose_output_dir(config, files)
    if config.suite == "papers":
        found = papers.rows()
        papers.show(found)
        _write(output, config, papers.documents(found))
        return None
    spec, cost, dense = plan(config)
    title = f"{label(spec)} on {config.model.name}"
    _print(title, cost, dense)
    knob = knob_of(spec["name"])
    if isinstance(spec.get(knob), list):  # the title has room for some of it
        print(f"policy.{knob}={in_yaml(spec[knob])}")
    image = io.BytesIO()
    picture(title, cost, dense).savefig(image, format="png", dpi=150)
    said = {"schema": 1, "environment": environment(), "config": asdict(config), "policy": spec}
    content = json.dumps({**said, "dense_gmacs": dense, **asdict(cost)}, indent=1) + "\n"
    _write(output, config, dict(zip(FILES, (content, image.getvalue()))))
    return cost


def plan(config: PlanConfig) -> tuple[Spec, Cost, float]:
    """Find the knob, if a cost is asked for, and the cost.

    Args:
        config: The composed configuration.

    Returns:
        The policy with its knob, its cost, and GMACs of the unpruned model.

    Raises:
        InputError: If the policy does not fit the model or cannot cost what is asked for.
    """
    with policy_errors(config.policy["name"]):
        check_fit(config.model, build_policy(config.policy, config.seed))
        model = architecture(config.model)
        known = known_cost(model, build_policy(config.policy, config.seed)) is not None
    weights = None
    if not known:
        weights = read_weights(config.weights)
        model = build_model(config.model, weights)
        print(f"{config.policy['name']} keeps what the data says: its cost is measured on training photos")
    on_gpu = config.accelerator != "cpu" and torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    photos = Calibration(config.data, model, config.calibration_images, config.batch_size, device)
    spec = solve(config.policy, model, photos, config.seed, weights)
    cost = cost_of(spec, model, photos, config.seed, weights)
    return spec, cost, dense_macs(model) / 1e9


def label(spec: Spec) -> str:
    """Name a policy by its knob, and its count conventions where they are not as shipped.

    Args:
        spec: `name` and the arguments.
    """
    knob = knob_of(spec["name"])
    return f"{spec['name']} {knob}={in_short(spec[knob], LONGEST)}" if knob in spec else str(spec["name"])


def _print(title: str, cost: Cost, dense: float) -> None:
    console = Console()
    table = Table("block", title=title, title_style="bold")
    for name in ("tokens in attention", "tokens in MLP"):
        table.add_column(name, justify="right")
    digits = 1 if cost.images else 0
    for number, (attention, mlp) in enumerate(zip(cost.attention_rows, cost.mlp_rows)):
        table.add_row(str(number), f"{attention:.{digits}f}", f"{mlp:.{digits}f}")
    if cost.images:
        table.caption = f"means over {cost.images} training photos"
    console.print(table)
    model = cost.gmacs - cost.policy_gmacs
    for line in (
        f"GMACs an image: {cost.gmacs:.3f} (model {model:.3f}, policy {cost.policy_gmacs:.3f})",
        f"unpruned: {dense:.3f}, {1 - cost.gmacs / dense:.1%} saved",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def _write(output: Path | None, config: PlanConfig, files: dict[str, str | bytes]) -> None:
    if output is None:
        return
    refuse_results(output, config, [*files])
    try:
        output.mkdir(parents=True, exist_ok=True)
        replace_files({output / name: content for name, content in files.items()})
    except OSError as error:
        raise InputError(
            f"output_dir: the results could not be written to {output} ({error.strerror})"
        ) from error
    print(f"results in {output}")
