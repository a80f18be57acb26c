"""What is shown of a run's log: nothing that tells its user something is lost, whenever it comes."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from posy.commands.runlog import RunLog

INFO, WARNING, ERROR = ("\x1b[92mINFO \x1b[0m:      ", "\x1b[93mWARNING \x1b[0m:   ", "\x1b[91mERROR \x1b[0m:     ")
ACTOR = "\x1b[36m(ClientAppActor pid=6904)\x1b[0m "
RESULTS = INFO + "Results of this run: /runs/one"

NOISE = [
    "Using SuperLink: posy (127.0.0.1:8000)",
    INFO + "Starting logstream for run_id `1`",
    INFO,
    INFO + "\t├──> Network: linear, 650 parameters",
    WARNING + "Since flwr 1.32, default simulated SuperNodes changed from 10 to 2.",
    "Successfully installed posy to /tmp/posy-x/flwr/apps/posy.posy.0.1.0.0.",
    "2026-11-22 11:44:01,234\tINFO worker.py:2014 -- Started a local Ray instance.",
    "2026-11-22 11:44:01,234\tWARNING services.py:2072 -- The object store is using /tmp instead of /dev/shm",
    "/x/site-packages/ray/_private/worker.py:2051: FutureWarning: Tip: In future versions of Ray\n  warnings.warn(",
    ACTOR + INFO + "a client's news",
    ACTOR + "what an actor prints",
    ERROR + "An exception was raised when processing a message by RayBackend",
    "INFO:     Started server process [5887]",
    ERROR + "Exit Code: 201\n\nAn unhandled exception occurred in the ServerApp.\n\nFor more information, visit: <x>",
]
NEWS = [
    WARNING + "site-c is left out: a.npz: nan at index (3, 2)",
    WARNING + "The run begins with 2 of 3 clients\n  and this belongs to it",
    ERROR + "client on node 3: ValueError('x')",
    "round 1/2  served 87.83 %",
    "fedavg on digits: completed\n\n accuracy   round\n ───────\n served  2\n\nclients  3",
    "/x/site-packages/numpy/core.py:3: RuntimeWarning: overflow\n  return a * b",
    "(raylet) node_manager.cc:1: 1 Workers killed due to memory pressure (OOM)",
    ERROR + 'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\nKeyError: 3',
    'Traceback (most recent call last):\n  File "b.py", line 1, in f\nValueError: two\nlines',
]


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n    g()\n{error}'


def shown(lines: Iterable[str], capsys: pytest.CaptureFixture[str], *, failed: bool = False) -> str:
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
@pytest.mark.parametrize("news", NEWS, ids=range(len(NEWS)))
def test_news_are_shown_before_and_after_the_first_round(
    news: str, after: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*NOISE, RESULTS, news, *NOISE] if after else [*NOISE, news, *NOISE, RESULTS]
    told = shown(lines, capsys)
    assert bare(news) in told
    assert told.replace(bare(news) + "\n", "") == "Results of this run: /runs/one\n"


@given(st.lists(st.sampled_from(NOISE + NEWS[:-2]), max_size=12))
def test_whatever_the_order_all_news_and_no_noise_are_shown(lines: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        told: list[str] = []
        patch.setattr(RunLog, "_print", lambda self, line: told.append(bare(line)))
        log = RunLog(verbose=False)
        for part in "".join(line + "\n" for line in lines).splitlines(keepends=True):
            log.add(part)
        log.end()
    assert "".join(told) == "".join(bare(line) + "\n" for line in lines if line not in NOISE)


def test_warnings_of_simulated_clients_are_shown_without_rays_words(capsys: pytest.CaptureFixture[str]) -> None:
    repeated = "\x1b[32m [repeated 4x across cluster] (Ray deduplicates logs by default. Set RAY_DEDUP_LOGS=0)\x1b[0m"
    told = shown([RESULTS, ACTOR + WARNING + "client 0 diverged", ACTOR + WARNING + "it again" + repeated], capsys)
    assert told.splitlines()[1:] == ["WARNING :   client 0 diverged", "WARNING :   it again [4 times more]"]


def test_what_a_line_of_the_end_tells_is_no_traceback_before(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = trace("posy.settings.SettingsError: lr = -1: it must be > 0")
    told = shown([*NOISE, ERROR + "ServerApp raised an exception", wrong, "round 1/2"], capsys, failed=True)
    assert told == "round 1/2\n"
    for error in (
        "posy.settings.NothingTrainedError: none",
        "posy.training.TrainingDivergedError: nan",
    ):
        told = shown([RESULTS, ERROR + trace(error), "round 1/2"], capsys)
        assert told == "Results of this run: /runs/one\nround 1/2\n"


def test_equal_tracebacks_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = shown([ERROR + trace("ValueError: x"), *NOISE, ERROR + trace("ValueError: x"), "round 1/2"], capsys)
    assert told.count("ValueError: x") == told.count("Traceback") == told.count("round 1/2") == 1
    twice = shown([ERROR + "out of reach", ERROR + "out of reach"], capsys)
    assert twice.count("out of reach") == 2


def test_a_run_that_fails_before_it_begins_shows_what_was_hidden(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Starting logstream" in shown([*NOISE, trace("ValueError: x")], capsys, failed=True)
    assert "Starting logstream" not in shown([*NOISE, RESULTS, trace("ValueError: x")], capsys, failed=True)


def test_verbose_shows_every_line_as_it_comes(capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(verbose=True)
    for line in NOISE:
        log.add(line + "\n")
        assert capsys.readouterr().out == bare(line) + "\n"
