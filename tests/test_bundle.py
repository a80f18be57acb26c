"""The bundle that nodes receive: the app, custom files, and the nodes' rule on foreign code."""

import io
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from posy.commands.cli import main
from posy.commands.deploy.bundle import bundle
from posy.data.policy import Policy
from posy.deploy.foreign import REFUSE, ForeignCodeError, check_code, code_rule, foreign_code
from posy.extensions import local_imports
from posy.settings import LaunchError, SettingsError

NETS = "import tools\nfrom inner.deep import x\nimport numpy\n\n\ndef net(task):\n    return None\n"
MINE = """
from posy.settings import setting
from posy.strategies.settings import MethodSettings


class FedMineSettings(MethodSettings):
    strength: float = setting(0.5, "how strong", minimum=0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a network with circular local imports and a method, and change to their folder."""
    files = {
        "nets.py": NETS,
        "tools.py": "import nets\nfrom inner import deep\n",
        "inner/__init__.py": "",
        "inner/deep.py": "import last\nx = 1\n",
        "last.py": "",
        "unused.py": "",
        "mine.py": MINE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def members(content: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def packed(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_local_imports_are_collected_recursively(folder: Path) -> None:
    imported = {path.relative_to(folder).as_posix() for path in local_imports(folder / "nets.py")}
    assert imported == {"nets.py", "tools.py", "inner/__init__.py", "inner/deep.py", "last.py"}
    assert local_imports(folder / "mine.py") == [folder / "mine.py"]


def test_a_bundle_contains_custom_files_and_their_settings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "inner/deep.py").write_text("x = 1\n", encoding="utf-8")
    settings = {"method": "mine:FedMine", "fedmine-strength": 0.7, "lr": 0.1}
    content, sent = bundle(settings)
    assert sent == {"method": "own/mine.py:FedMine", "fedmine-strength": 0.7, "lr": 0.1}
    files = members(content)
    assert files["own/mine.py"] == MINE.encode()
    config = tomllib.loads(files["pyproject.toml"].decode())["tool"]["flwr"]["app"]["config"]
    assert config["fedmine-strength"] == 0.5
    output = capsys.readouterr().out
    assert str(folder / "mine.py") in output and "own/mine.py" in output
    assert foreign_code(content) == ["own/mine.py"]


def test_a_bundle_without_custom_files_has_no_foreign_code() -> None:
    content, sent = bundle({"method": "fedavg", "model": "mlp"})
    assert sent == {"method": "fedavg", "model": "mlp"}
    assert foreign_code(content) == []


def test_bundle_errors_are_raised_at_submission(folder: Path) -> None:
    with pytest.raises(LaunchError, match="fedmine-strength is not in"):
        bundle({"method": "fedavg", "fedmine-strength": 0.7})
    (folder / "nets.py").write_text("import a_missing_package\n", encoding="utf-8")
    with pytest.raises(SettingsError, match="a_missing_package"):
        bundle({"model": "nets:net"})
    (folder / "sub").mkdir()
    (folder / "sub/mine.py").write_text("def net(task):\n    return None\n", encoding="utf-8")
    with pytest.raises(LaunchError, match="two files would both be"):
        bundle({"method": "mine:FedMine", "model": "sub/mine.py:net"})


def test_the_code_rule_reports_or_refuses_foreign_code() -> None:
    """Foreign code includes dot files such as own/.py."""
    files = members(bundle({})[0])
    assert check_code(packed(files), "installed") and not check_code(packed(files), "any")
    for name, data in (
        ("client_app/app.py", files["client_app/app.py"] + b"# changed\n"),
        ("client_app/fast.so", b"\x7fELF"),
        ("sitecustomize.py", b""),
        ("own/.py", b"open('ran', 'w')"),
        ("pyproject.toml", files["pyproject.toml"].replace(b"posy.clientapp:app", b"own.mine:app")),
        ("pyproject.toml", b"[tool]\nflwr = 3\n"),
        ("pyproject.toml", b"\xff"),
    ):
        changed = packed({**files, name: data})
        assert foreign_code(changed) == [name]
        assert not check_code(changed, "any")  # the log names the files
        with pytest.raises(ForeignCodeError, match=re.escape(name)):
            check_code(changed, "installed")
        with pytest.raises(ForeignCodeError, match="no trusted entity has signed"):
            check_code(changed, "signed")
        assert not check_code(changed, "signed", signed=True)
    assert check_code(packed({**files, "papers/fedfew/settings/other.yaml": b"lr: 0.1"}), "installed")  # data


def test_the_code_rule_comes_from_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REFUSE, raising=False)
    assert [code_rule(policy) for policy in (None, Policy(), Policy(code="signed"))] == ["any", "installed", "signed"]
    monkeypatch.setenv(REFUSE, "1")
    assert code_rule(Policy(code="any")) == "installed"


def test_a_stock_node_requires_code_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supernode", "--insecure", "--stock", f"data={tmp_path}"]) == 2
    assert "code = installed; drop --stock, or set code: any" in capsys.readouterr().err


def test_a_stock_node_cannot_refuse_foreign_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supernode", "--insecure", "--stock", "--refuse-foreign-code"]) == 2
    assert "--refuse-foreign-code cannot be combined with --stock" in capsys.readouterr().err


LOADING = """
import sys, threading, time
from importlib import import_module, util

sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
sys.path.insert(0, sys.argv[1])
server = threading.Thread(target=import_module, args=[sys.argv[2]])
server.start()
while "posy" not in sys.modules:
    time.sleep(0.001)
assert util.find_spec(sys.argv[3])
print(import_module(sys.argv[3]).app)
server.join()
"""


@pytest.mark.slow
def test_a_simulation_loads_both_apps_concurrently(tmp_path: Path) -> None:
    """Flower imports the ServerApp in one thread and looks up the ClientApp in another, while `posy` is imported."""
    files = members(bundle({})[0])
    files["posy/__init__.py"] = b"import time\ntime.sleep(0.5)\n" + files["posy/__init__.py"]
    for name, data in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(data)
    apps = tomllib.loads(files["pyproject.toml"].decode())["tool"]["flwr"]["app"]["components"]
    loaded = [apps[name].removesuffix(":app") for name in ("serverapp", "clientapp")]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(tmp_path), *loaded],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "ClientApp" in done.stdout, done.stderr
