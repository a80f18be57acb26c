"""A table on a Ray cluster of a head and two workers on this machine. The test kills one worker."""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from posy.commands.launch import APP
from posy.commands.on_ray import digest_of_code, pack_files
from posy.commands.table import read_plan
from posy.deploy.addresses import free_port

TABLE = """
output: {output}
seeds: [0, 1]
settings: {{dataset: digits, max-samples: 300, num-clients: 3, num-server-rounds: 40, device: cpu}}
runs:
  - {{name: FedAvg, settings: {{method: fedavg}}}}
  - {{name: Local, settings: {{method: local}}}}
"""


QUICK = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
"""Settings with which Ray tolerates a slow start, and notices a lost worker within seconds."""


def until(condition: Callable[[], bool], describe: Callable[[], str], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, describe()
        time.sleep(0.1)


class Cluster:
    """Ray's own processes: a head without cores, and workers of one core each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.start("--head", f"--port={self.address.rpartition(':')[2]}", "--num-cpus=0", "--include-dashboard=false")

    def start(self, *words: str) -> None:
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--block", "--disable-usage-stats", f"--temp-dir={self.folder}", *words]
        log = (self.folder / f"node-{len(self.nodes)}.log").open("wb")
        before = len(self.nodes)
        python_path = os.pathsep.join(filter(None, (str(APP), os.environ.get("PYTHONPATH", ""))))
        environment = {**os.environ, "PYTHONPATH": python_path, **QUICK}
        self.nodes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True))

        # Nodes start one after the other, because all of them look for free ports on one machine.
        text = (self.folder / f"node-{before}.log").read_text
        until(lambda: "Ray runtime started" in text(), text)

    def worker(self) -> None:
        self.start(f"--address={self.address}", "--num-cpus=1")

    def kill(self, node: int) -> None:
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()


@pytest.fixture
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    # Ray's sockets need a short path.
    started = Cluster(tmp_path_factory.mktemp("r"))
    try:
        yield started
    finally:
        for node in reversed(range(len(started.nodes))):
            if started.nodes[node].poll() is None:
                started.kill(node)


@pytest.mark.federation
def test_cells_are_distributed_and_rerun_if_a_worker_is_lost(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(TABLE.format(output=tmp_path / "results"))
    cluster.worker()
    cluster.worker()
    command = [sys.executable, "-P", "-m", "posy.commands.cli", "table", str(file), "--ray", cluster.address]
    environment = {**os.environ, "PYTHONPATH": str(APP)}
    log = tmp_path / "table.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        until(lambda: "[1/4]" in log.read_text() or process.poll() is not None, log.read_text)
        cluster.kill(1)
        assert process.wait(timeout=240) == 0, log.read_text()
    cells = read_plan(file).cells
    assert all(cell.summary() is not None for cell in cells)
    assert log.read_text().count("/4]") == 4
    for cell in cells:
        assert len((cell.path / "rounds.jsonl").read_text().splitlines()) == 40
        assert (cell.path / "figures").is_dir() and not (cell.path / "models").exists()
        assert "completed after 40 rounds" in cell.log.read_text()
    # Without Ray, each cell has the same results.
    alone = tmp_path / "alone"
    words = [*command[:-2], "--output", str(alone), "-j", "2"]
    assert subprocess.run(words, env=environment, check=False, capture_output=True).returncode == 0
    for cell in cells:
        other = alone / cell.path.relative_to(tmp_path / "results") / "summary.json"
        first, second = (json.loads(path.read_text()) for path in (cell.path / "summary.json", other))
        for key in ("served", "local", "samples", "bytes-up"):
            assert first[key] == second[key]


def test_an_address_without_a_cluster_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text(TABLE.format(output=tmp_path / "results"))
    command = [sys.executable, "-P", "-m", "posy.commands.cli", "table", str(file), "--ray", f"127.0.0.1:{free_port()}"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(APP)}, check=False, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 2
    assert "no Ray cluster answers" in ended.stderr and "Traceback" not in ended.stderr


def test_packed_results_omit_the_models(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models/client-0.safetensors").write_bytes(b"x")
    (tmp_path / "summary.json").write_text("{}")
    with tarfile.open(fileobj=io.BytesIO(pack_files(tmp_path))) as archive:
        assert archive.getnames() == ["summary.json"]
    assert len(digest_of_code()) == 32
