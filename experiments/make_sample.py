"""Make the bundled sample: fine-tune a ViT on class folders of photos, store it in 8 bits, draw photos.

`python -m prunevit.experiments.make_sample --photos DIR --weights FILE.safetensors --output DIR`
with photos in DIR/train/<class>/*.jpg and DIR/val/<class>/*.jpg.

The model learns from `train` alone. `val` is looked at once, after the last step: no checkpoint, no setting
and no bundled photo is chosen by what the model makes of it. A minute or two on one H200. All draws are
seeded, but sums on a GPU are not bit-exact: a rerun differs by tenths of a percent.
"""

import argparse
import copy
import json
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

import timm
import torch
from safetensors.torch import save_file
from timm.data import Mixup, create_loader, resolve_model_data_config
from timm.data.loader import PrefetchLoader
from timm.loss import SoftTargetCrossEntropy
from timm.models import VisionTransformer
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, random_seed
from torch.optim import Optimizer
from torchvision.datasets import ImageFolder

from prunevit.experiments.sample_model import load_sample_model, quantise


@dataclass(frozen=True)
class Recipe:
    """All numbers of a run; each is a command-line option of the same name."""

    architecture: str = "vit_small_patch14_dinov2"
    train_size: int = 224  # px, fine-tuning
    stored_size: int = 196  # px: 14x14 patches and CLS are the 197 tokens of DeiT-S
    epochs: int = 40
    warmup_epochs: int = 4
    batch_size: int = 128
    lr: float = 3e-4
    layer_decay: float = 0.75
    weight_decay: float = 0.05
    drop_path: float = 0.2
    crop_min: float = 0.25  # least area of a random resized crop
    color_jitter: float = 0.4
    mixup: float = 0.2
    label_smoothing: float = 0.1
    ema_decay: float = 0.99
    train_photos: int = 200  # copied
    val_photos: int = 300  # copied
    seed: int = 0


@dataclass(frozen=True)
class Machine:
    """Where it runs, and how many processes read and augment photos."""

    device: torch.device
    workers: int


def batches(
    model: VisionTransformer, photos: ImageFolder, img_size: int, machine: Machine, **options: Any
) -> PrefetchLoader:
    """Give timm's loader at `img_size` px with the model's own normalisation, interpolation and crop."""
    return create_loader(
        photos,  # type: ignore[arg-type]  # any map-style data set with a `transform` will do
        **resolve_model_data_config(model) | {"input_size": (3, img_size, img_size)},
        device=machine.device,
        num_workers=machine.workers,
        persistent_workers=machine.workers > 0,
        **options,
    )


def schedule(model: VisionTransformer, recipe: Recipe, updates_per_epoch: int) -> tuple[Optimizer, Scheduler]:
    """Give AdamW with layer-wise learning rates, and its warm-up and cosine decay by update."""
    optimizer = create_optimizer_v2(
        model, "adamw", lr=recipe.lr, weight_decay=recipe.weight_decay, layer_decay=recipe.layer_decay
    )
    scheduler, _ = create_scheduler_v2(
        optimizer,
        num_epochs=recipe.epochs,
        warmup_epochs=recipe.warmup_epochs,
        warmup_lr=recipe.lr / 100,
        step_on_epochs=False,
        updates_per_epoch=updates_per_epoch,
    )
    return optimizer, scheduler


def finetune(
    model: VisionTransformer, photos: ImageFolder, recipe: Recipe, machine: Machine
) -> VisionTransformer:
    """Train every weight of `model` in place, in bf16 autocast, and give the moving average of its weights.

    Raises:
        ValueError: There are fewer photos than one batch holds.
    """
    if len(photos) < recipe.batch_size:
        raise ValueError(
            f"make_sample: train must hold a batch of {recipe.batch_size} photos, got {len(photos)}; "
            "lower --batch-size"
        )
    random_seed(recipe.seed)
    training = {"is_training": True, "scale": (recipe.crop_min, 1.0), "color_jitter": recipe.color_jitter}
    loader = batches(model, photos, recipe.train_size, machine, batch_size=recipe.batch_size, **training)
    optimizer, scheduler = schedule(model, recipe, len(loader))
    mixup = Mixup(recipe.mixup, label_smoothing=recipe.label_smoothing, num_classes=len(photos.classes))
    criterion = SoftTargetCrossEntropy()
    average = ModelEmaV3(model, decay=recipe.ema_decay)
    model.train()
    start = time.perf_counter()
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=machine.device)
        for step, (images, labels) in enumerate(loader, start=epoch * len(loader) + 1):
            images, targets = mixup(images, labels)
            with torch.autocast(machine.device.type, torch.bfloat16):
                loss = criterion(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(step)
            average.update(model)
            total += loss.detach()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}: loss {total.item() / len(loader):.4f}, {seconds:.1f} s", flush=True)
    return average.module


@torch.inference_mode()
def count_correct(model: VisionTransformer, photos: ImageFolder, machine: Machine) -> int:
    """Count the photos whose highest logit is their class: the model's own input size, fp32."""
    model = model.to(machine.device).eval()
    loader = batches(model, photos, model.patch_embed.img_size[0], machine, batch_size=64)
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)


