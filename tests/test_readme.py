"""What the README shows works as it stands there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NODE_CONFIG = {"partition-id", "num-partitions", "state-dir", "skip-unreadable"}
PACKAGES = ("posy", "data", "models", "strategies", "client_app", "server_app", "commands", "experiments")


def test_the_worked_example_of_a_new_method_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("## Add a method") : readme.index("## How it is built")]
    blocks = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    line = re.search(r'`("fedper": "FedPer",)`', section)
    command = re.search(r"^posy run (.*)$", section, flags=re.MULTILINE)
    assert len(blocks) == 1
    assert blocks[0].count("\n") <= 15
    assert line is not None
    assert command is not None
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "strategies/fedper.py").write_text(blocks[0], encoding="utf-8")
    registry = tmp_path / "strategies/methods.py"
    registry.write_text(registry.read_text().replace("METHODS = {\n", f"METHODS = {{\n    {line[1]}\n", 1))
    words = [*command[1].split(), "num-server-rounds=2", "num-clients=3", "run-name=readme", "output-dir=runs"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-P", "-m", "posy.commands.cli", "run", *words],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "runs/readme/summary.json").read_text())
    assert (summary["method"], summary["status"], summary["dropped"]) == ("fedper", "completed", {})
    assert summary["local"]["last"]["mean"] > 0.2
    rounds = [json.loads(row) for row in (tmp_path / "runs/readme/rounds.jsonl").read_text().splitlines()]
    assert rounds[0]["bytes_up"] < rounds[0]["bytes_down"]  # only the base travels, and evaluation sends it again


def test_every_file_and_setting_that_the_readme_names_exists() -> None:
    from posy.strategies.methods import METHODS
    from posy.strategies.registry import defaults

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for path in re.findall(r"(?:benchmarks|experiments|docs)/[\w./-]+\.\w+", readme):
        assert (ROOT / path).exists(), path
    table = readme[readme.index("## Methods") : readme.index("## Data")]
    assert set(METHODS) <= set(re.findall(r"`([\w-]+)`", table))
    for key in re.findall(r"`([a-z]+(?:-[a-z]+)+)=", readme):
        assert key in defaults().keys() | NODE_CONFIG, key
    assert "@@" not in readme


def test_how_far_stacked_models_part_is_what_was_measured() -> None:
    from posy.strategies.methods import METHODS

    rows = (ROOT / "benchmarks/results/stacking.txt").read_text(encoding="utf-8").splitlines()[1:]
    worst = {row.split()[0]: max(map(float, row.split()[1:])) for row in rows}
    assert worst.keys() == set(METHODS)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    claimed = re.search(
        r"models of nine methods are within (\S+) of .* PPFE within (\S+), and those of FedFew, FedAMP and cwFedAvg, "
        r"whose weights amplify rounding, within (\S+), (\S+) and (\S+) \(",
        readme,
    )
    assert claimed is not None
    most, *others = map(float, claimed.groups())
    assert others == [worst.pop(method) for method in ("ppfe", "fedfew", "fedamp", "cwfedavg")]
    assert len(worst) == 9
    assert max(worst.values()) <= most
