"""The faults of benchmarks.mutants are valid code, and the tests of a module detect them."""

import ast
from pathlib import Path

from benchmarks.mutants import all_mutants, covering_tests, mutants_of, outcome_of

ROOT = Path(__file__).resolve().parent.parent
SOURCE = b'''def share(a: int = 3, *, total: int) -> float:
    """Return a / total."""
    if total <= 0:
        raise ValueError(f"{total + 1}")
    print("x", a)
    return -a / total
'''


def test_mutants_cover_each_part_of_a_function() -> None:
    mutants = mutants_of("m.py", SOURCE)
    faults = {(mutant.kind, mutant.original, mutant.replacement) for mutant in mutants}
    assert faults == {
        ("condition", "total <= 0", "(not total <= 0)"),
        ("comparison", "total <= 0", "(total < 0)"),
        ("constant", "0", "(1)"),
        ("call", 'print("x", a)', "pass"),
        ("argument", 'print("x", a)', "(print(a, 'x'))"),
        ("return", "return -a / total", "return None"),
        ("operator", "-a / total", "(-a * total)"),
        ("sign", "-a", "(a)"),
    }
    assert mutants[0].applied(SOURCE).count(b"not total <= 0") == 1


def test_project_mutants_are_valid_and_have_distinct_keys() -> None:
    mutants = all_mutants(ROOT)
    assert len({mutant.key for mutant in mutants}) == len(mutants) > 5000
    for mutant in mutants[::100]:
        ast.parse(mutant.applied((ROOT / mutant.file).read_bytes()))


def test_covering_tests_name_or_import_the_module(tmp_path: Path) -> None:
    for folder in ("tests", "docs/methods"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/methods/ditto.md").touch()
    (tmp_path / "tests/test_own.py").write_text("from posy.client_app.base import LocalRun\n")
    program, base = "tests/programs/test_program_ditto.py::test_it", "tests/test_own.py::test_b"
    ditto, fedfew = "tests/test_methods.py::test_c[ditto]", "tests/test_methods.py::test_c[fedfew]"
    tests = [program, base, fedfew, ditto]
    assert covering_tests("strategies/ditto.py", tmp_path, tests) == [program, ditto]
    assert covering_tests("client_app/base.py", tmp_path, tests) == [base, fedfew]


def test_mutant_is_caught_or_survives(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_bytes(SOURCE)
    check = "def test_share():\n    from m import share\n\n    assert share(1, total=2) == -0.5\n"
    (tmp_path / "test_m.py").write_text(f"import sys\n\nsys.path.insert(0, {str(tmp_path)!r})\n\n\n{check}")
    mutants = {mutant.kind: mutant for mutant in mutants_of("m.py", SOURCE)}
    outcomes = {}
    for kind in ("operator", "call"):
        outcomes[kind] = outcome_of(mutants[kind], tmp_path, [str(tmp_path / "test_m.py")], 60)
    assert (tmp_path / "m.py").read_bytes() == SOURCE
    assert outcomes["call"] == {"key": mutants["call"].key, "outcome": "survived", "test": "", "tests": 1}
    assert outcomes["operator"]["outcome"] == "caught"
    assert outcomes["operator"]["test"].endswith("test_m.py::test_share")
