"""Settings that have an effect only under a condition: the conditions, and errors for settings without effect."""

from pathlib import Path
from typing import Any

import pytest

from posy.commands.table import Cell, plan_of
from posy.commands.tuning import space_of
from posy.settings import Scalar, Search, Setting, SettingsError, check_conditions, parse_condition, quoted
from posy.strategies.registry import (
    declared,
    effective,
    from_json,
    normalised,
    read_settings,
    unmet_conditions,
    with_experiment,
    without_effect,
)
from posy.yaml12 import dump

COMMAND_LINE = "the command line"

# A setting, a value, settings under which it has no effect, and settings under which it has an effect.
WITHOUT_EFFECT: list[tuple[str, Scalar, dict[str, Scalar], dict[str, Scalar]]] = [
    ("protocol", "flamby", {"dataset": "digits"}, {"dataset": "heart-disease"}),
    ("scaling", "client", {"dataset": "sites"}, {"dataset": "heart-disease"}),
    *(
        (key, value, {"dataset": "heart-disease", "protocol": "flamby"}, {"dataset": "heart-disease"})
        for key, value in (("missing", "impute"), ("missing", "refuse"), ("categories", "cp"), ("min-category-rows", 3))
    ),
    (
        "stratify",
        False,
        {"dataset": "heart-disease", "protocol": "flamby"},
        {"dataset": "heart-disease", "protocol": "flamby", "validation-fraction": 0.2},
    ),
    ("dp-clip", 1.0, {}, {"dp": "local"}),
    ("dp-epsilon", 0.5, {}, {"dp": "central"}),
    ("dp-delta", 1e-6, {}, {"dp": "sample"}),
    ("dp-clip-quantile", 0.5, {"dp": "local"}, {"dp": "central"}),
    ("dp-clip-quantile", 0.5, {"dp": "central", "secure-aggregation": True}, {"dp": "central"}),
    ("dp-scores", "exact", {}, {"dp": "local"}),
    ("client-weights", "uniform", {"robust": "median", "method": "fedavg"}, {"method": "fedavg"}),
    ("max-client-weight", 0.3, {"robust": "krum", "method": "fedavg"}, {"robust": "mean", "method": "fedavg"}),
    ("max-norm-ratio", 2.0, {"secure-aggregation": True, "method": "fedavg"}, {"method": "fedavg"}),
    ("trim-fraction", 0.1, {"method": "fedavg"}, {"robust": "trimmed-mean", "method": "fedavg"}),
    ("max-attackers", 2, {"robust": "median", "method": "fedavg"}, {"robust": "krum", "method": "fedavg"}),
    ("krum-clients", 3, {"robust": "krum", "method": "fedavg"}, {"robust": "multi-krum", "method": "fedavg"}),
    ("lr-decay", 0.5, {}, {"lr-schedule": "exponential"}),
    ("lr-decay", 0.5, {"lr-schedule": "cosine"}, {"lr-schedule": "step"}),
    ("lr-step", 3, {"lr-schedule": "exponential"}, {"lr-schedule": "step"}),
    ("momentum", 0.9, {"optimizer": "adamw"}, {}),
    ("adam-beta1", 0.8, {}, {"optimizer": "adam"}),
    ("adam-beta2", 0.9, {}, {"optimizer": "adamw"}),
    ("adam-epsilon", 1e-3, {}, {"optimizer": "adam"}),
    ("local-epochs", 3, {"local-steps": 4}, {}),
    ("patience", 2, {}, {"validation-fraction": 0.2}),
    ("full-last-round", True, {}, {"fraction-train": 0.5}),
    ("weights-sha256", "0" * 64, {}, {"weights": "w.safetensors"}),
    ("weights-sha256", "0" * 64, {"weights": "torchvision", "model": "torchvision:resnet18"}, {"weights": "w"}),
    ("secure-threshold", 0.7, {}, {"method": "fedavg", "secure-aggregation": True}),
    ("secure-neighbours", 3, {}, {"method": "fedavg", "secure-aggregation": True}),
    ("secure-range", 2.0, {}, {"method": "fedavg", "secure-aggregation": True}),
    ("dirichlet-alpha", 0.1, {"partition": "iid"}, {}),
    ("dirichlet-alpha", 0.1, {"dataset": "sites"}, {}),
    ("dirichlet-balanced", True, {"partition": "shards"}, {}),
    ("classes-per-client", 3, {}, {"partition": "pathological"}),
    ("shards-per-client", 3, {"partition": "classes"}, {"partition": "shards"}),
    ("samples-per-client", 30, {}, {"partition": "iid"}),
    ("partition-file", "/p.json", {}, {"partition": "file"}),
    ("test-set", "pooled", {}, {"dataset": "mnist"}),
    ("test-set", "pooled", {"dataset": "sent140"}, {"dataset": "femnist"}),
    ("test-set", "pooled", {"dataset": "sites"}, {"dataset": "mnist"}),
    ("train-samples", 50, {"dataset": "sites"}, {}),
    ("test-fraction", 0.5, {"dataset": "sites"}, {}),
    ("test-fraction", 0.5, {"folds": 2, "fold": 1}, {}),
    ("stratify", False, {"dataset": "sites"}, {}),
    ("split-seed", 3, {"dataset": "sites"}, {}),
    ("split-column", "id", {}, {"partition": "natural", "dataset": "a.csv"}),
    ("split-column", "id", {"dataset": "sites"}, {"partition": "file", "dataset": "a.csv"}),
    ("folds", 5, {"partition": "given"}, {"dataset": "sites"}),
    ("fold", 2, {}, {"folds": 2}),
    ("part-of", "cv", {"folds": 2, "fold": 1}, {"folds": 2, "fold": 1, "dataset": "sites"}),
    ("part-of", "cv", {"dataset": "sites"}, {"folds": 2, "fold": 1, "dataset": "sites"}),
    ("run-name", "a", {"folds": 2, "fold": 1, "dataset": "sites", "part-of": "cv"}, {"dataset": "sites"}),
    ("test-fraction", 0.5, {"partition": "given"}, {"partition": "natural"}),
    ("partition", "iid", {"dataset": "sites"}, {}),
    ("max-samples", 100, {"dataset": "sites"}, {}),
    ("shift", "low", {"dataset": "sites"}, {}),
    ("image-size", 32, {"dataset": "sites"}, {}),
    ("text-length", 20, {"dataset": "sites"}, {"dataset": "agnews"}),
    ("target-mean", "1", {"dataset": "sites"}, {"dataset": "sites", "task": "regression"}),
    ("target-std", "2", {"dataset": "sites"}, {"dataset": "sites", "task": "regression"}),
    ("huber-delta", 2.0, {"task": "regression"}, {"task": "regression", "loss": "huber"}),
    ("input-shape", "20", {}, {"dataset": "sites"}),
    ("classes", "a,b", {}, {"dataset": "sites"}),
    ("feature-mean", "1", {}, {"dataset": "sites"}),
    ("feature-std", "2", {}, {"dataset": "sites"}),
    ("feature-names", "a,b", {}, {"dataset": "sites"}),
    ("encoder", "none", {}, {"dataset": "sites"}),
    ("min-category-rows", 5, {"dataset": "sites"}, {"dataset": "heart-disease"}),
    ("share-class-counts", True, {}, {"dataset": "sites"}),
]


