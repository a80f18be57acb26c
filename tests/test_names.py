"""Posy uses only the import name ``posy``, because users' projects may have their own data/ and models/."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = """
import posy
record = posy.run(method="fedavg", dataset="digits.npz", model="linear", num_clients=2, num_server_rounds=1)
import data, models, strategies
assert (data.NAME, models.NAME) == ("user", "user")
assert strategies.__file__ is None
import posy.data, posy.models
print(record.summary["status"], posy.data.__name__, posy.models.__name__)
"""


@pytest.mark.slow
def test_posy_runs_next_to_user_packages_named_data_and_models(tmp_path: Path) -> None:
    """The user has packages, modules and folders without code that have the names of Posy's folders."""
    rng = np.random.default_rng(1)
    np.savez(tmp_path / "digits.npz", x_train=rng.normal(size=(40, 3)), y_train=np.arange(40) % 2)
    for name in ("data", "client_app"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text('NAME = "user"\n')
    for name in ("models", "server_app"):
        (tmp_path / f"{name}.py").write_text('NAME = "user"\n')
    for name in ("strategies", "commands"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("nothing to import")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "completed posy.data posy.models"


def test_imports_work_in_a_bundle_without_symbolic_links(tmp_path: Path) -> None:
    import shutil

    root = Path(__file__).resolve().parent.parent
    for name in ("posy", "data", "models", "strategies", "client_app", "server_app"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        if (link := tmp_path / "posy" / name).is_symlink():
            link.unlink()
    code = "import posy.data.task, posy.server_app; print(posy.data.task.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(tmp_path / "data" / "task.py"), done.stderr
