"""Measure the requests per second and the times of the service, relative to calling the model in a loop.

``python -m benchmarks.serving RUN --model NAME`` starts ``posy serve RUN`` in a separate process, and sends requests
with one sample each from 1, 8 and 64 callers over gRPC and REST, in binary format. The reference is
``ClientModel.predict`` in a loop in one thread, before and after the service. The command prints JSON.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import grpc
import numpy as np
import torch
import typer

from benchmarks.measure import machine
from posy.client_app.stored import ClientModel
from posy.serve.messages import MESSAGES, SERVICE
from posy.serve.tensors import Array, datatype_of
from posy.server_app.record import Record

Call = Callable[[], Awaitable[None]]


def main(
    run: str,
    model: str = "",
    callers: Annotated[str, typer.Option(help="Numbers of callers, separated by commas.")] = "1,8,64",
    seconds: Annotated[float, typer.Option(help="Duration of each measurement.")] = 5.0,
) -> None:
    """Measure a run's service."""
    record = Record.find(run)
    stored = record.predictor(min(record.names))
    x = sample_of(stored)
    name = model or f"client-{stored.client}"
    before = direct_rate(stored, x, seconds)
    process, http_port, grpc_port = start(run)
    try:
        results = []
        for count in map(int, callers.split(",")):
            for transport in ("grpc", "rest"):
                port = grpc_port if transport == "grpc" else http_port
                times = asyncio.run(measure(transport, port, name, x, count, seconds))
                results.append({"transport": transport, "callers": count, **summary(times, seconds)})
    finally:
        process.terminate()
        process.wait()
    direct = [before, direct_rate(stored, x, seconds)]
    for result in results:
        result["of direct"] = round(result["requests/s"] / max(direct), 2)
    report = {"run": record.path.name, "model": name, "input": list(x.shape), "direct/s": direct, "results": results}
    print(json.dumps({**report, "machine": machine()}, indent=2))


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


def start(run: str) -> tuple[subprocess.Popen[str], int, int]:
    """Start the service, and return its process and its ports for HTTP and gRPC."""
    command = [sys.executable, "-m", "posy", "serve", run, "--http-port", "0", "--grpc-port", "0"]
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


async def measure(transport: str, port: int, model: str, x: Array, callers: int, seconds: float) -> list[float]:
    """Return the time of each request that several callers send one after the other, in seconds."""
    prepare = grpc_calls if transport == "grpc" else rest_calls
    calls, close = await prepare(port, model, x, callers)
    times: list[float] = []
    begin = time.perf_counter() + 1  # after a second of warm-up

    async def repeat(call: Call) -> None:
        while (sent := time.perf_counter()) < begin + seconds:
            await call()
            if sent >= begin:
                times.append(time.perf_counter() - sent)

    await asyncio.gather(*map(repeat, calls))
    await close()
    return times


async def grpc_calls(port: int, model: str, x: Array, callers: int) -> tuple[list[Call], Call]:
    """Return a function for each caller that sends a request over gRPC, and a function that closes the channels."""
    request = MESSAGES["ModelInferRequest"](model_name=model, raw_input_contents=[x.tobytes()])
    request.inputs.add(name=INPUTS[x.dtype.kind], datatype=datatype_of(x), shape=x.shape)
    content = request.SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(min(callers, 8))]
    methods = [channel.unary_unary(f"/{SERVICE}/ModelInfer") for channel in channels]

    def caller(number: int) -> Call:
        async def call() -> None:
            await methods[number % len(methods)](content)

        return call

    async def close() -> None:
        for channel in channels:
            await channel.close()

    return [caller(number) for number in range(callers)], close


async def rest_calls(port: int, model: str, x: Array, callers: int) -> tuple[list[Call], Call]:
    """Return a function for each caller that sends a request over HTTP, and a function that closes the connections."""
    raw = x.tobytes()
    tensor: dict[str, Any] = {"name": INPUTS[x.dtype.kind], "datatype": datatype_of(x), "shape": list(x.shape)}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    lines = (
        f"POST /v2/models/{model}/infer HTTP/1.1", "Host: localhost", f"Content-Length: {len(head) + len(raw)}",
        f"Inference-Header-Content-Length: {len(head)}", "", "",
    )  # fmt: skip
    request = "\r\n".join(lines).encode() + head + raw
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(callers)]

    def caller(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Call:
        async def call() -> None:
            writer.write(request)
            answer = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " not in answer[:20]:
                raise SystemExit(f"the service has refused a request: {answer[:200]!r}")
            length = answer.lower().partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]
            await reader.readexactly(int(length))

        return call

    async def close() -> None:
        for _, writer in streams:
            writer.close()

    return [caller(*pair) for pair in streams], close


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