@pytest.mark.parametrize(("key", "value", "without", "with_effect"), WITHOUT_EFFECT)
def test_a_setting_without_an_effect_is_refused(
    key: str, value: Scalar, without: dict[str, Scalar], with_effect: dict[str, Scalar]
) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({**without, key: value}, COMMAND_LINE)
    message = str(raised.value)
    assert message.startswith(f"{key} = {quoted(value)} on {COMMAND_LINE} has no effect")
    assert declared()[key].needs in message
    assert message.endswith(f"remove {key}")
    assert read_settings({**with_effect, key: value}, COMMAND_LINE).as_config()[key] == value


@pytest.mark.parametrize("key", sorted({key for key, *_ in WITHOUT_EFFECT}))
def test_a_default_without_an_effect_is_accepted(key: str) -> None:
    """A file or table may repeat a default."""
    default = declared()[key].default
    without = next(without for other, _, without, _ in WITHOUT_EFFECT if other == key)
    assert read_settings({**without, key: default}).as_config()[key] == default


def test_the_error_names_the_unmet_condition() -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({"dp-epsilon": 0.5}, COMMAND_LINE)
    for part in ("dp-epsilon = 0.5", "command line", "no effect", "dp != off, but dp = 'off'", "remove dp-epsilon"):
        assert part in str(raised.value)


