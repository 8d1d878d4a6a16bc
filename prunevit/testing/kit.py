"""The conformance kit: all checks, their order, and what came of them."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from prunevit.policy import PruningPolicy
from prunevit.testing.candidate import Candidate, CheckFailure, NotApplicable
from prunevit.testing.cost import check_cost
from prunevit.testing.decisions import (
    check_forward,
    check_known_count,
    check_leaves_alone,
    check_mask,
    check_one_patch_stays,
    check_prefix,
    check_repeats,
    check_score,
    check_setup,
)
from prunevit.testing.device import check_graph, check_no_wait
from prunevit.testing.training import check_copies, check_gradients, check_half_precision, check_state_dict
from prunevit.testing.walks import (
    check_dead_rows,
    check_distilled,
    check_independence,
    check_keep_all,
    check_no_cls,
    check_one_patch,
    check_pruned_rows,
    check_registers,
    check_replay,
    check_two_patches,
)

Check = Callable[[Candidate], str | None]
Status = Literal["passed", "failed", "not applicable", "not reached"]

FOUNDATIONS: tuple[Check, ...] = (
    check_setup,
    check_mask,
    check_one_patch_stays,
    check_known_count,
    check_prefix,
    check_score,
    check_forward,
    check_repeats,
    check_leaves_alone,
)
"""Each builds on those before it, and all others on them."""
OTHERS: tuple[Check, ...] = (
    check_independence,
    check_keep_all,
    check_replay,
    check_pruned_rows,
    check_dead_rows,
    check_one_patch,
    check_two_patches,
    check_registers,
    check_distilled,
    check_no_cls,
    check_gradients,
    check_state_dict,
    check_copies,
    check_half_precision,
    check_no_wait,
    check_graph,
    check_cost,
)


BUILDS_ON: dict[Check, Check] = {
    **dict.fromkeys(
        (
            check_pruned_rows,
            check_one_patch,
            check_two_patches,
            check_registers,
            check_distilled,
            check_no_cls,
        ),
        check_independence,
    ),
    check_dead_rows: check_pruned_rows,
}
"""Of those, what could only fail again where another check has failed."""


@dataclass(frozen=True)
class Result:
    """What came of one check: its name, "passed", "failed", "not applicable" or "not reached", and a line on it."""

    name: str
    status: Status
    reason: str = ""


def checks() -> list[tuple[str, Check]]:
    """List all checks by name, in order; each is called with a `Candidate`.

    A check returns a line to report, or None. It raises `CheckFailure`, `NotApplicable`, or whatever the policy raises.
    """
    return [(check.__name__.removeprefix("check_"), check) for check in (*FOUNDATIONS, *OTHERS)]


def check_policy(
    policy: PruningPolicy | Callable[[], PruningPolicy],
    *,
    device: torch.device | str | None = None,
    raises: bool = True,
) -> list[Result]:
    """Hold a policy against what every policy owes.

    Args:
        policy: A policy, or better a class or function that makes one with the settings to be checked.
        device: Where no-wait, graphs and cost are looked at; default: a GPU if there is one.
        raises: Raise if a check fails; else the results say so.

    Returns:
        A result for each of `checks()`. What builds on a check that failed is not reached.

    Raises:
        CheckFailure: With a line for each check that failed.
    """
    candidate, results, unmet = Candidate(policy, device), list[Result](), set[Check | None]()
    for name, check in checks():
        reached = not unmet & {*FOUNDATIONS, BUILDS_ON.get(check)}
        results.append(_run(name, check, candidate) if reached else Result(name, "not reached"))
        if results[-1].status in ("failed", "not reached"):
            unmet.add(check)
    failures = [f"{each.name}: {each.reason}" for each in results if each.status == "failed"]
    if failures and raises:
        raise CheckFailure("\n".join(failures))
    return results


def _run(name: str, check: Check, candidate: Candidate) -> Result:
    dtype, is_graded = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Result(name, "passed", check(candidate) or "")
    except NotApplicable as reason:
        return Result(name, "not applicable", str(reason))
    except CheckFailure as failure:
        return Result(name, "failed", f"{failure}{_place(failure.__cause__, candidate)}")
    except (Exception, SystemExit) as error:  # the policy may do anything
        line = next(iter(str(error).strip().splitlines()), "")
        return Result(name, "failed", f"{type(error).__name__}: {line}{_place(error, candidate)}")
    finally:
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(is_graded)


def _place(error: BaseException | None, candidate: Candidate) -> str:
    """` (my_policy.py:15)`: the innermost line of the policy's own file that the error came through."""
    if error is None:
        return ""
    make = candidate.make
    try:
        file = inspect.getfile(make if inspect.isclass(make) else type(make()))
    except (OSError, TypeError):  # a class without a file
        return ""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({Path(file).name}:{lines[-1]})" if lines else ""
