"""The log of a run on a SuperLink loses no line that matters to the user."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posy.commands.deploy import control
from posy.commands.runlog import RunLog

INFO, WARNING, ERROR = ("\x1b[92mINFO \x1b[0m:      ", "\x1b[93mWARNING \x1b[0m:   ", "\x1b[91mERROR \x1b[0m:     ")
RESULTS = INFO + "Results of this run: /runs/one"

NOISE = [
    INFO + "Start `flwr-serverapp` process",
    INFO,
    INFO + "\t├──> Network: linear, 650 parameters",
    "Successfully installed posy to /tmp/posy-x/flwr/apps/posy.posy.0.1.0.0.",
    "/x/site-packages/flwr/server/app.py:51: FutureWarning: Tip: In future versions\n  warnings.warn(",
    "INFO:     Started server process [5887]",
    ERROR + "Exit Code: 201\n\nAn unhandled exception occurred in the ServerApp.\n\nFor more information, visit: <x>",
]
RELEVANT = [
    WARNING + "site-c is skipped: a.npz: nan at index (3, 2)",
    WARNING + "The run begins with 2 of 3 clients\n  and this belongs to it",
    ERROR + "client on node 3: ValueError('x')",
    "round 1/2  served 87.83 %",
    "fedavg on digits: completed\n\n accuracy   round\n ───────\n served  2\n\nclients  3",
    "/x/site-packages/numpy/core.py:3: RuntimeWarning: overflow\n  return a * b",
    ERROR + 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 3',
    'Traceback (most recent call last):\n  File "b.py", line 1, in f\nValueError: two\nlines',
]


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{error}'


def output_of(lines: Iterable[str], capsys: pytest.CaptureFixture[str], *, failed: bool = False) -> str:
    log = RunLog(verbose=False)
    for line in "".join(line + "\n" for line in lines).splitlines(keepends=True):
        log.add(line)
    log.end(failed=failed)
    return capsys.readouterr().out


def bare(text: str) -> str:
    for code in ("\x1b[92m", "\x1b[93m", "\x1b[91m", "\x1b[36m", "\x1b[0m"):
        text = text.replace(code, "")
    return text


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("message", RELEVANT, ids=range(len(RELEVANT)))
def test_relevant_lines_are_shown_before_and_after_the_first_round(
    message: str, after: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*NOISE, RESULTS, message, *NOISE] if after else [*NOISE, message, *NOISE, RESULTS]
    output = output_of(lines, capsys)
    assert bare(message) in output
    assert output.replace(bare(message) + "\n", "") == "Results of this run: /runs/one\n"


@given(st.lists(st.sampled_from(NOISE + RELEVANT[:-2]), max_size=12))
def test_only_relevant_lines_are_shown_in_any_order(lines: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines_shown: list[str] = []
        patch.setattr(RunLog, "_print", lambda self, line: lines_shown.append(bare(line)))
        log = RunLog(verbose=False)
        for part in "".join(line + "\n" for line in lines).splitlines(keepends=True):
            log.add(part)
        log.end()
    assert "".join(lines_shown) == "".join(bare(line) + "\n" for line in lines if line not in NOISE)


def test_the_log_knows_the_last_round_of_an_unfinished_run() -> None:
    log = RunLog(verbose=False)
    begun = INFO + "[ROUND 6/12]\n"
    ends = (("round  9/12 served\n", 9), ("round 10/12  served\n", 10), (begun, 5), ("round 12/12  served\n", 0))
    for line, rounds in ends:
        log.add(line)
        assert log.rounds == rounds


def test_an_error_with_an_explanation_is_shown_without_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = trace("posy.settings.SettingsError: lr = -1: it must be > 0")
    output = output_of([*NOISE, ERROR + "ServerApp raised an exception", wrong, "round 1/2"], capsys, failed=True)
    assert output == "round 1/2\n"
    for error in (
        "posy.settings.NothingTrainedError: none",
        "posy.training.TrainingDivergedError: nan",
    ):
        output = output_of([RESULTS, ERROR + trace(error), "round 1/2"], capsys)
        assert output == "Results of this run: /runs/one\nround 1/2\n"


def test_the_reason_for_a_failure_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Flower's own lines about the exception stay hidden."""
    reason = "classes-per-client = 11 in the run config: digits has 10 classes; allowed: 1 to 10"
    log = RunLog(verbose=False)
    for line in [*NOISE, f"{ERROR}ServerApp raised an exception: {reason}", NOISE[-1]]:
        for part in line.splitlines():
            log.add(f"{part}\n")
    details = f"ServerApp failed with exception: {reason}"
    assert control._exit_status(control.Run("7", {}, "failed", "", 1.0, details), log) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("posy: run 7 ended with status failed")
    assert output.err.endswith(f": {reason}\n") and output.err.count(reason) == output.err.count("\n") == 1


def test_equal_tracebacks_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    output = output_of([ERROR + trace("ValueError: x"), *NOISE, ERROR + trace("ValueError: x"), "round 1/2"], capsys)
    assert output.count("ValueError: x") == output.count("Traceback") == output.count("round 1/2") == 1
    twice = output_of([ERROR + "out of reach", ERROR + "out of reach"], capsys)
    assert twice.count("out of reach") == 2


def test_an_early_failure_shows_the_hidden_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Start `flwr-serverapp`" in output_of([*NOISE, trace("ValueError: x")], capsys, failed=True)
    assert "Start `flwr-serverapp`" not in output_of([*NOISE, RESULTS, trace("ValueError: x")], capsys, failed=True)


def test_verbose_shows_every_line_immediately(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(verbose=True)
    for line in NOISE:
        log.add(line + "\n")
        assert capsys.readouterr().out == bare(line) + "\n"
