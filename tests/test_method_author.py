"""The methods of docs/develop/method.md are short and use twelve names, and Posy reports mistakes in a method."""

import ast
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from posy.client_app.method_check import check_code
from posy.client_app.registry import client_class
from posy.commands.cli import main
from posy.mistakes import MethodError
from posy.settings import SettingsError
from posy.strategies.arrays import model
from posy.strategies.methods import METHODS, settings_class, strategy_class
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings

Config = dict[str, Any]
DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = "".join((DOCS / page).read_text(encoding="utf-8") for page in ("how-to/custom-code.md", "develop/method.md"))
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
MOST_LINES = {"MyProx": 5, "FedMine": 5, "MyScaffold": 25, "FedSlow": 12}
"""Largest number of lines of each documented method."""
TABLE = re.search(r"## Twelve names\n.*?\n\n(\|.*?)\n\n", PAGE, flags=re.DOTALL)
NAMES = set(re.findall(r"^\| `(\w+)", TABLE[1], flags=re.MULTILINE)) if TABLE else set()
BASES = {"MethodSettings", "PersonalisedStrategy", "PersonalClient", "setting"}


def source_of(method: str) -> str:
    (code,) = (block for block in BLOCKS if f"class {method}Settings" in block)
    return code


def lines_of(source: str) -> int:
    """Return the number of lines that are not empty, imports or docstrings."""
    tree = ast.parse(source)
    lines = {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()}
    for node in ast.walk(tree):
        texts = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if texts or isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def names_of(source: str) -> set[str]:
    """Return the names of Posy that a method imports, overrides or declares."""
    tree = ast.parse(source)
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("posy"):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ClassDef):
            names |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            targets = [item.targets[0] for item in node.body if isinstance(item, ast.Assign)]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def write(folder: Path, source: str) -> None:
    (folder / "mine.py").write_text(source, encoding="utf-8")


def test_docs_table_has_twelve_names() -> None:
    assert len(NAMES) == 12


@pytest.mark.parametrize("method", MOST_LINES)
def test_documented_methods_are_short_and_use_only_listed_names(method: str) -> None:
    source = source_of(method)
    assert lines_of(source) <= MOST_LINES[method]
    assert names_of(source) <= NAMES | BASES


@pytest.fixture
def write_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that writes a documented method to ``mine.py`` and returns its name for the settings."""
    monkeypatch.chdir(tmp_path)

    def written(method: str) -> str:
        write(tmp_path, source_of(method))
        return f"mine:{method}"

    return written


@pytest.mark.parametrize(
    ("method", "built_in", "settings", "built_in_settings"),
    [
        ("MyProx", "fedprox", {"myprox_mu": 0.5}, {"fedprox_mu": 0.5}),
        ("FedMine", "fedper", {"fedmine_layers": 2}, {"fedper_layers": 2}),
        ("MyScaffold", "scaffold", {}, {}),
    ],
)
def test_documented_methods_train_like_the_built_in_methods(
    method: str,
    built_in: str,
    settings: Config,
    built_in_settings: Config,
    write_method: Callable[[str], str],
    make_config: Callable[..., Config],
    federate: Callable[..., Any],
) -> None:
    shared = {"model": "mlp", "num_server_rounds": 3, "client_weights": "uniform", "max_update_norm": 1e6}
    first = federate(make_config(write_method(method), **shared, **settings))
    second = federate(make_config(built_in, **shared, **built_in_settings))
    np.testing.assert_allclose(first.strategy.model, second.strategy.model, rtol=1e-5, atol=1e-6)
    assert [record.dropped for record in first.records] == [[]] * 3


def test_documented_server_rule_scales_the_step(
    write_method: Callable[[str], str], make_config: Callable[..., Config], federate: Callable[..., Any]
) -> None:
    slow, average = (
        federate(make_config(method, num_server_rounds=1, **settings))
        for method, settings in ((write_method("FedSlow"), {"fedslow_step": 0.25}), ("fedavg", {}))
    )
    start = slow.strategy.initial()
    np.testing.assert_allclose(
        slow.strategy.model - start, 0.25 * (average.strategy.model - start), rtol=1e-4, atol=1e-7
    )


def test_documented_weights_apply_to_the_mean(
    write_method: Callable[[str], str], make_config: Callable[..., Config], federate: Callable[..., Any]
) -> None:
    """The page's test of FedLoss passes, and only the head stays on the client."""
    method = write_method("FedLoss")
    strategy = federate(make_config(method, num_server_rounds=1)).strategy
    head = {entry.layer for entry in strategy.architecture.layout.entries if entry.layer == "head"}
    assert head and strategy.model.size < strategy.architecture.layout.size
    body = strategy.model
    strategy.aggregate(2, [Update({"model": body}, loss=1.0), Update({"model": body + 4}, loss=3.0)])
    np.testing.assert_allclose(strategy.model, body + 1, rtol=1e-5)
    with pytest.raises(SettingsError, match="the server weights each update by its loss"):
        federate(make_config(method, client_weights="uniform"))


NETWORK = """
from torch import nn

def small(task):
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, task.num_classes))
"""


