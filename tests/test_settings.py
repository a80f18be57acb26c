"""Settings: types, ranges, names, experiment files, and errors before the first round."""

import dataclasses
import json
import math
import runpy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from posy.data.errors import DataError
from posy.data.settings import DataSettings
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.settings import Scalar, SettingsError, as_config, build, checked, key_of, set_in, setting, settings_of
from posy.strategies import registry as config_module
from posy.strategies.methods import METHODS, REFERENCES, settings_class, strategy_class
from posy.strategies.registry import (
    declared,
    defaults,
    experiment_path,
    from_json,
    groups,
    read_settings,
)
from posy.strategies.run_settings import RunSettings, TrainSettings

ROOT = Path(__file__).resolve().parent.parent
DECLARED = declared()


# -- the declarations ------------------------------------------------------------------------------------


def test_synonyms_are_unique_and_differ_from_keys() -> None:
    synonyms = [word for setting in DECLARED.values() for word in setting.synonyms]
    assert len(synonyms) == len({*synonyms} - DECLARED.keys())


def test_generated_files_are_up_to_date() -> None:
    """`python docs/generate.py` writes the run config of pyproject.toml and the tables of the documentation."""
    generate = runpy.run_path(str(ROOT / "docs/generate.py"))
    assert not {str(path.relative_to(ROOT)) for path in generate["stale"]()}
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    assert written == defaults()


def test_keys_are_declared_once() -> None:
    assert len(DECLARED) == sum(map(len, groups(METHODS).values()))


def test_defaults_are_within_their_ranges() -> None:
    for key, rule in DECLARED.items():
        assert rule.admits(rule.default) and rule.help and rule.allowed(), key


def test_empty_settings_give_the_dataclass_defaults() -> None:
    settings = read_settings({})
    assert settings.run == RunSettings(output_dir=str(Path("runs").absolute()))
    assert settings.data == DataSettings(data_dir=str(Path("datasets").absolute()))
    assert settings.train == TrainSettings()
    assert settings.method == settings_class("fedfew")()


def test_settings_are_frozen() -> None:
    for group in (RunSettings(), DataSettings(), TrainSettings(), *(settings_class(m)() for m in METHODS)):
        for field in dataclasses.fields(group)[:1]:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(group, field.name, 1)


def test_method_names_select_their_settings() -> None:
    for method in METHODS:
        assert type(read_settings({"method": method}).method) is settings_class(method)


# -- one value -------------------------------------------------------------------------------------------

WRONG = [
    ("num-clients", True, "a whole number of at least 1"),
    ("num-clients", 10.0, "a whole number"),
    ("num-clients", "10", "a whole number"),
    ("num-clients", None, "a whole number"),
    ("num-clients", [10], "a whole number"),
    ("num-clients", 0, "of at least 1"),
    ("num-clients", -3, "of at least 1"),
    ("num-clients", 1_000_001, "at most 1,000,000"),
    ("num-server-rounds", 0, "of at least 1"),
    ("seed", -1, "of at least 0"),
    ("seed", 2**31, "at most 2,147,483,647"),
    ("threads", 2**31, "from 0 to 1024"),
    ("batch-size", 2**63, "at most 1,000,000,000"),
    ("local-steps", 10**400, "at most 1,000,000,000"),
    ("lr", 10**400, "a number"),
    ("vocabulary", 2**31, "at most 10,000,000"),
    ("round-timeout", 1e300, "at most 100,000,000"),
    ("fraction-train", 0, "above 0"),
    ("fraction-train", 1.5, "at most 1"),
    ("fraction-train", True, "a number"),
    ("min-train-replies", 0, "of at least 1"),
    ("round-timeout", 0.0, "above 0"),
    ("round-timeout", math.inf, "above 0"),
    ("evaluate-every", 0, "of at least 1"),
    ("save-models", "False", "true or false"),
    ("save-models", "true", "true or false"),
    ("save-models", 1, "true or false"),
    ("save-models", 0, "true or false"),
    ("system-accuracy", True, "one of auto, on, off"),
    ("lr", 0, "above 0"),
    ("lr", -0.1, "above 0"),
    ("lr", math.nan, "above 0"),
    ("lr", math.inf, "above 0"),
    ("lr", "0.1", "a number"),
    ("lr", False, "a number"),
    ("momentum", 1.0, "from 0 to 0.9999"),
    ("momentum", -0.1, "from 0 to 0.9999"),
    ("batch-size", 0, "of at least 1"),
    ("test-fraction", 0.0, "above 0"),
    ("test-fraction", 0.95, "at most 0.9"),
    ("dirichlet-alpha", 0.0, "above 0"),
    ("partition", "dirichlett", "one of dirichlet, iid"),
    ("model", "resnet", "resnet18-gn"),
    ("lr-schedule", "Cosine", "one of constant, cosine, exponential, step"),
    ("output-dir", 5, "a string"),
    ("fedfew-mu", 0.0, "above 0"),
    ("fedfew-models", 0, "from 1 to 1000"),
    ("cwfedavg-wdr", "False", "true or false"),
    ("feddrm-class-weight", 1.1, "from 0 to 1"),
    ("fedacs-p", -0.1, ""),
    ("ppfe-beta", "adabost", "one of samme, adaboost, adaboost-positive"),
    ("ifca-clusters", 1.0, "a whole number"),
]


