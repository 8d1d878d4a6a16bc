"""Labels go by name: WordNet ids, class indices, ground-truth files, ReaL labels."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from timm.data import ImageNetInfo

from prunevit.experiments.config import InputError
from prunevit.experiments.labels import class_names, ground_truth, head_indices, real_labels

WORDNET_IDS = ImageNetInfo("imagenet-1k").label_names()


def model(num_classes: int, **pretrained_cfg: object) -> SimpleNamespace:
    return SimpleNamespace(num_classes=num_classes, pretrained_cfg=pretrained_cfg)


def test_known_positions_of_imagenet_classes() -> None:
    assert WORDNET_IDS.index("n01440764") == 0  # tench
    assert WORDNET_IDS.index("n02124075") == 285  # Egyptian cat
    assert WORDNET_IDS.index("n15075141") == 999  # toilet tissue


def test_a_subset_of_wordnet_ids_is_mapped_by_id() -> None:
    assert head_indices(["n02124075", "n15075141"], WORDNET_IDS, 1000) == [285, 999]


def test_integer_folders_are_indices_in_numerical_meaning() -> None:
    assert head_indices(["0", "2", "10", "999"], WORDNET_IDS, 1000) == [0, 2, 10, 999]
    assert head_indices(["002", "010"], WORDNET_IDS, 1000) == [2, 10]


def test_an_unknown_folder_is_named() -> None:
    with pytest.raises(InputError, match=r'got "n02124070" \(unknown: 1 of 2\); the nearest is n02124075'):
        head_indices(["n02124075", "n02124070"], WORDNET_IDS, 1000)
    with pytest.raises(InputError, match='got "1000"'):
        head_indices(["3", "1000"], WORDNET_IDS, 1000)


def test_without_names_all_classes_must_be_there() -> None:
    assert head_indices(["a", "b", "c"], None, 3) == [0, 1, 2]
    with pytest.raises(InputError, match="each of the 3 classes of the head, got 2"):
        head_indices(["a", "b"], None, 3)


def test_names_of_the_model_and_of_a_file(tmp_path: Path) -> None:
    assert class_names(model(2, label_names=("hat", "shoe")), None) == ["hat", "shoe"]
    assert class_names(model(1000), None) == WORDNET_IDS
    assert class_names(model(7), None) is None
    file = tmp_path / "classes.txt"
    file.write_text("shoe\nhat\n\n")
    assert class_names(model(2, label_names=("hat", "shoe")), str(file)) == ["shoe", "hat"]
    with pytest.raises(InputError, match="must name the 3 classes of the head, got 2"):
        class_names(model(3), str(file))


FILES = ["ILSVRC2012_val_00000002.JPEG", "ILSVRC2012_val_00000003.JPEG"]


@pytest.mark.parametrize(
    "text",
    [
        "ILSVRC2012_val_00000002.JPEG n02124075\nILSVRC2012_val_00000003.JPEG n01440764\n",
        "ILSVRC2012_val_00000003.JPEG 0\nILSVRC2012_val_00000002.JPEG 285\n",
        "ImageId,PredictionString\nILSVRC2012_val_00000002,n02124075 1 2\nILSVRC2012_val_00000003,n01440764 5\n",
        "n15075141\nn02124075\nn01440764\n",
        "999\n285\n0\n",
    ],
    ids=["file id", "file index", "csv", "ids by number", "indices by number"],
)
def test_ground_truth_files(tmp_path: Path, text: str) -> None:
    file = tmp_path / "labels.txt"
    file.write_text(text)
    assert ground_truth(str(file), FILES, WORDNET_IDS) == [285, 0]


def test_the_development_kit_counts_in_its_own_order(tmp_path: Path) -> None:
    file = tmp_path / "ground_truth.txt"
    file.write_text("1000\n7\n1\n")
    with pytest.raises(InputError, match=r"whose order is not the model's; put the kit's map_clsloc\.txt"):
        ground_truth(str(file), FILES, WORDNET_IDS)
    (tmp_path / "map_clsloc.txt").write_text("n02124075 7 Egyptian_cat\nn01440764 1 tench\n")
    assert ground_truth(str(file), FILES, WORDNET_IDS) == [285, 0]


def test_ground_truth_that_does_not_say(tmp_path: Path) -> None:
    file = tmp_path / "labels.txt"
    file.write_text("ILSVRC2012_val_00000002.JPEG 3\n")
    with pytest.raises(
        InputError, match=r"a line for each image, got none for ILSVRC2012_val_00000003\.JPEG"
    ):
        ground_truth(str(file), FILES, WORDNET_IDS)
    file.write_text("ILSVRC2012_val_00000002.JPEG cat\n")
    with pytest.raises(InputError, match='got "cat"'):
        ground_truth(str(file), FILES[:1], WORDNET_IDS)
    with pytest.raises(InputError, match="must be a readable file, got /nowhere"):
        ground_truth("/nowhere", FILES, WORDNET_IDS)


def truth(tmp_path: Path, text: str, *files: str) -> list[int]:
    (tmp_path / "labels.txt").write_text(text)
    return ground_truth(str(tmp_path / "labels.txt"), files, WORDNET_IDS)


def test_ground_truth_by_path_before_name(tmp_path: Path) -> None:
    assert truth(tmp_path, "a/0.png 1\nb/0.png 2\n", "a/0.png", "b/0.png") == [1, 2]
    assert truth(tmp_path, "a/0 1\nb/0 2\n", "a/0.png", "b/0.png") == [1, 2]
    assert truth(tmp_path, "0.jpg 1\n0.png 2\n", "0.jpg", "0.png") == [1, 2]
    assert truth(tmp_path, "val/0.png 1\nval/1.png 2\n", "0.png", "1.png") == [1, 2]


@pytest.mark.parametrize(
    ("text", "files", "message"),
    [
        ("0.png 1\n0.png 2\n", ["0.png"], r"must name a file once, got 0\.png twice"),
        ("0.png 1\n", ["a/0.png", "b/0.png"], r"must tell files of one name apart, got 0 for a/0\.png"),
        ("x/0.png 1\ny/0.png 2\n", ["0.png"], r"must tell files of one name apart, got 0 for 0\.png"),
    ],
)
def test_ambiguous_ground_truth(tmp_path: Path, text: str, files: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        truth(tmp_path, text, *files)


@pytest.mark.parametrize(
    "labels",
    ["{}", "3", "[1, 2, 3]", '[["a"], [], []]', "[[1], [2.5], []]", "[[1], null, []]", "[[-1]]", "[" * 9999],
)
def test_malformed_real_labels_are_one_line(tmp_path: Path, labels: str) -> None:
    (tmp_path / "real.json").write_text(labels)
    with pytest.raises(InputError, match=r"data\.real_labels: must be a JSON list of lists") as caught:
        real_labels(str(tmp_path / "real.json"), FILES)
    assert len(caught.value.problems) == 1


def test_real_labels(tmp_path: Path) -> None:
    file = tmp_path / "real.json"
    file.write_text(json.dumps([[5], [285, 3], []]))
    assert real_labels(str(file), FILES) == [[285, 3], []]
    with pytest.raises(InputError, match="got other"):
        real_labels(str(file), ["other.JPEG"])
    file.write_text("no json")
    with pytest.raises(InputError, match="must be a JSON list of lists"):
        real_labels(str(file), FILES)


def test_the_copy_of_timm_has_all_images() -> None:
    first, second, last = real_labels("timm", [f"ILSVRC2012_val_{n:08d}.JPEG" for n in (1, 2, 50000)])
    assert first == []  # the first photo has no label that the annotators agreed on
    assert second == [970, 795]
    assert all(0 <= label < 1000 for label in last)
