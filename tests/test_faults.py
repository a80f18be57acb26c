"""Faults of machines and networks in a real federation of three nodes: a run resumes and loses no client.

Each test starts a run, causes a fault, and limits the time until the run resumes.
"""

import contextlib
import os
import re
import resource
import signal
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.local_federation import Deployment

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("faults")]

NODES = 3
ROUNDS = 3
"""Rounds before and after a fault."""
LONGEST_ROUND = 600.0
"""Longest time of a round without a fault, in seconds, on a busy machine."""
FAULT_SECONDS = 10.0
SABOTEUR = Path(__file__).resolve().parent / "saboteur"
HOUR = 3600.0
FULL = 4096
"""Largest size of a file on the full disk, in bytes."""


class Federation(Deployment):
    """A SuperLink with its database and three nodes."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"node-{i}" for i in range(NODES)]
        self.orders = folder / "orders"
        self.orders.mkdir()
        super().__init__(folder, self.names)
        self.database = folder / "superlink/state.db"

    def environment(self) -> dict[str, str]:
        """Return the environment of processes that load the saboteur."""
        inherited = super().environment()
        return inherited | {
            "PYTHONPATH": os.pathsep.join((str(SABOTEUR), inherited["PYTHONPATH"])),
            "POSY_SABOTAGE": str(self.orders),
        }

    def order(self, run: str, word: str, within: float) -> None:
        """Order a fault, and wait until it has happened and further rounds are complete."""
        (self.orders / word).touch()
        self.until(lambda: not (self.orders / word).exists(), f"run-{run}", within)
        self.wait_for_rounds(run, len(self.rounds(run)) + ROUNDS, within)

    def set_clock(self, seconds: float) -> None:
        """Set the clock of all processes."""
        (self.orders / "clock.new").write_text(str(seconds))
        (self.orders / "clock.new").replace(self.orders / "clock")

    def bring_up(self) -> None:
        for i, name in enumerate(self.names):
            self.node(name, f"partition-id={i}", f"num-partitions={NODES}")
        for name in self.names:
            self.until(lambda name=name: self.ready(name), name, LONGEST_ROUND)

    @contextlib.contextmanager
    def run_with_fault(self, name: str, *settings: str, within: float) -> Iterator[None]:
        """Run a federation, and yield during it to cause a fault.

        The run must resume ``within`` these seconds with all clients. No client may train twice in a round.
        """
        words = ["method=fedavg", "dataset=digits", "model=linear", "device=cpu", "num-server-rounds=10000"]
        self.submit(name, *words, f"num-clients={NODES}", "save-models=false", *settings)
        self.wait_for_rounds(name, ROUNDS, LONGEST_ROUND)
        before = {node: len(self.log(node)) for node in self.names}
        yield
        self.wait_for_rounds(name, len(self.rounds(name)) + ROUNDS, within)
        self.posy("stop", name, *self.where)
        assert self.ended(f"run-{name}", LONGEST_ROUND) == 1
        rounds = self.rounds(name)
        assert [row["round"] for row in rounds] == list(range(1, len(rounds) + 1))
        assert [(row["cohort"], row["dropped"]) for row in rounds] == [(NODES, [])] * len(rounds)
        for node in self.names:
            assert max(self.trained(self.log(node)[before[node] :]).values()) == 1

    def wait_for_rounds(self, name: str, number: int, seconds: float) -> None:
        process = self.processes[f"run-{name}"]

        def enough_rounds() -> bool:
            assert process.poll() is None, self.log(f"run-{name}")[-5000:]
            return len(self.rounds(name)) >= number

        self.until(enough_rounds, f"run-{name}", seconds)

    @staticmethod
    def trained(log: str) -> Counter[int]:
        """Return the number of trainings in each round of a log."""
        return Counter(int(number) for number in re.findall(r"processing the train message of round (\d+)", log))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    deployment = Federation(tmp_path_factory.mktemp("faults"))
    try:
        deployment.bring_up()
        yield deployment
    finally:
        deployment.stop()


def test_run_survives_a_locked_database(federation: Federation) -> None:
    """Another process, such as a backup, holds the lock for longer than SQLite waits."""
    with (
        federation.run_with_fault("locked", within=150.0),
        contextlib.closing(sqlite3.connect(federation.database)) as connection,
    ):
        connection.execute("BEGIN EXCLUSIVE")
        time.sleep(FAULT_SECONDS)


def test_run_survives_a_full_disk(federation: Federation) -> None:
    with federation.run_with_fault("full", within=150.0):
        superlink = federation.superlink()
        before = resource.prlimit(superlink, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        time.sleep(FAULT_SECONDS)
        resource.prlimit(superlink, resource.RLIMIT_FSIZE, before)
    assert federation.superlink() == superlink


def test_killed_superlink_restarts_and_the_run_continues(federation: Federation) -> None:
    with federation.run_with_fault("killed", within=180.0):
        os.kill(federation.superlink(), signal.SIGKILL)
        federation.wait_for_rounds("killed", len(federation.rounds("killed")) + 1, 180.0)
        os.kill(federation.superlink(), signal.SIGKILL)


def test_run_survives_a_superlink_killed_during_a_transfer(federation: Federation) -> None:
    with federation.run_with_fault("half", within=150.0):
        for word in ("die-while-pulled", "die-while-pushed"):
            federation.order("half", word, 240.0)


def test_lost_messages_and_replies_are_resent(federation: Federation) -> None:
    orders = ("lose-message", "lose-reply", "lose-object-of-message", "lose-object-of-reply")
    with federation.run_with_fault("lost", within=150.0):
        for word in orders:
            federation.order("lost", word, 240.0)
    assert sum(row.get("sent_again", 0) for row in federation.rounds("lost")) >= 1


def test_run_survives_clock_changes(federation: Federation) -> None:
    with federation.run_with_fault("clock", within=150.0):
        for seconds in (HOUR, 0.0):
            federation.set_clock(seconds)
            federation.wait_for_rounds("clock", len(federation.rounds("clock")) + 2 * ROUNDS, 240.0)
