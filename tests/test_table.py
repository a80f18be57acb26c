"""`posy table`: the plan, the runs, skipped and repeated runs, and the figures."""

import gzip
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from posy.commands import archive
from posy.commands import table as table_module
from posy.commands.archive import clear
from posy.commands.launch import APP
from posy.commands.table import (
    Cell,
    Plan,
    aggregate,
    markdown,
    read_plan,
    run_cells,
    run_table,
)
from posy.metrics import METRICS
from posy.server_app.app import run as execute
from posy.server_app.resume import RAN_ON
from posy.settings import SettingsError
from posy.strategies.methods import METHODS
from posy.strategies.registry import read_settings

ACCURACY = METRICS["accuracy"]
COMMON = {
    "dataset": "digits",
    "num-clients": 2,
    "num-server-rounds": 1,
    "model": "linear",
    "max-samples": 200,
    "device": "cpu",
}


def write_table(folder: Path, **content: Any) -> Path:
    file = folder / "tiny.yaml"
    table = {
        "output": str(folder / "out"),
        "settings": COMMON,
        "seeds": [0],
        "runs": [{"name": "FedAvg", "settings": {"method": "fedavg"}}],
        **content,
    }
    file.write_text(yaml.safe_dump(table), encoding="utf-8")
    return file


def test_all_adds_one_row_per_method(tmp_path: Path) -> None:
    pooled = {"name": "Pooled", "settings": {"method": "pooled"}}
    for runs, expected in (("all", [*METHODS]), (["all", pooled], [*METHODS, "Pooled"])):
        assert [cell.row for cell in read_plan(write_table(tmp_path, runs=runs)).cells] == expected


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in a fresh working directory."""
    monkeypatch.chdir(tmp_path)


def test_rows_override_variants_and_variants_override_common_settings(tmp_path: Path) -> None:
    plan = read_plan(
        write_table(
            tmp_path,
            settings={**COMMON, "lr": 0.1, "batch-size": 4, "momentum": 0.5},
            variants=[{"name": "a"}, {"name": "b", "settings": {"lr": 0.2, "batch-size": 8}}],
            runs=[
                {"name": "x", "settings": {"method": "fedavg", "lr": 0.3}},
                {"name": "y", "settings": {"method": "local"}},
            ],
            seeds=[3, 1],
        ),
        {"momentum": 0.9},
    )
    configured = {
        (c.variant, c.row, c.seed): [c.config[k] for k in ("lr", "batch-size", "momentum")] for c in plan.cells
    }
    assert configured == {
        **{("a", "x", s): [0.3, 4, 0.9] for s in (3, 1)},
        **{("a", "y", s): [0.1, 4, 0.9] for s in (3, 1)},
        **{("b", "x", s): [0.3, 8, 0.9] for s in (3, 1)},
        **{("b", "y", s): [0.2, 8, 0.9] for s in (3, 1)},
    }
    assert len({cell.path for cell in plan.cells}) == 8
    assert plan.cells[0].path == tmp_path / "out/a/x/seed-3"


def test_table_settings_override_the_experiment_file(tmp_path: Path) -> None:
    cell = read_plan(write_table(tmp_path, settings={"experiment": "ppfe-cifar10-s2", "lr": 0.05})).cells[0]
    settings = read_settings(cell.config)
    assert (settings.run.method, settings.train.lr) == ("fedavg", 0.05)  # 0.05 is the default, but the table sets it
    assert settings.data.samples_per_client == 150


def test_rows_get_only_the_shared_settings_of_their_method(tmp_path: Path) -> None:
    rows = [{"name": name, "settings": {"method": name}} for name in ("fedavg", "fedfew", "ditto")]
    table = write_table(tmp_path, settings={**COMMON, "fedfew-models": 2}, runs=rows)
    cells = read_plan(table, {"ditto-strength": 2.0}).cells
    method_keys = {key for cell in cells for key in cell.config if key.startswith(("fedfew-", "ditto-"))}
    assert method_keys == {"fedfew-models", "ditto-strength"}
    assert [("fedfew-models" in c.config, "ditto-strength" in c.config) for c in cells] == [
        (False, False), (True, False), (False, True),
    ]  # fmt: skip
    for cell in cells:
        read_settings(cell.config)
    with pytest.raises(SettingsError, match="ppfe-stages on the command line is a setting of ppfe"):
        read_plan(table, {"ppfe-stages": 2})


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        ({"seeds": []}, "seeds"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"seeds": [True]}, "seeds"),
        ({"seeds": 3}, "seeds = 3"),
        ({"runs": []}, "runs"),
        ({"runs": ["fedavg"]}, "entry 1 in runs of .*tiny.yaml is 'fedavg'"),
        ({"runs": [{"name": "a"}, {"settings": {"lr": 0.1}}]}, "entry 2 in runs of .*tiny.yaml has no name"),
        ({"variants": [{"settings": {}}]}, "entry 1 in variants of .*tiny.yaml has no name"),
        ({"runs": [{"name": "a", "setings": {}}]}, "entry 1 in runs of .*tiny.yaml has the unknown key setings"),
        ({"runs": [{"name": "a/b"}]}, "a/b"),
        ({"runs": [{"name": ".."}]}, "'..'"),
        ({"runs": [{"name": "a"}, {"name": "a"}]}, "a appears twice"),
        ({"runs": [{"name": "a", "settings": {"lr": -1}}]}, "lr = -1.*tiny.yaml, a"),
        ({"runs": [{"name": "a", "settings": {"method": "x"}}]}, "method = 'x'.*tiny.yaml, a"),
        (
            {"runs": [{"name": "a", "settings": {"method": "fedavg", "fedfew-models": 2}}]},
            "fedfew-models in .*tiny.yaml, a is a setting of fedfew",
        ),
        ({"runs": [{"name": "a", "settings": {"seed": 1}}]}, "seed in .*the table sets this value"),
        ({"variants": [{"name": "v", "setings": {}}]}, "setings"),
        ({"settings": {**COMMON, "nm-clients": 3}}, "nm-clients.*did you mean num-clients"),
        ({"repeat": 3}, "repeat"),
    ],
)
def test_invalid_tables_are_rejected(content: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=pattern):
        read_plan(write_table(tmp_path, **content))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lr": -1.0}, "lr = -1.0 on the command line: it must be"),
        (
            {"min-clients": 99},
            r"min-clients = 99 on the command line: .* num-clients = \d+ in .*tiny.yaml",
        ),
        ({"method": "nope"}, "method = 'nope' on the command line: it must be one of"),
        ({"seed": 3}, "seed on the command line: the table sets this value"),
    ],
)
def test_override_errors_name_the_command_line(overrides: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=message):
        read_plan(write_table(tmp_path), overrides)


def test_the_report_lists_command_line_overrides(tmp_path: Path) -> None:
    """The first line is the title, the second one names the overrides."""
    overrides = {"num-server-rounds": 2, "save-models": False, "loss": "my loss.py:f"}
    table = write_table(tmp_path)
    plan = replace(read_plan(table), overrides=overrides)
    title, line, *_ = markdown(plan, {}, aggregate({}), {}, ACCURACY).split("\n\n")
    assert title == f"# {plan.title}"
    assert "`num-server-rounds=2 save-models=false 'loss=my loss.py:f'`" in line and "command line" in line
    assert read_plan(table, {"num-server-rounds": 2}).overrides == {"num-server-rounds": 2}
    assert "command line" not in markdown(read_plan(table), {}, aggregate({}), {}, ACCURACY)


def test_a_table_runs_skips_repeats_and_reports_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"name": "p = 0.5, no WDR", "settings": {"method": "fedavg", "system-accuracy": "on"}},
        {"name": "Broken", "settings": {"method": "fedavg", "partition": "classes", "classes-per-client": 11}},
    ]
    assert run_table(read_plan(write_table(tmp_path, runs=rows)), jobs=2) == 1
    printed = capsys.readouterr().out
    first, second = (tmp_path / f"out/p = 0.5, no WDR/seed-{seed}" for seed in (0, 1))
    assert json.loads((first / "summary.json").read_text())["status"] == "completed"
    assert not (first / "models").exists()
    assert "[2/2]" in printed
    assert "| p = 0.5, no WDR | 1/1 |" in printed
    assert "Broken / seed 0: exit status 2: posy: classes-per-client = 11" in printed
    assert (tmp_path / "out/table.md").read_text() in printed
    assert len(pd.read_csv(tmp_path / "out/table.csv")) == 1

    # The table was interrupted while seed 1 was running: seed 0 is not run again, and seed 1 restarts in its folder.
    modified = (first / "summary.json").stat().st_mtime_ns
    shutil.copytree(first, second)
    summary = json.loads((second / "summary.json").read_text())
    (second / "summary.json").write_text(json.dumps({**summary, "status": "running", "seed": 1}))
    (second / "stale.txt").touch()
    plan = read_plan(write_table(tmp_path, runs=rows[:1], seeds=[0, 1]))
    assert run_table(plan, jobs=1, only_print=True) == 1
    assert "| p = 0.5, no WDR | 1/2 |" in capsys.readouterr().out
    assert run_table(plan, jobs=1) == 0
    assert re.search(r"1 of 2 runs .*\n\[2/2\] p = 0\.5, no WDR / seed 1: ", capsys.readouterr().out)
    assert (first / "summary.json").stat().st_mtime_ns == modified
    assert json.loads((second / "summary.json").read_text())["status"] == "completed"
    assert not (second / "stale.txt").exists()
    assert {path.name for path in second.parent.iterdir() if path.is_dir()} == {"seed-0", "seed-1"}


def test_invalid_settings_end_a_row_after_its_first_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "Broken", "settings": {"method": "fedavg", "partition": "classes", "classes-per-client": 11}}]
    plan = read_plan(write_table(tmp_path, runs=rows, seeds=[0, 1, 2]))
    assert run_table(plan, jobs=1) == 1
    printed = capsys.readouterr().out
    assert "[3/3] Broken / seed 0: failed, exit status 2: posy: classes-per-client = 11" in printed
    assert printed.count("classes-per-client = 11") == 2  # the line about the run, and the list of missing runs
    assert "- Broken / seed 2: not started, because Broken / seed 0 failed" in printed
    assert not (tmp_path / "out/Broken/seed-1").exists()


def test_a_subset_of_a_named_partition_is_rejected_before_the_first_run(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("[[0, 1, 2, 3], [4, 5, 6, 7]]")
    named = {"method": "fedavg", "partition": "file", "partition-file": str(tmp_path / "p.json"), "max-samples": 100}
    with pytest.raises(SettingsError, match=r"max-samples = 100 .* cannot be combined"):
        read_plan(write_table(tmp_path, runs=[{"name": "a", "settings": named}]))


def test_a_finished_run_with_other_settings_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"name": "a", "settings": {"method": "fedavg", "lr": 0.1}}]
    assert run_table(read_plan(write_table(tmp_path, runs=rows)), jobs=1) == 0
    rows[0]["settings"]["lr"] = 0.2
    assert run_table(read_plan(write_table(tmp_path, runs=rows)), jobs=1, only_print=True) == 1
    assert "a / seed 0: finished with other settings or other code" in capsys.readouterr().out


def test_cells_run_seed_by_seed(tmp_path: Path) -> None:
    """An interrupted table then has results for every row."""
    started: list[str] = []

    def begin(cell: Cell) -> subprocess.Popen[bytes]:
        started.append(cell.name)
        cell.path.mkdir(parents=True)
        cell.log.touch()
        return subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])

    rows = [{"name": name, "settings": {"method": name}} for name in ("local", "fedavg")]
    plan = read_plan(write_table(tmp_path, runs=rows, seeds=[5, 0]))
    failures = run_cells(replace(plan, output=tmp_path / "out"), 1, begin)
    assert started == ["local / seed 5", "fedavg / seed 5", "local / seed 0", "fedavg / seed 0"]
    assert list(failures) == started and "exit status 3" in failures[started[0]]


def test_results_with_other_settings_are_moved_aside(tmp_path: Path) -> None:
    summary = make_summary(served=0.5, local=0.5, system=None, seconds=1)
    plan, _ = write_results(tmp_path, {("", "A", 0): summary}, lr=0.1)
    cell = plan.cells[0]
    changed = Cell("", "A", 0, {**cell.config, "lr": 0.2})
    moved = Cell("", "A", 0, {**cell.config, "data-dir": "/elsewhere", "device": "cuda:1"})
    assert cell.summary() == moved.summary() == summary
    assert changed.summary() is None
    clear(cell.path)
    assert not cell.path.exists()
    moved_results = list(cell.path.parent.glob("seed-0-before-*/summary.json"))
    assert [json.loads(path.read_text()) for path in moved_results] == [summary]


def test_a_folder_without_a_run_is_not_removed(tmp_path: Path) -> None:
    thesis = tmp_path / "out/FedAvg/seed-0/thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    with pytest.raises(SettingsError, match=r"thesis\.txt"):
        run_cells(read_plan(write_table(tmp_path)), jobs=1)
    assert thesis.exists()


def test_interrupting_a_table_stops_its_runs(tmp_path: Path) -> None:
    file = write_table(tmp_path, settings={**COMMON, "num-server-rounds": 100_000}, seeds=[0, 1])
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    process = subprocess.Popen(
        [sys.executable, "-m", "posy", "table", str(file), "-j", "1"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    rounds = tmp_path / "out/FedAvg/seed-0/rounds.jsonl"
    end = time.monotonic() + 120
    while not rounds.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.05)
    second = subprocess.run(
        [sys.executable, "-m", "posy", "table", str(file)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert second.returncode == 2
    assert "another `posy table`" in second.stderr
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in error
    assert json.loads((rounds.parent / "summary.json").read_text())["status"] == "stopped"
    size = rounds.stat().st_size
    time.sleep(0.5)
    assert rounds.stat().st_size == size  # the run writes no rounds after it has stopped
    assert not (tmp_path / "out/FedAvg/seed-1").exists()


def test_a_run_that_ends_during_the_interrupt_is_archived(tmp_path: Path) -> None:
    class Ending:
        """A run that ends between Ctrl-C and the signal from the table."""

        def __init__(self, cell: Cell) -> None:
            self.process = table_module.start(cell)

        def poll(self) -> int | None:
            raise KeyboardInterrupt

        def terminate(self) -> None:
            assert self.process.wait() == 0

        def wait(self) -> int:
            return self.process.wait()

    collected: list[Path] = []
    plan = replace(read_plan(write_table(tmp_path)), collect=collected.append)
    with pytest.raises(KeyboardInterrupt):
        table_module.fill(plan, jobs=1, begin=Ending)
    (cell,) = plan.cells
    assert archive.read(plan.output)[cell.name]["summary"] == cell.summary()
    assert collected == [cell.path] and not (cell.path / "models").exists()


@pytest.mark.slow
def test_an_interrupted_cell_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    def run(folder: Path, *, until: int = 0) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        settings = {**COMMON, "num-server-rounds": 20, "checkpoint-every": 4}
        file = write_table(folder, settings=settings, runs=[{"name": "Ditto", "settings": {"method": "ditto"}}])
        process = subprocess.Popen(
            [sys.executable, "-m", "posy", "table", str(file)],
            env={**os.environ, "PYTHONPATH": str(APP)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        path = folder / "out/Ditto/seed-0"
        while until and not (path / f"checkpoints/round-{until}").exists():
            assert process.poll() is None
            time.sleep(0.01)
        if until:
            process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == (130 if until else 0), printed
        summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
        assert summary["status"] == ("stopped" if until else "completed")
        assert (path / "checkpoints").exists() == bool(until)
        return summary

    run(tmp_path / "stopped", until=4)
    cell = read_plan(tmp_path / "stopped/tiny.yaml").cells[0]
    assert cell.resume_settings and not replace(cell, config={**cell.config, "lr": 0.3}).resume_settings
    file = cell.path / "summary.json"  # as if the run was killed before its system accuracy
    written = file.read_text()
    file.write_text(json.dumps(json.loads(written) | {"status": "completed"}))
    assert not cell.resume_settings
    file.write_text(written)
    resumed = run(tmp_path / "stopped")
    reference = execute(None, {**cell.config, "output-dir": str(tmp_path / "uninterrupted")})
    uninterrupted = reference.summary
    assert len((cell.path / "rounds.jsonl").read_text().splitlines()) == 20
    file = cell.path / "config.yaml"
    record = yaml.safe_load(file.read_text())
    (entry,) = record["resumed"]
    assert {key: entry[key] for key in RAN_ON} == {key: record[key] for key in RAN_ON}
    assert len(table_module.machines({cell: resumed})) == 1
    # The run began on another machine and with another output directory.
    entry["machine"]["cpu"], entry["changed"]["output-dir"] = "another", "/elsewhere"
    file.write_text(yaml.safe_dump(record))
    assert next(iter(table_module.machines({cell: resumed}))).startswith("another, ")
    archive.store(tmp_path, [cell])
    assert "/elsewhere" not in json.dumps(archive.read(tmp_path)) and "another" in json.dumps(archive.read(tmp_path))
    assert resumed["served"] == uninterrupted["served"] and resumed["local"] == uninterrupted["local"]


def test_table_figures_by_hand(tmp_path: Path) -> None:
    plan, results = write_results(
        tmp_path,
        {
            ("v", "A", 0): make_summary(served=0.5, local=0.7, system=0.2, seconds=10),
            ("v", "A", 1): make_summary(served=0.7, local=0.8, system=0.4, seconds=20),
            ("v", "B", 0): make_summary(served=None, local=0.9, system=None, seconds=5),
        },
    )
    table = aggregate(results)
    a, b = table.to_dict("records")
    assert (a["variant"], a["method"], a["seeds"]) == ("v", "A", 2)
    assert a["served-last"] == pytest.approx(0.6)
    assert a["served-last-seeds-std"] == pytest.approx(statistics.stdev([0.5, 0.7])) == pytest.approx(0.02**0.5)
    assert a["served-last-clients-std"] == pytest.approx(0.1)
    assert a["served-upper-bound"] == pytest.approx(0.65)  # each is 0.05 above the last
    assert a["served-last-weighted"] == pytest.approx(0.61)
    assert (a["served-last-round"], a["served-upper-bound-round"]) == (10, 4)
    assert (a["system"], a["seconds"], a["bytes-up"]) == (pytest.approx(0.3), 15, 1000)
    assert all(pd.isna(b[key]) for key in ("served-last", "served-last-clients-std", "system", "local-last-seeds-std"))
    text = markdown(plan, results, table, {"v / B / seed 1": "killed by signal 9"}, ACCURACY)
    assert "## v" in text
    assert (
        "| A | 2/2 | 60.00 ± 14.14 (10.00) | 65.00 ± 14.14 (10.00) | 75.00 ± 7.07 (10.00) | 80.00 ± 7.07 (10.00) | "
        "61.00 ± 14.14 | 76.00 ± 7.07 | 30.00 ± 14.14 | 15 s | 1.00 kB | 2.00 kB | 6 |"
    ) in text
    assert "| B | 1/2 |  |  | 90.00 (10.00) | 95.00 (10.00) |  | 91.00 |  | 5 s | 1.00 kB | 2.00 kB | 3 |" in text
    assert "Machine: a CPU, 2 cores, no GPU; torch 2.11" in text
    assert "- v / B / seed 1: killed by signal 9" in text


def test_diverged_seeds_are_marked_in_the_table(tmp_path: Path) -> None:
    """One seed of A and both seeds of B have no served model at the end. Round 4 is not their last round."""
    early = make_summary(served=0.9, local=0.8, system=None, seconds=1)
    early["served"]["last"] = {**early["served"]["last"], "round": 4}
    complete = make_summary(served=0.5, local=0.8, system=None, seconds=1)
    plan, results = write_results(
        tmp_path, {("", "A", 0): complete, ("", "A", 1): early, ("", "B", 0): early, ("", "B", 1): early}
    )
    table = aggregate(results)
    a, b = table.to_dict("records")
    assert (a["served-last"], a["served-last-weighted"], a["served-last-measured"]) == (0.5, 0.51, 1)
    assert pd.isna(b["served-last"]) and pd.isna(b["served-last-round"]) and b["served-last-measured"] == 0
    assert b["served-upper-bound"] == pytest.approx(0.95)
    text = markdown(plan, results, table, {}, ACCURACY)
    assert "| A | 2/2 | 50.00 (10.00) 1 of 2! | 75.00 ± 28.28 (10.00) | 80.00" in text
    assert "| B | 2/2 | 0 of 2! | 95.00 ± 0.00 (10.00) |" in text


def test_a_run_without_its_system_accuracy_is_unfinished(tmp_path: Path) -> None:
    summary = make_summary(served=0.5, local=0.5, system=None, seconds=1)
    plan, _ = write_results(tmp_path, {("", "A", 0): summary}, **{"system-accuracy": "on"})
    assert plan.cells[0].summary() is None
    write_results(tmp_path, {("", "A", 0): {**summary, "system-accuracy": 0.0}}, **{"system-accuracy": "on"})
    assert plan.cells[0].summary() is not None


def test_a_diverged_run_is_not_repeated(tmp_path: Path) -> None:
    """The run has no system accuracy, and the last line of its log does not give the cause."""
    summary = {**make_summary(served=0.5, local=0.5, system=None, seconds=1), "status": "diverged"}
    plan, _ = write_results(tmp_path, {("", "A", seed): summary for seed in (0, 1)}, **{"system-accuracy": "on"})
    assert plan.cells[0].summary() is None and plan.cells[0].summary("diverged") is not None

    def begin(cell: Cell) -> subprocess.Popen[bytes]:
        raise AssertionError(f"{cell.name} is repeated")

    assert run_cells(plan, 1, begin) == {}
    log = tmp_path / "run.log"
    log.write_text("posy: the loss is 1e9; a smaller lr may help\nposy: failed before the first checkpoint: /x/y\n\n")
    assert table_module.failure_of(1, log) == "exit status 1: posy: the loss is 1e9; a smaller lr may help"


def make_summary(
    served: float | None, local: float, system: float | None, seconds: float, cohort: int = 4
) -> dict[str, Any]:
    def point(mean: float | None, rise: float, number: int, clients: int) -> dict[str, Any] | None:
        if mean is None:
            return None
        return {
            "round": number,
            "mean": mean + rise,
            "std": 0.1,
            "min": 0,
            "max": 1,
            "weighted": mean + rise + 0.01,
            "jain": 1.0,
            "clients": clients,
        }

    return {
        "status": "completed",
        "rounds": 10,
        "seconds": seconds,
        "bytes-up": 1000,
        "bytes-down": 2000,
        "num-clients": 4,
        "system-accuracy": system,
        "dropped": {"no reply": 2, "diverged": 1},
        **{
            name: {"last": point(mean, 0, 10, clients), "best": None, "upper-bound": point(mean, 0.05, 4, clients)}
            for name, mean, clients in (("served", served, 4), ("local", local, cohort))
        },
    }


def write_results(
    folder: Path, summaries: dict[tuple[str, str, int], dict[str, Any]], **settings: Any
) -> tuple[Plan, dict[Cell, dict[str, Any]]]:
    """Write the summaries to the folders of a table's cells, and return the plan and the results."""
    cells = {}
    for variant, row, seed in {**summaries, **{(v, r, s): None for v, r, _ in summaries for s in (0, 1)}}:
        config = {"output-dir": str(folder / variant / row), "run-name": f"seed-{seed}", "method": "fedavg", **settings}
        cells[variant, row, seed] = cell = Cell(variant, row, seed, config)
        if (variant, row, seed) in summaries:
            cell.path.mkdir(parents=True, exist_ok=True)
            (cell.path / "summary.json").write_text(json.dumps(summaries[variant, row, seed]))
            (cell.path / "config.yaml").write_text(
                yaml.safe_dump(
                    {
                        "settings": read_settings(config).as_config(),
                        "versions": {"torch": "2.11", "flwr": "1.39", "python": "3.11"},
                        "machine": {"cpu": "a CPU", "cpus": 2, "gpu": None},
                    }
                )
            )
    plan = Plan("title", folder, tuple(cells.values()))
    return plan, {cells[key]: summary for key, summary in summaries.items()}


