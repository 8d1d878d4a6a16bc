"""The documents: their Python runs, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


def blocks(document: Path) -> list[str]:
    """Python blocks of a Markdown file."""
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.S)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_the_policy_of_the_guide_runs(tmp_path: Path) -> None:
    policy, usage = blocks(ROOT / "docs" / "write_a_policy.md")
    (tmp_path / "distinct.py").write_text(policy)
    (tmp_path / "usage.py").write_text(usage)
    script = subprocess.run(
        [sys.executable, "usage.py"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    # 98, 49 and 25 of 196 patches, and CLS
    assert re.findall(r"-> ([\d.]+)", script.stdout) == ["99.0", "50.0", "26.0"]


def test_the_python_of_the_readme_runs() -> None:
    """As written, but for the weights, which would be downloaded, and the images, which a user has."""
    code = "\n".join(blocks(ROOT / "README.md")).replace("pretrained=True", "pretrained=False")
    code = (
        "import torch\nimages = torch.randn(2, 3, 224, 224)\n" + code + "\nassert logits.shape == (2, 1000)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
