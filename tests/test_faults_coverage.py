"""A mean over the clients of one cohort is not comparable with a mean over all clients."""

import re
from pathlib import Path

import pytest
import yaml

import posy
from posy.commands.cli import main

QUICK = {
    "num-clients": 10,
    "fraction-train": 0.2,
    "num-server-rounds": 2,
    "local-epochs": 1,
    "max-samples": 400,
    "model": "linear",
    "device": "cpu",
    "stack": "loop",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_run_reports_the_number_of_clients_behind_a_local_accuracy(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {key.replace("-", "_"): value for key, value in QUICK.items()}
    record = posy.run(method="local", run_name="local", **settings)
    clients = record.summary["local"]["last"]["clients"]
    output = capsys.readouterr().out
    assert clients < 10
    (line,) = (line for line in output.splitlines() if "local model, last" in line)
    assert line.rstrip().endswith(f"{clients} of 10")
    progress = [line for line in output.splitlines() if line.startswith("round 2/2")]
    assert f"({clients} of 10)" in progress[-1]


def test_table_reports_client_counts_and_ranks_only_rows_over_all_clients(folder: Path) -> None:
    rows = [{"name": name, "settings": {"method": name.lower()}} for name in ("FedAvg", "Local")]
    plan = {"output": "out", "settings": QUICK, "seeds": [0, 1], "runs": rows}
    Path("plan.yaml").write_text(yaml.safe_dump(plan), encoding="utf-8")
    assert main(["table", "plan.yaml"]) == 0
    page = (folder / "out" / "table.md").read_text(encoding="utf-8")
    accuracies, clients = page.split("## Clients")
    lines = accuracies.splitlines()
    table_rows = {name: next(line for line in lines if line.startswith(f"| {name}")) for name in ("FedAvg", "Local")}
    points = {
        "FedAvg": ("local last", "local weighted"),
        "Local": ("local last", "local upper bound", "local weighted"),
    }
    columns = [name.strip() for name in lines[2].split("|")]
    for name, row in table_rows.items():
        cells = dict(zip(columns, (cell.strip() for cell in row.split("|")), strict=True))
        assert all(re.search(r"^[0-9.]+ .*, [0-9]+ of 20 clients$", cells[point]) for point in points[name])
        assert "of 20" not in cells["served last"]
    assert re.search(r"^\| Local \| local \| [0-9.]+ \([0-9]+ of 20\) \|", clients, re.MULTILINE)
    assert re.search(r"^\| FedAvg ≈ \| served \| [0-9.]+ \|", clients, re.MULTILINE)  # the best row covers all clients
