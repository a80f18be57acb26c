"""Load a service for a long time while its models are replaced: failed requests, times and memory.

The benchmark starts `posy serve` on a copy of a run, and sends requests over both transports. After each period it
replaces all models as a run does, with one more round. It prints JSON. Its exit status is 1 if a request has failed, if
the service has missed a round, or if its memory has grown by more than ``--growth``.
"""

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import grpc
import numpy as np
import typer

import posy
from benchmarks.measure import machine
from posy.serve.messages import MESSAGES, SERVICE
from posy.server_app.record import Record
from posy.storage import lock, read_arrays, write_arrays

CHECK_SECONDS = 1.0
"""Time between two looks of the service at the files, and between two measurements of its memory."""
FIRST_ROUND = 2
"""The last round of the run before its models are replaced."""
SETTINGS: dict[str, Any] = {
    "method": "feddrm",
    "dataset": "digits",
    "num_clients": 4,
    "num_server_rounds": FIRST_ROUND,
    "device": "cpu",
}
"""The run that the benchmark serves."""


class Load:
    """Callers that send requests until the benchmark ends, and their results."""

    def __init__(self, http_port: int, grpc_port: int, models: list[str]) -> None:
        self.http_port, self.grpc_port, self.models = http_port, grpc_port, models
        self.results: Counter[str] = Counter()
        self.seconds: list[float] = []
        self.versions: set[int] = set()
        self._ended, self._threads = threading.Event(), list[threading.Thread]()

    @contextmanager
    def running(self, callers: int) -> Iterator[None]:
        """Send requests from threads while the context lasts: half of the threads use each transport."""
        for number in range(callers):
            ask = (self._http, self._grpc)[number % 2]()
            self._threads.append(threading.Thread(target=self._repeat, args=(ask, number)))
            self._threads[-1].start()
        try:
            yield
        finally:
            self._ended.set()
            for thread in self._threads:
                thread.join()

    def _repeat(self, ask: Callable[[str], tuple[str, int]], number: int) -> None:
        while not self._ended.is_set():
            started = time.perf_counter()
            try:
                result, version = ask(self.models[number % len(self.models)])
            except (OSError, http.client.HTTPException, grpc.RpcError) as error:
                result, version = f"{type(error).__name__}: {error}", 0
            self.seconds.append(time.perf_counter() - started)
            self.results[result] += 1
            self.versions.add(version)
            number += 1

    def _http(self) -> Callable[[str], tuple[str, int]]:
        """Return a function that sends a request over HTTP, and returns its result and the version of the model."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=60)
        tensor = {"name": "image", "datatype": "UINT8", "shape": [2, 1, 8, 8], "data": list(range(128))}
        body = json.dumps({"inputs": [tensor]})

        def ask(model: str) -> tuple[str, int]:
            connection.request("POST", f"/v2/models/{model}/infer", body)
            response = connection.getresponse()
            answer = json.loads(response.read())
            if response.status != 200:
                return f"{response.status} {answer}", 0
            return "ok", int(answer["model_version"])

        return ask

    def _grpc(self) -> Callable[[str], tuple[str, int]]:
        """Return a function as from :meth:`_http` for gRPC."""
        channel = grpc.insecure_channel(f"127.0.0.1:{self.grpc_port}", [("grpc.use_local_subchannel_pool", 1)])
        method = channel.unary_unary(
            f"/{SERVICE}/ModelInfer", response_deserializer=MESSAGES["ModelInferResponse"].FromString
        )

        def ask(model: str) -> tuple[str, int]:
            request = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[bytes(range(128))])
            request.inputs.add(name="image", datatype="UINT8", shape=[2, 1, 8, 8])
            return "ok", int(method(request.SerializeToString(), timeout=60).model_version)

        return ask


def replace_models(folder: Path, server_round: int) -> None:
    """Replace all models of a run as its clients and its server do: models, rows in the record, the server's state."""
    models = sorted((folder / "models").glob("*.safetensors"))
    for path in models:
        if path.stem != "server":
            arrays, metadata = read_arrays(path)
            changed = {n: a * np.float32(0.999) if a.dtype == np.float32 else a for n, a in arrays.items()}
            write_arrays(path, changed, metadata | {"round": str(server_round)})
    record = Record(folder)
    rows = record.clients[record.clients["round"] == record.clients["round"].max()].assign(round=server_round)
    rows.to_csv(folder / "clients.csv", mode="a", header=False, index=False)
    state, metadata = read_arrays(folder / "models" / "server.safetensors")
    write_arrays(folder / "models" / "server.safetensors", state, metadata)