def test_errors_print_booleans_as_users_type_them() -> None:
    with pytest.raises(SettingsError, match=r"secure-aggregation = true, but secure-aggregation = false;"):
        read_settings({"secure-threshold": 0.7}, COMMAND_LINE)


@pytest.mark.parametrize("method", ["fedavg-ft", "fedprox-ft", "fedsam-ft", "fedbabu"])
def test_fine_tuning_lengths_exclude_each_other(method: str) -> None:
    """The methods inherit the settings, and each condition uses the method's own keys."""
    epochs, steps, rounds = f"{method}-epochs", f"{method}-steps", f"{method}-rounds"
    for idle, other in ((epochs, steps), (epochs, rounds), (steps, rounds)):
        match = f"{idle} = 3 on {COMMAND_LINE} has no effect.*{other} = 0.*{other} = 2;"
        with pytest.raises(SettingsError, match=match):
            read_settings({"method": method, idle: 3, other: 2}, COMMAND_LINE)
    assert read_settings({"method": method, epochs: 3}, COMMAND_LINE).method.epochs == 3
    assert read_settings({"method": method, steps: 3}, COMMAND_LINE).method.steps == 3


@pytest.mark.parametrize(
    ("idle", "settings"),
    [
        ({"cwfedavg-wdr-lambda": 5.0}, {"method": "cwfedavg", "cwfedavg-wdr": False}),
        ({"ppfe-ranks": "9,8"}, {"method": "ppfe", "ppfe-reduction": "sparse"}),
        ({"ppfe-ranks": "9,8"}, {"method": "ppfe", "ppfe-reduction": "none"}),
        ({"ppfe-beta": "adaboost"}, {"method": "ppfe", "ppfe-reweighting": False, "ppfe-ensemble": False}),
        ({"ppfe-loss": "probability"}, {"method": "ppfe", "ppfe-reweighting": False, "ppfe-ensemble": False}),
        ({"cfl-eps2": 1.0}, {"method": "cfl", "cfl-eps1": 0.0}),
        ({"cfl-eps2": 1.0}, {"method": "cfl", "cfl-gamma-max": 1.0}),
        ({"cfl-gamma-max": 0.5}, {"method": "cfl", "cfl-eps1": 0.0}),
        ({"fedfomo-epsilon-decay": 0.1}, {"method": "fedfomo", "fedfomo-epsilon": 0.0}),
    ],
)
def test_a_method_setting_without_an_effect_is_refused(idle: dict[str, Any], settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="has no effect"):
        read_settings({**settings, **idle}, COMMAND_LINE)
    read_settings({"method": settings["method"], **idle}, COMMAND_LINE)


def test_every_shared_condition_has_a_test_case() -> None:
    assert {key for key, item in declared([]).items() if item.needs} == {key for key, *_ in WITHOUT_EFFECT}


# -- conditions ------------------------------------------------------------------------------------------


def test_every_condition_is_valid() -> None:
    check_conditions(declared(), declared())


NUMBER = Setting(1, "a number", minimum=0, maximum=9)
SETTINGS = {
    "number": NUMBER,
    "word": Setting("a", "a word", choices=("a", "b")),
    "flag": Setting(False, "a flag"),
    "rate": Setting("off", "a rate", number_or="off", minimum=0),
    "path": Setting("", "a path"),
}


@pytest.mark.parametrize(
    "condition",
    ["other = 1", "word = c", "word > a", "flag = True", "flag > 0", "number = a", "number > 10", "number = 0.5"],
)
def test_an_invalid_condition_is_an_error(condition: str) -> None:
    with pytest.raises(ValueError, match=f"mine needs {condition}: "):
        check_conditions({"mine": Setting(0, "mine", needs=condition)}, SETTINGS)


@pytest.mark.parametrize("condition", ["number", "number 3", "number >", "number > 3 or flag", "number >= 3"])
def test_a_malformed_condition_is_an_error(condition: str) -> None:
    with pytest.raises(ValueError, match="is not a comparison"):
        parse_condition(condition)


