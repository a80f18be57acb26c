"""Measure the share of faults that the tests detect, in a seeded sample of faults in strategies/ and client_app/.

``python -m benchmarks.mutants OUTPUT.jsonl --count 150`` draws mutants. A mutant changes a comparison, an operator, a
constant, a return value, a condition or an argument in a function. For each mutant, the command runs the tests of the
module in a copy of the working tree until one fails, and appends the outcome. An interrupted measurement resumes.

To compare two versions of the tests, measure the older version, then run the command with ``--again OLD.jsonl`` and a
different output in the newer version. The command repeats the caught mutants. For each mutant, it first runs the test
that caught the mutant earlier.
"""

import ast
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("strategies", "client_app")
SHARED_BY_METHODS = ("test_methods", "test_recompute")
"""Test files whose tests run every method."""
EXAMPLES = ("fedfew", "ppfe", "scaffold", "fedrep", "fedamp")
"""Methods whose shared tests cover the modules that all methods use."""
LOADED = ("torch", "scipy.optimize", "sklearn.datasets", "hypothesis", "pandas", "flwr.app", "flwr.serverapp.strategy")
"""Modules that are imported once, before the tests of each mutant run in a forked process."""
SECONDS = 1800.0
"""Timeout in seconds for the tests of a mutant, long enough for a busy machine."""

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip


class Mutant(NamedTuple):
    """A fault: the replacement of a part of a file."""

    file: str
    function: str
    kind: str
    original: str
    number: int
    """Number of identical faults that precede this fault in the function."""
    start: int
    """Offset of the part in the file, in bytes."""
    replacement: str

    @property
    def key(self) -> str:
        """A name that does not depend on the rest of the file."""
        return "|".join([self.file, self.function, self.kind, self.original, str(self.number)])

    def applied(self, source: bytes) -> bytes:
        """Return the content of the file with the fault."""
        return source[: self.start] + self.replacement.encode() + source[self.start + len(self.original.encode()) :]


# -- the faults ------------------------------------------------------------------------------------------


def faults(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """Yield the faults of a node: their kind, the node that they replace, and its replacement."""
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=right) if type(operator) in COMPARISONS:
            yield "comparison", node, ast.Compare(left, [COMPARISONS[type(operator)]()], right)
        case ast.BinOp(left=left, op=op, right=other) if type(op) in OPERATORS and not is_text(left, other):
            yield "operator", node, ast.BinOp(left, OPERATORS[type(op)](), other)
        case ast.BoolOp(op=joint, values=values):
            yield "operator", node, ast.BoolOp(ast.Or() if isinstance(joint, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield "sign", node, operand
        case ast.Constant(value=bool(value)):
            yield "constant", node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, ast.Constant(value + 1)
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "return", node, ast.Return(ast.Constant(None))
        case ast.If(test=test) | ast.IfExp(test=test):
            yield "condition", test, ast.UnaryOp(ast.Not(), test)
        case ast.Expr(value=ast.Call()):
            yield "call", node, ast.Pass()
        case ast.Call(func=called, args=[first, second, *others], keywords=named) if not is_starred(first, second):
            yield "argument", node, ast.Call(called, [second, first, *others], named)
        case ast.Call(func=called, args=arguments, keywords=[*named, _]):
            yield "argument", node, ast.Call(called, arguments, named)


def is_text(*nodes: ast.expr) -> bool:
    """Return whether one of the expressions is a string literal."""
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str)) for n in nodes
    )


def is_starred(*nodes: ast.expr) -> bool:
    """Return whether one of the arguments is unpacked."""
    return any(isinstance(node, ast.Starred) for node in nodes)


