"""Conflict errors name the source of each setting, and overrides drop incompatible settings of a file."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from posy.commands.cli import main
from posy.server_app.app import run
from posy.server_app.in_process import InProcessGrid
from posy.settings import COMMAND_LINE, SettingsError, with_sources
from posy.strategies.registry import merge_experiment, read_settings

TEXTS = {"dataset": "agnews", "text-length": 200, "vocabulary": 32000, "model": "textcnn", "lr": 0.01}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in a fresh working directory."""
    monkeypatch.chdir(tmp_path)


def write_experiment(tmp_path: Path, settings: dict[str, Any]) -> str:
    """Write a file of settings and return its path."""
    file = tmp_path / "mine.yaml"
    file.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()), encoding="utf-8")
    return str(file)


# -- the message -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "min-clients = 11: it must be 0 to num-clients = 10",
            "min-clients = 11 on the command line: it must be 0 to num-clients = 10 in my.yaml",
        ),
        ("lr = 0.5 in my.yaml: it must be lower", "lr = 0.5 in my.yaml: it must be lower"),
        ("lr = 0.55: no quotation of 0.5", "lr = 0.55: no quotation of 0.5 (lr is set on the command line)"),
        ("num-clients = 100 and 10", "num-clients = 100 and 10 (num-clients is set in my.yaml)"),
        ("max-lr = 0.5 is another key", "max-lr = 0.5 is another key"),
        ("lr: it must be less than 1", "lr: it must be less than 1 (lr is set on the command line)"),
        (
            "partition = 'iid' cannot be combined with it; use partition = 'classes'",
            "partition = 'iid' in my.yaml cannot be combined with it; use partition = 'classes'",
        ),
        ("seed = 3 has its default", "seed = 3 has its default"),
        ("frozen = '' is empty", "frozen = '' on the command line is empty"),
    ],
)
def test_messages_name_the_source_of_each_setting(message: str, expected: str) -> None:
    values = {"min-clients": 11, "num-clients": 10, "lr": 0.5, "partition": "iid", "frozen": "", "seed": 3}
    sources = dict.fromkeys(("min-clients", "lr", "frozen"), COMMAND_LINE)
    sources |= dict.fromkeys(("num-clients", "partition"), "my.yaml")
    assert with_sources(message, values, sources) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["min-clients=11"], "min-clients = 11 on the command line: .* 0 to num-clients = 10"),
        (["min-train-replies=11"], "min-train-replies = 11 on the command line: 10 clients train"),
        (["frozen=nope"], "frozen = 'nope' on the command line: 'nope' is not a layer"),
        (["model=textcnn"], "model = 'textcnn' on the command line: for image data"),
        (["device=cuda:99"], "device = 'cuda:99' on the command line: this machine has"),
        (["partition=classes", "classes-per-client=20"], "classes-per-client = 20 on the command line: digits has 10"),
        (["run-name=a/b"], "run-name = 'a/b' on the command line: .* folder"),
        (["output-dir=/proc/x"], "output-dir = '/proc/x' on the command line: .* writable"),
        (["method=ppfe", "ppfe-stage-rounds=1,1"], r"ppfe-stage-rounds = '1,1' on the command line"),
        (["weights=w.safetensors"], r"weights = '/.*/w.safetensors' on the command line: .* does not exist"),
        (["resume=x"], "resume = 'x' on the command line: .* does not contain a run"),
        (
            ["optimizer-state=kept", "optimizer=sgd"],
            "optimizer-state = 'kept' on the command line cannot be combined with optimizer = 'sgd' and",
        ),
        (
            ["method=fedacs", "client-weights=uniform"],
            "client-weights = 'uniform' on the command line with method = 'fed",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_command_line_conflicts_name_the_command_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *words]) == 2
    error = capsys.readouterr().err
    assert re.match(f"posy: {message}", error), error
    assert error.count("\n") == 1


def test_a_conflict_with_a_file_names_the_file(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"num-clients": 5})
    with pytest.raises(SettingsError) as raised:
        read_settings({"experiment": file, "min-clients": 7}, COMMAND_LINE)
    assert str(raised.value).startswith("min-clients = 7 on the command line: it must be 0 to ")
    assert str(raised.value).endswith(f"num-clients = 5 in {file}")


