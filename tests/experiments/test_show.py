"""`prunevit show`: one photo on the command line."""

from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from prunevit.experiments.cli import main
from prunevit.experiments.sample_model import PHOTOS

Folders = Callable[..., Path]
SMALL = ("model=test_vit", "model.pretrained=false", "model.num_classes=3", "policy.layers=[1,3]")


def test_a_photo_with_label_and_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled model knows the class of the folder, and says it in the title."""
    photo = sorted((PHOTOS / "val" / "hat").iterdir())[0]
    output = tmp_path / "kept.png"
    assert main(["show", str(photo), "policy=evit", f"output={output}"]) == 0
    assert str(output) in capsys.readouterr().out
    with Image.open(output) as image:
        assert image.info["Description"].startswith(f"{photo.name}: label hat, unpruned hat ")
        assert image.width > 4 * 196  # the photo and three stages
    assert list(tmp_path.iterdir()) == [output]


def test_any_timm_model_and_policy(folders: Folders, tmp_path: Path) -> None:
    photo = folders(cat=1) / "cat" / "0.png"
    output = tmp_path / "k.png"
    assert main(["show", str(photo), "policy=topk", f"output={output}", *SMALL]) == 0
    with Image.open(output) as image:
        assert image.info["Description"].startswith("0.png: unpruned class ")


def test_logits_that_are_not_finite(
    folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = timm.create_model("test_vit", num_classes=3).state_dict()
    state["blocks.4.mlp.fc1.weight"][0, 0] = torch.nan
    save_file(state, tmp_path / "nan.safetensors")
    photo, words = folders(cat=1) / "cat" / "0.png", [f"weights={tmp_path / 'nan.safetensors'}", *SMALL]
    assert main(["show", str(photo), "policy=topk", f"output={tmp_path / 'k.png'}", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "logits: must be finite" in line
    assert line.endswith("block 4, mlp")
    assert not (tmp_path / "k.png").exists()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "image: must be a photo, got none"),
        (["nowhere.jpg"], "image: must be a photo, got nowhere.jpg, which does not exist"),
        (["{photo}", "output=k.jpg"], "output: must end in .png, got k.jpg"),
        (["{photo}", "output={photo}"], "output: must be another file than the photo, got {photo}"),
        (["{photo}", "output={folder}/no/k.png"], "output: must be a file that can be written"),
        (["{text}"], "image: {text}: not a readable image (empty or in no known format)"),
        (["{photo}", "policy.layers=[99]"], "EViT: layers"),
        (["{photo}", "model.img_size=0"], "model.img_size: must be px or [height, width], got 0"),
        (["{photo}", "policy=evitt"], "policy: unknown name, got evitt; the nearest is evit"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str],
    line: str,
    folders: Folders,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    photo, text = folders(cat=1) / "cat" / "0.png", tmp_path / "text.jpg"
    text.write_text("no image")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    names = {"photo": str(photo), "text": str(text), "folder": str(tmp_path)}
    given = {word.partition("=")[0] for word in words}
    small = [word for word in SMALL if word.partition("=")[0] not in given]
    assert main(["show", *(word.format(**names) for word in words), *small]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert line.format(**names) in said[0]
    assert sorted(tmp_path.rglob("*")) == before
