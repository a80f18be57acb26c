"""The wheel: it contains all of Posy, and works without the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "requirements.txt", "README.md", "LICENSE", "posy", "papers")
FOLDERS = [path.name for path in (ROOT / "posy").iterdir() if path.is_symlink() and path.name != "papers"]
"""The packages for which posy/ contains links."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the sources, because setuptools also packs files of an earlier build."""
    source, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*SOURCES, *FOLDERS):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(output), str(source))
    [path] = output.glob("posy-*.whl")
    return path


def pip(*words: str) -> None:
    """Run pip without its check for a newer version."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_contains_every_module_and_data_file(wheel: Path) -> None:
    content = set(zipfile.ZipFile(wheel).namelist())
    folders = [ROOT / "posy", *(ROOT / name for name in FOLDERS)]
    files = {file for folder in folders for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc"}
    expected = {file.relative_to(ROOT).as_posix() for file in files if "papers" not in file.relative_to(ROOT).parts[:2]}
    settings = {file.relative_to(ROOT).as_posix() for file in ROOT.glob("papers/*/settings/*.yaml")}
    assert len(expected) > 300 and len(settings) > 30
    assert not {f"posy/{name.removeprefix('posy/')}" for name in expected | settings} - content
    assert {name.partition("/")[0] for name in content} == {"posy", wheel.name.rpartition("-py3")[0] + ".dist-info"}


@pytest.mark.slow
def test_an_installed_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    paths = {"base": str(environment), "platbase": str(environment)}
    packages = Path(sysconfig.get_path("purelib", "venv", paths))
    (packages / "zz.pth").write_text("\n".join({sysconfig.get_path(name) for name in ("purelib", "platlib")}))
    python = Path(sysconfig.get_path("scripts", "venv", paths)) / "python"
    pip("--python", str(python), "install", "--no-deps", str(wheel))

    def output_of(*words: str) -> str:
        command = [str(python), "-m", "posy", *words]
        hidden = {"PYTHONPATH", "POSY_START_DIRECTORY"}
        variables = {key: value for key, value in os.environ.items() if key not in hidden}
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    code = "import posy; print(posy.__file__)"
    where = subprocess.check_output([str(python), "-P", "-c", code], cwd=tmp_path, env={}, text=True).strip()
    assert Path(where) == packages / "posy" / "__init__.py"
    quick = ["num-server-rounds=1", "local-epochs=1", "device=cpu"]
    assert "completed after 1 round" in output_of("run", "run-name=digits", *quick)
    assert "completed after 1 round" in output_of("run", "run-name=heart", "dataset=heart-disease", *quick)
    of_paper = ["dataset=digits", "model=mlp", "num-clients=4", "num-server-rounds=3", "ppfe-stage-rounds=1,1,1"]
    assert output_of("run", "ppfe-cifar10-s2", "run-name=paper", *of_paper).startswith("ppfe on digits: ")
    assert output_of("report", "digits", "heart").startswith("report.html: 2 runs, ")
    assert "fedfew-models" in output_of("settings", "fedfew")
    table = tmp_path / "table.yaml"
    table.write_text(
        "settings: {num-server-rounds: 1, num-clients: 2, model: linear}\nruns: [{name: local}]\nseeds: [0]\n"
    )
    assert "written to" in output_of("table", str(table), "method=local")
