"""Every setting at invalid values, derived from its declaration, and at the edges of its range.

An invalid value gives a one-line error with the key, the value and the allowed values. A valid value is stored
unchanged. A run with an extreme value gives finite numbers or a one-line error.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from recorded import check_numbers

from posy.commands import cli
from posy.data.errors import DataError
from posy.server_app.app import run
from posy.settings import MOST, RunError, Setting, SettingsError, checked, key_of
from posy.strategies.methods import METHODS, settings_class
from posy.strategies.registry import declared, parse_words, read_settings, with_experiment

WHERE = "the command line"

DECLARED = declared()
LONGEST_LINE = 1500
BIG = float(np.finfo(np.float32).max)
HUGE = (10**39, 10**400, -(10**400), 10**5000)


def rule_of(key: str) -> tuple[type, Setting]:
    return DECLARED[key].kind, DECLARED[key]


def expect_error(call: Callable[[], Any]) -> str:
    with pytest.raises(SettingsError) as raised:
        call()
    message = str(raised.value)
    assert len(message.splitlines()) == 1 and len(message) < LONGEST_LINE
    return message


# -- from Python and from files --------------------------------------------------------------------------


def outside(rule: Setting, kind: type) -> list[Any]:
    """Return the numbers just outside the range of a setting."""
    step = (lambda x, way: int(x) + way) if kind is int else (lambda x, way: math.nextafter(x, way * math.inf))
    numbers = [step(rule.minimum, -1)] if rule.minimum > -math.inf else []
    numbers += [kind(rule.above), -1 if kind is int else -5e-324] if rule.above > -math.inf else []
    return numbers + ([step(rule.most, 1)] if rule.most < math.inf else [])


def wrong_values(key: str) -> list[Any]:
    kind, rule = rule_of(key)
    wrong: list[Any] = [None, [], [1], {}, {"a": 1}, (), b"1", 1j, object, *HUGE]
    if kind is not str:
        wrong += ["", " ", "1", "true", "é\n", "x" * 100_000, "\x00"]
    if kind is str:
        wrong += [True, False, 0, 1, 1.5, math.nan, "\x00"]
        misspelt = [change(c) for c in rule.choices for change in (str.upper, lambda c: c + " ", lambda c: c[:-1])]
        wrong += [c for c in [*misspelt, "", "\n", "é", "x" * 100_000] if rule.choices and c not in rule.choices]
    if kind is bool:
        wrong += [0, 1, 0.0, 1.0, math.nan]
    if kind is int:
        wrong += [True, False, 1.0, 1.5, math.nan, math.inf, *outside(rule, kind)]
    if kind is float:
        wrong += [True, False, math.nan, math.inf, -math.inf, 1e39, -1e39, 1e308, *outside(rule, kind)]
    return wrong


def test_invalid_values_give_a_one_line_error() -> None:
    for key in DECLARED:
        check_invalid_values(key)


def check_invalid_values(key: str) -> None:
    kind, rule = rule_of(key)
    for value in wrong_values(key):
        message = expect_error(lambda value=value: read_settings({key: value}, "the file mine.yaml"))
        assert message.startswith(f"{key} = ")
        assert "in the file mine.yaml: it must be " + rule.allowed() in message
        if not isinstance(value, int) or abs(value) < 10**16:
            shown_value = float(value) if kind is float and type(value) is int else value
            assert (str(value).lower() if isinstance(value, bool) else repr(shown_value)[:80]) in message


def test_range_bounds_are_valid_values() -> None:
    for key in (key for key in DECLARED if rule_of(key)[0] in (int, float)):
        check_edges(key)


def check_edges(key: str) -> None:
    kind, rule = rule_of(key)
    edges = [kind(edge) for edge in (rule.minimum, rule.most) if math.isfinite(edge)]
    if rule.above > -math.inf:
        edges.append(math.nextafter(rule.above, math.inf) if kind is float else int(rule.above) + 1)
    if rule.most == math.inf:
        edges.append(BIG)
    for value in edges:
        parsed = checked({key: value}, DECLARED, "a test")[key]
        assert parsed == value and type(parsed) is kind


def test_keys_with_line_breaks_are_quoted() -> None:
    assert "'\\nlr'" in expect_error(lambda: read_settings({"\nlr": 1}))


# -- the command line ------------------------------------------------------------------------------------

TRUE, FALSE = {"true", "True", "TRUE"}, {"false", "False", "FALSE"}
WORDS = [
    *(
        "",
        " ",
        "\n",
        "\t",
        "\x00",
        "\x1b[31m",
        "é",
        "１",
        "٣",
        "\u202e1",
        "x" * 5000,
        "None",
        "null",
        "~",
        "-",
        "=",
        "=1",
    ),
    *("nan", "inf", "-inf", "Infinity", "1e400", "-1e400", "1e-400", "9" * 400, "9" * 5000, "-" + "9" * 5000),
    *(
        "-1",
        "-0",
        "0",
        "0.0",
        "1",
        "1.0",
        "1.5",
        "+5",
        "0x10",
        "0b1",
        "010",
        "1:30",
        "1_0",
        "1e3",
        " 5",
        "5\n",
        "5\r",
        "5\x85",
        "\u20285",
        "5 # five",
    ),
    *("true", "TRUE", "yes", "on", "off", "False", "y", "n", "truee", " true", "true # yes", "true\n...\n---\nfalse"),
    *("[", "{", "{a: b}", "{[1]: 2}", "- 1", "&a [*a]", "*a", "!!bool x", "!!int ''", "!!timestamp x"),
    *("!!python/object/apply:os.system ['true']", "2001-99-99", "%YAML 9.9", "---", "...", "@", "`", "|", ">"),
    *("'", '"', "''", "'a", "'a'", '"a\\nb"', "'a': !!bool x", "'''", '"\\x"', "'a' # b"),
]


def from_words(key: str, text: str) -> Any:
    words = parse_words([f"{key}={text}"], WHERE)
    return (checked(words, DECLARED, WHERE) if key == "experiment" else with_experiment(words, WHERE))[key]


NUMBERS = {
    int: re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"),
    float: re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|0o[0-7]+|0x[0-9a-fA-F]+"),
}


def expected_value(key: str, text: str) -> Any:
    """Return the value of a word in YAML 1.2, or None if it is not a valid value of the setting."""
    kind, rule = rule_of(key)
    plain = text.partition(" #")[0].strip(" \n\r\x85\u2028\u2029")  # PyYAML breaks lines as YAML 1.1 does
    if rule.number_or and plain == rule.number_or:
        return plain
    value: Any = None
    try:
        if kind in (int, float):
            integer = int(plain, 10 if plain.lstrip("+-").isdecimal() else 0) if NUMBERS[int].fullmatch(plain) else None
            value = float(plain) if integer is None and NUMBERS[kind].fullmatch(plain) else integer
            value = None if value is None else kind(value)
        elif kind is bool:
            value = {**dict.fromkeys(TRUE, True), **dict.fromkeys(FALSE, False)}.get(plain)
        elif text[:1] in ("'", '"'):  # complete quotes of YAML
            value = yaml.load(text, yaml.BaseLoader)
            value = value if isinstance(value, str) else text
        else:
            value = text
    except (ValueError, OverflowError, RecursionError, yaml.YAMLError):
        value = None if kind is not str else text
    if value is None:
        return None
    if kind is str:
        return value if "\x00" not in value and (not rule.choices or value in rule.choices) else None
    inside = abs(value) <= BIG and rule.minimum <= value <= rule.most and value > rule.above
    return value if inside else None


def check_word(key: str, text: str) -> None:
    expected = expected_value(key, text)
    if key == "method" and expected not in METHODS:
        expected = None
    if expected is None:
        message = expect_error(lambda: from_words(key, text))
        assert message.startswith(f"{key} = ") and WHERE in message
        assert "it must be" in message or (key == "method" and "did you mean" in message)
    else:
        value = from_words(key, text)
        assert value == expected and type(value) is type(expected)


def test_listed_words_are_parsed_or_give_a_one_line_error() -> None:
    for key, text in itertools.product(DECLARED, WORDS):
        check_word(key, text)


def test_deeply_nested_words_are_handled() -> None:
    check_word("save-models", "[" * 5000)
    check_word("run-name", "'a': " + "[" * 500)


@given(st.sampled_from(list(DECLARED)), st.text() | st.floats().map(str) | st.integers().map(str))
def test_any_value_is_parsed_or_gives_a_one_line_error(key: str, text: str) -> None:
    check_word(key, text)


@given(st.text())
def test_words_without_a_known_key_give_a_one_line_error(word: str) -> None:
    key, equals, _ = word.partition("=")
    if not equals or key not in DECLARED:
        expect_error(lambda: parse_words([word], WHERE))


# -- paths -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["~nobody-of-this-name/x", "x" * 300, "loop", "loop/x", "\x00", "missing", "file/x"])
@pytest.mark.parametrize("key", ["dataset", "experiment", "output-dir", "partition-file", "data-dir"])
def test_invalid_paths_give_a_one_line_error(
    key: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    np.savez(tmp_path / "own.npz", x_train=np.zeros((8, 2)), y_train=np.arange(8) % 2)
    words = {"dataset": "own.npz", "num-clients": 2, "partition": "iid", "method": "fedavg"}
    words |= {"partition": "file"} if key == "partition-file" else {}
    words |= {"run-name": "/"}  # an invalid name stops every command that accepts the path
    status = cli.main(["run", *(f"{k}={v}" for k, v in {**words, key: text}.items())])
    lines = capsys.readouterr().err.splitlines()
    assert status == 2 and len(lines) == 1 and lines[0].startswith("posy: ")
    if (key, text) != ("output-dir", "missing"):
        assert text[:100] in lines[0] or repr(text)[1:-1] in lines[0] or "run-name" in lines[0]


# -- runs with extreme settings --------------------------------------------------------------------------

SAMPLES, FEATURES = 36, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    y = np.arange(SAMPLES) % 3
    x = (rng.normal(0, 2, (3, FEATURES))[y] + rng.normal(0, 1, (SAMPLES, FEATURES))).astype(np.float32)
    path = tmp_path_factory.mktemp("edges") / "data.npz"
    np.savez(path, x_train=x, y_train=y)
    return path


@pytest.fixture
def attempt_run(data: Path, tmp_path: Path) -> Callable[..., Path | str]:
    """Return a function that starts a run, checks its numbers, and returns its folder or its error message."""

    def attempt(method: str, settings: dict[str, Any]) -> Path | str:
        common = {
            "method": method,
            "device": "cpu",
            "dataset": str(data),
            "partition": "iid",
            "num-clients": 3,
            "num-server-rounds": 3,
            **({} if "local-steps" in settings else {"local-epochs": 1}),
            "batch-size": 8,
            "model": "mlp",
            "system-accuracy": "on",
            "checkpoint-every": 0,
            "output-dir": str(tmp_path),
            "run-name": "edge",
        }
        try:
            run(None, {**common, **settings})
        except (SettingsError, DataError) as error:
            assert len(str(error).splitlines()) == 1
            assert not (tmp_path / "edge").exists()
            return str(error)
        except RunError as error:
            check_numbers(tmp_path / "edge")
            return str(error)
        check_numbers(tmp_path / "edge")
        return tmp_path / "edge"

    return attempt


EDGES: list[tuple[str, dict[str, Any], str]] = [
    ("fedavg", {"batch-size": MOST}, ""),
    ("fedavg", {"local-steps": 1}, ""),
    ("fedavg", {"fraction-train": 1e-9}, ""),
    ("fedavg", {"evaluate-every": MOST}, ""),
    ("fedavg", {"num-clients": 1}, ""),
    ("fedavg", {"test-fraction": 0.9}, ""),
    ("fedavg", {"test-fraction": 5e-324}, ""),
    ("fedavg", {"momentum": 0.9999}, ""),
    ("fedavg", {"max-grad-norm": 1e-12}, ""),
    ("fedavg", {"max-grad-norm": BIG}, ""),
    ("fedavg", {"max-update-norm": 1e-300}, "max-update-norm"),
    ("fedavg", {"lr": 5e-324}, ""),
    ("fedavg", {"lr": BIG}, "diverged"),
    ("fedavg", {"lr": BIG, "lr-schedule": "cosine"}, "diverged"),
    ("fedavg", {"weight-decay": BIG}, "diverged"),
    ("fedavg", {"dp": "local", "dp-clip": BIG}, "NaN or Inf"),
    ("fedavg", {"dp": "local", "dp-clip": 1e-300, "dp-epsilon": 1e-3}, ""),
    ("fedavg", {"seed": 2**31 - 1}, ""),
    ("fedavg", {"num-clients": SAMPLES}, ""),
    ("fedavg", {"num-clients": SAMPLES + 1}, "num-clients"),
    ("fedavg", {"max-samples": 1}, "num-clients"),
    ("fedavg", {"train-samples": 1}, ""),
    ("fedavg", {"train-samples": MOST}, ""),
    ("fedavg", {"round-timeout": BIG}, "round-timeout"),
    ("fedavg", {"join-timeout": BIG}, "join-timeout"),
    ("fedavg", {"round-timeout": 5e-324}, "round-timeout"),
    ("fedavg", {"min-train-replies": 4}, "min-train-replies"),
    ("fedavg", {"min-clients": 4}, "min-clients"),
    ("fedavg", {"partition": "dirichlet", "dirichlet-alpha": 5e-324}, ""),
    ("fedavg", {"partition": "dirichlet", "dirichlet-alpha": BIG}, ""),
    ("fedavg", {"partition": "classes", "classes-per-client": MOST}, "classes-per-client"),
    ("fedavg", {"partition": "shards", "shards-per-client": MOST}, "shards-per-client"),
    ("fedavg", {"samples-per-client": MOST}, "samples-per-client"),
    ("fedavg", {"state-memory": MOST}, ""),
    ("fedfew", {"fedfew-models": 7}, ""),
    ("fedfew", {"fedfew-models": 1}, ""),
    ("fedfew", {"fedfew-mu": 5e-324}, ""),
    ("fedfew", {"fedfew-mu": BIG}, ""),
    ("fedfew", {"fedfew-server-lr": 1e30}, "no client's evaluation was accepted"),
    ("fedfew", {"fedfew-server-lr": BIG}, "no client's evaluation was accepted"),
    ("cwfedavg", {"cwfedavg-wdr-lambda": BIG}, "diverged"),
    ("cwfedavg", {"cwfedavg-wdr-lambda": 0}, ""),
    ("fedacs", {"fedacs-p": 0}, ""),
    ("fedacs", {"fedacs-p": 1}, ""),
    ("feddrm", {"feddrm-class-weight": 0}, ""),
    ("feddrm", {"feddrm-class-weight": 1}, ""),
    ("feddrm", {"num-clients": 1}, "num-clients"),
    ("ppfe", {"ppfe-stages": 1}, ""),
    ("ppfe", {"ppfe-stages": MOST}, ""),
    ("ppfe", {"ppfe-stages": MOST, "ppfe-fixed-head": 1}, "num-server-rounds"),
    ("ppfe", {"ppfe-fixed-head": MOST}, "ppfe-fixed-head"),
    ("ppfe", {"ppfe-body-lr-factor": 0}, ""),
    ("ppfe", {"ppfe-body-lr-factor": BIG}, "diverged"),
    ("ppfe", {"ppfe-body-lr-stage": MOST, "ppfe-body-lr-factor": BIG}, ""),
    ("ppfe", {"ppfe-final-epochs": 1}, ""),
    ("ppfe", {"ppfe-ranks": "1"}, ""),
    ("ppfe", {"ppfe-ranks": str(2**63)}, ""),
    ("ppfe", {"ppfe-ranks": "9" * 5000}, "ppfe-ranks"),
    ("ppfe", {"ppfe-stage-rounds": "1,1"}, "ppfe-stage-rounds"),
    ("ppfe", {"ppfe-stage-rounds": f"1,1,{2**63}"}, "ppfe-stage-rounds"),
    ("ppfe", {"num-server-rounds": 2, "ppfe-stages": 3}, "num-server-rounds"),
    ("fedavg-ft", {"fedavg-ft-lr": BIG}, ""),
    ("fedavg-ft", {"fedavg-ft-steps": 1}, ""),
    ("fedprox", {"fedprox-mu": BIG}, "diverged"),
    ("fedprox", {"fedprox-mu": 0}, ""),
    ("fedrep", {"model": "linear"}, "nothing is left to share"),
    ("ditto", {"ditto-strength": BIG}, "diverged"),
    ("ditto", {"ditto-strength": 0}, ""),
    ("fedamp", {"fedamp-alpha": BIG}, ""),
    ("fedamp", {"fedamp-alpha": 5e-324}, "diverged"),
    ("fedamp", {"fedamp-sigma": 5e-324}, ""),
    ("fedamp", {"fedamp-sigma": BIG}, ""),
    ("fedamp", {"fedamp-strength": BIG}, "diverged"),
    ("ifca", {"ifca-clusters": 1}, ""),
    ("ifca", {"ifca-clusters": 9}, ""),
    ("fedper", {"fedper-layers": MOST}, "nothing is left to share"),
    ("lg-fedavg", {"lg-fedavg-layers": MOST}, ""),
    ("fedbabu", {"model": "linear"}, "nothing is left to share"),
    ("fedbabu", {"fedbabu-lr": BIG}, ""),
    ("fedbabu", {"fedbabu-steps": 1}, ""),
    ("fedavg-ft", {"fedavg-ft-rounds": MOST}, "fedavg-ft-rounds"),
    ("fedprox-ft", {"fedprox-ft-rounds": 1}, ""),
    ("fedsam-ft", {"fedsam-ft-rounds": 1}, ""),
    ("fedbabu", {"fedbabu-rounds": 1}, ""),
    ("fedprox-ft", {"fedprox-ft-mu": BIG}, "diverged"),
    ("fedprox-ft", {"fedprox-ft-lr": BIG, "fedprox-ft-mu": 0}, ""),
    ("fedprox-ft", {"fedprox-ft-steps": 1}, ""),
    ("fedsam-ft", {"fedsam-ft-rho": BIG}, "diverged"),
    ("fedsam-ft", {"fedsam-ft-rho": 5e-324}, ""),
    ("fedsam-ft", {"fedsam-ft-lr": BIG, "fedsam-ft-rho": 0}, ""),
    ("fedsam-ft", {"fedsam-ft-steps": 1}, ""),
    ("apfl", {"apfl-alpha": 0}, ""),
    ("apfl", {"apfl-alpha": 1, "apfl-adaptive": True}, ""),
    ("per-fedavg", {"per-fedavg-alpha": BIG}, "diverged"),
    ("per-fedavg", {"per-fedavg-alpha": 0}, ""),
    ("per-fedavg", {"per-fedavg-hessian": "hf", "per-fedavg-hessian-delta": BIG}, "diverged"),
    ("per-fedavg", {"per-fedavg-hessian": "hf", "per-fedavg-hessian-delta": 5e-324}, "diverged"),
    ("per-fedavg", {"per-fedavg-steps": 50}, ""),
    ("pfedme", {"pfedme-strength": BIG}, "diverged"),
    ("pfedme", {"pfedme-strength": 5e-324}, ""),
    ("pfedme", {"pfedme-steps": 50}, ""),
    ("pfedme", {"pfedme-personal-lr": BIG}, "diverged"),
    ("pfedme", {"pfedme-personal-lr": 5e-324}, ""),
    ("pfedme", {"pfedme-beta": BIG}, "no client's evaluation was accepted"),
    ("pfedme", {"pfedme-beta": 5e-324}, ""),
    ("fedfomo", {"fedfomo-models": 0}, ""),
    ("fedfomo", {"fedfomo-models": 1000}, "fedfomo-models"),
    ("fedfomo", {"fedfomo-epsilon": 0}, ""),
    ("fedfomo", {"fedfomo-epsilon": 1}, ""),
    ("cfl", {"cfl-eps1": BIG, "cfl-eps2": 0}, ""),
    ("cfl", {"cfl-eps1": 0, "cfl-eps2": BIG}, "cfl-eps2"),
    ("fedala", {"fedala-layers": MOST}, ""),
    ("fedala", {"fedala-eta": BIG}, ""),
    ("fedala", {"fedala-eta": 0}, ""),
    ("fedala", {"fedala-sample": 5e-324}, ""),
    ("fedala", {"fedala-sample": 1}, ""),
    ("fedala", {"fedala-threshold": 5e-324}, ""),
    ("fedala", {"fedala-threshold": BIG}, ""),
    ("fedmtl", {"fedmtl-strength": 0}, ""),
    ("fedmtl", {"fedmtl-strength": BIG}, "diverged"),
    ("fedmgda", {"fedmgda-epsilon": 0}, ""),
    ("fedmgda", {"fedmgda-epsilon": 1}, ""),
    ("fedmgda", {"fedmgda-server-lr": BIG}, "no client's evaluation was accepted"),
    ("feduv", {"feduv-variance": BIG}, "diverged"),
    ("feduv", {"feduv-uniformity": BIG}, "diverged"),
    ("fednh", {"fednh-rho": 0}, ""),
    ("fednh", {"fednh-rho": 1}, ""),
    ("fednh", {"fednh-scale": BIG}, "diverged"),
    ("fednh", {"fednh-scale": 5e-324}, ""),
    ("fednh", {"model": "linear"}, "model"),
    ("pfedfda", {"pfedfda-ridge": 1e-6}, ""),
    ("pfedfda", {"pfedfda-ridge": 1e6}, ""),
    ("pfedfda", {"pfedfda-folds": 100}, ""),
    ("pfedfda", {"pfedfda-beta": 0.0}, ""),
    ("pfedfda", {"pfedfda-beta": 1}, ""),
    ("confree", {"confree-alpha": 0}, ""),
    ("confree", {"confree-alpha": 1}, ""),
    ("scaffold", {"scaffold-server-lr": 5e-324}, ""),
    ("scaffold", {"scaffold-server-lr": 1e30}, "no client's evaluation was accepted"),
    ("scaffold", {"scaffold-server-lr": BIG}, "no client's evaluation was accepted"),
    ("moon", {"moon-mu": BIG}, "diverged"),
    ("moon", {"moon-mu": 0}, ""),
    ("moon", {"moon-temperature": 5e-324}, "diverged"),
    ("moon", {"moon-temperature": BIG}, ""),
    ("cfl", {"cfl-gamma-max": 1}, ""),
    ("fedfomo", {"fedfomo-epsilon-decay": 1}, ""),
    ("fedfomo", {"fedfomo-validation": 0.9}, ""),
    ("fedmgda", {"fedmgda-decay": 1e-30}, "has no effect"),
    ("fedpac", {"fedpac-head-lr": BIG}, "diverged"),
    ("fedpac", {"fedpac-head-lr": 0}, ""),
    ("fedas", {"fedas-align-lr": BIG}, "diverged"),
    ("fedproto", {"fedproto-strength": BIG}, "diverged"),
    ("fedproto", {"fedproto-strength": 0}, ""),
    ("fedpac", {"fedpac-strength": BIG}, "diverged"),
    ("fedpac", {"fedpac-strength": 0}, ""),
    ("fedas", {"fedas-align-epochs": 0}, ""),
    ("fedcp", {"fedcp-strength": BIG}, "diverged"),
    ("fedcp", {"fedcp-strength": 0}, ""),
]


@pytest.mark.parametrize(
    ("method", "settings", "part"),
    [pytest.param(*edge, marks=pytest.mark.slow) if "pfedfda-folds" in edge[1] else edge for edge in EDGES],
    ids=[" ".join(f"{k}={str(v)[:20]}" for k, v in e[1].items()) for e in EDGES],
)
def test_extreme_settings_give_finite_numbers_or_a_one_line_error(
    method: str, settings: dict[str, Any], part: str, attempt_run: Callable[..., Path | str]
) -> None:
    outcome = attempt_run(method, settings)
    assert isinstance(outcome, Path) if not part else part in str(outcome)


def test_every_numeric_method_setting_has_an_edge_case() -> None:
    keys = {key_of(f.name, m) for m in METHODS for f in dataclasses.fields(settings_class(m)) if f.type in (int, float)}
    assert keys <= {key for _, settings, _ in EDGES for key in settings} | {
        "fedrep-head-epochs",
        "confree-head-epochs",
        "fedpac-head-epochs",
        "fedavg-ft-epochs",
        "fedbabu-epochs",
        "fedprox-ft-epochs",
        "fedsam-ft-epochs",
        "ditto-epochs",
    }
