"""Pictures of what a policy did: held against the photo, and against the recorded decisions one by one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from prunevit import RaggedViT, Trace, prune
from prunevit.experiments.comparison.pictures import (
    DARK,
    TINT,
    class_titles,
    draw,
    look,
    prediction,
    save,
    shade,
    unnormalise,
    write_pictures,
)
from prunevit.experiments.comparison.series import PALETTE
from prunevit.experiments.data import Batch, evaluation_transform
from prunevit.policies import ATS, ToMe, TopK
from prunevit.policies.evit import EViT
from prunevit.policy import PruningPolicy

POLICIES = {
    "topk": lambda: TopK(keep_rate=0.6, layers=[0, 2]),
    "evit": lambda: EViT(keep_rate=0.6, layers=[0, 2]),
    "tome": lambda: ToMe(r=4, layers=[0, 1, 2]),
    "ats": lambda: ATS(layers=[1, 2], min_rows=2),
}
COLOURS = np.array([[int(code[at : at + 2], 16) / 255 for at in (1, 3, 5)] for code in PALETTE])


def pruned_model(policy: PruningPolicy) -> RaggedViT:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "num_heads": 2, "depth": 3, "num_classes": 5}
    return prune(timm.create_model("vit_tiny_patch16_224", **settings), policy).eval()


def a_batch(count: int = 2) -> Batch:
    images = torch.rand(count, 3, 64, 64, generator=torch.Generator().manual_seed(1)) * 1.8 - 0.9
    return Batch(images, torch.arange(count), torch.arange(count) + 7, ())


def holders(trace: Trace, image: int, upto: int) -> list[int]:
    """Patch whose row holds each patch after a stage, -1 if none: row by row, straight from the masks."""
    held = list(range(16))
    for stage in trace.stages[: upto + 1]:
        tokens, mask = stage.tokens, stage.mask
        start, end = tokens.cu_seqlens[image : image + 2].tolist()
        after = {}
        for row in range(start, end):
            patch = int(tokens.source[row])
            heir = row if mask.merge_into is None else int(mask.merge_into[row])
            if not mask.keep[row] and mask.merge_into is None:
                heir = -1
            after[patch] = int(tokens.source[heir]) if heir >= 0 and mask.keep[heir] else -1
        held = [-1 if each < 0 else after[each] for each in held]
    return held


def patch(pixels: np.ndarray, number: int, side: int = 16, across: int = 4) -> np.ndarray:
    row, column = divmod(number, across)
    return pixels[row * side : (row + 1) * side, column * side : (column + 1) * side]


@pytest.mark.parametrize("name", POLICIES)
def test_every_patch_looks_as_the_masks_say(name: str) -> None:
    """Dropped: darker. Alone: the photo. Together in one token: one colour, and it is that of the token."""
    pruned, batch = pruned_model(POLICIES[name]()), a_batch()
    trace = pruned.trace(batch.images, batch.positions)
    kinds = set()
    for image, stages in enumerate(look(name, pruned, batch)):
        assert len(stages.panels) == len(trace.stages)
        for number, (_, heirs) in enumerate(stages.panels):
            pixels, held = shade(stages.photo, heirs, stages.grid), holders(trace, image, number)
            for index, holder in enumerate(held):
                seen, before = patch(pixels, index), patch(stages.photo, index)
                if holder < 0:
                    np.testing.assert_allclose(seen, DARK * before)
                    assert (seen < before).all()
                elif held.count(holder) == 1:
                    np.testing.assert_array_equal(seen, before)
                else:
                    tint = (seen - (1 - TINT) * before) / TINT
                    np.testing.assert_allclose(
                        tint, np.broadcast_to(COLOURS[holder % 7], tint.shape), atol=1e-9
                    )
                kinds.add("dropped" if holder < 0 else "alone" if held.count(holder) == 1 else "together")
    assert kinds == {"topk": {"dropped", "alone"}, "ats": {"dropped", "alone"}}.get(
        name, {"alone", "together"}
    )


def test_panels_say_block_and_tokens_left() -> None:
    (stages, _) = look("topk", pruned_model(TopK(keep_rate=0.5, layers=[0, 2])), a_batch())
    assert [said for said, _ in stages.panels] == ["block 0: 8 of 16 tokens", "block 2: 4 of 16 tokens"]


def test_a_photo_of_another_shape() -> None:
    """Two rows of three patches, 2 x 2 px each: the middle one of the lower row is dropped."""
    photo = np.full((4, 6, 3), 0.5)
    shaded = shade(photo, np.array([0, 1, 2, 3, -1, 5]), (2, 3))
    expected = np.full((4, 6, 3), 0.5)
    expected[2:, 2:4] *= DARK
    np.testing.assert_allclose(shaded, expected)


def test_the_photo_comes_back_from_the_model_s_input() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    transform = evaluation_transform(model)
    transform.transforms = [each for each in transform.transforms if "Resize" not in type(each).__name__]
    images = transform(Image.fromarray(pixels))[None]
    np.testing.assert_allclose(unnormalise(images, model)[0] * 255, pixels, atol=0.01)


def test_prediction_and_class_names() -> None:
    assert prediction(torch.tensor([0.0, 2.0]).log(), ["cat", "dog"]) == "dog 100 %"
    assert prediction(torch.tensor([1.0, 3.0]).log(), ["cat", "dog"]) == "dog 75 %"
    assert class_titles(pruned_model(TopK(layers=[0])).model)[4] == "class 4"
    imagenet = timm.create_model("vit_tiny_patch16_224", depth=1)
    assert class_titles(imagenet)[0] == "tench"


def test_one_line_for_each_model_and_one_panel_for_each_stage() -> None:
    batch = a_batch(1)
    rows = [look(name, pruned_model(POLICIES[name]()), batch)[0] for name in ("topk", "tome")]
    figure = draw("a title", rows)
    shown = [[axes.get_title() for axes in part.axes if axes.images] for part in figure.subfigs]
    assert [len(each) for each in shown] == [3, 4]
    assert figure.get_suptitle() == "a title"
    assert [part.get_suptitle().partition(":")[0] for part in figure.subfigs] == ["topk", "tome"]


def test_many_stages_take_several_lines() -> None:
    pruned = pruned_model(TopK(keep_rate=0.9, layers=[0]))
    (stages,) = look("topk", pruned, a_batch(1))
    figure = draw("a title", [replace(stages, panels=[*stages.panels] * 9)])
    places = {(round(axes.get_position().x0, 2)) for axes in figure.axes}
    assert len(figure.axes) == 14
    assert len(places) == 7


def test_a_name_in_another_script_is_no_warning(tmp_path: Path) -> None:
    (row,) = look("topk", pruned_model(TopK(layers=[0])), a_batch(1))
    save(draw("日本.jpg", [row]), tmp_path / "a.png", "日本.jpg")
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["Description"] == "日本.jpg"


def test_a_name_with_dollars_is_no_formula(tmp_path: Path) -> None:
    (row,) = look("$x_{$", pruned_model(TopK(layers=[0])), a_batch(1))
    save(draw(r"a$\foo$.jpg", [row]), tmp_path / "a.png", r"a$\foo$.jpg")
    with Image.open(tmp_path / "a.png") as image:
        assert image.info["Description"] == r"a$\foo$.jpg"


def test_pictures_on_disk(tmp_path: Path) -> None:
    models = {name: pruned_model(POLICIES[name]()) for name in ("topk", "evit")}
    written = write_pictures(tmp_path / "pictures", models, a_batch(), ["a.jpg", "b.jpg"])
    assert [path.name for path in written] == ["000007.png", "000008.png"]
    assert sorted((tmp_path / "pictures").iterdir()) == written
    with Image.open(written[1]) as image:
        assert image.format == "PNG"
        assert image.info["Description"].startswith("b.jpg: label class 1, unpruned class ")
        assert len(image.convert("RGB").getcolors(2**24) or []) > 100