def choose(photos: ImageFolder, count: int, seed: int) -> list[Path]:
    """Draw `count` photos at random, each class in its share (largest remainders are rounded up).

    Raises:
        ValueError: There are fewer photos than that.
    """
    total = len(photos)
    if count > total:
        raise ValueError(f"make_sample: {photos.root} must hold {count} photos, got {total}; ask for fewer")
    files = [[Path(path) for path, label in photos.samples if label == i] for i in range(len(photos.classes))]
    counts = [count * len(each) // total for each in files]
    remainders = [count * len(each) % total for each in files]
    for i in sorted(range(len(files)), key=lambda i: -remainders[i])[: count - sum(counts)]:
        counts[i] += 1
    draw = random.Random(seed)
    return [path for each, n in zip(files, counts) for path in sorted(draw.sample(sorted(each), n))]


def copy_photos(photos: ImageFolder, count: int, seed: int, output: Path) -> None:
    """Copy drawn photos byte for byte to output/<class>/, which must not exist yet."""
    output.mkdir(parents=True)
    for path in choose(photos, count, seed):
        (output / path.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(path, output / path.parent.name / path.name)


def describe(model: VisionTransformer, classes: list[str], recipe: Recipe) -> dict[str, str]:
    """Give the metadata of the stored file: the recipe and what `load_sample_model` builds the model from.

    `pretrained_cfg` speaks timm's language: input size, mean, std, interpolation, crop, classes in order. It
    names no download, so that nothing takes the weights that the training started from for these.
    """
    config = resolve_model_data_config(model) | {
        "input_size": (3, recipe.stored_size, recipe.stored_size),
        "num_classes": len(classes),
        "label_names": classes,
        "tag": "sample",
        "url": "",
        "hf_hub_id": None,
        "license": None,
    }
    return {
        "architecture": recipe.architecture,
        "pretrained_cfg": json.dumps(config),
        "recipe": json.dumps(asdict(recipe)),
        "format": "pt",
    }


def make_sample(
    photos: Path, weights: Path, output: Path, recipe: Recipe, machine: Machine, notes: dict[str, str]
) -> dict[str, int]:
    """Go from photos and starting weights to output/model.safetensors and output/photos.

    Args:
        photos: Folder with train/<class>/*.jpg and val/<class>/*.jpg, the same classes in both.
        weights: A safetensors state dict of the architecture at `train_size`, with a head for these classes.
        output: Folder to write to; must not hold photos yet.
        recipe: All numbers.
        machine: Where to run.
        notes: Further metadata of the stored file, such as its origin and licence.

    Returns:
        How many photos of `val` are classified correctly by the model as fine-tuned, after its position grid
        was resampled, and as read back from the stored file.

    Raises:
        ValueError: Photos are too few, or `val` has other classes than `train`.
    """
    train, val = ImageFolder(str(photos / "train")), ImageFolder(str(photos / "val"))
    if train.classes != val.classes:
        raise ValueError(
            f"make_sample: val must have the classes of train {train.classes}, got {val.classes}"
        )
    copy_photos(train, recipe.train_photos, recipe.seed, output / "photos" / "train")
    copy_photos(val, recipe.val_photos, recipe.seed, output / "photos" / "val")
    model = timm.create_model(
        recipe.architecture,
        img_size=recipe.train_size,
        num_classes=len(train.classes),
        drop_path_rate=recipe.drop_path,
        checkpoint_path=str(weights),
    )
    tuned = finetune(cast(VisionTransformer, model.to(machine.device)), train, recipe, machine)
    resampled = copy.deepcopy(tuned).cpu()
    resampled.set_input_size(img_size=(recipe.stored_size, recipe.stored_size))

    stored, path = quantise(resampled.state_dict()), output / "model.safetensors"
    metadata = describe(resampled, train.classes, recipe) | notes
    save_file(stored, path, metadata)
    models = {"fine-tuned": tuned, "resampled": resampled, "stored": load_sample_model(path)}
    correct = {name: count_correct(each, val, machine) for name, each in models.items()}
    # Written again with its own result, which needed the file as it is read back.
    save_file(stored, path, metadata | {"val_top1": f"{correct['stored']} of {len(val)}"})
    return correct


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, run `make_sample`, print how many photos of `val` are classified correctly."""
    summary, _, layout = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(prog="make_sample", description=summary, epilog=layout.strip())
    parser.add_argument(
        "--photos", type=Path, required=True, help="train/<class>/*.jpg and val/<class>/*.jpg"
    )
    parser.add_argument("--weights", type=Path, required=True, help="safetensors file to start from")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--origin", default="not stated", help="recorded: where photos and weights come from")
    parser.add_argument("--license", default="not stated", help="recorded beside it")
    default_device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=default_device, help="default %(default)s")
    parser.add_argument("--workers", type=int, default=16, help="processes that read and augment photos")
    for field in fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(
            option, type=type(field.default), default=field.default, help="default %(default)s"
        )
    options = parser.parse_args(arguments)
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    machine = Machine(options.device, options.workers)
    notes = {"origin": options.origin, "license": options.license}
    try:
        correct = make_sample(options.photos, options.weights, options.output, recipe, machine, notes)
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    for name, count in correct.items():
        print(f"{name}: {count} photos of val correct")


if __name__ == "__main__":
    main()
