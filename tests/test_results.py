"""The directory of a run, its history, and its output."""

import csv
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import yaml

from posy.metrics import METRICS
from posy.server_app.progress import Progress, duration, results_table, size, task_table
from posy.server_app.results import RunDirectory, Status
from posy.server_app.totals import Totals
from posy.settings import SettingsError
from posy.spread import Evaluation, Spread, best, spread
from posy.storage import load_arrays, plain, write_arrays
from posy.strategies.columns import Columns
from posy.strategies.replies import RoundRecord

ACCURACY = METRICS["accuracy"]
COLUMNS = Columns(ACCURACY, splits=("validation",))


def spread_of(*values: float) -> Spread:
    over = spread(values, [1] * len(values))
    assert over is not None
    return over


def summarise(run: RunDirectory, totals: Totals, status: Status = "running", **extra: Any) -> dict[str, Any]:
    facts = {"status": status, "method": "fedavg", "dataset": "digits", "num-clients": 2, "rounds": 3, "seed": 1}
    return run.write_summary({**facts, "seconds": 4.5, "system-accuracy": None, **totals.summary(ACCURACY), **extra})


def round_record(number: int, *values: float, **more: Any) -> RoundRecord:
    """Return a round in which the clients' served models had these accuracies."""
    rows = {c: {"n_train": 1, "served_accuracy": value} for c, value in enumerate(values)}
    return RoundRecord(number, clients=rows, **more)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(tmp_path / "runs", "a run")


@pytest.fixture
def totals() -> Totals:
    totals = Totals(bytes_up=1000, bytes_down=2000)
    for number, values in enumerate(((0.2, 0.4), (0.7, 0.9), (0.5, 0.7)), start=1):
        record = round_record(number, *values)
        if number == 2:
            for row in record.clients.values():
                row["local_accuracy"] = 0.8
        totals.add(record, COLUMNS, evaluated=True)
    return totals


class TestTotals:
    def test_each_point_records_its_evaluated_rounds(self, totals: Totals) -> None:
        served, local = totals.scores
        assert [e.round for e in served] == [1, 2, 3]
        assert [e.round for e in local] == [2]

    def test_ties_go_to_the_earliest_round(self) -> None:
        selected = best([Evaluation(number, spread_of(0.5, 0.5)) for number in (1, 2, 3)])
        assert selected is not None
        assert selected.round == 1

    def test_rounds_with_too_few_clients_cannot_be_best(self) -> None:
        sizes = {1: [0.9] * 8, 2: [0.5] * 10, 3: [0.6] * 9}  # one client was lost in round 3
        selected = best([Evaluation(number, spread_of(*values)) for number, values in sizes.items()])
        assert selected is not None
        assert selected.round == 3

    def test_totals_do_not_depend_on_the_order_of_replies(self) -> None:
        rows = {c: {"n_train": c + 1, "train_loss": 0.1 * c, "local_loss": 1 / (c + 1)} for c in range(20)}
        forward, backward = Totals(), Totals()
        spreads = forward.add(RoundRecord(1, clients=rows), COLUMNS, evaluated=True)
        assert backward.add(RoundRecord(1, clients=dict(reversed(rows.items()))), COLUMNS, evaluated=True) == spreads
        assert forward == backward
        assert forward.last_round == list(range(20))

    def test_totals_add_up_over_rounds(self) -> None:
        totals = Totals()
        assert not totals.trained
        first = RoundRecord(1, clients={0: {"n_train": 2, "train_loss": 3.0}}, asked=3, evaluated=2, bytes_up=5)
        first.dropped = [(1, "late"), (2, "late")]
        totals.add(first, COLUMNS, evaluated=True)
        totals.add(RoundRecord(2, clients={1: {"n_train": 1, "train_loss": 2.0}}, bytes_up=6), COLUMNS, evaluated=False)
        assert (totals.trained, totals.worst_loss, totals.bytes_up) == (True, 3.0, 11)
        assert (totals.asked, totals.evaluated, totals.dropped) == (3, 2, {"late": 2})
        assert (totals.missing, totals.last_round, list(totals.clients)) == ([1, 2], [1], [0, 1])

    def test_totals_round_trip_through_json(self, totals: Totals) -> None:
        totals.add(round_record(4, 0.5, away=(1,), dropped=[(0, "late")]), COLUMNS, evaluated=True)
        stored = json.loads(json.dumps(plain({**totals.as_json(), "another": "key"})))
        assert Totals.from_json(stored) == totals


