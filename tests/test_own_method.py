"""Methods of one's own, as the documentation shows them: few lines, few names to know, and they run."""

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.methods import METHODS, settings_class

Config = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
PAGES = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/own-method.md"))
SOURCES = {
    (stem.lower(), "client_app" if kind == "Client" else "strategies"): block
    for block in re.findall(r"```python\n(.*?)```", PAGES, re.DOTALL)
    for stem, kind in re.findall(r"^class (\w+)(Settings|Client)\(", block, re.MULTILINE)
}
"""What the documentation shows of methods, by name and package."""
OWN = {"fedper": ("FedPer", 15), "myditto": ("MyDitto", 25), "myifca": ("MyIfca", 45)}
"""The methods: what their classes are called, and the lines of code that they may take."""


def sources(method: str) -> dict[str, str]:
    return {package: source for (name, package), source in SOURCES.items() if name == method}


def lines_of_code(source: str) -> int:
    """Return the number of lines that are neither empty nor of a docstring; imports count."""
    lines = {number for number, line in enumerate(source.splitlines(), start=1) if line.strip()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def imported(source: str) -> set[str]:
    """Return the names that a source imports from Posy."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {alias.name for node in found if str(node.module).startswith("posy") for alias in node.names}


@pytest.fixture
def own_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the methods as their author would: a file or two, and a line in the list of methods."""
    for name, (stem, _) in OWN.items():
        monkeypatch.setitem(METHODS, name, stem)
        for package, source in sources(name).items():
            path = tmp_path / f"{package}-{name}.py"
            path.write_text(source, encoding="utf-8")
            spec = importlib.util.spec_from_file_location(f"posy.{package}.{name}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, spec.name, module)
            spec.loader.exec_module(module)


@pytest.mark.parametrize("name", OWN)
def test_a_method_of_ones_own_is_short(name: str) -> None:
    shown = sources(name)
    assert shown.keys() == ({"strategies"} if name == "fedper" else {"strategies", "client_app"})
    assert sum(map(lines_of_code, shown.values())) <= OWN[name][1]
    assert len(set().union(*map(imported, shown.values()))) <= 10


def test_the_line_that_makes_a_method_known_is_as_the_readme_shows_it() -> None:
    assert '`"fedper": "FedPer",`' in PAGES
    assert '    "fedavg": "FedAvg",\n' in (ROOT / "strategies/methods.py").read_text(encoding="utf-8")


def test_fedper_keeps_its_last_layers(
    own_methods: None, make_config: Callable[..., Config], federate: Callable[..., Any]
) -> None:
    finished = federate(make_config("fedper", model="mlp", fedper_layers=2, dp_clip=1e6, dp_sensitivity=1e-30))
    layout = finished.strategy.architecture.layout
    assert finished.strategy.model.size == layout.without(layout.layers[-2:]).size < layout.size
    assert [record.dropped for record in finished.records] == [[]] * 3
    for client in range(4):
        assert {name: a.shape for name, a in finished.kept(client).items()} == {
            "personal": (layout.part(layout.layers[-2:]).size,)
        }
    served, local = finished.column("served_loss")[-1], finished.column("local_loss")[-1]
    assert served.keys() == local.keys() == {0, 1, 2} and served != local


@pytest.mark.parametrize(
    ("own", "known", "kept"), [("myditto", "ditto", True), ("myifca", "ifca", False)], ids=["ditto", "ifca"]
)
def test_a_method_written_anew_gives_what_ours_does(
    own: str,
    known: str,
    kept: bool,
    own_methods: None,
    make_config: Callable[..., Config],
    federate: Callable[..., Any],
) -> None:
    settings = {"model": "mlp", "fraction_train": 0.6, "max_update_norm": 1e6}
    mine, ours = (federate(make_config(method, **settings)) for method in (own, known))
    states = [finished.strategy.server_state() for finished in (mine, ours)]
    assert states[0].keys() == states[1].keys()
    for name, array in states[0].items():
        np.testing.assert_array_equal(array, states[1][name])
    for column in ("served_accuracy", "local_loss", "train_loss"):
        assert mine.column(column) == ours.column(column)
    for client in range(4 if kept else 0):
        np.testing.assert_equal(mine.kept(client), ours.kept(client))


def test_a_method_without_a_verdict_on_noise_does_not_load() -> None:
    with pytest.raises(TypeError, match="'noise'"):

        class Undecided(MethodSettings):
            pass

    class Decided(MethodSettings, noise=Refused("it counts")):
        pass

    assert Decided.noise == Refused("it counts")
    assert settings_class("fedavg").noise is ALLOWED


def test_a_hook_may_be_a_plain_function_or_a_generator(make_client: Callable[..., Any]) -> None:
    client = make_client("fedavg")
    flat = client.initial().numpy()
    _, _, plain = client.evaluate([flat], {"server-round": 1})

    def asking(received: list[torch.Tensor], config: Any) -> Any:
        yield from client.train_losses(received[0][None])
        return client.plain(received[0])

    client.served_model = asking
    assert client.evaluate([flat], {"server-round": 1})[2] == plain
