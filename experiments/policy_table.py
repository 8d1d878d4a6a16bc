"""`prunevit policies`: what each policy is, found by running it on a tiny model, not by what it declares."""

import inspect
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from timm.models import VisionTransformer

from prunevit import PruningPolicy, Trace, prune
from prunevit.experiments.config import PoliciesConfig
from prunevit.policies import POLICIES, TopK
from prunevit.policy import NEEDS
from prunevit.settings import settings_of

LONGEST_NEED = max(map(len, NEEDS))  # characters that the last column gives to one line


def run(config: PoliciesConfig) -> None:
    """Print the table.

    Args:
        config: Without keys.
    """
    table = Table(show_lines=True)
    table.add_column("name\nits knob", no_wrap=True)
    table.add_column("what it does; paper", overflow="fold")
    table.add_column("count\nknown to", no_wrap=True)
    table.add_column("needs", width=LONGEST_NEED)
    for name, cls in POLICIES.items():
        count = "host" if host_knows_count(cls) else "device"
        knob = f"\n{cls.knob}" if cls.knob else ""
        table.add_row(f"{name}{knob}", paper(cls), count, needs(cls))
    Console().print(table)


def paper(cls: type[PruningPolicy]) -> str:
    """Say in one line what a policy is and where it comes from: the first of its module.

    Args:
        cls: The policy.
    """
    return (inspect.getmodule(cls).__doc__ or cls.__doc__ or "").strip().splitlines()[0]


def host_knows_count(cls: type[PruningPolicy]) -> bool:
    """Tell whether the host knows, without asking the device, how many rows each stage leaves.

    Args:
        cls: The policy, run with its default arguments.
    """
    return all(stage.mask.rows_per_image is not None for stage in _tiny_trace(cls).stages)


def needs(cls: type[PruningPolicy]) -> str:
    """Say what a policy reads besides the tokens.

    Args:
        cls: The policy, with its default arguments.
    """
    policy = _default(cls)
    found = [need.replace("_", " ") for need in sorted(policy.needs)]
    try:
        prune(_tiny_model(class_token=False), policy)
    except ValueError:
        found.insert(0, "CLS token")
    return ", ".join(found) or "-"


def _tiny_model(class_token: bool = True) -> VisionTransformer:
    return VisionTransformer(
        img_size=32,
        patch_size=8,
        embed_dim=8,
        depth=12,
        num_heads=2,
        num_classes=2,
        class_token=class_token,
        global_pool="token" if class_token else "avg",
    ).eval()


def _tiny_trace(cls: type[PruningPolicy]) -> Trace:
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return prune(_tiny_model(), _default(cls)).trace(images)


def _default(cls: type[PruningPolicy]) -> PruningPolicy:
    """A policy with its default arguments; one that repeats a trace gets one."""
    given: dict[str, Any] = {"trace": _tiny_trace(TopK)} if "trace" in settings_of(cls) else {}
    return cls(**given)
