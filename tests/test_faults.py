"""Faults of machines and networks in a real federation of three nodes: a run goes on, and counts all its clients.

Each test begins a run, brings a fault about, and says for how long at most nothing may happen once it is over.
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
"""Rounds before a fault, and after it."""
MOST = 600.0
"""Seconds that a round without a fault never takes, however busy the machine is."""
FAULT_SECONDS = 10.0
SABOTEUR = Path(__file__).resolve().parent / "saboteur"
HOUR = 3600.0
FULL = 4096
"""Bytes of a file that can be written on a disk that is full."""


class Federation(Deployment):
    """A SuperLink with its database and three nodes."""

    def __init__(self, folder: Path) -> None:
        self.names = [f"node-{i}" for i in range(NODES)]
        self.orders = folder / "orders"
        self.orders.mkdir()
        super().__init__(folder, self.names)
        self.database = folder / "superlink/state.db"

    def environment(self) -> dict[str, str]:
        """Return what processes need, which obey orders."""
        own = super().environment()
        return own | {
            "PYTHONPATH": os.pathsep.join((str(SABOTEUR), own["PYTHONPATH"])),
            "POSY_SABOTAGE": str(self.orders),
        }

    def order(self, run: str, word: str, within: float) -> None:
        """Give an order, and wait until it is obeyed and further rounds are finished."""
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
            self.until(lambda name=name: self.ready(name), name, MOST)

    @contextlib.contextmanager
    def a_run(self, name: str, *settings: str, within: float) -> Iterator[None]:
        """Bring about a fault in the course of a run, which must go on ``within`` some seconds and count all clients.

        No client may train twice in a round.
        """
        words = ["method=fedavg", "dataset=digits", "model=linear", "device=cpu", "num-server-rounds=10000"]
        self.submit(name, *words, f"num-clients={NODES}", "save-models=false", *settings)
        self.wait_for_rounds(name, ROUNDS, MOST)
        before = {node: len(self.log(node)) for node in self.names}
        yield
        self.wait_for_rounds(name, len(self.rounds(name)) + ROUNDS, within)
        self.posy("stop", name, *self.where)
        assert self.ended(f"run-{name}", MOST) == 1
        rounds = self.rounds(name)
        assert [row["round"] for row in rounds] == list(range(1, len(rounds) + 1))
        assert [(row["cohort"], row["dropped"]) for row in rounds] == [(NODES, [])] * len(rounds)
        for node in self.names:
            assert max(self.trained(self.log(node)[before[node] :]).values()) == 1

    def wait_for_rounds(self, name: str, number: int, seconds: float) -> None:
        process = self.processes[f"run-{name}"]

        def there() -> bool:
            assert process.poll() is None, self.log(f"run-{name}")[-5000:]
            return len(self.rounds(name)) >= number

        self.until(there, f"run-{name}", seconds)

    @staticmethod
    def trained(log: str) -> Counter[int]:
        """Return how often a worker has trained in each round."""
        return Counter(int(number) for number in re.findall(r"working on a train message of round (\d+)", log))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("faults"))
    try:
        made.bring_up()
        yield made
    finally:
        made.stop()


def test_run_survives_a_locked_database(federation: Federation) -> None:
    """Another process, such as one that copies the database, holds its lock for longer than SQLite waits for it."""
    with federation.a_run("locked", within=150.0), contextlib.closing(sqlite3.connect(federation.database)) as other:
        other.execute("BEGIN EXCLUSIVE")
        time.sleep(FAULT_SECONDS)


def test_run_survives_a_full_disk(federation: Federation) -> None:
    with federation.a_run("full", within=150.0):
        superlink = federation.superlink()
        before = resource.prlimit(superlink, resource.RLIMIT_FSIZE, (FULL, resource.RLIM_INFINITY))
        time.sleep(FAULT_SECONDS)
        resource.prlimit(superlink, resource.RLIMIT_FSIZE, before)
    assert federation.superlink() == superlink


def test_killed_superlink_restarts_and_the_run_continues(federation: Federation) -> None:
    with federation.a_run("killed", within=180.0):
        os.kill(federation.superlink(), signal.SIGKILL)
        federation.wait_for_rounds("killed", len(federation.rounds("killed")) + 1, 180.0)
        os.kill(federation.superlink(), signal.SIGKILL)


def test_run_survives_a_superlink_killed_during_a_transfer(federation: Federation) -> None:
    with federation.a_run("half", within=150.0):
        for word in ("die-while-pulled", "die-while-pushed"):
            federation.order("half", word, 240.0)


def test_lost_messages_and_replies_are_resent(federation: Federation) -> None:
    orders = ("lose-message", "lose-reply", "lose-object-of-message", "lose-object-of-reply")
    with federation.a_run("lost", within=150.0):
        for word in orders:
            federation.order("lost", word, 240.0)
    assert sum(row.get("sent_again", 0) for row in federation.rounds("lost")) >= 1


def test_run_survives_clock_changes(federation: Federation) -> None:
    with federation.a_run("clock", within=150.0):
        for seconds in (HOUR, 0.0):
            federation.set_clock(seconds)
            federation.wait_for_rounds("clock", len(federation.rounds("clock")) + 2 * ROUNDS, 240.0)
