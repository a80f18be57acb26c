"""Posy uses few private names of Flower in few modules, because any version of Flower may change them."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import flwr
import pytest

ROOT = Path(__file__).resolve().parent.parent
PUBLIC = {
    *("flwr", "flwr.app", "flwr.client", "flwr.clientapp", "flwr.common", "flwr.common.logger", "flwr.common.typing"),
    *("flwr.server", "flwr.serverapp", "flwr.serverapp.strategy", "flwr.simulation"),
}
"""Modules of Flower's public API."""
ALLOWED = {"posy/flower.py", "deploy/flower_internals.py", "deploy/database.py"}
"""Modules that may use private names. ``deploy/database.py`` uses columns of Flower's database."""
MOST_NAMES = 25
ATTRIBUTES = {"_retry_invoker", "on_backoff", "_message_id", "_reply_to_message_id", "_run_id", "_data", "_content"}
"""Private attributes of the objects that Flower's public API returns. Attributes of Posy may have the same names."""
TABLES = {
    "task": {"token", "active_until", "run_id", "task_id", "starting_at", "running_at", "finished_at"},
    "node": {"online_until", "status", "node_id", "heartbeat_interval", "public_key"},
    "run": {"run_id", "status"},
    "message_ins": {"message_id"},
    "message_res": {"message_id"},
}
"""Tables and columns of Flower's database."""


def sources() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    skipped = ("tests/", "papers/", "docs/")
    paths = [ROOT / name for name in listed.stdout.split() if not name.startswith(skipped)]
    return [path for path in paths if path.is_file()]


def is_private(module: str) -> bool:
    return module.split(".", maxsplit=1)[0] == "flwr" and module not in PUBLIC


def names_in(tree: ast.AST) -> Iterator[str]:
    """Yield the private names of Flower in a module: imported, accessed on a module, by a string, or in SQL."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        yield from imported_by(node, modules)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from accessed_by(node, modules)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            path = re.fullmatch(r"flwr(\.\w+)+(:[\w.]+)?", node.value)
            if node.value in ATTRIBUTES or (path and is_private(node.value)):
                yield node.value
            yield from columns_in(node.value)


def imported_by(node: ast.AST, modules: dict[str, str]) -> Iterator[str]:
    """Yield the private names that a statement imports, and add the modules that it imports to ``modules``."""
    if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flwr":
        for alias in node.names:
            path = f"{node.module}.{alias.name}"
            if is_private(node.module) or is_module(path):
                modules[alias.asname or alias.name] = path
            if is_private(node.module):
                yield path
    elif isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] == "flwr":
                modules[alias.asname or "flwr"] = alias.name if alias.asname else "flwr"
                if is_private(alias.name):
                    yield alias.name


def accessed_by(node: ast.Attribute, modules: dict[str, str]) -> Iterator[str]:
    """Yield the private name that an expression accesses on an imported module, or on an object of Flower."""
    if path := dotted(node):
        head, _, attributes = path.partition(".")
        full = f"{modules[head]}.{attributes}" if head in modules else ""
        owner = full.rpartition(".")[0]
        if full and is_private(owner) and is_module(owner) and node.attr != "DESCRIPTOR":  # protobuf's
            yield full
    if node.attr in ATTRIBUTES and not is_attribute_of_posy(node):
        yield node.attr


def is_attribute_of_posy(node: ast.Attribute) -> bool:
    """Return whether an attribute belongs to an object of Posy."""
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def columns_in(text: str) -> Iterator[str]:
    """Yield the tables and columns of Flower's database in an SQL statement."""
    table = re.match(r"(?:UPDATE|INSERT INTO|DELETE FROM|SELECT .* FROM) (\w+)", text)
    if table and table[1] in TABLES:
        yield f"table {table[1]}"
        yield from (f"{table[1]}.{column}" for column in TABLES.get(table[1], ()) if re.search(rf"\b{column}\b", text))


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def is_module(path: str) -> bool:
    target = Path(flwr.__file__).parent.joinpath(*path.split(".")[1:])
    return path == "flwr" or target.is_dir() or target.with_suffix(".py").is_file()


def private_names() -> dict[str, set[str]]:
    by_module = {path.relative_to(ROOT).as_posix(): set(names_in(ast.parse(path.read_text()))) for path in sources()}
    return {name: names for name, names in by_module.items() if names}


def test_private_flower_names_are_few_and_in_allowed_modules() -> None:
    by_module = private_names()
    assert by_module.keys() <= ALLOWED, {name: by_module[name] for name in by_module.keys() - ALLOWED}
    names = set().union(*by_module.values())
    assert len(names) <= MOST_NAMES, sorted(names)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from flwr.app import Message", set()),
        ("from flwr.common.serde import message_to_proto as to", {"flwr.common.serde.message_to_proto"}),
        (
            "import flwr.supercore.retry as r\nr.RetryInvoker()",
            {"flwr.supercore.retry", "flwr.supercore.retry.RetryInvoker"},
        ),
        ("from flwr.supercore import heartbeat\nsetattr(heartbeat, 'X', 1)", {"flwr.supercore.heartbeat"}),
        (
            "from flwr.proto import fleet_pb2\nfleet_pb2.PullMessagesRequest()",
            {"flwr.proto.fleet_pb2", "flwr.proto.fleet_pb2.PullMessagesRequest"},
        ),
        ("import_module('flwr.superlink.extensions')", {"flwr.superlink.extensions"}),
        ("message.metadata.__dict__['_message_id'] = 'a'", {"_message_id"}),
        ("getattr(grid, '_retry_invoker', None)", {"_retry_invoker"}),
        ("invoker.on_backoff = note", {"on_backoff"}),
        ("self._data = 1", set()),
        ("a = 'UPDATE task SET active_until = ? WHERE token = ?'", {"table task", "task.active_until", "task.token"}),
    ],
)
def test_names_in_detects_private_names(source: str, expected: set[str]) -> None:
    assert set(names_in(ast.parse(source))) == expected