def nodes_in(node: ast.AST, name: str = "", inside: bool = False) -> Iterator[tuple[str, ast.AST]]:
    """Yield each node in a function with the function's name; skip raised errors, f-strings and annotations."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        name = f"{name}.{node.name}".lstrip(".")
        inside = inside or isinstance(node, ast.FunctionDef)
        children: list[ast.AST] = list(node.body)
    else:
        children = [child for field, child in fields_of(node) if field != "annotation"]
    for child in children:
        if isinstance(child, ast.Raise | ast.JoinedStr):
            continue
        if inside and not isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield name, child
        yield from nodes_in(child, name, inside)


def fields_of(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the child nodes of a node, each with the name of its field."""
    for field, value in ast.iter_fields(node):
        children = value if isinstance(value, list) else [value]
        yield from ((field, child) for child in children if isinstance(child, ast.AST))


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Return all faults of a file."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    mutants: list[Mutant] = []
    counts: Counter[tuple[str, str, str]] = Counter()
    for function, node in nodes_in(ast.parse(source)):
        for kind, old, new in faults(node):
            assert isinstance(old, ast.expr | ast.stmt) and old.end_lineno and old.end_col_offset
            start, end = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            text = ast.unparse(ast.fix_missing_locations(new))
            fault = (function, kind, source[start:end].decode())
            replacement = f"({text})" if isinstance(old, ast.expr) else text
            mutants.append(Mutant(file, *fault, counts[fault], start, replacement))
            counts[fault] += 1
    return mutants


def all_mutants(root: Path) -> list[Mutant]:
    """Return all faults of strategies/ and client_app/."""
    files = sorted(file for folder in FOLDERS for file in (root / folder).rglob("*.py"))
    return [mutant for file in files for mutant in mutants_of(file.relative_to(root).as_posix(), file.read_bytes())]


# -- the tests -------------------------------------------------------------------------------------------


def collected(root: Path) -> list[str]:
    """Return the ids of all tests that need no real federation."""
    options = ["--collect-only", "-q", "-n", "0", "-p", "no:warnings", "-o", "addopts=", "-m", "not federation"]
    command = [sys.executable, "-m", "pytest", *options]
    lines = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    tests = [line for line in lines if "::" in line]
    if not tests:
        raise RuntimeError(f"pytest lists no tests in {root}")
    return tests


def plain(name: str) -> str:
    """Return a name in lower case without separators, so that ``lg_fedavg`` and ``LG-FedAvg`` match."""
    return name.lower().replace("-", "").replace("_", "")


def covering_tests(file: str, root: Path, tests: list[str]) -> list[str]:
    """Return the tests of a module, the most specific first.

    The name of the module selects the tests. For a module that all methods use, the result includes the tests in files
    that import the module. It also includes the tests that run every method, but only for a few methods.
    """
    module, stem = file.removesuffix(".py").replace("/", "."), Path(file).stem
    name = plain(stem)
    named = [test for test in tests if any(part in plain(test) for part in (f"test{name}.py", f"program{name}.py"))]
    if (root / "docs/methods" / f"{stem.replace('_', '-')}.md").exists():
        named += [test for test in tests if name in plain(test.partition("::")[2])]
        return list(dict.fromkeys(named))
    importing = {
        path.relative_to(root).as_posix()
        for path in (root / "tests").glob("test_*.py")
        if f"posy.{module} " in path.read_text(encoding="utf-8")
    }
    named += [test for test in tests if test.partition("::")[0] in importing]
    examples = tuple(f"[{method}]" for method in EXAMPLES)
    shared = tuple(f"tests/{name}.py" for name in SHARED_BY_METHODS)
    named += [test for test in tests if test.startswith(shared) and test.endswith(examples)]
    return list(dict.fromkeys(named))


class Failures:
    """A plugin for pytest that records a failed test in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Record the test if it failed."""
        if report.failed:
            self.file.write_text(report.nodeid, encoding="utf-8")

    pytest_collectreport = pytest_runtest_logreport