@pytest.mark.parametrize(
    ("condition", "values", "holds"),
    [
        ("number > 3", {"number": 4}, True),
        ("number > 3", {"number": 3}, False),
        ("number < 3", {"number": 2}, True),
        ("number < 3", {"number": 3}, False),
        ("number = 3", {"number": 3}, True),
        ("number != 3", {"number": 3}, False),
        ("number != 3", {"number": 4}, True),
        ("word = a | b", {"word": "b"}, True),
        ("word = a | b", {"word": "c"}, False),
        ("word != a | b", {"word": "b"}, False),
        ("word != a | b", {"word": "c"}, True),
        ("flag = true", {"flag": True}, True),
        ("flag = true", {"flag": False}, False),
        ("flag = false", {"flag": False}, True),
        ("rate = off", {"rate": "off"}, True),
        ("rate = off", {"rate": 1.0}, False),
        ("rate > 0", {"rate": "off"}, False),
        ("rate > 0", {"rate": 0.5}, True),
        ('path != ""', {"path": ""}, False),
        ('path != ""', {"path": "x"}, True),
        ("word = a and number > 3", {"word": "a", "number": 4}, True),
        ("word = a and number > 3", {"word": "a", "number": 3}, False),
        ("word = a and number > 3", {"word": "b", "number": 4}, False),
        ("word = a or number > 3", {"word": "b", "number": 4}, True),
        ("word = a or number > 3", {"word": "a", "number": 3}, True),
        ("word = a or number > 3", {"word": "b", "number": 3}, False),
        ("flag = true or word = a and number > 3", {"flag": False, "word": "a", "number": 3}, False),
        ("flag = true or word = a and number > 3", {"flag": False, "word": "a", "number": 4}, True),
        ("flag = true or word = a and number > 3", {"flag": True, "word": "b", "number": 3}, True),
    ],
)
def test_conditions_are_evaluated(condition: str, values: dict[str, Scalar], holds: bool) -> None:
    check_conditions({"mine": Setting(0, "mine", needs=condition)}, SETTINGS)
    assert (Setting(0, "mine", needs=condition).unmet(values) == "") == holds


def test_unmet_names_the_failed_comparisons() -> None:
    setting = Setting(0, "mine", needs="word = a and number > 3")
    assert setting.unmet({"word": "a", "number": 3}) == "number = 3"
    assert setting.unmet({"word": "b", "number": 3}) == "word = 'b' and number = 3"
    either = Setting(0, "mine", needs="word = a or number > 3 and word != b")
    assert either.unmet({"word": "b", "number": 3}) == "word = 'b' and number = 3"
    assert either.unmet({"word": "a", "number": 3}) == ""


# -- limits ----------------------------------------------------------------------------------------------

# A setting, a value above its limit, the other settings, the limit as a number, and as text.
ABOVE_LIMIT: list[tuple[str, Scalar, dict[str, Scalar], int, str]] = [
    ("average-rounds", 6, {"method": "fedavg", "num-server-rounds": 5}, 5, "num-server-rounds"),
    ("secure-neighbours", 8, {"method": "fedavg", "secure-aggregation": True, "num-clients": 7}, 6, "num-clients - 1"),
    ("fedfomo-models", 10, {"method": "fedfomo"}, 9, "num-clients - 1"),
    ("fold", 6, {"folds": 5}, 5, "folds"),
]


