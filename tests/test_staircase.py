"""Import layers: each package imports only from lower layers, and there are no import cycles."""

import ast
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from posy.strategies.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    *("posy", "data", "models", "strategies", "client_app", "server_app"),
    *("deploy", "report", "serve", "commands", "benchmarks"),
)
"""The packages, lowest layer first."""
ENTRY_POINTS = ("posy/__init__.py", "posy/__main__.py", "posy/method.py", "posy/serverapp.py", "posy/clientapp.py")
"""`posy.run`, `python -m posy`, the names for custom methods, and the apps for Flower. Only these import upwards."""
TRACKERS = {"mlflow-skinny", "wandb"}
"""Optional trackers. PyTorch imports TensorBoard."""
ACCOUNTANTS = {"dp-accounting"}
"""The library of the extra `privacy`, which DP-SGD needs."""
EXPORTERS = {"onnx", "onnxruntime"}
"""The libraries of the extra `export`, which `posy export` imports for ONNX."""
NOT_IMPORTED = {"grpcio", "protobuf", "typer", "pandas"}


@cache
def modules() -> dict[str, Path]:
    """Return the files of the product and the benchmarks by the names under which they are imported."""
    files = {}
    for package in LAYERS:
        for file in sorted((ROOT / package).rglob("*.py")):
            relative = file.relative_to(ROOT)
            if any((ROOT / parent).is_symlink() for parent in relative.parents):
                continue
            parts = relative.with_suffix("").parts
            name = ".".join(parts if package in ("posy", "benchmarks") else ("posy", *parts))
            files[name.removesuffix(".__init__")] = file
    return files


def imports_of(file: Path) -> Iterator[str]:
    """Yield the names that a file imports, also inside functions and under TYPE_CHECKING."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: imports are absolute"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def graph() -> dict[str, set[str]]:
    """Return the project modules that each module imports. Two registries import every method by name."""
    files = modules()
    edges = {name: {n for n in imports_of(file) if n in files} - {name} for name, file in files.items()}
    for name in ("posy.strategies.methods", "posy.client_app.registry"):
        if name in edges:
            package = name.rpartition(".")[0]
            edges[name] |= {f"{package}.{method.replace('-', '_')}" for method in METHODS} & files.keys()
    return edges


def layer(module: str) -> int:
    """Return the index of a module's layer."""
    return LAYERS.index(modules()[module].relative_to(ROOT).parts[0])


def test_no_module_imports_from_a_higher_layer() -> None:
    entry_points = {name for name, file in modules().items() if str(file.relative_to(ROOT)) in ENTRY_POINTS}
    upwards = [
        f"{module} -> {name}"
        for module, imports in graph().items()
        for name in sorted(imports)
        if module not in entry_points and layer(name) > layer(module)
    ]
    assert not upwards


def test_there_are_no_import_cycles() -> None:
    entry_points = {name for name, file in modules().items() if str(file.relative_to(ROOT)) in ENTRY_POINTS}
    remaining = {module: imports - entry_points for module, imports in graph().items() if module not in entry_points}
    while free := [module for module, imports in remaining.items() if not imports & remaining.keys()]:
        for module in free:
            del remaining[module]
    assert not remaining, {module: sorted(imports & remaining.keys()) for module, imports in remaining.items()}


def test_only_known_modules_import_dynamically() -> None:
    loading = {
        name
        for name, file in modules().items()
        if "import_module" in file.read_text(encoding="utf-8") or "__import__" in file.read_text(encoding="utf-8")
    }
    # A node's worker preloads PyTorch and imports a run's ClientApp. Extensions are custom code.
    custom_code = {"benchmarks.mutants", "posy.deploy.worker", "posy.deploy.apps", "posy.extensions"}
    assert loading <= {"posy.strategies.methods", "posy.client_app.registry", *custom_code}


def count_card_lines(text: str) -> int:
    """Return the number of lines of a module's method cards, which contain documentation."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    cards = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "MethodCard"]
    return sum((card.end_lineno or card.lineno) - card.lineno + 1 for card in cards)


def test_no_package_has_more_than_a_fifth_of_the_code() -> None:
    lines = dict.fromkeys(LAYERS, 0)
    for name, file in modules().items():
        text = file.read_text(encoding="utf-8")
        lines[LAYERS[layer(name)]] += len(text.splitlines()) - count_card_lines(text)
    assert max(lines.values()) <= sum(lines.values()) / 5, lines


def test_imported_and_declared_dependencies_match() -> None:
    names = {name.partition(".")[0] for file in modules().values() for name in imports_of(file)}
    distributions = packages_distributions()
    used = {d.lower().replace("_", "-") for name in names for d in distributions.get(name, ())} - {"posy"}
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [
        line.split("#")[0].strip() for line in (*text.splitlines(), *extra["compare"], *extra["serve"], "ray")
    ]  # flwr[simulation]
    declared = {line.split(">")[0].split("<")[0].split("=")[0].split("[")[0].strip().lower() for line in lines if line}
    assert used - declared - TRACKERS - ACCOUNTANTS - EXPORTERS == set()
    assert declared - used <= NOT_IMPORTED  # see requirements.txt


@pytest.mark.parametrize("package", [name for name in LAYERS if name not in ("posy", "benchmarks")])
def test_each_package_is_in_the_image(package: str) -> None:
    assert f"!{package}" in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
