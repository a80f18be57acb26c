"""Commands that only read settings load no PyTorch, pandas or matplotlib."""

import json
import subprocess
import sys

import pytest

from posy.strategies.methods import METHODS

HEAVY = ("torch", "torchvision", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn", "ray")
SCRIPT = """
import contextlib, io, json, sys
from posy.commands.cli import main

with contextlib.redirect_stdout(io.StringIO()) as output:
    try:
        status = main(sys.argv[1:])
    except SystemExit as end:
        status = end.code
print(json.dumps([status, output.getvalue(), sorted(name for name in sys.modules if "." not in name)]))
"""


def run_command(*words: str) -> tuple[int, str, set[str]]:
    """Return the exit status and the output of a command, and the packages that it imports."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    status, output, packages = json.loads(done.stdout)
    return status, output + done.stderr, set(packages)


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("--help",), 0, "Personalised federated learning on Flower"),
        (("run", "method=fedavgg"), 2, "method = 'fedavgg'"),
        (("run", "method=ppfe", "lr=-1"), 2, "lr = -1"),
        (("settings",), 0, "num-server-rounds"),
        (("settings", "confree"), 0, "confree-"),
        (("methods",), 0, "FedFew"),
    ],
)
def test_settings_commands_import_no_heavy_packages(words: tuple[str, ...], status: int, text: str) -> None:
    actual_status, output, packages = run_command(*words)
    assert (actual_status, packages & set(HEAVY)) == (status, set())
    assert text in output


def test_help_does_not_import_flower() -> None:
    assert "flwr" not in run_command("--help")[2]


def test_strategies_import_no_heavy_packages() -> None:
    script = (
        f"import sys\nfrom posy.strategies.methods import strategy_class\n"
        f"for method in {list(METHODS)}:\n    strategy_class(method)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