def outcome_of(mutant: Mutant, root: Path, tests: list[str], seconds: int) -> dict[str, Any]:
    """Run tests with a fault in a forked process, for at most ``seconds`` of CPU time, and return the outcome."""
    if not tests:  # without arguments, pytest would run all tests
        return {"key": mutant.key, "outcome": "survived", "test": "", "tests": 0}
    file, failure_file = root / mutant.file, root / "failed.txt"
    source = file.read_bytes()
    failure_file.write_text("", encoding="utf-8")
    file.write_bytes(mutant.applied(source))
    process = os.fork()
    if not process:
        run_tests(root, tests, seconds, failure_file)
    try:
        status = status_of(process)
    finally:
        file.write_bytes(source)
        shutil.rmtree(root / "temporary", ignore_errors=True)
    failed_test = failure_file.read_text(encoding="utf-8")
    outcomes = {0: "survived", -signal.SIGKILL: "stopped", -signal.SIGXCPU: "stopped"}
    return {"key": mutant.key, "outcome": outcomes.get(status, "caught"), "test": failed_test, "tests": len(tests)}


def run_tests(root: Path, tests: list[str], seconds: int, note: Path) -> None:
    """Run tests until one fails, and exit this forked process with pytest's status."""
    status = 1
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        log = os.open(root / "pytest.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "--basetemp", str(root / "temporary")]
        status = int(import_module("pytest").main([*options, *tests], plugins=[Failures(note)]))
    finally:
        os._exit(status)


def status_of(process: int) -> int:
    """Wait for a process, kill it after :data:`SECONDS`, and return its exit status."""
    end = time.monotonic() + SECONDS
    while True:
        finished, status = os.waitpid(process, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            os.killpg(process, signal.SIGKILL)
        time.sleep(0.05)


# -- the measurement -------------------------------------------------------------------------------------


def read(file: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file, or an empty list if it does not exist."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def sample(root: Path, count: int, seed: int, again: Path | None) -> list[tuple[Mutant, str]]:
    """Return mutants, each with the test that caught it earlier, or with an empty string."""
    mutants = all_mutants(root)
    if again is None:
        random.Random(seed).shuffle(mutants)
        return [(mutant, "") for mutant in mutants[:count]]
    by_key = {mutant.key: mutant for mutant in mutants}
    caught = [row for row in read(again) if row["outcome"] == "caught"]
    return [(by_key[row["key"]], row["test"]) for row in caught if row["key"] in by_key]


def copy_of_tree(folder: Path) -> Path:
    """Copy the tracked files of the working tree, and return the copy."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    return folder


def main(
    output: Path,
    count: Annotated[int, typer.Option(help="number of mutants")] = 150,
    seed: Annotated[int, typer.Option(help="seed of the sample")] = 0,
    seconds: Annotated[int, typer.Option(help="CPU time for the tests of a mutant")] = 90,
    again: Annotated[Path | None, typer.Option(help="file of earlier outcomes; repeat its caught mutants")] = None,
) -> None:
    """Append the outcome of each mutant to OUTPUT and print the share of caught mutants."""
    output = output.absolute()
    measured_keys = {row["key"] for row in read(output)}
    with tempfile.TemporaryDirectory(prefix="posy-mutants-") as folder:
        root = copy_of_tree(Path(folder))
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        sys.path[:0] = [str(root), str(root / "tests"), str(root / "tests/programs")]
        sys.dont_write_bytecode = True
        tests = collected(root)
        sampled = sample(root, count, seed, again.absolute() if again else None)
        os.chdir(root)
        for module in LOADED:
            import_module(module)
        for mutant, test in sampled:
            if mutant.key not in measured_keys:
                covering = covering_tests(mutant.file, root, tests)
                row = outcome_of(mutant, root, list(dict.fromkeys([*({test} & {*tests}), *covering])), seconds)
                with output.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{row['outcome']:8} {mutant.key} {row['test']}".replace("\n", " "), flush=True)
        os.chdir(ROOT)
    outcomes = Counter(row["outcome"] for row in read(output))
    print(f"{outcomes['caught']} of {outcomes.total()} mutants are caught: {dict(outcomes)}")


if __name__ == "__main__":
    typer.run(main)
