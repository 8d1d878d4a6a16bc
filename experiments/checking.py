"""`prunevit check POLICY`: hold a policy against what every policy owes, and report."""

import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prunevit.experiments.compose import read_yaml
from prunevit.experiments.config import CheckConfig
from prunevit.experiments.policy_spec import build_policy
from prunevit.policies import POLICIES
from prunevit.testing import Result, check_policy

COLOURS = {"passed": "green", "failed": "bold red", "not applicable": "dim", "not reached": "dim"}


def run(config: CheckConfig) -> int:
    """Check one policy or all, and print what came of it.

    Args:
        config: The composed configuration.

    Returns:
        The exit code: 1 if a check failed.
    """
    device = {"auto": None, "cpu": "cpu", "gpu": "cuda"}[config.accelerator]
    if not config.all:
        return report(config.policy["name"], _results(config.policy, device))
    specs = {name: read_yaml(f"policy/{name}.yaml") for name in POLICIES if name != "replay"}
    failed = 0
    for name, spec in specs.items():
        started = time.perf_counter()
        failed += summarise(name, _results(spec, device), time.perf_counter() - started)
    print("replay is not checked: it repeats a trace, which has to be there")
    print(f"{len(specs) - failed} of {len(specs)} policies pass")
    return int(failed > 0)


def report(name: str, results: list[Result]) -> int:
    """Print a line for each check of one policy.

    Args:
        name: Of the policy.
        results: What came of each check.

    Returns:
        1 if one failed, else 0.
    """
    table = Table("check", "result", "", title=f"prunevit check {name}", title_justify="left")
    for each in results:
        table.add_row(words(each), Text(each.status, COLOURS[each.status]), Text(each.reason))
    Console().print(table)
    print(counted(results))
    return int(any(each.status == "failed" for each in results))


def summarise(name: str, results: list[Result], seconds: float) -> int:
    """Print a line for one policy, and one for each of its checks that failed.

    Args:
        name: Of the policy.
        results: What came of each check.
        seconds: How long that took.

    Returns:
        1 if one failed, else 0.
    """
    failures = [each for each in results if each.status == "failed"]
    verdict = "failed" if failures else "passed"
    Console().print(
        Text.assemble(
            f"{name:<14}", (f"{verdict}  ", COLOURS[verdict]), f"{counted(results)}, {seconds:.1f} s"
        )
    )
    for each in failures:
        Console().print(Text(f"  {words(each)}: {each.reason}", COLOURS["failed"]))
    return int(bool(failures))


def words(result: Result) -> str:
    """The name of a check as words.

    Args:
        result: What came of it.
    """
    return result.name.replace("_", " ")


def counted(results: list[Result]) -> str:
    """How many checks came out how, in words.

    Args:
        results: What came of each check.
    """
    statuses = [each.status for each in results]
    return ", ".join(f"{statuses.count(status)} {status}" for status in COLOURS if status in statuses)


def _results(spec: dict[str, Any], device: str | None) -> list[Result]:
    return check_policy(lambda: build_policy(spec), device=device, raises=False)