@pytest.mark.parametrize(("key", "value", "settings", "largest", "limit"), ABOVE_LIMIT)
def test_a_value_above_its_limit_is_refused(
    key: str, value: Scalar, settings: dict[str, Scalar], largest: int, limit: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        read_settings({**settings, key: value}, COMMAND_LINE)
    assert str(raised.value).startswith(f"{key} = {value} on {COMMAND_LINE}")
    for part in (f"at most {limit}, which is {largest};", f"lower {key}", f"raise {limit.removesuffix(' - 1')}"):
        assert part in str(raised.value)
    assert read_settings({**settings, key: largest}, COMMAND_LINE).as_config()[key] == largest


def test_every_limit_has_a_test_case() -> None:
    assert {key for key, item in declared().items() if item.limit} == {key for key, *_ in ABOVE_LIMIT}


def test_a_default_above_its_limit_is_accepted() -> None:
    settings = {"method": "fedfomo", "num-clients": 3}
    assert read_settings(settings).method.models == read_settings({**settings, "fedfomo-models": 4}).method.models == 4


def test_a_limit_must_name_another_setting() -> None:
    with pytest.raises(ValueError, match=r"mine .* other - 1: other is not a setting"):
        check_conditions({"mine": Setting(0, "mine", limit="other - 1")}, SETTINGS)
    with pytest.raises(ValueError, match="limit 'number / 2' is not of the form `num-clients - 1`"):
        check_conditions({"mine": Setting(0, "mine", limit="number / 2")}, SETTINGS)
    check_conditions({"mine": Setting(0, "mine", limit="number - 2")}, SETTINGS)
    assert Setting(0, "mine", limit="number - 2").largest({"number": 5}) == 3
    assert Setting(0, "mine", minimum=1, limit="number - 2").largest({"number": 2}) == 1


def test_an_override_lowers_a_file_value_to_the_new_limit(tmp_path: Path) -> None:
    file = write(tmp_path, method="fedavg", num_server_rounds=50, average_rounds=10)
    assert read_settings({"experiment": file, "num-server-rounds": 4}).run.average_rounds == 4
    assert read_settings({"experiment": file}).run.average_rounds == 10
    with pytest.raises(SettingsError, match=r"average-rounds = 10 on the command line.*at most"):
        read_settings({"experiment": file, "num-server-rounds": 4, "average-rounds": 10}, COMMAND_LINE)
    invalid_file = write(tmp_path, method="fedavg", num_server_rounds=4, average_rounds=10)
    with pytest.raises(SettingsError, match=f"average-rounds = 10 in {invalid_file}.*at most num-server-rounds"):
        read_settings({"experiment": invalid_file}, COMMAND_LINE)


def test_a_table_lowers_values_only_under_an_override() -> None:
    content = table(settings={"num-server-rounds": 50, "average-rounds": 10})
    assert cells(content, {"num-server-rounds": 4})["A"].config["average-rounds"] == 4
    with pytest.raises(SettingsError, match=r"average-rounds = 10 in t.yaml, A.*at most"):
        cells(table(settings={"num-server-rounds": 4, "average-rounds": 10}))


def test_a_run_above_a_limit_fits_the_cell_at_the_limit() -> None:
    """Earlier versions applied the limit silently."""
    row = {"name": "A", "settings": {"method": "fedfomo", "fedfomo-models": 9}}
    cell = cells(table(runs=[row]))["A"]
    recorded = read_settings(cell.config).as_config()
    assert cell.fits(recorded | {"fedfomo-models": 10})
    assert not cell.fits(recorded | {"fedfomo-models": 8})


def test_an_earlier_value_without_an_effect_fits_its_cell() -> None:
    """A run from before `test-set` counts as pooled. Digits has no test set to pool."""
    cell = cells(table())["A"]
    recorded = read_settings(cell.config).as_config()
    del recorded["test-set"]
    assert cell.fits(recorded) and cell.fits(recorded | {"test-set": "pooled"})
    assert not cell.fits(recorded | {"dataset": "mnist"})
    mnist = cells(table(settings={"dataset": "mnist"}))["A"]
    assert not mnist.fits(recorded | {"dataset": "mnist"})
    assert mnist.fits(recorded | {"dataset": "mnist", "test-set": "supplied"})


def test_posy_tune_searches_up_to_the_limit() -> None:
    assert space_of("fedfomo", {"num-clients": 5})["fedfomo-models"].high == 4
    assert space_of("fedfomo", {"num-clients": 50})["fedfomo-models"].high == 10


METHOD = """
from posy.client_app.base import PersonalClient
from posy.strategies.base import PersonalisedStrategy
from posy.settings import setting
from posy.strategies.settings import MethodSettings


class MineSettings(MethodSettings):
    models: int = setting(1, "number of models", minimum=1)
    mu: float = setting(0.5, "weight of the second model", needs="{needs}", above=0)
"""


def test_custom_methods_can_have_conditions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(METHOD.format(needs="mine-models > 1"), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"mine-mu = 0.2 .*mine-models > 1, but mine-models = 1"):
        read_settings({"method": "mine:Mine", "mine-mu": 0.2})
    assert read_settings({"method": "mine:Mine", "mine-mu": 0.2, "mine-models": 2}).method.mu == 0.2
    Path("other.py").write_text(METHOD.format(needs="model > 1").replace("Mine", "Other"), encoding="utf-8")
    with pytest.raises(SettingsError, match=r"method = .*other-mu needs model > 1.*correct `needs`"):
        read_settings({"method": "other:Other"})


# -- files -----------------------------------------------------------------------------------------------


def write(folder: Path, **settings: Any) -> str:
    path = folder / "mine.yaml"
    path.write_text(dump({key.replace("_", "-"): value for key, value in settings.items()}), encoding="utf-8")
    return str(path)


def test_a_file_with_a_setting_without_an_effect_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, method="fedavg", dp_epsilon=0.5)
    with pytest.raises(SettingsError) as raised:
        read_settings({"experiment": file}, COMMAND_LINE)
    assert f"dp-epsilon = 0.5 in {file} has no effect" in str(raised.value)
    settings = read_settings({"experiment": file, "dp": "local"}, COMMAND_LINE)
    assert (settings.train.dp, settings.train.dp_epsilon) == ("local", 0.5)


