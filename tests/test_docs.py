"""The documents: their Python runs, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prunevit.policies import resolve
from prunevit.testing import check_policy, checks

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
    prose = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", prose):
        assert (document.parent / target).exists(), f"{document.name} links to {target}"


EXAMPLES = {"top_mass": "TopMass", "learned_score": "LearnedScore", "merge_rest": "MergeRest"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_of_the_guide_are_the_files_and_pass_the_check(name: str) -> None:
    file = ROOT / "docs" / "examples" / f"{name}.py"
    assert file.read_text() in blocks(ROOT / "docs" / "write_a_policy.md")
    check_policy(resolve(f"{file}:{EXAMPLES[name]}"), device="cpu")
    assert f"prunevit check docs/examples/{name}.py:{EXAMPLES[name]}" in file.read_text()


def test_the_control_experiment_passes_the_check() -> None:
    check_policy(resolve(f"{ROOT}/docs/examples/lowest_attention.py:LowestAttention"), device="cpu")


def test_the_python_of_the_guide_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = ROOT / "docs" / "examples"
    monkeypatch.syspath_prepend(folder)
    examples = [(folder / f"{name}.py").read_text() for name in EXAMPLES]
    usage, own_test, comparison = (
        block for block in blocks(ROOT / "docs" / "write_a_policy.md") if block not in examples
    )
    names: dict[str, Any] = {}
    exec(usage, names)
    # Of 197 rows three stages leave less and less; an image that is noise all over needs many of its patches.
    first, second, third = (float(mean) for mean in re.findall(r"-> ([\d.]+)", capsys.readouterr().out))
    assert 197 > first > second > third > 50
    names |= {"my_fork": names["model"], "images": torch.randn(2, 3, 224, 224)}
    exec(comparison, names)
    assert "they part in block 3, attention; TopMass after it: images 0, 1 differ" in capsys.readouterr().out
    exec(own_test, names)
    (mark,) = names["test_top_mass"].pytestmark
    assert mark.args == (("name", "check"), checks())
    names["test_top_mass"](*checks()[5])


def test_the_python_of_the_readme_runs() -> None:
    """As written, but for the weights, which would be downloaded, and the images, which a user has."""
    code = "\n".join(blocks(ROOT / "README.md")).replace("pretrained=True", "pretrained=False")
    code = (
        "import torch\nimages = torch.randn(2, 3, 224, 224)\n" + code + "\nassert logits.shape == (2, 1000)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
