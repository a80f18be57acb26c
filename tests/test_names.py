"""Posy takes no import name but its own: people's projects have a data/ and a models/ of theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import posy
record = posy.run(method="fedavg", dataset={data!r}, model="linear", num_clients=2, num_server_rounds=1, device="cpu")
import data, models, strategies
assert (data.NAME, models.NAME, strategies.NAME) == ("theirs", "theirs", "theirs")
import posy.data, posy.models
print(record.summary["status"], posy.data.__name__, posy.models.__name__)
"""


@pytest.mark.parametrize("form", ["packages", "modules", "folders without code"])
def test_posy_runs_in_a_folder_that_has_data_and_models_of_its_own(form: str, tmp_path: Path) -> None:
    import numpy as np

    rng = np.random.default_rng(1)
    np.savez(tmp_path / "digits.npz", x_train=rng.normal(size=(40, 3)), y_train=np.arange(40) % 2)
    script = SCRIPT.format(data=str(tmp_path / "digits.npz"))
    for name in ("data", "models", "strategies", "client_app", "server_app"):
        if form == "modules":
            (tmp_path / f"{name}.py").write_text('NAME = "theirs"\n')
            continue
        (tmp_path / name).mkdir()
        if form == "packages":
            (tmp_path / name / "__init__.py").write_text('NAME = "theirs"\n')
        else:
            (tmp_path / name / "notes.txt").write_text("nothing to import")
    if form == "folders without code":
        script = script.replace("import data, models, strategies\n", "").replace(
            'assert (data.NAME, models.NAME, strategies.NAME) == ("theirs", "theirs", "theirs")\n', ""
        )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "completed posy.data posy.models"


def test_flowers_bundle_finds_the_folders_without_links(tmp_path: Path) -> None:
    import shutil

    root = Path(__file__).resolve().parent.parent
    for name in ("posy", "data", "models", "strategies", "client_app", "server_app"):
        shutil.copytree(root / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        if (link := tmp_path / "posy" / name).is_symlink():
            link.unlink()
    words = "import posy.data.task, posy.server_app; print(posy.data.task.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(tmp_path / "data" / "task.py"), done.stderr