def test_an_override_drops_file_settings_that_lose_their_effect(tmp_path: Path) -> None:
    file = write(tmp_path, method="fedavg", optimizer="adam", adam_beta1=0.8, partition="classes", classes_per_client=3)
    override = {"experiment": file, "optimizer": "sgd", "partition": "iid"}
    settings = read_settings(override, COMMAND_LINE)
    assert (settings.train.adam_beta1, settings.data.classes_per_client) == (0.9, 2)
    assert "adam-beta1" not in with_experiment(override, COMMAND_LINE)
    with pytest.raises(SettingsError, match=r"adam-beta1 = 0.7 on the command line has no effect"):
        read_settings(override | {"adam-beta1": 0.7}, COMMAND_LINE)


def test_conditions_use_the_default_of_a_setting_without_an_effect() -> None:
    config = {"dataset": "sites", "partition": "given", "test-fraction": 0.5}
    assert effective(config) == {"dataset": "sites"}
    assert normalised(config) == {
        "dataset": "sites", "partition": "dirichlet", "stratify": True, "test-fraction": 0.25, "test-set": "supplied",
    }  # fmt: skip


def test_a_config_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """The record of an earlier version may hold a setting without an effect. The repeated run omits it."""
    recorded = read_settings({"method": "fedavg"}).as_config() | {"dp-epsilon": 0.5}
    file = tmp_path / "config.yaml"
    file.write_text(dump({"settings": recorded, "versions": {}}), encoding="utf-8")
    assert read_settings({"experiment": str(file)}).train.dp_epsilon == 1.0
    assert read_settings({"experiment": str(file), "dp": "local"}).train.dp_epsilon == 0.5
    assert read_settings({}, "the run config", recorded).train.dp_epsilon == 0.5  # for a resumed run, or a stored model


def test_stored_runs_may_contain_removed_settings() -> None:
    recorded = read_settings({"method": "fedavg"}).as_config() | {"dp-sensitivity": 0.0}
    assert "dp-sensitivity" not in normalised(recorded)
    with pytest.raises(SettingsError, match=r"dp-sensitivity on the command line is not a setting"):
        read_settings({"dp": "local", "dp-clip": 1.0, "dp-sensitivity": 1e-9}, COMMAND_LINE)


def test_settings_round_trip_through_json() -> None:
    settings = read_settings({"method": "fedavg", "optimizer": "adam", "adam-beta1": 0.8})
    assert from_json(settings.to_json()) == settings


# -- tables ----------------------------------------------------------------------------------------------

FILE = Path("t.yaml")


def table(**parts: Any) -> dict[str, Any]:
    return {"seeds": [0], "runs": [{"name": "A", "settings": {"method": "fedavg"}}, {"name": "B"}], **parts}


def cells(content: dict[str, Any], overrides: dict[str, Scalar] | None = None) -> dict[str, Cell]:
    return {cell.place: cell for cell in plan_of(content, FILE, overrides or {}).cells}


