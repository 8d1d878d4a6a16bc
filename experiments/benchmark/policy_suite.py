"""`prunevit bench suite=policies`: what each policy costs: its time beyond the same walk with the counts given.

Each policy runs at the settings of its file, as CUDA graphs. Beside it runs the walk that keeps as many rows of every
image at every stage, but the first ones: no score, no selection, a copy. The difference is the price of deciding,
packing and whatever the policy asks of the attention. LTMP runs a second time, with thresholds that leave as many rows
behind each block as ToMe.
"""

from collections.abc import Iterator
from itertools import product

import torch

from prunevit.experiments.benchmark import model_suite
from prunevit.experiments.benchmark.config import BenchConfig
from prunevit.experiments.benchmark.measurements import Measurement, Measurements, Target, overhead, within
from prunevit.experiments.benchmark.model_rows import Case, Spec, spanned
from prunevit.experiments.benchmark.model_suite import GRAPHS, MS
from prunevit.experiments.compose import group_names, read_yaml
from prunevit.experiments.config import ModelConfig
from prunevit.experiments.cost import known_cost
from prunevit.experiments.models import architecture
from prunevit.experiments.policy_spec import build_policy

MODE = "graph"
MOST = 0.15
LTMP_OF_TOME = 0.85
NOT_IN_EVALUATION = ("none", "patch_dropout", "replay")
"""Policies that prune nothing there, or only what a file says."""
FIRST = "tome"


def policies() -> dict[str, Spec]:
    """Every policy that prunes in evaluation, at the settings of its file; ToMe, whose rival is LTMP, comes first."""
    names = [name for name in group_names("policy") if name not in NOT_IN_EVALUATION]
    return {name: read_yaml(f"policy/{name}.yaml") for name in sorted(names, key=lambda name: name != FIRST)}


def cases(config: BenchConfig) -> list[Case]:
    """A case for each model, with all policies.

    Args:
        config: As for `spanned`.

    Raises:
        InputError: If a policy of a sweep is not known.
    """
    rivals = ("given",) if config.rows == "sweep" else ("given", "ltmp")
    return spanned(config, policies(), (256,), rivals)


def run(config: BenchConfig, device: torch.device) -> Iterator[Measurement]:
    """Measure every policy and its walk with given counts.

    Args:
        config: The configuration.
        device: A CUDA device.

    Yields:
        Times, peak memory and the number of CUDA graphs.
    """
    for case, dtype in product(cases(config), config.dtypes):
        yield from model_suite.measured(case, dtype, [MODE], config.seconds, device)


def targets(figures: Measurements, config: BenchConfig) -> list[Target]:
    """Compare with what is to be reached.

    Args:
        figures: The measurements.
        config: Says which cases ran.
    """
    found = []
    for case in cases(config):
        host_known = [name for name, spec in case.policies.items() if _is_host_known(case, spec)]
        for dtype, batch_size in product(config.dtypes, case.batch_sizes):
            place = case.place(batch_size, dtype)
            for name in case.policies:
                ours, given, dense = (
                    figures.find(place, each, MS, MODE) for each in (name, f"given {name}", "dense")
                )
                what = f"{name}: its cost as a share of the dense time"
                found.append(overhead(what, place, ours, given, dense, MOST))
            for name in host_known:
                graphs = figures.find(place, name, GRAPHS, MODE)
                found.append(within(f"{name}: CUDA graphs of a forward", place, graphs, 1))
            if "ltmp" in case.rivals:
                what = "ltmp: its cost where it leaves as many rows behind each block as ToMe"
                ours, given, dense = (
                    figures.find(place, each, MS, MODE)
                    for each in (f"ltmp {FIRST}", f"given {FIRST}", "dense")
                )
                found.append(overhead(what, place, ours, given, dense, MOST))
                what = "LTMP's throughput over ToMe's, as many rows behind each block (1 %)"
                found.append(figures.faster(what, place, f"ltmp {FIRST}", FIRST, MS, LTMP_OF_TOME, MODE))
    return found


def _is_host_known(case: Case, spec: Spec) -> bool:
    model = architecture(ModelConfig(case.model, img_size=case.img_size))
    return known_cost(model, build_policy(spec)) is not None
