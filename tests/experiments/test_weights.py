"""Weights files: fine-tuned ones rebuild the run that made them; published ones load by their authors' names."""

import json
import logging
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from dense_dynamicvit import dynamicvit
from safetensors.torch import save_file
from torch import Tensor, nn

from prunevit import prune
from prunevit.experiments.cli import main
from prunevit.experiments.compose import compose
from prunevit.experiments.config import EvaluateConfig, InputError, ModelConfig
from prunevit.experiments.models import build_model, prune_model
from prunevit.experiments.weights import load_policies, provenance, read_weights
from prunevit.policies import DPCKNN, DynamicViT, EViT, TopK

NAME, WIDTH, CLASSES = "test_vit", 64, 5


def random_model() -> Any:
    return timm.create_model(NAME, num_classes=CLASSES).eval()


def authors_predictors(stages: int = 2) -> dict[str, Tensor]:
    """Predictors by the names and shapes of raoyongming/DynamicViT."""
    shapes = {
        "in_conv.0.weight": (WIDTH,),
        "in_conv.0.bias": (WIDTH,),
        "in_conv.1.weight": (WIDTH, WIDTH),
        "in_conv.1.bias": (WIDTH,),
        "out_conv.0.weight": (WIDTH // 2, WIDTH),
        "out_conv.0.bias": (WIDTH // 2,),
        "out_conv.2.weight": (WIDTH // 4, WIDTH // 2),
        "out_conv.2.bias": (WIDTH // 4,),
        "out_conv.4.weight": (2, WIDTH // 4),
        "out_conv.4.bias": (2,),
    }
    return {
        f"score_predictor.{stage}.{name}": torch.randn(shape) / shape[-1] ** 0.5
        for stage in range(stages)
        for name, shape in shapes.items()
    }


def composed(*words: str) -> EvaluateConfig:
    return compose("evaluate", EvaluateConfig, [*words])


@pytest.fixture
def finetuned(tmp_path: Path) -> Path:
    """A file as `prunevit finetune` writes it: DynamicViT at 0.5 after blocks 1 and 3."""
    pruned = prune(random_model(), DynamicViT(0.5, (1, 3)))
    said = {
        "schema": 1,
        "model": {"name": NAME, "pretrained": True, "num_classes": None, "img_size": None},
        "architecture": {"name": NAME, "num_classes": CLASSES, "img_size": [160, 160]},
        "policy": {"name": "dynamicvit", "keep_rate": 0.5, "layers": [1, 3]},
        "recipe": {"lr": 0.1},
        "trained": "fine-tuned",
        "seed": 3,
    }
    save_file(pruned.state_dict(), tmp_path / "best.safetensors", {"prunevit": json.dumps(said)})
    return tmp_path / "best.safetensors"


def test_a_fine_tuned_file_rebuilds_model_and_policy(finetuned: Path) -> None:
    config = composed(f"weights={finetuned}")
    assert (config.model.name, config.model.num_classes) == (NAME, CLASSES)
    assert config.policy["name"] == "dynamicvit"
    assert (config.policy["keep_rate"], config.policy["layers"]) == (0.5, [1, 3])
    assert config.policy["rule"] == "count"  # what the file does not say is as shipped

    weights = read_weights(config.weights)
    pruned = prune_model(build_model(config.model, weights), DynamicViT(0.5, (1, 3)))
    load_policies(pruned, weights)
    assert weights is not None
    for name, value in pruned.model.state_dict().items():
        assert torch.equal(value, weights.model[name])
    for name, value in pruned.policies.state_dict().items():
        assert torch.equal(value, weights.policies[name])
    assert provenance(config.model, weights, pruned) == {
        "weights": str(finetuned),
        "trained": "fine-tuned",
        "predictors": None,
    }


def test_the_users_words_win(finetuned: Path, tmp_path: Path) -> None:
    assert composed(f"weights={finetuned}", "policy.keep_rate=0.3").policy["keep_rate"] == 0.3
    # Naming the same policy again is no reason to forget what the file says of it.
    assert composed(f"weights={finetuned}", "policy=dynamicvit").policy["keep_rate"] == 0.5
    assert composed(f"weights={finetuned}", "policy=evit").policy["name"] == "evit"
    (tmp_path / "mine.yaml").write_text(f"weights: {finetuned}\npolicy: {{keep_rate: 0.4}}\n")
    assert composed(f"config={tmp_path / 'mine.yaml'}").policy["keep_rate"] == 0.4
    assert composed(f"config={tmp_path / 'mine.yaml'}").policy["layers"] == [1, 3]


@pytest.mark.parametrize("policy", [EViT(0.5, (1, 3)), DynamicViT(0.5, (1, 3, 5))])
def test_a_policy_that_would_lose_parameters_is_refused(finetuned: Path, policy: Any) -> None:
    weights = read_weights(str(finetuned))
    with pytest.raises(InputError, match=r"would lose, got 1?\d?.* (missing|unknown).*set policy=dynamicvit"):
        load_policies(prune_model(random_model(), policy), weights)


def test_a_file_of_another_version(tmp_path: Path) -> None:
    for number, said in enumerate(('{"schema": 2}', "[]", "{")):
        file = tmp_path / f"{number}.safetensors"
        save_file(random_model().state_dict(), file, {"prunevit": said})
        with pytest.raises(InputError, match=r"weights: .*safetensors") as caught:
            read_weights(str(file))
        assert len(caught.value.problems) == 1
        with pytest.raises(InputError, match="weights: "):
            composed(f"weights={file}")


def test_dynamicvits_own_names_give_the_papers_logits(tmp_path: Path) -> None:
    model = random_model()
    published = authors_predictors()
    torch.save({"model": {**model.state_dict(), **published}}, tmp_path / "dynamicvit.pth")

    weights = read_weights(str(tmp_path / "dynamicvit.pth"))
    loaded = prune_model(
        build_model(ModelConfig(NAME, num_classes=CLASSES), weights), DynamicViT(0.6, (1, 3))
    )
    load_policies(loaded, weights)
    assert provenance(ModelConfig(NAME), weights, loaded)["trained"] == "fine-tuned"

    pairs = []
    for stage in range(2):
        features = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        classify = nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH // 2), nn.GELU(), nn.Linear(WIDTH // 2, WIDTH // 4), nn.GELU()),
            *(nn.Linear(WIDTH // 4, 2), nn.LogSoftmax(-1)),
        )
        for module, part in ((features, "in_conv"), (classify, "out_conv")):
            begin = f"score_predictor.{stage}.{part}."
            module.load_state_dict(
                {k.removeprefix(begin): v for k, v in published.items() if k.startswith(begin)}
            )
            module.double()
        pairs.append((features, classify))
    images = torch.randn(2, 3, 160, 160, dtype=torch.float64)
    with torch.no_grad():
        expected, _ = dynamicvit(model.double(), images, pairs, 0.6, (1, 3))
        logits = loaded.double()(images)
        others = prune(model, DynamicViT(0.6, (1, 3)).double()).eval()(images)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert (others - expected).abs().max() > 1e-6  # other predictors keep other patches


def test_dpc_knns_names_of_token_reduction(tmp_path: Path) -> None:
    scorers = {
        f"cluster_layers.{stage}.score.{part}": torch.randn(shape)
        for stage in range(2)
        for part, shape in (("weight", (1, WIDTH)), ("bias", (1,)))
    }
    torch.save({"model": {**random_model().state_dict(), **scorers}}, tmp_path / "w.pth")
    weights = read_weights(str(tmp_path / "w.pth"))
    pruned = prune_model(random_model(), DPCKNN(0.5, (1, 3), learned_weight=True))
    load_policies(pruned, weights)
    for stage in range(2):
        for part in ("weight", "bias"):
            own = pruned.policies.state_dict()[f"0.scorers.{stage}.{part}"]
            assert torch.equal(own, scorers[f"cluster_layers.{stage}.score.{part}"])


ARGUMENTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "evit": (
        {
            "model": "deit_small_patch16_shrink_base",
            "base_keep_rate": 0.7,
            "drop_loc": "(3, 6, 9)",
            "fuse_token": True,
            "input_size": 224,
        },
        {"name": "evit", "keep_rate": 0.7, "layers": [3, 6, 9]},
        "deit_small_patch16_224",
    ),
    "topk": (
        {"model": "topk_base_patch16_224", "keep_rate": [0.5], "reduction_loc": [3, 6, 9]},
        {"name": "topk", "keep_rate": 0.5, "rounding": "floor", "of": "initial", "compound": True},
        "deit_base_patch16_224",
    ),
    "dyvit": (
        {"model": "dyvit_tiny_patch16_224", "keep_rate": [0.8, 0.4], "reduction_loc": [4, 8]},
        {"name": "dynamicvit", "keep_rate": [0.8, 0.5], "layers": [4, 8]},
        "deit_tiny_patch16_224",
    ),
    "kmedoids": (
        {
            **{"model": "kmedoids_tiny_patch16_224", "keep_rate": [0.9], "reduction_loc": [3, 6, 9]},
            **{"cluster_iters": 2, "num_classes": 555},
        },
        {"name": "kmedoids", "keep_rate": 0.9, "iterations": 2, "layers": [3, 6, 9]},
        "deit_tiny_patch16_224",
    ),
    "ats": (
        {"model": "ats_small_patch16_224", "keep_rate": [0.5], "reduction_loc": [3, 6, 9]},
        {"name": "ats", "budget": 0.5, "variant": "token_reduction", "layers": [3, 6, 9]},
        "deit_small_patch16_224",
    ),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_the_arguments_in_a_published_checkpoint_name_model_and_policy(tmp_path: Path, kind: str) -> None:
    arguments, policy, name = ARGUMENTS[kind]
    torch.save({"model": random_model().state_dict(), "args": Namespace(**arguments)}, tmp_path / "w.pth")
    config = composed(f"weights={tmp_path / 'w.pth'}")
    assert config.model.name == name
    assert {key: config.policy.get(key) for key in policy} == policy
    assert config.model.num_classes == arguments.get("num_classes")
    weights = read_weights(config.weights)
    assert weights is not None
    assert weights.trained == "fine-tuned"


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, "model"),
        ({"ema_best": False}, "model"),
        ({"ema_best": True}, "model_ema"),
        ({"state_dict_ema": "ema"}, "state_dict_ema"),
    ],
)
def test_which_of_several_state_dicts_was_taken_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], taken: str
) -> None:
    states = {name: {"w": torch.full((1,), number)} for number, name in enumerate(("model", "model_ema"))}
    if "state_dict_ema" in more:
        more = {"state_dict_ema": {"w": torch.full((1,), 7)}}
    content = {**states, **more}
    torch.save(content, tmp_path / "w.pth")
    with caplog.at_level(logging.WARNING, "prunevit"):
        weights = read_weights(str(tmp_path / "w.pth"))
    assert weights is not None
    assert torch.equal(weights.model["w"], content[taken]["w"])
    assert f"took {taken} of" in caplog.text
    assert weights.trained is None


@pytest.mark.parametrize("prefix", ["model.", "module.", "_orig_mod."])
def test_prefixes_of_wrappers(tmp_path: Path, prefix: str) -> None:
    source = random_model()
    save_file(
        {prefix + name: value for name, value in source.state_dict().items()}, tmp_path / "w.safetensors"
    )
    weights = read_weights(str(tmp_path / "w.safetensors"))
    loaded = build_model(ModelConfig(NAME, num_classes=CLASSES), weights)
    images = torch.randn(1, 3, 160, 160)
    assert torch.equal(loaded(images), source(images))


def test_missing_and_unknown_names_are_listed(tmp_path: Path) -> None:
    state = random_model().state_dict()
    moved = {("typo." + name if name.startswith("norm.") else name): value for name, value in state.items()}
    save_file(moved, tmp_path / "w.safetensors")
    with pytest.raises(
        InputError,
        match=r"2 missing \(norm\.weight, norm\.bias\), 2 unknown \(typo\.norm\.bias, typo\.norm\.weight\)",
    ):
        build_model(ModelConfig(NAME, num_classes=CLASSES), read_weights(str(tmp_path / "w.safetensors")))


def test_another_input_size_is_resampled_once(tmp_path: Path) -> None:
    source: Any = timm.create_model(NAME, num_classes=CLASSES, img_size=192)
    save_file(source.state_dict(), tmp_path / "w.safetensors")
    config = ModelConfig(NAME, num_classes=CLASSES, img_size=192)
    loaded = build_model(config, read_weights(str(tmp_path / "w.safetensors")))
    assert torch.equal(loaded.pos_embed, source.pos_embed)


@pytest.mark.parametrize(
    ("keys", "policy", "expected"),
    [
        ({"name": "sample"}, TopK(layers=(1,)), ("sample", "off-the-shelf", None)),
        ({"pretrained": False}, TopK(layers=(1,)), ("random", None, None)),
        ({}, TopK(layers=(1,)), ("r160_in1k", "off-the-shelf", None)),
        ({}, DynamicViT(layers=(1,)), ("r160_in1k", None, "random")),
    ],
)
def test_where_weights_come_from(keys: dict[str, Any], policy: Any, expected: tuple[str | None, ...]) -> None:
    pruned = prune_model(random_model(), policy)
    said = provenance(ModelConfig(**{"name": NAME, **keys}), None, pruned)
    assert (said["weights"], said["trained"], said["predictors"]) == expected


def test_a_plain_file_does_not_say_how_it_was_trained(tmp_path: Path) -> None:
    save_file(random_model().state_dict(), tmp_path / "w.safetensors")
    weights = read_weights(str(tmp_path / "w.safetensors"))
    for policy, predictors in ((TopK(layers=(1,)), None), (DynamicViT(layers=(1,)), "random")):
        said = provenance(ModelConfig(NAME), weights, prune_model(random_model(), policy))
        assert (said["trained"], said["predictors"]) == (None, predictors)
    assert read_weights(None) is None


def test_evaluate_needs_nothing_but_the_file(
    finetuned: Path, folders: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, out = folders(a=1, b=1, c=1, d=1, e=1), tmp_path / "out"
    where = [f"weights={finetuned}", "data=folder", f"data.root={root}", f"output_dir={out}"]
    fast = ["timing_s=0", "numeric_images=0", "progress=false", "data.num_workers=0", "accelerator=cpu"]
    assert main(["evaluate", *where, *fast]) == 0
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    said = {name: row[name] for name in ("policy", "knob_value", "layers", "model", "trained", "predictors")}
    assert said == {
        **{"policy": "dynamicvit", "knob_value": 0.5, "layers": [1, 3], "model": NAME},
        **{"trained": "fine-tuned", "predictors": None},
    }
    assert row["images"] == 5
    capsys.readouterr()
    assert main(["evaluate", *where, *fast, "policy=evit", "policy.layers=[1,3]", "overwrite=true"]) == 2
    err = capsys.readouterr().err
    assert "holds parameters of a policy, which EViT would lose" in err
    assert err.count("\n") == 1


def spoil(kind: str, path: Path) -> Path:
    """A weights file of test_vit with three classes that is wrong in one way."""
    state = timm.create_model(NAME, num_classes=3).state_dict()
    norm = state["norm.weight"]
    said = {"schema": 1, "recipe": {"name": "evit", "version": 1}}
    altered: dict[str, dict[str, Tensor]] = {
        "missing keys": {name: value for name, value in state.items() if "blocks.2" not in name},
        "extra keys": {**state, "my.key": norm.clone()},
        "wrong shape": {**state, "norm.weight": norm[:7].clone()},
        "no grid": {**state, "pos_embed": state["pos_embed"][0].clone()},
        "integers": {**state, "norm.weight": norm.int()},
    }
    texts = {"no JSON": "{no json", "another schema": json.dumps({**said, "schema": 2})}
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty":
        path.touch()
    else:
        save_file(altered.get(kind, state), path, {"prunevit": texts[kind]} if kind in texts else None)
    if kind == "cut off":
        path.write_bytes(path.read_bytes()[:-5])
    elif kind == "locked":
        path.chmod(0)
    return path


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("folder", "must be a file, got PATH"),
        ("loop", "must be a file, got PATH"),
        pytest.param(
            "locked",
            "must be readable, got PATH (Permission denied)",
            marks=pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file"),
        ),
        ("empty", "must hold tensors, got PATH, which is empty"),
        ("cut off", "must be safetensors or a pickle of tensors only, got PATH"),
        ("missing keys", "PATH must fit test_vit, got 12 missing (blocks.2.norm1.weight, "),
        ("extra keys", "PATH must fit test_vit, got 1 unknown (my.key)"),
        ("wrong shape", "PATH must fit test_vit, got norm.weight is [7], not [64]"),
        ("no grid", "PATH must fit test_vit, got tensors of other shapes"),
        ("integers", "PATH must fit test_vit, got norm.weight holds torch.int32, not torch.float32"),
        ("no JSON", "PATH must have JSON under prunevit in its metadata, got other text"),
        ("another schema", "PATH must be of schema 1, got 2; use the version that wrote it"),
    ],
)
def test_odd_files_are_one_line_and_leave_nothing(
    kind: str, line: str, tmp_path: Path, folders: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path, root = spoil(kind, tmp_path / "odd.safetensors"), folders(a=1, b=1, c=1)
    words = [f"model={NAME}", "model.num_classes=3", "data=folder", f"data.root={root}", "accelerator=cpu"]
    words += ["policy.layers=[1]", f"weights={path}", f"output_dir={tmp_path / 'out'}"]
    for verb in ("evaluate", "finetune"):
        assert main([verb, *words]) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"prunevit: weights: {line.replace('PATH', str(path))}")
        assert not (tmp_path / "out").exists()


def test_the_kind_of_float_and_the_version_of_the_recipe_are_no_matter(tmp_path: Path) -> None:
    model = random_model()
    said = {"schema": 1, "recipe": {"name": "evit", "version": 99}, "trained": "fine-tuned"}
    state = {name: value.double() for name, value in model.state_dict().items()}
    save_file(state, tmp_path / "double.safetensors", {"prunevit": json.dumps(said)})
    read = read_weights(str(tmp_path / "double.safetensors"))
    config = ModelConfig(NAME, pretrained=False, num_classes=CLASSES)
    assert all(
        torch.equal(p, own) for p, own in zip(build_model(config, read).parameters(), model.parameters())
    )
