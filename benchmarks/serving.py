"""Measure the requests per second and the times of the service, relative to calling the model in a loop.

``python -m benchmarks.serving RUN --model NAME`` starts ``posy serve RUN`` in a separate process, and sends requests
with one sample each from 1, 8 and 64 callers over gRPC and REST, in binary format. The callers are plain sockets
(``benchmarks/callers.py``) on the same machine. The reference is ``ClientModel.predict`` in a loop in one thread,
before and after each measurement. ``--empty`` measures the libraries without a model. The command prints JSON.
"""

import json
import statistics
import subprocess
import sys
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.callers import STREAMS_PER_CONNECTION, Connection, GrpcConnection, HttpConnection, measure
from benchmarks.measure import cpu_of_process, machine
from posy.client_app.stored import ClientModel
from posy.serve.messages import MESSAGES, SERVICE
from posy.serve.tensors import Array, datatype_of
from posy.server_app.record import Record


def main(
    run: str,
    model: str = "",
    callers: Annotated[str, typer.Option(help="Numbers of callers, separated by commas.")] = "1,8,64",
    seconds: Annotated[float, typer.Option(help="Duration of each measurement.")] = 5.0,
    empty: Annotated[bool, typer.Option(help="Measure a service that answers with constant bytes.")] = False,
) -> None:
    """Measure a run's service."""
    record = Record.find(run)
    stored = record.predictor(min(record.names))
    x = sample_of(stored)
    name = model or f"client-{stored.client}"
    process, http_port, grpc_port = start(run, "benchmarks.empty_service" if empty else "posy")
    direct, results = [direct_rate(stored, x, seconds)], list[dict[str, Any]]()
    try:
        for count in map(int, callers.split(",")):
            for transport, port in (("grpc", grpc_port), ("rest", http_port)):
                cpu = cpu_of_process(process.pid)
                times = measure(connect(transport, port, name, x, count), seconds, WARM_UP)
                cpu = (cpu_of_process(process.pid) - cpu) * seconds / (seconds + WARM_UP)
                direct.append(direct_rate(stored, x, seconds))
                result = {"transport": transport, "callers": count, **summary(times, seconds)}
                result["of direct"] = round(result["requests/s"] / statistics.mean(direct[-2:]), 2)
                results.append(result | {"service's CPU ms": round(1000 * cpu / len(times), 3)})
    finally:
        process.terminate()
        process.wait()
    report = {"run": record.path.name, "model": "" if empty else name, "input": list(x.shape), "direct/s": direct}
    print(json.dumps({**report, "results": results, "machine": machine()}, indent=2))


def sample_of(model: ClientModel) -> Array:
    """Return a random sample in the format of the service, with the axis of samples."""
    task = model.preprocessing.task
    rng = np.random.default_rng(0)
    if model.preprocessing.sample_kind == "image":
        return rng.integers(0, 256, (1, *task.input_shape)).astype(np.uint8)
    if task.kind == "text":
        return rng.integers(1, task.vocabulary, (1, *task.input_shape))
    return rng.standard_normal((1, *task.input_shape))


def direct_rate(model: ClientModel, x: Array, seconds: float) -> float:
    """Return how often per second one thread calls the model for one sample."""
    torch.set_num_threads(1)
    end, calls = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        model.predict(x[0])
        calls += 1
    return round(calls / seconds, 1)


def start(run: str, module: str = "posy") -> tuple[subprocess.Popen[str], int, int]:
    """Start a service, and return its process and its ports for HTTP and gRPC."""
    command = [sys.executable, "-m", module, "serve", run, "--http-port", "0", "--grpc-port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ports = {}
    for line in process.stdout:
        kind, _, address = line.partition(" ")
        if kind in ("REST", "gRPC"):
            ports[kind] = int(address.rpartition(":")[2].partition("/")[0])
        if len(ports) == 2:
            return process, ports["REST"], ports["gRPC"]
    raise SystemExit("the service has not started")


def connect(transport: str, port: int, model: str, x: Array, callers: int) -> list[Connection]:
    """Return the connections of the callers; each request contains one sample in binary format."""
    raw, name, datatype = x.tobytes(), INPUTS[x.dtype.kind], datatype_of(x)
    if transport == "grpc":
        request = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[raw])
        request.inputs.add(name=name, datatype=datatype, shape=x.shape)
        count = -(-callers // STREAMS_PER_CONNECTION)
        method, content = f"/{SERVICE}/ModelInfer", request.SerializeToString()
        return [GrpcConnection(port, callers // count, method, content) for _ in range(count)]
    tensor: dict[str, Any] = {"name": name, "datatype": datatype, "shape": list(x.shape)}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = [f"Inference-Header-Content-Length: {len(head)}"]
    return [HttpConnection(port, f"/v2/models/{model}/infer", headers, head + raw) for _ in range(callers)]


WARM_UP = 1.0
"""Time before each measurement in which the callers already send requests, in seconds."""
INPUTS = {"u": "image", "i": "tokens", "f": "features"}
"""The name of the input for each kind of number."""


def summary(times: list[float], seconds: float) -> dict[str, Any]:
    """Return the requests per second, and the median and the 99th percentile of the times in milliseconds."""
    cuts = statistics.quantiles(times, n=100)
    return {
        "requests/s": round(len(times) / seconds, 1),
        "p50 ms": round(1000 * cuts[49], 2),
        "p99 ms": round(1000 * cuts[98], 2),
    }


if __name__ == "__main__":
    typer.run(main)