@pytest.mark.parametrize(("key", "value", "allowed"), WRONG, ids=lambda v: repr(v)[:20])
def test_wrong_values_report_key_value_source_and_range(key: str, value: Any, allowed: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({key: value}, "the command line")
    message = str(raised.value)
    formatted_value = str(value).lower() if isinstance(value, bool) else repr(value)[:100]
    for part in (key, formatted_value, "the command line", allowed, DECLARED[key].help):
        assert part in message


@pytest.mark.parametrize("method", ["fedavg", "fedfew"])
def test_wrong_settings_of_another_method_are_rejected(method: str) -> None:
    with pytest.raises(SettingsError, match="fedfew-models = 0"):
        read_settings({"method": method, "fedfew-models": 0})


@pytest.mark.parametrize("where", ["the run config", "the command line"])
@pytest.mark.parametrize(("method", "key", "value"), [("fedavg", "fedfew-models", 5), ("fedavg", "fedavg-ft-lr", 0.1)])
def test_settings_of_another_method_are_rejected(method: str, key: str, value: Scalar, where: str) -> None:
    owner = "fedfew" if key.startswith("fedfew") else "fedavg-ft"
    with pytest.raises(SettingsError) as raised:
        read_settings({"method": method, key: value}, where)
    assert str(raised.value).startswith(f"{key} {set_in(where)} is a setting of {owner}; ")
    assert f"method is {method}; remove {key}" in str(raised.value)
    assert read_settings({"method": owner, key: value}).run.method == owner


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("fraction-train", 1, 1.0),
        ("lr", 1, 1.0),
        ("momentum", 0, 0.0),
        ("seed", 0, 0),
        ("seed", 2**31 - 1, 2**31 - 1),
        ("test-fraction", 0.9, 0.9),
        ("momentum", 0.9999, 0.9999),
        ("num-clients", 1_000_000, 1_000_000),
        ("save-models", False, False),
        ("download", True, True),
        ("run-name", "", ""),
    ],
)
def test_boundary_values_and_integers_for_floats_are_accepted(key: str, value: Scalar, expected: Scalar) -> None:
    read_back = read_settings({key: value}).as_config()[key]
    assert read_back == expected
    assert type(read_back) is type(expected)


@dataclasses.dataclass(frozen=True)
class Sample:
    whole_number: int = setting(3, "a number to test with", minimum=2, maximum=9)
    share: float = setting(0.5, "a share", above=0, maximum=1)
    flag: bool = setting(False, "a flag")
    word: str = setting("a", "a word", choices=("a", "b"))


KINDS = (int, float, bool, str)
values = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**62), 2**62), st.floats(), st.text(max_size=3), st.lists(st.integers())
)


@given(values, st.sampled_from(["whole-number", "share", "flag", "word"]))
def test_any_value_is_accepted_or_raises_a_settings_error(value: Any, key: str) -> None:
    is_valid = {
        "whole-number": type(value) is int and 2 <= value <= 9,
        "share": type(value) in (int, float) and 0 < value <= 1,
        "flag": type(value) is bool,
        "word": value in ("a", "b") if isinstance(value, str) else False,
    }[key]
    if is_valid:
        config = checked({f"mine-{key}": value}, settings_of(Sample, "mine"), "a test")
        sample = build(Sample, {**config, "other": 1}, "mine")
        assert as_config(sample, "mine")[f"mine-{key}"] == value
        assert all(type(v) is kind for v, kind in zip(as_config(sample).values(), KINDS, strict=True))
    else:
        with pytest.raises(SettingsError, match=f"^mine-{key} = "):
            checked({f"mine-{key}": value}, settings_of(Sample, "mine"), "a test")


