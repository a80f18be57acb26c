"""`posy watch` prints a run's rounds as they are written, until the run ends."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posy.commands.cli import main
from posy.commands.runlog import RunLog
from posy.server_app.app import run
from posy.storage import lock


@pytest.fixture
def finished(make_config: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Path:
    """Return the directory of a run of three rounds."""
    path = run(None, make_config("fedavg", num_server_rounds=3, save_models=False)).directory.path
    capsys.readouterr()
    return path


def truncate_run(path: Path) -> tuple[list[str], str]:
    """Reduce a run to its first round, and return the lines of the later rounds and the summary."""
    file, summary = path / "rounds.jsonl", (path / "summary.json").read_text()
    first, *later_rounds = file.read_text().splitlines(keepends=True)
    file.write_text(first)
    (path / "summary.json").write_text(json.dumps({**json.loads(summary), "status": "running", "rounds": 1}))
    return later_rounds, summary


def test_watch_shows_a_finished_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(finished)]) == 0
    lines = capsys.readouterr().out.splitlines()
    last = json.loads((finished / "rounds.jsonl").read_text().splitlines()[-1])
    assert lines[2].startswith(f"round 3/3  served {100 * last['served_accuracy']['mean']:.2f} %")
    assert "fedavg on" in lines[3] and "completed after 3 rounds" in lines[3]


def test_watch_shows_rounds_as_they_finish(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later_rounds, summary = truncate_run(finished)
    run_lock = lock(finished)
    outputs: list[str] = []

    def write_rounds() -> None:
        with (finished / "rounds.jsonl").open("a") as file:
            for line in later_rounds:
                for part in (line[:20], line[20:]):  # an incomplete line is not a round
                    file.write(part)
                    file.flush()
                    time.sleep(0.7)
                outputs.append(capsys.readouterr().out)
        (finished / "summary.json").write_text(summary)
        os.close(run_lock)

    thread = threading.Thread(target=write_rounds)
    thread.start()
    assert main(["watch", str(finished)]) == 0
    thread.join()
    assert "round 2/3" in outputs[0] and "round 3/3" not in outputs[0]
    assert "round 3/3" in outputs[1]


def test_watch_reports_a_killed_run(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truncate_run(finished)
    assert main(["watch", str(finished)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("posy: ") and "killed after round 1" in error and error.count("\n") == 1


def test_watch_finds_the_newest_run(
    finished: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished.parent.parent)
    assert finished.parent.name == "runs"
    assert main(["watch"]) == 0
    assert f"results          runs/{finished.name}" in capsys.readouterr().out
    assert main(["watch", "missing"]) == 2
    assert "no run in" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert main(["watch"]) == 2
    assert "contains no run" in capsys.readouterr().err


def test_rounds_on_a_superlink_show_online_nodes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["round 1/2  served 50.00 %\n", "round 2/2  served 60.00 %\n", "WARNING : one has left\n"]

    def output() -> str:
        log = RunLog(verbose=False, suffix=lambda: "2 of 3 nodes online")
        for line in lines:
            log.add(line)
        log.end()
        return capsys.readouterr().out

    assert output() == (
        "round 1/2  served 50.00 %  2 of 3 nodes online\nround 2/2  served 60.00 %  2 of 3 nodes online\n"
        "WARNING : one has left\n"
    )
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert output() == (
        "round 1/2  served 50.00 %  2 of 3 nodes online\r\x1b[Kround 2/2  served 60.00 %  2 of 3 nodes online\n"
        "WARNING : one has left\n"
    )
