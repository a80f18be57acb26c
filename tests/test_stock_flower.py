"""A SuperLink and two nodes of unmodified Flower, of any version that Posy supports, run a custom method."""

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import posy
from benchmarks.local_federation import ProcessGroup
from posy.deploy.addresses import free_port

pytestmark = [pytest.mark.federation, pytest.mark.xdist_group("stock")]

TIMEOUT = 600.0
"""Timeout in seconds of every step, for a busy machine."""
WARM = version("flwr").startswith("1.39.")
METHOD = """
from posy.method import MethodSettings, PersonalClient


class FedMineSettings(MethodSettings):
    pass


class FedMineClient(PersonalClient):
    pass
"""


class Stock(ProcessGroup):
    """Processes without TLS on this machine."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.control, self.fleet = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"

    def until_logged(self, name: str, text: str) -> None:
        def is_logged() -> bool:
            assert self.processes[name].poll() is None, self.log(name)[-3000:]
            return text in self.log(name)

        self.until(is_logged, name, TIMEOUT)


@pytest.fixture
def stock(tmp_path: Path) -> Iterator[Stock]:
    processes = Stock(tmp_path)
    try:
        yield processes
    finally:
        processes.stop()


def test_stock_processes_run_a_custom_method(stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --stock, Posy warns once if the installed Flower has no warm nodes."""
    stock_option = ["--stock"] if WARM else []
    fleet = ["--fleet", stock.fleet] if WARM else []
    stock.start("superlink", "superlink", "--insecure", "--control", stock.control, *fleet, *stock_option)
    stock.until_logged("superlink", "Application startup complete")
    address = stock.fleet if WARM else stock.control
    for number in range(2):
        node = ["--insecure", "--superlink", address, f"partition-id={number}", "num-partitions=2", *stock_option]
        stock.start(f"node-{number}", "supernode", *node)
    for number in range(2):
        stock.until_logged(f"node-{number}", "SuperNode ID")
    (tmp_path / "mine.py").write_text(METHOD)
    settings = {"method": "mine:FedMine", "model": "linear", "device": "cpu", "num-clients": 2, "num-server-rounds": 1}
    words = [f"{key}={value}" for key, value in settings.items()]
    stock.start("run", "run", "--insecure", "--superlink", stock.control, *words, "run-name=stock", "output-dir=runs")
    assert stock.ended("run", TIMEOUT) == 0, stock.log("run")[-3000:]
    monkeypatch.chdir(tmp_path)
    record = posy.load("runs/stock")
    assert (record.summary["status"], record.summary["dropped"]) == ("completed", {})
    reference = posy.run(**{key.replace("-", "_"): value for key, value in settings.items()}, output_dir="same")
    assert record.summary["served"] == reference.summary["served"]
    for name in ("superlink", "node-0"):
        assert stock.log(name).count(
            f"posy: WARNING: {'Posy has no warm' if name == 'node-0' else 'with Flower 1.'}"
        ) == (0 if WARM else 1)
    for number in range(2):  # a node never imports code that another node is still copying
        [installed] = (tmp_path / "home/nodes" / str(number) / "apps").iterdir()
        assert (installed / "client_app/app.py").is_file()
