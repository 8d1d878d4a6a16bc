"""The tree: who may import whom, what is packaged, what `import prunevit` costs."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import prunevit

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "prunevit": {"kernels", "prunevit"},
    "policies": {"kernels", "prunevit", "policies"},
    "experiments": {"kernels", "prunevit", "policies", "experiments", "configs"},
    "configs": set[str](),
}
CORE_PACKAGES = {"torch", "timm", "triton", "safetensors"}


def sources(folder: str) -> list[Path]:
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not _through_a_link(path)]


def _through_a_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents)


def imports(path: Path, typing_only: bool = True) -> set[str]:
    """Modules that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: import by the full name"
            found.add(node.module or "")
            found |= (
                {f"{node.module}.{alias.name}" for alias in node.names}
                if node.module == "prunevit"
                else set()
            )
    return found


def folder_of(module: str) -> str | None:
    """Folder at the root that a module lives in; None outside the project."""
    parts = module.split(".")
    if parts[0] != "prunevit":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "prunevit"


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_import_arrows(folder: str) -> None:
    for path in sources(folder):
        for module in imports(path):
            assert module.split(".")[0] not in MAY_IMPORT.keys() - {"prunevit"}, (
                f"{path}: import prunevit.{module}"
            )
            target, kit = folder_of(module), path.is_relative_to(ROOT / "prunevit" / "testing")
            allowed = MAY_IMPORT[folder] | ({"policies"} if kit else set())
            assert target is None or target in allowed, f"{path} may not import {module}"
            assert kit or folder == "experiments" or not module.startswith("prunevit.testing"), (
                f"{path} may not import {module}"
            )


@pytest.mark.parametrize("folder", ["kernels", "prunevit", "policies"])
def test_the_core_needs_torch_and_timm_only(folder: str) -> None:
    for path in sources(folder):
        outside = (
            {module.split(".")[0] for module in imports(path)} - set(sys.stdlib_module_names) - {"prunevit"}
        )
        assert outside <= CORE_PACKAGES, path
        assert folder != "kernels" or "timm" not in outside, path


def test_every_package_is_listed() -> None:
    """A package that is missing from the list is missing from the wheel only."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = {"prunevit"}
    for folder in MAY_IMPORT:
        for path in sources(folder):
            inside = path.parent.relative_to(ROOT / folder).parts
            found.add(".".join(["prunevit", *([folder] if folder != "prunevit" else []), *inside]))
    assert set(settings["packages"]) == found
    assert settings["package-dir"] == {
        name: name.replace(".", "/")
        if folder_of(name) == "prunevit"
        else name.removeprefix("prunevit.").replace(".", "/")
        for name in settings["packages"]
    }


def test_links_and_no_kernels_init() -> None:
    for folder in MAY_IMPORT.keys() - {"prunevit"}:
        link = ROOT / "prunevit" / folder
        assert link.is_symlink()
        assert link.resolve() == ROOT / folder
    assert not (ROOT / "kernels" / "__init__.py").exists(), "it would shadow the Hugging Face package kernels"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_works_without_the_experiments_packages() -> None:
    blocked = ("lightning", "torchmetrics", "wandb", "omegaconf", "triton", "rich")
    code = (
        "import sys\n"
        f"for name in {blocked}: sys.modules[name] = None\n"
        "import torch, timm, prunevit, prunevit.policies\n"
        "from prunevit.policies import EViT\n"
        "model = timm.create_model('vit_tiny_patch16_224', img_size=32, depth=2).eval()\n"
        "print(tuple(prunevit.prune(model, EViT(0.5, (1,)))(torch.zeros(1, 3, 32, 32)).shape))\n"
    )
    assert run(code).strip() == "(1, 1000)"


def test_import_alone_loads_no_framework() -> None:
    """What takes seconds to import waits until it is asked for: an interruption is heard before."""
    code = (
        "import sys, prunevit, prunevit.experiments.cli\n"
        "assert not {'torch', 'timm', 'omegaconf', 'lightning'} & set(sys.modules)\n"
        "assert set(prunevit.__all__) < set(dir(prunevit))\n"
        "assert not hasattr(prunevit, 'nothing')\n"
        "from prunevit import *\n"
        "for name in prunevit.__all__:\n"
        "    value = getattr(prunevit, name)\n"
        "    assert value is globals()[name] and value.__name__ == name\n"
        "from prunevit import policies, vit\n"
        "assert prune is vit.prune and 'prune' in vars(prunevit)\n"
        "print('torch' in sys.modules)\n"
    )
    assert run(code).strip() == "True"


def test_names_that_wait_are_those_that_type_checkers_see() -> None:
    source = (ROOT / "prunevit" / "__init__.py").read_text()
    (checked,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    seen = {
        alias.name: (node.module or "").removeprefix("prunevit.")
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == prunevit._HOME_OF
    assert sorted(seen) == sorted(prunevit.__all__)


def test_import_loads_little_beyond_timm() -> None:
    """What `import prunevit` adds to `import timm` is this project and a handful of modules, not a framework."""
    code = (
        "import sys, timm\n"
        "before = set(sys.modules)\n"
        "import prunevit\n"
        "prunevit.prune\n"
        "added = {name for name in set(sys.modules) - before if not name.startswith('prunevit')}\n"
        "print(*sorted(added))\n"
    )
    added = run(code).split()
    assert len(added) < 30, added


def test_files_stay_small() -> None:
    for folder in [*MAY_IMPORT, "tests"]:
        for path in sources(folder):
            assert len(path.read_text().splitlines()) <= 400, path
            assert path.stem not in ("utils", "helpers", "common", "misc"), path