def test_keys_are_kebab_case_with_a_method_prefix() -> None:
    assert key_of("weigh_losses", "fedfew") == "fedfew-weigh-losses"
    assert key_of("lr") == "lr"
    assert list(settings_of(Sample, "x")) == ["x-whole-number", "x-share", "x-flag", "x-word"]


# -- names -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "suggestion"),
    [
        ("num-client", "num-clients"),
        ("fedfew-um", "fedfew-mu"),
        ("learning-rate", "lr"),
        ("num_clients", "num-clients"),
        ("Seed", "seed"),
        ("batchsize", "batch-size"),
        ("metod", "method"),
        ("datset", "dataset"),
        ("rounds", "num-server-rounds"),
        ("num-rounds", "num-server-rounds"),
        ("Num_Rounds", "num-server-rounds"),
        ("epochs", "local-epochs"),
        ("clients", "num-clients"),
        ("alpha", "dirichlet-alpha"),
        ("stages", "ppfe-stages"),
        ("mu", "fedfew-mu or fedprox-mu or fedprox-ft-mu"),
    ],
)
def test_unknown_keys_get_a_suggestion(key: str, suggestion: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({key: 1}, "the command line")
    assert str(raised.value).startswith(f"{key} on the command line is not a setting; ")
    assert str(raised.value).endswith(f"did you mean {suggestion}?")
    with pytest.raises(SettingsError, match="xyzzy on the command line is not a setting; `posy settings`"):
        read_settings({"xyzzy": 1}, "the command line")


@pytest.mark.parametrize(
    ("key", "value", "suggestion"),
    [
        ("partition", "dirchlet", "dirichlet"),
        ("model", "resnet18", "resnet18-gn"),
        ("stack", "vmapp", "vmap"),
        ("lr-schedule", "Cosine", "cosine"),
    ],
)
def test_wrong_choices_get_a_suggestion(key: str, value: str, suggestion: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({key: value})
    assert str(raised.value).endswith(f"; did you mean {suggestion}?")


_ALL_METHODS = f"it must be one of {', '.join((*METHODS, *REFERENCES))}, or file:Name"


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("fedavgg", "fedavg"), ("FedAvg", "fedavg"), ("fed.avg", "fedavg"), ("fedfe", "fedfew"), ("", ""), ("base", "")],
)
def test_unknown_methods_get_a_suggestion_or_the_full_list(name: str, suggestion: str) -> None:
    hint = f"did you mean {suggestion}? (`posy methods`" if suggestion else _ALL_METHODS
    with pytest.raises(SettingsError) as raised:
        read_settings({"method": name})
    assert str(raised.value).startswith(f"method = {name!r} in the run config: {hint}")
    with pytest.raises(SettingsError) as raised:
        strategy_class(name)
    assert str(raised.value).startswith(f"method = {name!r}: {hint}")


# -- serialisation ---------------------------------------------------------------------------------------


def test_settings_survive_a_json_round_trip() -> None:
    for method in METHODS:
        settings = read_settings({"method": method, "lr": 1e-7, "num-clients": 3, "run-name": 'a "name" – ü'})
        assert from_json(settings.to_json()) == settings
        assert json.loads(settings.to_json()) == settings.as_config()
        assert settings.as_config().keys() == declared([method]).keys()


def test_settings_in_a_server_message_are_checked() -> None:
    with pytest.raises(SettingsError, match="num-clients = 0 in the server's message"):
        from_json('{"num-clients": 0}')


# -- experiment files ------------------------------------------------------------------------------------


@pytest.fixture
def experiments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "papers/mine/settings"
    folder.mkdir(parents=True)
    monkeypatch.setattr(config_module, "PAPERS", tmp_path / "papers")
    return folder