class TestRunDirectory:
    def test_a_resumed_run_keeps_the_columns_of_its_table(self, run: RunDirectory) -> None:
        """An earlier version of Posy wrote a column for each metric, regardless of all-metrics."""
        run.append_round({"round": 1})
        run.columns = ("round", "partition", "served_accuracy", "served_auroc", "site")
        run.append_clients([{"round": 1, "partition": 0, "served_accuracy": 0.5, "site": "a"}])
        run.columns = ("round", "partition", "served_accuracy", "site")
        run.cut_back(run.grown)
        run.append_clients([{"round": 2, "partition": 0, "served_accuracy": 0.75, "site": "a"}])
        with (run.path / "clients.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [(row["served_accuracy"], row["served_auroc"], row["site"]) for row in rows] == [
            ("0.5", "", "a"), ("0.75", "", "a")
        ]  # fmt: skip

    def test_runs_of_one_name_get_separate_folders(self, tmp_path: Path) -> None:
        names = [RunDirectory.create(tmp_path, "x").path.name for _ in range(3)]
        assert names == ["x", "x-2", "x-3"]

    def test_simultaneous_runs_get_separate_folders(self, tmp_path: Path) -> None:
        paths: list[Path] = []
        threads = [
            threading.Thread(target=lambda: paths.append(RunDirectory.create(tmp_path, "x").path)) for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(paths)) == 8

    @pytest.mark.parametrize(
        "name", ["", ".", "..", "../x", "a/b", "/tmp", "a\\b", "a\0b", "a\nb", " a", "x" * 201, "é" * 101]
    )
    def test_an_invalid_run_name_is_refused(self, tmp_path: Path, name: str) -> None:
        inside = tmp_path / "runs"
        with pytest.raises(SettingsError, match="run-name"):
            RunDirectory.create(inside, name)
        assert not inside.exists()

    def test_a_file_as_output_directory_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "runs").write_text("")
        with pytest.raises(SettingsError, match="output-dir"):
            RunDirectory.create(tmp_path / "runs", "x")

    def test_config(self, run: RunDirectory) -> None:
        settings = {"method": "fedavg", "seed": np.int64(7), "lr": np.float32(0.5), "save-models": True, "name": "µ: x"}
        run.write_config(settings, gpu="Some GPU")
        config = yaml.safe_load((run.path / "config.yaml").read_text(encoding="utf-8"))
        assert config["settings"] == {"method": "fedavg", "seed": 7, "lr": 0.5, "save-models": True, "name": "µ: x"}
        assert config["seed"] == 7
        assert config["machine"]["gpu"] == "Some GPU"
        assert config["machine"]["cpus"] == os.cpu_count()
        assert config["versions"]["numpy"] == np.__version__
        assert config["versions"]["python"].startswith("3.")

    def test_rounds(self, run: RunDirectory) -> None:
        run.append_round({"round": np.int64(1), "loss": math.nan, "each": np.array([1.5, math.inf]), "t": (1, None)})
        run.append_round({"round": 2, "deep": {"x": -math.inf, "text": "ä\nb"}})
        rows = [
            json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
            for line in (run.path / "rounds.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        assert rows == [
            {"round": 1, "loss": None, "each": [1.5, None], "t": [1, None]},
            {"round": 2, "deep": {"x": None, "text": "ä\nb"}},
        ]

    def test_clients(self, run: RunDirectory) -> None:
        run.columns = COLUMNS.of_clients()
        run.append_clients([{"round": 1, "partition": 0, "served_accuracy": np.float64(0.5), "chosen": 'model 1, "a"'}])
        run.append_clients([{"round": 2, "partition": 1, "local_loss": math.nan, "train_loss": None}])
        with (run.path / "clients.csv").open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            first, second = reader
        assert tuple(reader.fieldnames or ()) == run.columns
        assert first["served_accuracy"] == "0.5"
        assert first["chosen"] == 'model 1, "a"'
        assert {key: value for key, value in second.items() if value} == {"round": "2", "partition": "1"}

    def test_validation_accuracy_selects_the_best_round(self, run: RunDirectory) -> None:
        totals = Totals()
        for number, (tested, validated) in enumerate(((0.9, 0.3), (0.6, 0.7), (0.8, 0.5)), start=1):
            record = round_record(number, tested, tested)
            for row in record.clients.values():
                row["served_validation_accuracy"] = validated
            spreads = totals.add(record, COLUMNS, evaluated=True)
            assert spreads["served_validation_accuracy"] == spread_of(validated, validated)
            assert "local_validation_accuracy" not in spreads
        summary = summarise(run, Totals.from_json(json.loads(json.dumps(plain(totals.as_json())))))
        assert summary["served"]["best"] == {"round": 2, **spread_of(0.6, 0.6), "missing": 0}
        assert summary["served"]["upper-bound"]["round"] == 1
        assert summary["served"]["last"]["round"] == 3
        lines = results_table(summary, run.path).splitlines()
        assert [line.split("  ")[0].strip() for line in lines if "served" in line] == [
            "served model, last",
            "served model, best",
        ]

    def test_an_unknown_client_column_is_refused_and_nothing_written(self, run: RunDirectory) -> None:
        with pytest.raises(ValueError, match="accuracy_served"):
            run.append_clients([{"round": 1, "accuracy_served": 0.5}])
        assert not (run.path / "clients.csv").exists()

    def test_summary(self, run: RunDirectory, totals: Totals) -> None:
        returned = summarise(run, totals, **{"system-accuracy": math.nan, "dropped": {"timeout": 2}})
        summary = json.loads((run.path / "summary.json").read_text())
        assert summary == returned
        assert summary["served"]["upper-bound"] == {"round": 2, **spread_of(0.7, 0.9), "missing": 0}
        assert summary["served"]["best"] is None  # no validation split selects a round
        assert summary["served"]["last"] == {"round": 3, **spread_of(0.5, 0.7), "missing": 0}
        assert summary["local"]["last"]["round"] == 2
        assert (summary["bytes-up"], summary["bytes-down"], summary["num-clients"]) == (1000, 2000, 2)
        assert summary["system-accuracy"] is None
        assert summary["dropped"] == {"timeout": 2}

    def test_the_summary_averages_the_last_rounds(self, totals: Totals) -> None:
        totals.system = [(2, 0.25), (3, 0.75)]
        totals = Totals.from_json(json.loads(json.dumps(plain(totals.as_json()))))
        summary = totals.summary(ACCURACY, average_rounds=2)
        assert summary["served"]["average"]["evaluations"] == 2
        assert summary["served"]["average"]["mean"] == pytest.approx(0.7)
        assert summary["served"]["average"]["weighted"] == pytest.approx(0.7)
        assert summary["local"]["average"]["mean"] == pytest.approx(0.8)
        assert summary["system-accuracy-average"] == {"evaluations": 2, "mean": 0.5, "deviation": 0.25}
        assert totals.summary(ACCURACY, average_rounds=1)["system-accuracy-average"]["mean"] == 0.75
        assert "average" not in totals.summary(ACCURACY)["served"]
        stored = totals.as_json()
        del stored["system"]  # as in a checkpoint of an earlier version
        assert Totals.from_json(plain(stored)).system == []

    def test_the_best_round_has_its_weighted_mean(self) -> None:
        totals = Totals()
        for number, values in enumerate(((0.2, 0.4), (0.5, 0.9)), start=1):
            record = round_record(number, *values)
            for weight, row in zip((1, 3), record.clients.values(), strict=True):
                row |= {"n_train": weight, "served_validation_accuracy": 1.0 / number}
            totals.add(record, COLUMNS, evaluated=True)
        served = totals.summary(ACCURACY)["served"]
        assert served["best"]["weighted"] == pytest.approx(0.35)  # round 1, by the validation splits
        assert served["upper-bound"]["weighted"] == pytest.approx(0.8)

    def test_summary_of_a_run_without_evaluations(self, run: RunDirectory) -> None:
        summary = summarise(run, Totals(), "failed")
        assert summary["served"] == summary["local"] == {"last": None, "best": None, "upper-bound": None}
        assert (summary["status"], summary["dropped"]) == ("failed", {})

    def test_a_failed_write_keeps_the_previous_file(self, run: RunDirectory, totals: Totals) -> None:
        summarise(run, totals)
        before = (run.path / "summary.json").read_text()
        with pytest.raises(TypeError):
            summarise(run, totals, dropped={"x": object()})  # JSON cannot represent it
        path = run.models / "server.safetensors"
        write_arrays(path, {"w": np.ones(2)})
        with pytest.raises(TypeError):
            write_arrays(path, {"w": np.array([object()])})
        assert (run.path / "summary.json").read_text() == before
        assert load_arrays(path)["w"].tolist() == [1, 1]
        assert not list(run.path.rglob("*.part"))

    def test_arrays_round_trip(self, run: RunDirectory) -> None:
        square = np.arange(6, dtype=np.float32).reshape(2, 3)
        arrays: dict[str, npt.NDArray[Any]] = {
            "transposed": square.T,
            "every second": np.arange(10)[::2],
            "scalar": np.array(3.5),
            "empty": np.empty((0, 4), dtype=np.float16),
            "mask": np.array([True, False]),
        }
        path = run.models / "client-3.safetensors"
        write_arrays(path, arrays, {"method": "fedavg"})
        loaded = load_arrays(path)
        assert loaded.keys() == arrays.keys()
        for name, array in arrays.items():
            assert loaded[name].dtype == array.dtype
            assert loaded[name].shape == array.shape
            np.testing.assert_array_equal(loaded[name], array)
        with safetensors.safe_open(path, "np") as file:
            assert file.metadata() == {"method": "fedavg", "crc32": file.metadata()["crc32"]}

    def test_a_killed_run_leaves_readable_files(self, tmp_path: Path) -> None:
        program = """
import os, signal, sys
from pathlib import Path
from posy.metrics import METRICS
from posy.server_app.results import RunDirectory
from posy.server_app.totals import Totals
from posy.strategies.columns import Columns
from posy.strategies.replies import RoundRecord
accuracy = METRICS["accuracy"]
run, totals = RunDirectory.create(Path(sys.argv[1]), "x"), Totals()
run.write_config({"seed": 1})
for r in (1, 2, 3):
    rows = {i: {"n_train": 1, "served_accuracy": r / (10 - 5 * i)} for i in range(2)}
    totals.add(RoundRecord(r, clients=rows), Columns(accuracy), evaluated=True)
    run.columns = Columns(accuracy).of_clients()
    run.append_round({"round": r})
    run.append_clients({"round": r, "partition": i} for i in range(2))
    run.write_summary({"status": "running", "rounds": r, **totals.summary(accuracy)})
os.kill(os.getpid(), signal.SIGKILL)
"""
        root = Path(__file__).resolve().parents[1]
        environment = os.environ | {"PYTHONPATH": str(root)}
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, check=False)
        assert done.returncode == -signal.SIGKILL
        path = tmp_path / "x"
        assert [json.loads(line)["round"] for line in (path / "rounds.jsonl").read_text().splitlines()] == [1, 2, 3]
        with (path / "clients.csv").open(newline="") as file:
            assert [(row["round"], row["partition"]) for row in csv.DictReader(file)] == [
                (str(r), str(i)) for r in (1, 2, 3) for i in range(2)
            ]
        summary = json.loads((path / "summary.json").read_text())
        assert (summary["status"], summary["rounds"]) == ("running", 3)
        assert summary["served"]["last"]["mean"] == pytest.approx(0.45)
        assert yaml.safe_load((path / "config.yaml").read_text())["settings"] == {"seed": 1}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress:
    @pytest.mark.parametrize(("rounds", "lines"), [(1, 1), (12, 12), (200, 200), (2000, 201), (999, 201)])
    def test_a_log_gets_about_200_lines_at_most(self, rounds: int, lines: int) -> None:
        log = io.StringIO()
        with Progress(rounds, ACCURACY, stream=log) as progress:
            for server_round in range(1, rounds + 1):
                progress.update(server_round, 0.5, None)
        text = log.getvalue().splitlines()
        assert len(text) == lines
        assert text[0].startswith(f"round {1:{len(str(rounds))}d}/{rounds}")
        assert text[-1].startswith(f"round {rounds}/{rounds}")
        assert "\x1b" not in log.getvalue()

    def test_a_progress_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        clock = iter([0.0, 10.0, 14.0])
        monkeypatch.setattr("posy.server_app.progress.time.monotonic", lambda: next(clock))
        log = io.StringIO()
        with Progress(10, ACCURACY, stream=log) as progress:
            progress.update(1, 0.61234, 0.74, 0.8125)
            progress.update(2, None, 0.75, math.nan)
        assert log.getvalue().splitlines() == [
            "round  1/10  served 61.23 %  local 74.00 %  loss 0.8125  10.00 s/round  1 min 30 s left",
            # 14 s for 2 rounds, and no new evaluation of the served models.
            "round  2/10  served 61.23 % (round 1)  local 75.00 %  loss nan  7.00 s/round  56 s left",
        ]

    def test_a_long_first_round_estimates_the_duration_once(self) -> None:
        now, log = [0.0], io.StringIO()
        with Progress(20, ACCURACY, stream=log, clock=lambda: now[0]) as progress:
            for trained, seconds in ((1, 6.0), (2, 12.0), (3, 18.0), (4, 24.0)):
                now[0] = seconds
                progress.note_trained(trained, 4, trained / 5)
            progress.update(1, 0.5, None)
            now[0] = 60.0
            progress.note_trained(1, 4, 0.2)
        estimate, finished = log.getvalue().splitlines()
        assert estimate == "round  1/20  2 of 4 clients trained in 12 s; the run takes about 10 min 0 s"
        assert finished.startswith("round  1/20  served 50.00 %")

    def test_a_line_counts_the_clients_if_some_are_missing(self) -> None:
        log = io.StringIO()
        with Progress(2, ACCURACY, stream=log) as progress:
            progress.update(1, 0.5, None, present="2 of 3 clients")
            progress.update(2, 0.5, None)
        first, second = log.getvalue().splitlines()
        assert first.split("  ")[:3] == ["round 1/2", "served 50.00 %", "2 of 3 clients"]
        assert "clients" not in second

    def test_a_line_counts_only_the_dropped_replies_of_its_round(self) -> None:
        row = {"missing": [], "train_loss": None, "served_accuracy": spread_of(0.5), "local_accuracy": None}
        log = io.StringIO()
        with Progress(2, ACCURACY, stream=log) as progress:
            progress.add({**row, "round": 1, "dropped": [{"client": 1}, {"client": 2}]}, 3)
            progress.add({**row, "round": 2, "dropped": []}, 3)
        first, second = log.getvalue().splitlines()
        assert "  2 dropped  " in first and "dropped" not in second

    def test_a_figure_over_a_cohort_shows_its_client_count(self) -> None:
        row = {"round": 1, "missing": [4], "dropped": [], "train_loss": None}
        log = io.StringIO()
        with Progress(2, ACCURACY, stream=log) as progress:
            progress.add(
                {**row, "served_accuracy": spread_of(*[0.5] * 29), "local_accuracy": spread_of(0.9, 0.9, 0.9)}, 30
            )
            progress.add(
                {**row, "round": 2, "missing": [], "served_accuracy": None, "local_accuracy": spread_of(*[0.8] * 30)},
                30,
            )
        first, second = log.getvalue().splitlines()
        assert first.split("  ")[1:4] == ["served 50.00 %", "local 90.00 % (3 of 30)", "29 of 30 clients"]
        assert second.split("  ")[1:3] == ["served 50.00 % (round 1)", "local 80.00 %"]

    def test_a_terminal_gets_a_bar(self) -> None:
        terminal = Terminal()
        with Progress(3, ACCURACY, stream=terminal) as progress:
            progress.update(1, 0.5, None)
            progress.update(3, 0.625, None)
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
        assert "\x1b" in terminal.getvalue()
        assert "round 3/3" in plain
        assert "served 62.50 %" in plain

    def test_a_mirrored_terminal_gets_lines(self) -> None:
        terminal, mirrored = Terminal(), []
        original = terminal.write

        def write(text: str) -> int:
            mirrored.append(text)
            return original(text)

        terminal.write = write  # type: ignore[method-assign]  # as flwr.supercore.logger.mirror_output_to_queue does
        with Progress(3, ACCURACY, stream=terminal) as progress:
            progress.update(1, 0.5, None)
        assert len(mirrored) == 1
        assert mirrored[0].startswith("round 1/3  served 50.00 %")

    def test_an_error_propagates_and_ends_the_bar(self) -> None:
        terminal = Terminal()
        with pytest.raises(KeyError), Progress(3, ACCURACY, stream=terminal):
            raise KeyError
        assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