def test_table_settings_apply_only_where_they_have_an_effect() -> None:
    configs = cells(
        table(
            settings={"adam-beta1": 0.8, "dirichlet-alpha": 0.1},
            runs=[
                {"name": "A", "settings": {"method": "fedavg", "optimizer": "adam"}},
                {"name": "B", "settings": {"method": "fedavg"}},
            ],
            variants=[{"name": "dir"}, {"name": "iid", "settings": {"partition": "iid"}}],
        )
    )
    assert configs["dir / A"].config["adam-beta1"] == configs["iid / A"].config["adam-beta1"] == 0.8
    assert "adam-beta1" not in configs["dir / B"].config
    assert configs["dir / A"].config["dirichlet-alpha"] == configs["dir / B"].config["dirichlet-alpha"] == 0.1
    assert "dirichlet-alpha" not in configs["iid / A"].config


@pytest.mark.parametrize(
    ("parts", "source"),
    [
        ({"settings": {"dp-epsilon": 0.5}}, "the settings of t.yaml"),
        ({"variants": [{"name": "v", "settings": {"dp-epsilon": 0.5}}]}, "the settings of variant v in t.yaml"),
        ({"runs": [{"name": "A", "settings": {"dp-epsilon": 0.5}}]}, "the settings of A in t.yaml"),
        (
            {"variants": [{"name": "v"}], "runs": [{"name": "A", "variants": {"v": {"dp-epsilon": 0.5}}}]},
            "t.yaml, v / A",
        ),
    ],
)
def test_a_setting_without_an_effect_in_any_cell_is_refused(parts: dict[str, Any], source: str) -> None:
    with pytest.raises(SettingsError) as raised:
        plan_of(table(**parts), FILE, {})
    for part in (f"dp-epsilon = 0.5 in {source} has no effect", "dp != off, but dp = 'off'", "remove dp-epsilon"):
        assert part in str(raised.value)
    assert plan_of(table(**parts), FILE, {"dp": "local"}).cells[0].config["dp-epsilon"] == 0.5


def test_the_command_line_may_disable_table_settings() -> None:
    content = table(settings={"optimizer": "adam", "adam-beta1": 0.8})
    assert "adam-beta1" not in cells(content, {"optimizer": "sgd"})["A"].config
    with pytest.raises(SettingsError, match=r"adam-beta2 = 0.9 on the command line has no effect"):
        cells(content, {"optimizer": "sgd", "adam-beta2": 0.9})
    one_row = table(runs=[{"name": "A"}, {"name": "B", "settings": {"optimizer": "adam"}}])
    assert cells(one_row, {"adam-beta2": 0.9})["B"].config["adam-beta2"] == 0.9


def test_a_run_with_a_setting_without_an_effect_fits_its_cell() -> None:
    """The record of an earlier version's run holds settings that a cell now omits."""
    cell = cells(
        table(
            settings={"dirichlet-alpha": 0.1}, variants=[{"name": "d"}, {"name": "i", "settings": {"partition": "iid"}}]
        )
    )["i / A"]
    recorded = read_settings(cell.config).as_config() | {"dirichlet-alpha": 0.1}
    assert cell.fits(recorded)
    assert normalised(recorded)["dirichlet-alpha"] == 0.5
    assert not cell.fits(recorded | {"partition": "dirichlet"})


@pytest.mark.parametrize(("fraction", "fits"), [(1.0, True), (0.5, False)])
def test_a_run_older_than_a_setting_fits_if_the_setting_has_no_effect(fraction: float, fits: bool) -> None:
    """With all clients in each round, pfedme-clients has no effect, so runs with its earlier default remain valid."""
    rows = [{"name": "A", "settings": {"method": "pfedme"}}]
    (cell,) = cells(table(settings={"fraction-train": fraction}, runs=rows)).values()
    recorded = read_settings(cell.config).as_config()
    del recorded["pfedme-clients"]
    assert cell.fits(recorded) is fits


def test_settings_without_an_effect_are_not_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = declared(["fedavg"]) | {
        "lr-decay": Setting(0.9, "x", needs="lr-schedule = step", above=0, search=Search(0.1, 0.9))
    }
    monkeypatch.setattr("posy.commands.tuning.declared", lambda methods: settings)
    assert "lr-decay" not in space_of("fedavg", {})
    assert "lr-decay" in space_of("fedavg", {"lr-schedule": "step"})
    assert "lr-decay" in unmet_conditions({"method": "fedavg"})
    assert "lr-decay" not in without_effect({"method": "fedavg"})