def resident_megabytes(process: int) -> float:
    """Return the resident memory of a process in MB."""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1000


def reloads_of(port: int) -> dict[str, int]:
    """Return the number of reloads of a service, keyed by their result."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return {result: int(count) for result, count in re.findall(r'posy_reloads_total\{result="(\w+)"\} (\d+)', text)}


@contextmanager
def serving(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", list[str], int, int]]:
    """Serve a run, and yield the process, the names of the models, and the ports for HTTP and gRPC."""
    command = [sys.executable, "-m", "posy", "serve", str(folder), "--http-port=0", "--grpc-port=0"]
    with subprocess.Popen([*command, f"--reload={CHECK_SECONDS}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        names, http_line, grpc_line = (process.stdout.readline() for _ in range(3))
        ports = [int(re.findall(r":(\d+)", line)[0]) for line in (http_line, grpc_line)]
        try:
            yield process, names.partition(" ")[2].replace(" ", "").strip().split(","), ports[0], ports[1]
        finally:
            process.terminate()


def replaced_while_waiting(folder: Path, first: int, seconds: float, period: float, process: int) -> list[float]:
    """Replace the models after each period until the time has passed, and return the service's memory over time."""
    started, server_round, megabytes = time.monotonic(), first, list[float]()
    while (elapsed := time.monotonic() - started) < seconds:
        if elapsed > (server_round - first + 1) * period and elapsed < seconds - period / 2:
            server_round += 1
            replace_models(folder, server_round)
        megabytes.append(resident_megabytes(process))
        time.sleep(CHECK_SECONDS)
    return megabytes


def main(
    seconds: float = typer.Option(300.0, help="duration of the load"),
    period: float = typer.Option(10.0, help="seconds between two replacements of the models"),
    callers: int = typer.Option(8, help="number of callers, half of them on each transport"),
    growth: float = typer.Option(0.05, help="allowed growth of memory from the second tenth of the time to the last"),
) -> None:
    """Load a service while its models are replaced, and print JSON."""
    with tempfile.TemporaryDirectory(prefix="posy-benchmark-") as name:
        with redirect_stdout(sys.stderr):
            trained = posy.run(output_dir=name, max_samples=600, lr=0.1, **SETTINGS)
        folder = Path(name) / "served"
        shutil.copytree(trained.path, folder)
        lock(folder)  # as a run in progress
        with serving(folder) as (process, models, http_port, grpc_port):
            load = Load(http_port, grpc_port, models)
            with load.running(callers):
                megabytes = replaced_while_waiting(folder, FIRST_ROUND, seconds, period, process.pid)
            reloads = reloads_of(http_port)
        last = max(Record(folder).clients["round"])
    results = _summary(load, megabytes, seconds) | {"reloads": reloads, "exit": process.returncode}
    results |= {"rounds": last - FIRST_ROUND, "rounds-seen": len(load.versions - {0, FIRST_ROUND})}
    print(json.dumps(results | {"machine": machine()}, indent=2))
    failed = set(load.results) != {"ok"} or last not in load.versions or process.returncode != 0
    raise typer.Exit(int(failed or results["growth"] > growth))


def _summary(load: Load, megabytes: list[float], seconds: float) -> dict[str, Any]:
    """Return the results of the requests, their times, and the growth of the service's memory."""
    tenth = max(1, len(megabytes) // 10)
    start, end = median(megabytes[tenth : 2 * tenth]), median(megabytes[-tenth:])
    percentiles = quantiles(load.seconds, n=1000)
    return {
        "seconds": seconds,
        "results": dict(load.results),
        "requests-per-second": round(len(load.seconds) / seconds, 1),
        "milliseconds": {
            name: round(1000 * value, 1)
            for name, value in (("50 %", percentiles[499]), ("99 %", percentiles[989]), ("most", max(load.seconds)))
        },
        "megabytes": [round(value, 1) for value in megabytes[:: max(1, len(megabytes) // 20)]],
        "growth": round(end / start - 1, 4),
    }


if __name__ == "__main__":
    typer.run(main)
