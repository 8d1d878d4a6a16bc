"""The pruning policies, one paper a file, and the table that names them."""

import difflib
import importlib
import importlib.util
import sys
from hashlib import sha256
from pathlib import Path
from types import ModuleType

from prunevit.policies.ats import ATS
from prunevit.policies.cross import Cross
from prunevit.policies.diffrate import DiffRate
from prunevit.policies.dpc_knn import DPCKNN
from prunevit.policies.dynamicvit import DynamicViT
from prunevit.policies.evit import EViT
from prunevit.policies.fixed_rate import FixedRate
from prunevit.policies.kmedoids import KMedoids
from prunevit.policies.ltmp import LTMP
from prunevit.policies.none import NoPruning
from prunevit.policies.patch_dropout import PatchDropout
from prunevit.policies.random import RandomPruning
from prunevit.policies.replay import Replay, replay
from prunevit.policies.threshold_l2 import ThresholdL2
from prunevit.policies.tome import ToMe
from prunevit.policies.top_p import TopP
from prunevit.policies.topk import TopK
from prunevit.policy import PruningPolicy

POLICIES: dict[str, type[PruningPolicy]] = {
    "none": NoPruning,
    "topk": TopK,
    "evit": EViT,
    "random": RandomPruning,
    "fixed_rate": FixedRate,
    "threshold_l2": ThresholdL2,
    "top_p": TopP,
    "ats": ATS,
    "dynamicvit": DynamicViT,
    "kmedoids": KMedoids,
    "tome": ToMe,
    "diffrate": DiffRate,
    "ltmp": LTMP,
    "dpc_knn": DPCKNN,
    "patch_dropout": PatchDropout,
    "cross": Cross,
    "replay": Replay,
}
"""Name on the command line -> class."""

__all__ = [
    "ATS",
    "DPCKNN",
    "LTMP",
    "POLICIES",
    "Cross",
    "DiffRate",
    "DynamicViT",
    "EViT",
    "FixedRate",
    "KMedoids",
    "NoPruning",
    "PatchDropout",
    "RandomPruning",
    "Replay",
    "ThresholdL2",
    "ToMe",
    "TopK",
    "TopP",
    "replay",
    "resolve",
]


def resolve(name: str) -> type[PruningPolicy]:
    """Find a policy class.

    Args:
        name: A name of `POLICIES`, "package.module:Class" for a class anywhere on the path, or "folder/file.py:Class".

    Raises:
        ValueError: If there is no such policy; names the nearest one.
    """
    if name in POLICIES:
        return POLICIES[name]
    module_name, colon, class_name = name.rpartition(":")
    if not colon:
        close = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f'policy: must be one of {", ".join(POLICIES)}, "module:Class" or "file.py:Class", got "{name}"; '
            f'try "{close}"'
        )
    try:
        module = _module(module_name)
        if not hasattr(module, class_name):
            raise AttributeError(
                f"no {class_name!r} in {module_name}; policies there: {_policies_of(module)}"
            )
        found = getattr(module, class_name)
    except (Exception, SystemExit) as error:  # the user's module may do anything
        what = (
            error if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        )
        raise ValueError(f'policy: "{name}" must name a class that can be imported, got {what}') from error
    if not (isinstance(found, type) and issubclass(found, PruningPolicy)):
        raise ValueError(f'policy: "{name}" must be a subclass of prunevit.PruningPolicy, got {found!r}')
    return found


def _policies_of(module: ModuleType) -> str:
    classes = [each for each in vars(module).values() if isinstance(each, type)]
    own = [each for each in classes if issubclass(each, PruningPolicy) and each.__module__ == module.__name__]
    return ", ".join(each.__name__ for each in own) or "none"


def _module(name: str) -> ModuleType:
    """Import a module by its name, or by the file that holds it: once, so that its classes stay the same."""
    if not name.endswith(".py"):
        return importlib.import_module(name)
    path = Path(name).resolve()
    # The stem alone could be that of another module: random.py, or a file of the same name in another folder.
    own = f"{path.stem}_{sha256(str(path).encode()).hexdigest()[:8]}"
    if own in sys.modules:
        return sys.modules[own]
    spec = importlib.util.spec_from_file_location(own, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ImportError(f"no file {name}")
    module = sys.modules[own] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return module