def write(folder: Path, text: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_experiments_override_defaults_and_settings_override_experiments(experiments: Path) -> None:
    write(experiments, "method: ditto\nlr: 0.3\nnum-clients: 7\nditto-strength: 2\n")
    settings = read_settings({"experiment": "mine", "num-clients": 4, "seed": 1})
    assert settings.run.method == "ditto"
    assert settings.train.lr == 0.3
    assert settings.method.strength == 2.0
    assert settings.data.num_clients == 4
    assert settings.run.seed == 1
    assert settings.train.batch_size == TrainSettings().batch_size
    assert settings.run.experiment == "mine"


def test_the_method_setting_overrides_the_experiment(experiments: Path) -> None:
    write(experiments, "method: ditto\nlr: 0.3\nditto-strength: 2\n")
    settings = read_settings({"experiment": "mine", "method": "fedavg"})
    assert (settings.run.method, settings.train.lr) == ("fedavg", 0.3)
    with pytest.raises(SettingsError, match="ditto-strength in the run config is a setting of ditto"):
        read_settings({"experiment": "mine", "method": "fedavg", "ditto-strength": 3.0})


def test_an_experiment_may_set_one_key(experiments: Path) -> None:
    write(experiments, "lr: 0.3\n")
    assert read_settings({"experiment": "mine"}).train.lr == 0.3
    assert read_settings({"experiment": "mine", "lr": 0.4}).train.lr == 0.4


@pytest.mark.parametrize("name", ["mine", "mine.yaml", "path"])
def test_an_experiment_can_be_a_name_or_a_path(experiments: Path, name: str) -> None:
    path = write(experiments, "lr: 0.3\n")
    assert experiment_path(str(path) if name == "path" else name) == path


def test_a_missing_experiment_gets_a_suggestion_or_a_list(experiments: Path) -> None:
    write(experiments, "lr: 0.3\n", "cifar.yaml")
    with pytest.raises(SettingsError) as raised:
        read_settings({"experiment": "cifarr"})
    assert str(raised.value).startswith("experiment = 'cifarr': ")
    assert str(raised.value).endswith("does not exist; did you mean cifar?")
    with pytest.raises(SettingsError, match="does not exist; papers/ has only cifar"):
        read_settings({"experiment": "xyzzy"})


def test_a_missing_path_gets_no_similar_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`runs/nothing/config.yaml` resembles the name of a method, `confree`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError) as raised:
        read_settings({"experiment": "runs/nothing/config.yaml"})
    message = str(raised.value)
    assert message.startswith("experiment = 'runs/nothing/config.yaml': this file does not exist; ")
    assert str(tmp_path / "runs/nothing/config.yaml") in message and "did you mean" not in message
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text("settings: {}\nversions: {}\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"directory; did you mean runs/mine/config\.yaml"):
        read_settings({"experiment": "runs/mine"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: [0.3", "not valid YAML"),
        ("lr: 0.3\n\tseed: 1", "not valid YAML"),
        ("a: &a [*a, !!python/object/apply:os.system ['true']]", "not valid YAML"),
        ("", "must hold `key: value` lines"),
        ("- lr\n- 0.3", "must hold `key: value` lines"),
        ("lr", "must hold `key: value` lines"),
        ("1: 2", "must hold `key: value` lines"),
        ("learning_rat: 0.3", "learning_rat in"),
        ("num-client: 3", "did you mean num-clients"),
        ("lr: -1", "lr = -1.0 in"),
        ("lr:", "lr = None in"),
        ("lr: 'fast'", "lr = 'fast' in"),
        ("save-models: 'False'", "true or false"),
        ("fedprox-mu: {a: 1}", "fedprox-mu = {'a': 1} in"),
        ("method: fedavgg", "did you mean fedavg?"),
    ],
)
def test_experiment_errors_name_the_file(experiments: Path, text: str, message: str) -> None:
    path = write(experiments, text)
    with pytest.raises(SettingsError) as raised:
        read_settings({"experiment": "mine"})
    assert message in str(raised.value)
    assert str(path) in str(raised.value)


def test_run_config_errors_name_the_run_config(experiments: Path) -> None:
    write(experiments, "lr: 0.3\n")
    with pytest.raises(SettingsError, match="batch-size = 0 in the run config"):
        read_settings({"experiment": "mine", "batch-size": 0})


def test_a_binary_experiment_file_is_rejected(experiments: Path) -> None:
    (experiments / "mine.yaml").write_bytes(b"lr: \xff\xfe\n")
    with pytest.raises(SettingsError, match="not valid YAML"):
        read_settings({"experiment": "mine"})


def test_all_project_experiments_are_valid() -> None:
    for path in (ROOT / "papers").glob("*/settings/*.yaml"):
        assert read_settings({"experiment": str(path)}).run.experiment == str(path)


# -- errors that need the data, before the first round ---------------------------------------------------

BASE: dict[str, Any] = {
    "method": "fedavg",
    "model": "linear",
    "num-clients": 4,
    "num-server-rounds": 3,
    "partition": "iid",
    "max-samples": 60,
}


class FailingGrid(InProcessGrid):
    """Grid that fails when a message is sent."""

    def push_messages(self, messages: Any) -> Any:
        raise AssertionError("a message was sent before the settings were checked")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num-clients": 61}, ("num-clients = 61", "60 samples")),
        ({"max-samples": 5000}, ("max-samples = 5000", "1797")),
        ({"method": "feddrm", "num-clients": 1}, ("num-clients = 1", "at least 2")),
        (
            {"method": "ppfe", "model": "mlp", "ppfe-stage-rounds": "1,1", "ppfe-stages": 2},
            ("ppfe-stage-rounds = '1,1'", "num-server-rounds = 3"),
        ),
        (
            {"method": "ppfe", "model": "mlp", "ppfe-stage-rounds": "1,2,3", "ppfe-stages": 2},
            ("ppfe-stage-rounds", "2 numbers"),
        ),
        (
            {"method": "ppfe", "model": "mlp", "ppfe-stage-rounds": "3,0", "ppfe-stages": 2},
            ("ppfe-stage-rounds", "at least 1"),
        ),
        ({"method": "ppfe", "model": "mlp", "ppfe-stage-rounds": "a,b", "ppfe-stages": 2}, ("'a,b'", "whole numbers")),
        ({"method": "ppfe", "ppfe-ranks": "x", "ppfe-stages": 1}, ("ppfe-ranks", "'x'")),
        (
            {"method": "ppfe", "ppfe-stages": 3, "num-server-rounds": 1, "model": "mlp"},
            ("num-server-rounds = 1", "at least"),
        ),
        ({"dataset": "digit"}, ("dataset = 'digit'", "digits", "mnist")),
        ({"dataset": "no/such.npz"}, ("dataset = ", "no/such.npz")),
        ({"model": "fasttext"}, ("model = 'fasttext'", "linear", "mlp")),
        ({"model": "cnn"}, ("model = 'cnn'", "1×8×8")),
        ({"device": "gpu0"}, ("device = 'gpu0'", "auto, cpu, cuda")),
        ({"partition": "natural"}, ("partition = 'natural'", "digits has none")),
        ({"partition": "given", "max-samples": 0}, ("partition = 'given'",)),
        ({"partition": "file", "max-samples": 0}, ("partition-file = ''",)),
        ({"partition": "classes", "classes-per-client": 11}, ("classes-per-client = 11", "1 to 10")),
        ({"samples-per-client": 100}, ("samples-per-client = 100", "num-clients = 4")),
        ({"min-train-replies": 5}, ("min-train-replies = 5", "1 to 4")),
        ({"min-train-replies": 3, "fraction-train": 0.5}, ("min-train-replies = 3", "1 to 2")),
        ({"min-clients": 5}, ("min-clients = 5", "0 to num-clients = 4")),
        ({"classes": "a,b"}, ("classes = 'a,b'", "it needs dataset = sites")),
        ({"input-shape": "1x8x8"}, ("input-shape = '1x8x8'",)),
        ({"image-size": 9}, ("image-size = 9", "digits", "of kind image and size 8x8", "image files")),
        ({"text-length": 64}, ("text-length = 64", "it needs texts", "dataset = 'digits' has images")),
        ({"vocabulary": 100}, ("vocabulary = 100", "it needs texts", "dataset = 'digits' has images")),
        ({"sample-kind": "text"}, ("sample-kind = 'text'", "digits has samples of kind image")),
        ({"shift": "low"}, ("shift = 'low'", "RGB")),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_errors_are_raised_before_the_first_round(
    tmp_path: Path, changes: dict[str, Any], parts: tuple[str, ...]
) -> None:
    config = {**BASE, "output-dir": str(tmp_path / "runs"), "data-dir": str(tmp_path), **changes}
    with pytest.raises((SettingsError, DataError)) as raised:
        run(FailingGrid(config["num-clients"]), config)
    for part in parts:
        assert part in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_a_run_name_with_a_parent_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"run-name = '\.\./x'"):
        run(InProcessGrid(4), {**BASE, "output-dir": str(tmp_path / "runs"), "run-name": "../x"})


def test_a_file_as_output_dir_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(SettingsError, match="output-dir = "):
        run(InProcessGrid(4), {**BASE, "output-dir": str(tmp_path / "runs")})


def test_data_sets_are_found_in_data_dir(tmp_path: Path) -> None:
    (tmp_path / "data" / "sub").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("mine.npz", "sub/mine.npz"):
        np.savez(tmp_path / "data" / name, x_train=rng.standard_normal((40, 3)), y_train=np.arange(40) % 2)
        result = run(
            InProcessGrid(4),
            {
                **BASE,
                "dataset": name,
                "max-samples": 0,
                "data-dir": str(tmp_path / "data"),
                "output-dir": str(tmp_path / "runs"),
                "num-server-rounds": 1,
            },
        )
        assert result.summary["dataset"] == str(tmp_path / "data" / name)
