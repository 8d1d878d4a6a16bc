"""Composition of the configuration: what wins, what is refused, and that all problems come at once."""

from dataclasses import asdict
from pathlib import Path

import pytest

from prunevit.experiments.compose import CONFIGS, compose, group_names, nearest, read_yaml
from prunevit.experiments.config import GROUPS, EvaluateConfig, InputError, leaves
from prunevit.experiments.plain_yaml import plain
from prunevit.experiments.verbs import VERBS, with_keys


def config(*arguments: str) -> EvaluateConfig:
    return compose("evaluate", EvaluateConfig, list(arguments))


def problems(*arguments: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        config(*arguments)
    return list(caught.value.problems)


def test_defaults() -> None:
    made = config()
    assert (made.model.name, made.data.name, made.logger.name) == ("sample", "sample", "none")
    assert made.policy == {"name": "evit", "keep_rate": 0.7, "layers": [3, 6, 9]}
    assert made.model.pretrained


def test_a_group_is_replaced_and_its_keys_refine_it_in_any_order() -> None:
    made = config("policy.keep_rate=0.5", "policy=topk", "policy.layers=[1, 2]", "data.num_images=7")
    assert made.policy["name"] == "topk"
    assert (made.policy["keep_rate"], made.policy["layers"]) == (0.5, [1, 2])
    assert made.data.num_images == 7


def test_a_timm_architecture_is_a_model() -> None:
    made = config("model=deit_small_patch16_224", "model.img_size=[160,192]")
    assert (made.model.name, made.model.pretrained) == ("deit_small_patch16_224", True)
    assert made.model.img_size == [160, 192]


def test_numbers_and_null() -> None:
    made = config("timing_s=1e-3", "data.num_images=null", "output_dir=12", "policy.keep_rate=1")
    assert (made.timing_s, made.data.num_images, made.output_dir) == (0.001, None, "12")


def test_text_with_a_colon() -> None:
    assert config("policy.layers=3:").policy["layers"] == "3:"
    assert config("policy=tome", "policy.layers=:").policy["layers"] == ":"


def test_a_file_comes_before_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("policy: {name: topk, keep_rate: 0.3}\ndata: {num_images: 5}\nbatch_size: 2\n")
    made = config(f"config={file}", "batch_size=3")
    assert made.policy == {"name": "topk", "keep_rate": 0.3}
    assert (made.data.name, made.data.num_images, made.batch_size) == ("sample", 5, 3)


def test_the_written_configuration_composes_to_itself(tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    made = config("policy=top_p", "model=test_vit", "seed=4")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(asdict(made))))
    assert config(f"config={tmp_path / 'config.yaml'}") == made


def test_an_environment_variable_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHOTOS", "/photos")
    assert config("data.root=${oc.env:PHOTOS}").data.root == "/photos"


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.rot=/x", "data.rot: unknown key; the nearest is data.root"),
        ("keep_rate=0.5", "keep_rate: unknown key; the nearest is policy.keep_rate"),
        ("batchsize=3", "batchsize: unknown key; the nearest is batch_size"),
        ("policy.keep_rat=0.5", "policy.keep_rat: unknown key of EViT; the nearest is policy.keep_rate"),
        ("batch_size=0", "batch_size: must be at least 1, got 0"),
        ("precision=8-true", "precision: must be one of 32-true"),
        ("data.on_error=ignore", "data.on_error: must be one of raise, skip, got ignore"),
        ("policy=evti", "policy: unknown name, got evti; the nearest is evit"),
        ("model=deit_smal_patch16_224", "the nearest is deit_small_patch16_224"),
        ("data=imagnet", "data: unknown name, got imagnet; the nearest is imagenet"),
        ("logger=wandbb", "logger: unknown name, got wandbb; the nearest is wandb"),
        ("data=imagenet", "data.root: must be set"),
        ("model=timm", "model.name: must be set"),
        ("policy=replay", "policy.trace: must be set for Replay"),
        ("policy.keep_rate=1.3", "EViT: keep_rate must be in (0, 1], got 1.3"),
        ("policy.keep_rate=much", "policy.keep_rate: must be"),
        ("policy=nowhere.to:Be", 'policy: "nowhere.to:Be" must name a class that can be imported'),
        ("policy=builtins:int", 'policy: "builtins:int" must be a subclass of prunevit.PruningPolicy'),
        ("verbose", "verbose: an argument must be key=value"),
        ("policy.layers=[3,6", "policy.layers: must be a YAML value, got [3,6"),
        ("config=/nowhere.yaml", "config: must be a readable YAML file, got /nowhere.yaml"),
        ("batch_size.big=3", "batch_size: "),
        ("batch_size=many", "batch_size: "),
        ("data.root=${oc.env:PRUNEVIT_UNSET}", "data.root: "),
        ("policy.keep_rate=${oc.env:PRUNEVIT_UNSET}", "policy.keep_rate: "),
        ("model.img_size=big", "model.img_size: must be px or [height, width], got big"),
        ("batch_size=1:30", "batch_size: Value '1:30' of type 'str' could not be converted to Integer"),
        ("batch_size=2147483648", "batch_size: must be at most 2147483647, got 2147483648"),
        ("numeric_images=2147483648", "numeric_images: must be at most 2147483647"),
        ("data.num_images=2147483648", "data.num_images: must be at most 2147483647"),
        ("seed=4294967296", "seed: must be at most 4294967295, got 4294967296"),
        ("timing_s=nan", "timing_s: must be a finite number, got nan"),
        ("timing_s=.inf", "timing_s: must be a finite number, got inf"),
        ("policy=", "policy: must have a value, got none; known: ats, cross, "),
        ("policy=null", "policy: unknown name, got null; known: ats, cross, "),
        ("policy.=3", "policy.: unknown key; a name must follow the dot"),
        ("policy.layers=[]", "EViT: layers must name at least one block, got none"),
        (
            "policy.layers=[1.5]",
            "policy.layers: must be a whole number or a list of whole numbers or text, got [1.5]",
        ),
        ("policy.layers=5:3", 'EViT: layers must leave at least one block, got "5:3"'),
        ("data.root=", "data.root: must have a value, got none; write data.root=null for none"),
        ("weights=''", "weights: must have a value, got ''"),
        ("logger.mode=offline", "logger.mode: needs logger=wandb"),
        ("logger.project=mine", "logger.project: needs logger=wandb"),
        ("seed=\udcff", "'seed=\\udcff': an argument must be UTF-8"),
        ("data.root=${data.root}", "data.root: "),
    ],
)
def test_one_line_says_what_is_wrong(argument: str, message: str) -> None:
    found = problems(argument)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize("name", [name for name in leaves(EvaluateConfig) if name != "policy"])