def test_a_mean_over_a_cohort_states_its_number_of_clients(tmp_path: Path) -> None:
    """One of four clients trains in a round, so the local models of two runs cover two of eight clients."""
    summaries = {("", "A", seed): make_summary(0.5, 0.9, None, 1, cohort=1) for seed in (0, 1)}
    plan, results = write_results(tmp_path, summaries)
    frame = aggregate(results)
    assert frame.loc[0, ["served-last-scored", "local-last-scored", "members"]].tolist() == [8, 2, 4]
    lines = markdown(plan, results, frame, {}, ACCURACY).splitlines()
    row = next(line for line in lines if line.startswith("| A "))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert "50.00 ± 0.00 (10.00)" in cells
    assert "90.00 ± 0.00 (10.00), 2 of 8 clients" in cells


def test_an_archive_restores_finished_runs_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only the archive of a table, its cells are not run again, and the table is the same."""
    file = tmp_path / "small.yaml"
    settings = "{dataset: digits, max-samples: 120, num-clients: 3, num-server-rounds: 2, model: linear, device: cpu}"
    runs = "runs: [{name: FedAvg, settings: {method: fedavg}}, {name: Local, settings: {method: local}}]"
    file.write_text(f"seeds: [0]\nsettings: {settings}\n{runs}\n")
    source, target = tmp_path / "here", tmp_path / "there"
    assert run_table(read_plan(file, output=str(source)), jobs=2) == 0
    target.mkdir()
    archived = (source / "cells.jsonl.gz").read_bytes()
    assert str(tmp_path) not in gzip.decompress(archived).decode()
    (target / "cells.jsonl.gz").write_bytes(archived + gzip.compress(b'{"name": "cut off"}')[:20])
    monkeypatch.setattr(table_module, "start", None)  # no run may start
    assert run_table(read_plan(file, output=str(target)), jobs=2) == 0
    for name in ("table.md", "table.csv", "clients.csv", "cells.jsonl.gz"):
        assert (target / name).read_bytes() == (source / name).read_bytes(), name
    other = tmp_path / "other"
    other.mkdir()
    (other / "cells.jsonl.gz").write_bytes(archived)
    plan = read_plan(file, {"lr": 0.01}, output=str(other))
    assert run_table(plan, jobs=1, only_print=True) == 1  # cells with other settings are other runs


def test_archived_runs_replace_runs_with_other_settings(tmp_path: Path) -> None:
    """The folder has results of other settings, and the archive has results of the wanted settings."""
    summary = make_summary(served=0.5, local=0.5, system=None, seconds=1)
    plan, _ = write_results(tmp_path / "here", {("", "A", 0): summary}, lr=0.1)
    (archived_cell,) = (cell for cell in plan.cells if cell.seed == 0)
    (archived_cell.path / "clients.csv").write_text("round\n")
    archive.store(plan.output, [archived_cell])
    old, _ = write_results(tmp_path / "here", {("", "A", 0): {**summary, "seconds": 9}}, lr=0.2)
    assert archived_cell.summary() is None
    archive.restore(plan.output, old.cells)
    assert next(iter(old.cells)).summary()["seconds"] == 9  # the archive has results of other settings
    archive.restore(plan.output, plan.cells)
    assert archived_cell.summary() == summary
    assert len(list(archived_cell.path.parent.glob("seed-0-before-*"))) == 1


def test_a_running_cell_is_not_restored_from_the_archive(tmp_path: Path) -> None:
    """Another table may have finished the same run, and a report may be written during the run."""
    summary = make_summary(served=0.5, local=0.5, system=None, seconds=1)
    plan, _ = write_results(tmp_path, {("", "A", 0): summary})
    cell, never_run = plan.cells
    (cell.path / "clients.csv").write_text("round\n")
    archive.store(plan.output, [cell])
    (cell.path / "summary.json").write_text(json.dumps({**summary, "status": "running"}))
    assert archive.restore(plan.output, plan.cells) == [never_run]
    assert json.loads((cell.path / "summary.json").read_text())["status"] == "running"
    (cell.path / "summary.json").write_text(json.dumps({**summary, "status": "stopped"}))
    archive.restore(plan.output, plan.cells)
    assert cell.summary() == summary
