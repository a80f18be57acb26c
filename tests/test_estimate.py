"""The estimate of the time that the runs of a table take."""

import json
from pathlib import Path

from posy.commands.estimate import Estimate


def test_rounds_and_ended_runs_determine_the_time_left(tmp_path: Path) -> None:
    """Four runs of ten rounds, two at a time. A run loads for 3 s, and its rounds take 2 s, so it takes 23 s."""
    seconds, round_record = [100.0], json.dumps({"seconds": {"train": 1.5, "evaluate": 0.5}}) + "\n"
    estimate = Estimate(2, clock=lambda: seconds[0])
    runs = [tmp_path / name for name in "abcd"]
    for run in runs:
        run.mkdir()
    (runs[1] / "rounds.jsonl").write_text(5 * round_record)  # the run resumes after round 5, so it takes 13 s
    for run in runs[:2]:
        estimate.begin(run, 10)
    assert estimate.remaining_time([""] * 2) is None and estimate.first([""] * 2) is None
    seconds[0] = 105.0
    (runs[0] / "rounds.jsonl").write_text(round_record)
    assert estimate.first([""] * 2) is None, "run b has not finished a round"
    seconds[0] = 107.0
    (runs[0] / "rounds.jsonl").write_text(2 * round_record)
    (runs[1] / "rounds.jsonl").write_text(7 * round_record)
    assert estimate.first([""] * 2) == (16 + 6 + 18 + 18) / 2
    assert estimate.first([""] * 2) is None, "the estimate is given once"
    seconds[0] = 113.0
    (runs[0] / "rounds.jsonl").write_text(5 * round_record)
    estimate.end(runs[1])
    estimate.begin(runs[2], 10)
    assert estimate.remaining_time([""] * 1) == (10 + 18 + 18) / 2
    seconds[0] = 123.0
    estimate.end(runs[0])
    assert estimate.remaining_time([""] * 0) == (13 + 23) / 2 - 10
    estimate.end(runs[2])
    assert estimate.remaining_time([""] * 0) == 0.0


def test_rows_with_known_durations_determine_their_own_estimate() -> None:
    """Row a took 10 s and 14 s, row b 60 s. The mean over the three runs, 28 s, is the estimate for row c."""
    seconds = [0.0]
    estimate = Estimate(1, {"a": [10.0, 14.0]}, clock=lambda: seconds[0])
    estimate.begin(Path("run"), 5, "b")
    seconds[0] = 60.0
    estimate.end(Path("run"))
    assert estimate.remaining_time(["a", "b", "c"]) == 12 + 60 + 28