def test_an_interpolation_of_nothing_is_one_line(name: str) -> None:
    (line,) = problems(f"{name}=${{nope}}")
    assert line.startswith(f"{name}: ")
    assert "nope" in line


def test_a_key_is_given_once() -> None:
    assert problems("seed=1", "seed=2") == ["seed: must be given once, got seed=2 again"]


def test_the_largest_values() -> None:
    made = config("seed=4294967295", "batch_size=2147483647")
    assert (made.seed, made.batch_size) == (4294967295, 2147483647)


def test_what_yaml_takes_for_base_60_is_text(tmp_path: Path) -> None:
    assert config("policy.layers=3:9").policy["layers"] == "3:9"
    (tmp_path / "mine.yaml").write_text("policy: {name: topk, layers: 3:9}\n")
    assert config(f"config={tmp_path / 'mine.yaml'}").policy["layers"] == "3:9"
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    assert "seed stands twice" in problems(f"config={tmp_path / 'twice.yaml'}")[0]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-.5", -0.5),
        ("0x1F", 31),
        ("1_000", 1000),
        ("+5", 5),
        ("0", 0),
        ("-.inf", float("-inf")),
        ("1.2.3", "1.2.3"),
        ("1:30.5", "1:30.5"),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("yes", True),
    ],
)
def test_values_of_yaml(text: str, value: object) -> None:
    found = plain(f"value: {text}")["value"]
    assert (type(found), found) == (type(value), value)


def test_all_problems_come_at_once() -> None:
    found = problems("data.rot=/x", "batch_size=0", "policy.keep_rate=1.3", "policy.foo=1", "accelerator=tpu")
    assert [line.split(":")[0] for line in found] == ["data.rot", "batch_size", "accelerator", "policy.foo"]


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_has_a_file_that_starts_with_its_command(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.jpg").touch()  # what the command of `show` names
    first = CONFIGS.joinpath(f"{verb}.yaml").read_text().splitlines()[0]
    assert first.startswith(f"# uv run prunevit {verb}")
    words = first.removeprefix(f"# uv run prunevit {verb}").split()
    compose(verb, VERBS[verb].schema, with_keys(VERBS[verb], words))


@pytest.mark.parametrize(
    ("group", "name"), [(group, name) for group in GROUPS if group != "recipe" for name in group_names(group)]
)
def test_each_shipped_file_fits_the_schema(group: str, name: str) -> None:
    needed = {"model=timm": ["model.name=test_vit"], "data=imagenet": ["data.root=/photos"]}
    if (group, name) == ("policy", "replay"):
        assert read_yaml("policy/replay.yaml") == {"name": "replay", "trace": "???", "policy": 0}
        return
    made = config(f"{group}={name}", *needed.get(f"{group}={name}", []))
    settings = read_yaml(f"{group}/{name}.yaml")
    chosen = getattr(made, group) if group == "policy" else asdict(getattr(made, group))
    assert {key: chosen[key] for key in settings if settings[key] not in ("???", None)} == {
        key: value for key, value in settings.items() if value not in ("???", None)
    }


def test_every_key_says_what_it_means() -> None:
    for name, declared in leaves(EvaluateConfig).items():
        assert declared.metadata["help"], name


def test_nearest_lists_the_names_when_none_is_close() -> None:
    assert nearest("zzz", ["one", "two"]) == "known: one, two"


def test_nearest_of_nothing() -> None:
    assert nearest("zzz", []) == "there are none"


def test_one_layer_without_brackets() -> None:
    assert config("policy.layers=3").policy["layers"] == 3
