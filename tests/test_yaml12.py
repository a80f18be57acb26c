"""YAML 1.2 in every file that users write, and files that would hang or harm a reader."""

import os
from pathlib import Path
from typing import Any

import pytest

from posy.commands.deploy.options import node_config
from posy.commands.table import read_plan
from posy.settings import SettingsError
from posy.strategies.registry import parse_words
from posy.yaml12 import dump, parse, read_yaml

SCALARS: dict[str, Any] = {
    "010": 10,
    "+5": 5,
    "0o10": 8,
    "0x1F": 31,
    "1_000": "1_000",
    "1:30": "1:30",
    "2026-11-22": "2026-11-22",
    "1e-3": 0.001,
    "1.5E+2": 150.0,
    "1e5abc": "1e5abc",
    "1.": 1.0,
    "true": True,
    "TRUE": True,
    "on": "on",
    "no": "no",
    "y": "y",
    "~": None,
    "": None,
    "<<": "<<",
}


@pytest.mark.parametrize("text", SCALARS)
def test_scalars_follow_yaml_1_2(text: str, tmp_path: Path) -> None:
    value = SCALARS[text]
    assert parse(text) == value and type(parse(text)) is type(value)
    (tmp_path / "one.yaml").write_text(f"key: {text}\n", encoding="utf-8")
    assert read_yaml(tmp_path / "one.yaml") == {"key": value}
    kind = type(value)
    if value is not None:
        key = {bool: "download", int: "seed", float: "lr", str: "run-name"}[kind]
        [parsed] = parse_words([f"{key}={text}"], "the test").values()
        assert parsed == value and type(parsed) is kind
    if kind in (bool, int, float):
        assert node_config([f"name={text}"]) == f"name={str(value).lower()}"
    else:
        assert node_config([f"name={text}"]) == f'name="{text}"'


def test_dumped_yaml_reads_the_same_in_both_versions() -> None:
    import yaml

    written = {"texts": [*SCALARS, "yes", "12:30:45", "0b1", "1e3", ".inf"], "numbers": [1e-05, 1e300, 10, True, None]}
    assert parse(dump(written)) == written
    assert yaml.safe_load(dump(written)) == written


LAUGHS = "a0: &a0 [1, 1, 1]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 40))


HARMFUL = {
    "deep": ("a: " + "[" * 5000 + "]" * 5000, "nested more than 50 levels deep"),
    "indented": ("".join(" " * i + "a:\n" for i in range(500)), "nested more than 50 levels deep"),
    "laughs": (LAUGHS, "more than 200000 values"),
    "chain": ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 5000)), "including aliases"),
    "itself": ("a: &a [*a]", "an alias that contains itself"),
    "int": ("a: !!int b", "invalid literal"),
    "timestamp": ("a: !!timestamp b", "not valid YAML"),
    "digits": ("a: " + "9" * 5000, "4300 digits"),
    "bell": ("a: \x07", "not allowed"),
    "twice": ("a: 1\nb: 2\na: 3", "a given twice (line 1)"),
    "python": ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "large": ("#" * (5 << 20), "must be a file of at most 4 MiB"),
}


@pytest.mark.parametrize("name", HARMFUL)
def test_unreadable_file_errors_take_one_line(name: str, tmp_path: Path) -> None:
    text, problem = HARMFUL[name]
    (tmp_path / "one.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(SettingsError) as raised:
        read_yaml(tmp_path / "one.yaml")
    assert problem in str(raised.value) and str(tmp_path / "one.yaml") in str(raised.value)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 400


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "loop", "missing"])
def test_paths_that_are_not_files_fail_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "one.yaml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises(SettingsError, match=r"one\.yaml (must be a file|cannot be read)"):
        read_yaml(path)
    with pytest.raises(SettingsError, match=r"one\.yaml"):
        read_plan(path)
