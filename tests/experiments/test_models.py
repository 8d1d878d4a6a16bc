"""Models and weights: every way to name them, and every way to be wrong."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file

from prunevit.experiments.config import InputError, ModelConfig
from prunevit.experiments.models import build_model, check_fit
from prunevit.experiments.weights import read_weights
from prunevit.policies import EViT, NoPruning, TopK

NAME = "test_vit"


def random_model(num_classes: int = 5) -> Any:
    return timm.create_model(NAME, num_classes=num_classes)


def config(**keys: Any) -> ModelConfig:
    return ModelConfig(**{"name": NAME, **keys})


@pytest.mark.parametrize("kind", ["safetensors", "plain pickle", "checkpoint", "ema"])
def test_a_weights_file_is_loaded(tmp_path: Path, kind: str) -> None:
    source = random_model()
    state = source.state_dict()
    file = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pth")
    if kind == "safetensors":
        save_file(state, file)
    else:
        zeros = {name: torch.zeros_like(value) for name, value in state.items()}
        content = {"plain pickle": state, "checkpoint": {"model": state, "epoch": 3}}
        torch.save(content.get(kind, {"state_dict": zeros, "state_dict_ema": state}), file)
    loaded = build_model(config(num_classes=5), read_weights(str(file)))
    images = torch.randn(2, 3, 160, 160)
    assert torch.equal(loaded(images), source.eval()(images))
    assert not loaded.training


class Planted:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code was run",))


def test_a_pickle_with_code_is_refused_and_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model": Planted()}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match=r"pickle of tensors only.*would call print") as caught:
        build_model(config(), read_weights(str(tmp_path / "evil.pth")))
    assert "weights_only" not in str(caught.value)  # torch advises to switch it off
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["broken.safetensors", "broken.pth", "empty.pth", "list.pth"])
def test_files_that_hold_no_weights(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes(b"" if name == "empty.pth" else b"nothing of the kind")
    if name == "list.pth":
        torch.save([torch.zeros(3)], file)
    with pytest.raises(InputError, match=f"weights: must (be safetensors or a pickle|hold tensors).*{name}"):
        build_model(config(), read_weights(str(file)))


@pytest.mark.parametrize("text", [b"junk\n", b"nothing of the kind"])
def test_what_is_no_pickle_is_called_so(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "w.pth").write_bytes(text)
    with pytest.raises(InputError, match=r"got .*w\.pth \(it is no pickle of torch's\)$"):
        read_weights(str(tmp_path / "w.pth"))


@pytest.mark.parametrize("more", [{"epoch": 3}, {"cls_token": [1.0]}, {"norm.weight": None}])
def test_entries_that_are_no_tensors(tmp_path: Path, more: dict[str, Any]) -> None:
    torch.save({**random_model().state_dict(), **more}, tmp_path / "w.pth")
    with pytest.raises(
        InputError, match=f"must be safetensors or a pickle of tensors only.*{next(iter(more))}"
    ):
        build_model(config(num_classes=5), read_weights(str(tmp_path / "w.pth")))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("foo", r"model\.name: unknown architecture, got foo"),
        ("hf-hub", r"model\.name: unknown architecture, got hf-hub"),
        ("deit_smal_patch16_224", "the nearest is deit_small_patch16_224"),
        ("test_vit.nosuchtag", r"model\.name: Invalid pretrained tag \(nosuchtag\)"),
        ("foo:bar", r"model\.name: unknown architecture, got foo:bar"),
    ],
)
def test_names_of_no_model_are_one_line(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        check_fit(ModelConfig(name=name), NoPruning())
    assert len(caught.value.problems) == 1


def test_a_hub_without_a_model_is_one_line() -> None:
    check_fit(ModelConfig(name="hf-hub:"), NoPruning())
    with pytest.raises(InputError, match="model: no weights for hf-hub: "):
        build_model(ModelConfig(name="hf-hub:"))


def test_a_missing_file() -> None:
    with pytest.raises(InputError, match=r"weights: must be a file, got /nowhere\.safetensors"):
        build_model(config(), read_weights("/nowhere.safetensors"))


def test_weights_of_another_architecture(tmp_path: Path) -> None:
    save_file(timm.create_model("test_vit2", num_classes=5).state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"must fit test_vit, got .*missing"):
        build_model(config(num_classes=5), read_weights(str(tmp_path / "other.safetensors")))


def test_weights_of_another_number_of_classes(tmp_path: Path) -> None:
    save_file(random_model(5).state_dict(), tmp_path / "five.safetensors")
    with pytest.raises(InputError, match=r"head\.bias is \[5\], not \[7\]; set model or model\.num_classes"):
        build_model(config(num_classes=7), read_weights(str(tmp_path / "five.safetensors")))


def test_another_input_size_resamples_the_positions() -> None:
    model = build_model(config(pretrained=False, img_size=[96, 128]))
    assert model.patch_embed.grid_size == (6, 8)
    assert model(torch.randn(1, 3, 96, 128)).shape == (1, 1000)
    with pytest.raises(InputError, match="multiple of the patch size 16, got 100"):
        build_model(config(pretrained=False, img_size=100))


def test_the_bundled_model() -> None:
    model = build_model(ModelConfig(name="sample"))
    assert (model.num_classes, len(model.blocks)) == (10, 12)
    with pytest.raises(InputError, match="the trained head of sample has 10, got 4"):
        build_model(ModelConfig(name="sample", num_classes=4))
    with pytest.raises(InputError, match="the bundled model is a trained one"):
        check_fit(ModelConfig(name="sample", pretrained=False), NoPruning())


def test_a_model_without_head() -> None:
    with pytest.raises(InputError, match="has no head to classify with"):
        build_model(ModelConfig(name="vit_small_patch14_dinov2", pretrained=False, img_size=56))


def test_weights_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        InputError, match=r"model: no weights for deit_tiny_patch16_224 .*model\.pretrained=false"
    ):
        build_model(ModelConfig(name="deit_tiny_patch16_224"))
    with pytest.raises(InputError, match="model: no weights for vit_base_patch32_plus_256"):
        build_model(ModelConfig(name="vit_base_patch32_plus_256"))


def test_misfits_are_told_before_weights_are_fetched() -> None:
    with pytest.raises(InputError, match="got SwinTransformer"):
        check_fit(ModelConfig(name="swin_tiny_patch4_window7_224"), EViT())
    with pytest.raises(InputError, match=r"TopK: layers must lie in 0\.\.5 .*got 9"):
        check_fit(config(), TopK(layers=(3, 9)))
    with pytest.raises(InputError, match="CLS token is needed"):
        check_fit(ModelConfig(name="vit_base_patch16_siglip_224"), EViT())
    check_fit(config(), EViT(layers=(1, 3)))
