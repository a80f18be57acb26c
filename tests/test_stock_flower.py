"""A SuperLink and two nodes of unmodified Flower, of any version that Posy supports, run a custom method."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import posy
from posy.commands.launch import APP
from posy.deploy.addresses import free_port

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("stock")]

MOST = 600.0
"""Seconds that nothing here takes, however busy the machine is."""
WARM = version("flwr").startswith("1.39.")
METHOD = """
from posy.method import MethodSettings, PersonalClient


class FedMineSettings(MethodSettings):
    pass


class FedMineClient(PersonalClient):
    pass
"""


class Stock:
    """Processes without TLS on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control, self.fleet = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> None:
        changes = {"PYTHONPATH": str(APP), "OMP_NUM_THREADS": "1", "FLWR_HOME": str(self.folder / f"home-{name}")}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-P", "-m", "posy.commands.cli", *words],
                cwd=self.folder,
                env=os.environ | changes,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def until(self, name: str, text: str) -> None:
        end = time.monotonic() + MOST
        while text not in self.log(name):
            assert time.monotonic() < end and self.processes[name].poll() is None, self.log(name)[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    made = Stock(tmp_path)
    try:
        yield made
    finally:
        made.stop()


def test_stock_processes_run_a_custom_method(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --stock, Posy warns once if the installed Flower has no warm nodes."""
    stocked = ["--stock"] if WARM else []
    fleet = ["--fleet", stock.fleet] if WARM else []
    stock.start("superlink", "superlink", "--insecure", "--control", stock.control, *fleet, *stocked)
    stock.until("superlink", "Application startup complete")
    address = stock.fleet if WARM else stock.control
    for number in range(2):
        node = ["--insecure", "--superlink", address, f"partition-id={number}", "num-partitions=2", *stocked]
        stock.start(f"node-{number}", "supernode", *node)
    for number in range(2):
        stock.until(f"node-{number}", "SuperNode ID")
    (tmp_path / "mine.py").write_text(METHOD)
    settings = {"method": "mine:FedMine", "model": "linear", "device": "cpu", "num-clients": 2, "num-server-rounds": 1}
    words = [f"{key}={value}" for key, value in settings.items()]
    stock.start("run", "run", "--insecure", "--superlink", stock.control, *words, "run-name=stock", "output-dir=runs")
    assert stock.processes["run"].wait(MOST) == 0, stock.log("run")[-3000:]
    monkeypatch.chdir(tmp_path)
    record = posy.load("runs/stock")
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    reference = posy.run(**{key.replace("-", "_"): value for key, value in settings.items()}, output_dir="same")
    assert record.summary["served"] == reference.summary["served"]
    for name in ("superlink", "node-0"):
        assert stock.log(name).count(f"posy: WARNING: {'Posy has no warm' if name == 'node-0' else 'Flower 1.'}") == (
            0 if WARM else 1
        )
