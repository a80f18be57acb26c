"""Posy notices that a run's custom code has changed: a table repeats the run, and a resumed run warns."""

import json
from pathlib import Path
from textwrap import dedent

import pytest

from posy.commands.cli import main
from posy.strategies.registry import code_digests
from posy.yaml12 import dump, read_yaml

METHOD = dedent("""
    from posy.method import MethodSettings, PersonalisedStrategy, model
    from factors import FACTOR


    class FedFactorSettings(MethodSettings, point="served"):
        returned = {"model": model(noise=True, sums=True)}


    class FedFactor(PersonalisedStrategy):
        def aggregate(self, server_round, updates):
            self.model = self.model + FACTOR * (self.mean(updates) - self.model)
            return {}
""")
SMALL = {"max-samples": 200, "num-clients": 2, "local-epochs": 1, "num-server-rounds": 1}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a method that imports a module from its folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(METHOD, encoding="utf-8")
    (tmp_path / "factors.py").write_text("FACTOR = 1.0\n", encoding="utf-8")
    return tmp_path


def test_digests_cover_local_imports_but_no_installed_modules(folder: Path) -> None:
    settings = {"method": "mine:FedFactor", "model": "torchvision:resnet18", "track": "mine:FedFactor"}
    before = code_digests(settings)
    assert before.keys() == {"method"}  # a tracker does not affect the results
    (folder / "unused.py").write_text("FACTOR = 3.0\n", encoding="utf-8")
    assert code_digests(settings) == before
    (folder / "factors.py").write_text("FACTOR = 0.5\n", encoding="utf-8")
    assert code_digests(settings)["method"] != before["method"]
    assert code_digests({"method": "fedavg"}) == {}


def test_a_table_repeats_runs_whose_code_has_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "mine", "settings": {"method": "mine:FedFactor"}}, {"name": "a", "settings": {"method": "fedavg"}}]
    (folder / "t.yaml").write_text(dump({"runs": rows, "seeds": [0], "settings": SMALL, "output": "t"}), "utf-8")
    assert main(["table", "t.yaml", "-j", "1"]) == 0
    assert main(["table", "t.yaml", "-j", "1"]) == 0
    assert "2 of 2 runs are already finished" in capsys.readouterr().out
    (folder / "factors.py").write_text("FACTOR = 0.0\n", encoding="utf-8")
    assert main(["table", "t.yaml", "-j", "1"]) == 0
    output = capsys.readouterr().out
    assert "1 of 2 runs are already finished" in output
    assert f"1 run will be repeated, because the code has changed: method = {folder / 'mine.py'}:FedFactor" in output


def test_a_resumed_run_warns_of_changed_code(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert main(["run", "method=mine:FedFactor", "run-name=r", "output-dir=runs", *words]) == 0
    started_with = read_yaml(folder / "runs/r/config.yaml")["code"]
    assert main(["run", "resume=r", "output-dir=runs", "num-server-rounds=2"]) == 0
    assert "has changed since the run started" not in caplog.text
    (folder / "factors.py").write_text("FACTOR = 0.0\n", encoding="utf-8")
    assert main(["run", "resume=r", "output-dir=runs", "num-server-rounds=3"]) == 0
    assert "mine.py:FedFactor' has changed since the run started; it has trained 2 rounds" in caplog.text
    config = read_yaml(folder / "runs/r/config.yaml")
    assert config["code"] != started_with
    assert [entry["code"] for entry in config["resumed"]] == [started_with, started_with]
    assert json.loads((folder / "runs/r/summary.json").read_text())["rounds"] == 3


def test_a_resumed_run_names_a_fixed_setting_of_its_custom_method(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = METHOD.replace("from posy.method import", "from posy.method import setting,").replace(
        "    returned", '    step: float = setting(1.0, "step", above=0)\n    returned'
    )
    (folder / "mine.py").write_text(source, encoding="utf-8")
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert main(["run", "method=mine:FedFactor", "run-name=r", "output-dir=runs", *words]) == 0
    assert main(["run", "resume=r", "output-dir=runs", "fedfactor-step=0.5", "num-server-rounds=2"]) == 2
    assert "fedfactor-step = 0.5, but the run has 1.0" in capsys.readouterr().err