class TestResultsTable:
    def test_table(self, run: RunDirectory, totals: Totals) -> None:
        summary = summarise(
            run, totals, "completed", **{"system-accuracy": 0.5, "dropped": {"timeout": 2, "not finite": 1}}
        )
        text = results_table(summary, run.path)
        lines = {line.strip().split("  ")[0]: line for line in text.splitlines()}
        assert text.startswith("fedavg on digits: completed after 3 rounds")
        # Population std of (0.5, 0.7) is 0.1; J = 1.2² / (2 · 0.74).
        assert re.split(" {2,}", lines["served model, last"].strip()) == [
            "served model, last",
            "3",
            "60.00 ± 10.00 %",
            "50.00 %",
            "70.00 %",
            "60.00 %",
            "0.9730",
            "2",
        ]
        assert lines["served model, upper bound"].split()[4:7] == ["2", "80.00", "±"]
        assert lines["dropped replies"].endswith("2 x timeout, 1 x not finite")
        assert lines["bytes"].endswith("1.00 kB up, 2.00 kB down")
        assert lines["system accuracy"].endswith(" 50.00 %")
        assert lines["results"].endswith(str(run.path))

    @pytest.mark.parametrize(
        ("extra", "clients"),
        [
            ({"missing": [1], "sites": ["site-a", "site-b"]}, "1 of 2 (missing in the last evaluation: site-b)"),
            ({"missing": [1], "sites": ["site-a", None]}, "1 of 2 (missing in the last evaluation: client 1)"),
            ({"missing": [0, 1]}, "0 of 2 (missing in the last evaluation: client 0, client 1)"),
            ({"missing": []}, "2"),
        ],
    )
    def test_missing_clients_are_listed(self, extra: dict[str, Any], clients: str, run: RunDirectory) -> None:
        missing = len(extra["missing"])
        served = [Evaluation(1, spread_of(0.9, 0.9)), Evaluation(2, spread_of(0.5, 0.5), missing)]
        totals = Totals(scores=[served, [Evaluation(2, spread_of(0.6, 0.6), missing)]])
        text = results_table(summarise(run, totals, **extra), run.path)
        lines = {re.split(" {2,}", line.strip())[0]: line for line in text.splitlines()}
        assert lines["clients"].split("  ")[-1].strip() == clients

    def test_the_delivery_of_final_models_names_a_command_only_if_it_works(self, run: RunDirectory) -> None:
        """The command starts no nodes, so it works only for a run in this process, which has stored the models."""
        summary = summarise(run, Totals(scores=[[], []]), **{"without-final-model": [1]})
        assert "`posy run" not in results_table(summary, run.path)
        (run.models / "client-0.safetensors").touch()
        assert f"deliver it with `posy run resume={run.path.name} output-dir=" in results_table(summary, run.path)

    @pytest.mark.parametrize("num_clients", [2, 30, 1000])
    def test_each_number_shows_its_client_count(self, num_clients: int, run: RunDirectory) -> None:
        """After a round with a cohort of two, the local models of the other clients are not measured."""
        all_clients = spread_of(*[0.5] * num_clients)
        totals = Totals(scores=[[Evaluation(1, all_clients)], [Evaluation(1, spread_of(0.9, 0.9), num_clients - 2)]])
        text = results_table(summarise(run, totals) | {"num-clients": num_clients}, run.path)
        lines = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
        covered = {cells[0]: cells[-1] for cells in lines if "model," in cells[0]}
        few = "2" if num_clients == 2 else f"2 of {num_clients}"
        assert covered == {
            "served model, last": str(num_clients),
            "served model, upper bound": str(num_clients),
            "local model, last": few,
            "local model, upper bound": few,
        }

    def test_newcomers_do_not_count_as_clients_of_a_round(self, run: RunDirectory) -> None:
        newcomers = {"served": spread_of(0.2), "local": spread_of(0.4), "clients": {"1": {}}}
        totals = Totals(scores=[[Evaluation(1, spread_of(0.9))], [Evaluation(1, spread_of(0.9))]])
        text = results_table(summarise(run, totals, newcomers=newcomers), run.path)
        rows = [re.split(" {2,}", line.strip()) for line in text.splitlines() if "model," in line]
        assert len(rows) == 6 and {cells[-1] for cells in rows} == {"1"}

    @pytest.mark.parametrize("columns", [40, 80])
    def test_a_row_stays_on_one_line(
        self, columns: int, run: RunDirectory, totals: Totals, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A log is searched by lines, and a pipe has no width."""
        monkeypatch.setenv("COLUMNS", str(columns))
        text = results_table(summarise(run, totals) | {"num-clients": 1_000_000}, run.path)
        rows = [line for line in text.splitlines() if "%" in line]
        assert len(rows) == 4 and all(line.endswith("2 of 1000000") for line in rows)

    def test_points_without_evaluations_are_marked(self, run: RunDirectory) -> None:
        text = results_table(summarise(run, Totals(), "stopped"), Path("[x]"))
        assert text.count("not evaluated") == 4
        assert "system accuracy" not in text
        assert "dropped" not in text
        assert text.endswith("[x]")

    @pytest.mark.parametrize(
        ("seconds", "words"), [(0, "0 s"), (59.6, "1 min 0 s"), (106, "1 min 46 s"), (7530, "2 h 5 min")]
    )
    def test_durations(self, seconds: float, words: str) -> None:
        assert duration(seconds) == words

    @pytest.mark.parametrize(
        ("count", "words"), [(0, "0 bytes"), (0.0, "0 bytes"), (999, "999 bytes"), (1_234_567, "1.23 MB")]
    )
    def test_sizes(self, count: float, words: str) -> None:
        assert size(count) == words


class TestTaskTable:
    def test_it_has_a_line_for_each_site_and_only_known_columns(self) -> None:
        rows: list[dict[str, Any]] = [
            {"site": "[red]a[/red]", "client": 0, "training": 120, "classes": "2: Cat, cat", "skipped": 0},
            {"site": "", "client": 1},
        ]
        text = task_table(rows, {"classes": "2: " + "cat, " * 300, "model": "mlp"})
        lines = [re.split(" {2,}", line.strip()) for line in text.splitlines()]
        assert ["site", "client", "training", "classes", "skipped"] in lines
        assert ["[red]a[/red]", "0", "120", "2: Cat, cat", "0"] in lines
        assert ["1"] in lines
        assert ["model", "mlp"] in lines
        assert len(text.splitlines()) < 15
        assert max(map(len, text.splitlines())) <= 100

    def test_long_names_and_many_sites_are_truncated(self) -> None:
        rows = [{"site": "n" * 100, "client": c, "classes": ", ".join(["c" * 100] * 4)} for c in range(1000)]
        text = task_table(rows, {"model": "mlp"})
        assert "… and 950 more" in text
        site_rows = [line.split() for line in text.splitlines() if line.startswith(" n")]
        assert [cells[1] for cells in site_rows] == [str(c) for c in range(50)]  # a line for each site
        assert {len(cells[0]) for cells in site_rows} == {50} and max(map(len, text.splitlines())) <= 120