def test_data_errors_name_the_settings_file(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"partition": "classes", "classes-per-client": 11})
    with pytest.raises(SettingsError, match=f"classes-per-client = 11 in {file}: digits has 10 classes"):
        run(InProcessGrid(10), {"experiment": file}, COMMAND_LINE)


# -- settings of a file that an override makes ineffective ----------------------------------------------------


def test_a_data_set_override_drops_incompatible_file_settings(tmp_path: Path) -> None:
    config = {"experiment": write_experiment(tmp_path, TEXTS), "dataset": "digits"}
    settings = read_settings(config, COMMAND_LINE)
    assert (settings.data.text_length, settings.data.vocabulary, settings.train.model) == (0, 20_000, "auto")
    assert settings.train.lr == 0.01
    notice = merge_experiment(config, COMMAND_LINE).notice
    assert notice.startswith(f"Posy ignores settings in {config['experiment']}")
    assert "model = 'textcnn', text-length = 200, vocabulary = 32000 (" in notice and "dataset = 'digits'" in notice


def test_a_run_logs_one_notice_about_dropped_settings(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    config = {
        "experiment": write_experiment(tmp_path, TEXTS),
        "dataset": "digits",
        "num-clients": 2,
        "num-server-rounds": 1,
    }
    run(InProcessGrid(2), config, COMMAND_LINE)
    records = {id(record): record.getMessage() for record in warnings.records}  # the fixture lists a record twice
    assert len([message for message in records.values() if message.startswith("Posy ignores settings in")]) == 1


def test_a_command_line_setting_without_effect_is_an_error(tmp_path: Path) -> None:
    config = {"experiment": write_experiment(tmp_path, TEXTS), "dataset": "digits", "text-length": 100}
    with pytest.raises(SettingsError, match=r"^text-length = 100"):
        read_settings(config, COMMAND_LINE)


def test_a_file_setting_without_effect_is_an_error(tmp_path: Path) -> None:
    file = write_experiment(tmp_path, {"dataset": "digits", "text-length": 100})
    with pytest.raises(SettingsError, match=f"^text-length = 100 in {file} has no effect"):
        read_settings({"experiment": file, "lr": 0.1}, COMMAND_LINE)
    file = write_experiment(tmp_path, {"dataset": "digits", "model": "textcnn"})
    assert read_settings({"experiment": file, "lr": 0.1}, COMMAND_LINE).train.model == "textcnn"


@pytest.mark.parametrize(
    ("key", "value", "dataset"),
    [
        ("text-length", 50, "mnist"),
        ("vocabulary", 50, "cifar10"),
        ("label-column", "y", "digits"),
        ("input-columns", "x", "agnews"),
        ("group-column", "g", "femnist"),
        ("shift", "low", "agnews"),
        ("augment", "flip", "sent140"),
        ("transforms", "RandomInvert", "agnews"),
        ("image-size", 32, "agnews"),
    ],
)
def test_settings_for_other_sample_kinds_fail_before_loading(key: str, value: Any, dataset: str) -> None:
    with pytest.raises(SettingsError, match=f"^{key} = .* on the command line has no effect: it needs "):
        read_settings({key: value, "dataset": dataset}, COMMAND_LINE)


def test_data_of_unknown_kind_is_checked_after_loading(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=np.ones((20, 3), np.float32), y_train=np.arange(20) % 2)
    config = {"experiment": write_experiment(tmp_path, TEXTS), "dataset": str(tmp_path / "a.npz"), "model": "linear"}
    message = f"^text-length = 200 in {config['experiment']} cannot be combined with .* text-length = 0"
    with pytest.raises(SettingsError, match=message):
        run(InProcessGrid(10), config, COMMAND_LINE)


# -- similar names -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["settings", "nope"], "nope on the command line is not a method; did you mean ppfe? `posy methods` lists"),
        (["settings", "fedrepp"], "fedrepp on the command line is not a method; did you mean fedrep or "),
        (["settings", "lr"], "lr on the command line is a setting, not a method"),
        (["run", "transforms=RandomRot"], "transforms = 'RandomRot' on .*; did you mean RandomRotation or "),
    ],
)
def test_a_misspelt_name_gets_suggestions(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert re.match(f"posy: {re.escape(message) if 'on .*' not in message else message}", capsys.readouterr().err)
