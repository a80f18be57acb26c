"""Imports run one way: each package stands on those below it, and nothing is imported upwards or in a circle."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from posy.strategies.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
STAIRCASE = (
    *("posy", "data", "models", "strategies", "client_app", "server_app"),
    *("deploy", "report", "commands", "benchmarks"),
)
"""The packages from the ground up."""
DOORS = ("posy/__init__.py", "posy/__main__.py", "posy/method.py", "posy/serverapp.py", "posy/clientapp.py")
"""`posy.run`, `python -m posy`, the names for custom methods, and the apps for Flower: the only upward imports."""
TRACKERS = {"mlflow-skinny", "wandb"}
"""Tools that a run's record goes to where they are installed; TensorBoard is imported through PyTorch."""
ACCOUNTANTS = {"dp-accounting"}
"""The library of the extra `privacy`, which DP-SGD needs."""
NOT_IMPORTED = {"grpcio", "protobuf", "typer", "pandas"}


@cache
def modules() -> dict[str, Path]:
    """Return the files of the product and the benchmarks by the names under which they are imported."""
    found = {}
    for package in STAIRCASE:
        for file in sorted((ROOT / package).rglob("*.py")):
            relative = file.relative_to(ROOT)
            if any((ROOT / parent).is_symlink() for parent in relative.parents):
                continue
            parts = relative.with_suffix("").parts
            name = ".".join(parts if package in ("posy", "benchmarks") else ("posy", *parts))
            found[name.removesuffix(".__init__")] = file
    return found


def imported(file: Path) -> Iterator[str]:
    """Yield the names that a file imports, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Return which of our modules each of them imports; the registry imports the methods by their names."""
    known = modules()
    edges = {name: {n for n in imported(file) if n in known} - {name} for name, file in known.items()}
    for name in ("posy.strategies.methods", "posy.client_app.registry"):
        if name in edges:
            package = name.rpartition(".")[0]
            edges[name] |= {f"{package}.{method.replace('-', '_')}" for method in METHODS} & known.keys()
    return edges


def step(module: str) -> int:
    """Return the height of the package that a module lies in."""
    return STAIRCASE.index(modules()[module].relative_to(ROOT).parts[0])


def test_no_module_imports_from_a_higher_layer() -> None:
    doors = {name for name, file in modules().items() if str(file.relative_to(ROOT)) in DOORS}
    upwards = [
        f"{module} -> {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if module not in doors and step(other) > step(module)
    ]
    assert not upwards


def test_there_are_no_import_cycles() -> None:
    doors = {name for name, file in modules().items() if str(file.relative_to(ROOT)) in DOORS}
    left = {module: others - doors for module, others in graph().items() if module not in doors}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert not left, {module: sorted(others & left.keys()) for module, others in left.items()}


def test_only_known_modules_import_dynamically() -> None:
    loading = {
        name
        for name, file in modules().items()
        if "import_module" in file.read_text(encoding="utf-8") or "__import__" in file.read_text(encoding="utf-8")
    }
    # A node's worker imports PyTorch in advance, and the ClientApp of a run's own code; extensions are code of people's
    # own.
    own = {"benchmarks.mutants", "posy.deploy.worker", "posy.deploy.apps", "posy.extensions"}
    assert loading <= {"posy.strategies.methods", "posy.client_app.registry", *own}


def lines_of_cards(text: str) -> int:
    """Return the lines of a module's method cards, which are the text of documentation pages."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    cards = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "MethodCard"]
    return sum((card.end_lineno or card.lineno) - card.lineno + 1 for card in cards)


def test_no_package_has_more_than_a_fifth_of_the_code() -> None:
    lines = dict.fromkeys(STAIRCASE, 0)
    for name, file in modules().items():
        text = file.read_text(encoding="utf-8")
        lines[STAIRCASE[step(name)]] += len(text.splitlines()) - lines_of_cards(text)
    assert max(lines.values()) <= sum(lines.values()) / 5, lines


def test_imported_and_declared_dependencies_match() -> None:
    names = {name.partition(".")[0] for file in modules().values() for name in imported(file)}
    distributions = packages_distributions()
    used = {d.lower().replace("_", "-") for name in names for d in distributions.get(name, ())} - {"posy"}
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [line.split("#")[0].strip() for line in (*text.splitlines(), *extra["compare"], "ray")]  # flwr[simulation]
    declared = {line.split(">")[0].split("<")[0].split("=")[0].split("[")[0].strip().lower() for line in lines if line}
    assert used - declared - TRACKERS - ACCOUNTANTS == set()
    assert declared - used <= NOT_IMPORTED  # the user's choice of dependencies; see requirements.txt


@pytest.mark.parametrize("package", [name for name in STAIRCASE if name not in ("posy", "benchmarks")])
def test_each_package_is_in_the_wheel_and_the_image(package: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = set(project["tool"]["setuptools"]["packages"])
    ours = {name for name, file in modules().items() if file.name == "__init__.py"}
    assert {name for name in ours if name.startswith(f"posy.{package}")} <= packaged
    assert f"!{package}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
