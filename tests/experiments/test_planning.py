"""`prunevit plan`: what it prints and writes, and the table against the papers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prunevit.experiments.cli import main
from prunevit.experiments.planning import papers, run
from prunevit.experiments.planning.published import PUBLISHED, RULES

Folders = Callable[..., Path]
RESULTS = Path(__file__).parents[2] / "docs" / "results"


def no_model(*arguments: Any) -> None:
    raise AssertionError("a model was built")


@pytest.mark.parametrize(
    ("words", "gmacs"),
    [
        (["policy=tome", "policy.r=13"], "GMACs an image: 2.706 (model 2.703, policy 0.003)"),
        (["policy=dynamicvit", "policy.keep_rate=0.7"], "GMACs an image: 2.982 (model 2.878, policy 0.104)"),
        (["policy=evit", "policy.keep_rate=0.7"], "GMACs an image: 3.029 (model 3.029, policy 0.000)"),
    ],
)
def test_a_plan_needs_no_model(
    words: list[str], gmacs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "build_model", no_model)
    assert main(["plan", "model=deit_small_patch16_224", *words]) == 0
    out = capsys.readouterr().out
    assert gmacs in out
    assert "unpruned: 4.599" in out


def test_a_plan_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "policy=tome",
        "policy.gmacs=2.65",
        "model=deit_small_patch16_224",
        f"output_dir={tmp_path}",
    ]
    assert main(words) == 0
    title, *_, exact, _ = capsys.readouterr().out.splitlines()
    assert title.strip() == "tome r=13 to 14 on deit_small_patch16_224"
    said = json.loads((tmp_path / "plan.json").read_text())
    assert said["gmacs"] == pytest.approx(2.65, rel=0.01)
    assert (said["schema"], set(said["policy"]["r"])) == (1, {13, 14})
    assert exact == f"policy.r={said['policy']['r']}".replace(" ", "")
    assert said["attention_rows"][0] == 197
    assert said["attention_rows"][1:] == said["mlp_rows"][:-1]
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert main(words) == 2
    assert "already holds results" in capsys.readouterr().err
    assert main([*words, "overwrite=true"]) == 0


def test_what_depends_on_the_data_is_measured(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders("photos/train", a=2, b=2, c=2)
    folders("photos/val", a=1, b=1, c=1)
    model = ["model=test_vit", "model.pretrained=false", "model.num_classes=3", "data.num_workers=0"]
    words = ["policy=top_p", "policy.layers=[1,3]", "data=folder", f"data.root={tmp_path / 'photos'}"]
    assert main(["plan", *model, *words, "calibration_images=4", "accelerator=cpu"]) == 0
    out = capsys.readouterr().out
    assert "measured on training photos" in out
    assert "means over 4 training photos" in out


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("policy.layers=[3,20]", "EViT: layers must lie in 0..11 (the model has 12 blocks), got 20"),
        ("model.img_size=0", "model.img_size: must be px or [height, width], got 0"),
        ("model.img_size=[1,2,3]", "model.img_size: must be px or [height, width], got [1, 2, 3]"),
    ],
)
def test_what_does_not_fit_is_one_line(word: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "model=deit_small_patch16_224", word]) == 2
    assert capsys.readouterr().err == f"prunevit: {line}\n"


def test_the_papers_beside_ours() -> None:
    """The shipped files are what the command makes of the code as it is."""
    rows = papers.rows()
    shipped = json.loads((RESULTS / "papers.json").read_text())
    assert shipped["rows"] == rows
    for name, content in papers.documents(rows).items():
        assert (RESULTS / name).read_text() == content
    by_name = {row["name"]: row for row in rows}
    assert all(row["our_counts"] == row["counts"] for row in rows if row["our_counts"] is not None)
    assert by_name["evit_0.7_deit_s"]["our_counts"] == [139, 99, 71]
    assert by_name["dynamicvit_0.7_deit_s"]["our_counts"] == [137, 96, 67]
    assert by_name["diffrate_11.5_deit_b"]["agrees"] == "model"  # 11.517, to the third digit
    unexplained = [
        row["name"] for row in rows if row["agrees"] and row["agrees"][0] in "+-" and not row["note"]
    ]
    assert unexplained == []


@pytest.mark.parametrize(
    ("rule", "policy", "counts"),
    [
        ("evit", {"keep_rate": 0.5}, (99, 51, 27)),
        ("evit_not_fused", {"keep_rate": 0.7}, (138, 97, 68)),
        ("initial", {"keep_rate": 0.7}, (137, 96, 67)),
        ("tome", {"r": 100}, (98, 49, 25, 13, 7, 4, 2, 1, 1, 1, 1, 1)),
    ],
)
def test_the_authors_rules(rule: str, policy: dict[str, Any], counts: tuple[int, ...]) -> None:
    assert RULES[rule](196, 12, policy) == counts


def test_published_rows_are_complete() -> None:
    assert len(PUBLISHED) > 30
    for row in PUBLISHED.values():
        assert row.trained in ("fine-tuned", "trained", "off-the-shelf")
        assert row.rule is None or row.rule in RULES
        assert (row.dense_top1 is None) <= (row.trained != "off-the-shelf")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        (
            "def macs(self, counts): return counts * float('nan')",
            r"macs(counts) must be finite and at least 0",
        ),
        ("def macs(self, counts): return -counts.double()", r"macs(counts) must be finite and at least 0"),
        (
            "def forward(self, *given):\n        return replace(super().forward(*given), rows_per_image=3)",
            "rows_per_image",
        ),
    ],
)
def test_a_policy_that_lies_about_its_cost_has_no_plan(
    body: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    imports = "from dataclasses import replace\nfrom prunevit.policies import TopK\n"
    (tmp_path / "liar.py").write_text(f"{imports}class Liar(TopK):\n    {body}\n")
    assert main(["plan", "model=deit_tiny_patch16_224", f"policy={tmp_path / 'liar.py'}:Liar"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said