def test_documented_methods_exclude_batchnorm_statistics(
    tmp_path: Path, write_method: Callable[[str], str], make_config: Callable[..., Config], federate: Callable[..., Any]
) -> None:
    """A control variate has no running statistics, and a server that moves a model does not extrapolate them."""
    (tmp_path / "nets.py").write_text(NETWORK, encoding="utf-8")
    sizes = {"batch_size": 4, "num_server_rounds": 1, "model": "nets:small"}
    scaffold = federate(make_config(write_method("MyScaffold"), **sizes)).strategy
    statistics = ~scaffold.influence.is_parameter(scaffold.model)
    assert statistics.any()
    assert not scaffold.control[statistics].any() and scaffold.control[~statistics].any()
    slow = federate(make_config(write_method("FedSlow"), fedslow_step=0.25, **sizes)).strategy
    average = federate(make_config("fedavg", **sizes)).strategy
    np.testing.assert_allclose(slow.model[statistics], average.model[statistics], rtol=1e-6)
    start = slow.initial()
    moved, full = (strategy.model - start for strategy in (slow, average))
    np.testing.assert_allclose(moved[~statistics], 0.25 * full[~statistics], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_built_in_methods_pass_the_checks(method: str) -> None:
    check_code(method, settings_class(method), strategy_class(method), client_class(method))


HEAD = """
    from posy.method import MethodSettings, PersonalClient, PersonalisedStrategy, Train, Update, model, numbers
"""
DECLARED = """
    class FedBadSettings(MethodSettings):
        returned = {"model": model(noise=True, sums=True)}
"""
MISTAKES = {
    "a misspelt hook of the server": (
        "class FedBad(PersonalisedStrategy):\n    def agregate(self, server_round, updates): return {}",
        r"FedBad\.agregate .* did you mean aggregate",
    ),
    "a misspelt hook of the client": (
        "class FedBadClient(PersonalClient):\n    def local_rounds(self, received, config): yield",
        r"FedBadClient\.local_rounds .* did you mean local_round",
    ),
    "a misspelt declaration": (
        "class FedBad(PersonalisedStrategy):\n    states = ('model', 'control')",
        r"FedBad\.states .* did you mean state",
    ),
    "other parameters": (
        "class FedBad(PersonalisedStrategy):\n    def aggregate(self, updates): return {}",
        r"FedBad\.aggregate.* must accept \(self, server_round, updates\)",
    ),
    "no generator": (
        "class FedBadClient(PersonalClient):\n    def local_round(self, received, config): return None",
        r"FedBadClient\.local_round is not a generator",
    ),
    "weights that secure aggregation hides": (
        "class FedBad(PersonalisedStrategy):\n    def mean_weights(self, updates): return [1.0 for _ in updates]",
        r"FedBad\.mean_weights needs .*FedBadSettings\.returned, replace sums=True",
    ),
    "a state that is not an array": (
        "class FedBad(PersonalisedStrategy):\n    state = ('model', 'count')\n"
        "    def initialise(self):\n        super().initialise()\n        self.count = 0",
        r"FedBad\.state names 'count'.* 0",
    ),
}
UNDECLARED = {
    "the server": (
        "class FedBad(PersonalisedStrategy):\n    def aggregate(self, server_round, updates): return {}",
        r"FedBad\.aggregate .*FedBadSettings must declare `returned`",
    ),
    "the client": (
        "class FedBadClient(PersonalClient):\n    def local_round(self, received, config): yield",
        r"FedBadClient\.local_round .*FedBadSettings must declare `returned`",
    ),
}


def error_of(source: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    write(folder, source)
    words = ["method=mine:FedBad", "max-samples=200", "num-clients=2", "num-server-rounds=1", "output-dir=runs"]
    assert main(["run", *words]) != 0
    return capsys.readouterr().err


@pytest.mark.parametrize(("source", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_before_round_1(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    error = error_of(dedent(HEAD) + dedent(DECLARED) + source + "\n", tmp_path, capsys)
    assert re.search(message, error)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("source", "message"), UNDECLARED.values(), ids=UNDECLARED)
def test_reply_arrays_must_be_declared(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = "class FedBadSettings(MethodSettings): ...\n"
    assert re.search(message, error_of(dedent(HEAD) + settings + source + "\n", tmp_path, capsys))


def test_array_declaration_requires_noise_and_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "class FedBadSettings(MethodSettings):\n    returned = {'model': model(noise=True)}\n"
    assert "'sums'" in error_of(dedent(HEAD) + source, tmp_path, capsys)


@pytest.mark.parametrize("answer", [False, None, ""])
def test_declared_support_is_true_or_a_reason(answer: Any) -> None:
    """``noise=False`` without a reason does not allow noise."""
    with pytest.raises(TypeError, match=re.escape(repr(answer))):
        model(noise=answer, sums=True)
    with pytest.raises(TypeError, match=re.escape(repr(answer))):
        type("Bad", (MethodSettings,), {}, dp_sgd=answer)


OTHER_ARRAYS = {
    "the server": (
        "class FedBad(PersonalisedStrategy):\n    def serve(self, client): return {'modell': self.model}",
        "arrays modell; FedBadSettings.sent declares model",
    ),
    "the client": (
        "class FedBadClient(PersonalClient):\n    def local_round(self, received, config):\n"
        "        trained = yield Train(received['model'])\n"
        "        return Update({'weights': trained.parameters}, trained.loss), None",
        "arrays weights; FedBadSettings.returned declares model",
    ),
}


@pytest.mark.parametrize(("source", "message"), OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
def test_undeclared_array_ends_the_run(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, dedent(HEAD) + dedent(DECLARED) + source + "\n")
    words = ["method=mine:FedBad", "max-samples=200", "num-clients=2", "num-server-rounds=1", "output-dir=runs"]
    with pytest.raises((TypeError, MethodError), match=re.escape(message)):
        main(["run", *words])
