"""The service: predictions over REST and gRPC, with unchanged clients."""

import asyncio
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

import posy
from posy.client_app.workspace import Workspace
from posy.commands.serve import serving
from posy.serve.server import Options
from posy.server_app.record import Record
from posy.strategies.registry import read_settings

RUN = {"dataset": "digits", "max-samples": 600, "num-clients": 4, "num-server-rounds": 2, "device": "cpu", "lr": 0.1}


class Running:
    """A service in a thread of this process."""

    def __init__(self, run: Path, options: Options, *, site: bool = False) -> None:
        self.server = serving(str(run), options, site=site)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.run(handles_signals=False)))
        self.thread.start()
        assert self.server.started.wait(60)
        self.http = tritonclient.http.InferenceServerClient(f"127.0.0.1:{self.server.http_port}", concurrency=4)
        self.grpc = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.server.grpc_port}")

    def stop(self) -> None:
        """Stop the service, and wait until it has ended."""
        self.http.close()
        self.grpc.close()
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def get(self, path: str, body: Any = None) -> Any:
        """Return the JSON of a path, or of its answer to a body."""
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.server.http_port}/{path}", data) as answer:
            return json.load(answer)


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Return the record of a run with FedDRM."""
    output = str(tmp_path_factory.mktemp("runs"))
    return posy.run(method="feddrm", **{**{k.replace("-", "_"): v for k, v in RUN.items()}, "output_dir": output})


@pytest.fixture(scope="module")
def service(record: Record) -> Iterator[Running]:
    """Serve the models of the run."""
    running = Running(record.path, Options(http_port=0, grpc_port=0))
    yield running
    running.stop()


def images(count: int) -> np.ndarray:
    """Return images of the size of the digits, uint8 ``(count, 1, 8, 8)``."""
    return np.random.default_rng(1).integers(0, 256, (count, 1, 8, 8)).astype(np.uint8)


def infer(service: Running, transport: str, model: str, x: np.ndarray, **options: Any) -> Any:
    """Return the result of tritonclient for images."""
    library: Any = tritonclient.http if transport == "http" else tritonclient.grpc
    tensor = library.InferInput("image", x.shape, np_to_triton_dtype(x.dtype))
    tensor.set_data_from_numpy(x)
    return getattr(service, transport).infer(model, [tensor], **options)


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("client", [0, 3])
def test_predictions_equal_those_of_the_stored_model(
    service: Running, record: Record, transport: str, client: int
) -> None:
    x = images(5)
    result = infer(service, transport, f"client-{client}", x)
    expected = record.predictor(client).predict_all(x)
    assert [name.decode() for name in result.as_numpy("class")] == [each.label for each in expected]
    probabilities = [list(each.probabilities.values()) for each in expected]
    np.testing.assert_allclose(result.as_numpy("probabilities"), probabilities, atol=1e-6)


@pytest.mark.parametrize("transport", ["http", "grpc"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floating_point_pixels(service: Running, record: Record, transport: str, dtype: type[np.floating]) -> None:
    x = np.random.default_rng(1).uniform(0, 255, (5, 1, 8, 8)).astype(dtype)
    x[0, 0, 0, :2] = 0, 255
    probabilities = infer(service, transport, "client-1", x).as_numpy("probabilities")
    with torch.no_grad():
        expected = record.predictor(1)(torch.from_numpy(x / np.float64(127.5) - 1).float())
    np.testing.assert_allclose(probabilities, expected, atol=1e-5)
    integers = images(5)
    same = [
        infer(service, transport, "client-1", each).as_numpy("probabilities")
        for each in (integers, integers.astype(dtype))
    ]
    np.testing.assert_allclose(*same, atol=1e-5)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (0, 1, "pixels from 0 to 1; the model expects pixels from 0 to 255; send them on this scale"),
        (-1, 1, "pixels from -1 to 1;"),
        (0, 255.1, "pixels from 0 to 255.1;"),
        (0, np.nan, "nan"),
    ],
)
def test_floating_point_pixels_on_another_scale(service: Running, low: float, high: float, text: str) -> None:
    x = np.full((2, 1, 8, 8), low, np.float32)
    x[1, 0, 3, 3] = high
    with pytest.raises(InferenceServerException, match=text):
        infer(service, "grpc", "router", x)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_the_router_answers_as_the_record_does(service: Running, record: Record, transport: str) -> None:
    x = images(20)
    result = infer(service, transport, "router", x)
    expected = record.route(x)
    assert [name.decode() for name in result.as_numpy("client")] == [
        f"client-{next(iter(a.clients))}" for a in expected
    ]
    assert [name.decode() for name in result.as_numpy("class")] == [a.prediction.label for a in expected]
    probabilities = [list(a.clients.values()) for a in expected]
    np.testing.assert_allclose(result.as_numpy("client_probabilities"), probabilities, atol=1e-5)


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_metadata_health_and_repository(service: Running, transport: str) -> None:
    client = getattr(service, transport)
    assert client.is_server_live() and client.is_server_ready()
    assert client.is_model_ready("client-1") and client.is_model_ready("client-1", "2")
    assert not client.is_model_ready("client-1", "1") and not client.is_model_ready("unknown")
    client.unload_model("client-1")
    try:
        assert not client.is_model_ready("client-1")
        with pytest.raises(InferenceServerException, match="is not loaded"):
            infer(service, transport, "client-1", images(1))
    finally:
        client.load_model("client-1")
    assert client.is_model_ready("client-1")
    with pytest.raises(InferenceServerException, match="'unknown' does not exist"):
        client.load_model("unknown")


def test_json_needs_no_client(service: Running) -> None:
    x = images(2)
    tensor = {"name": "image", "datatype": "UINT8", "shape": list(x.shape), "data": x.tolist()}
    answer = service.get("v2/models/router/infer", {"id": "7", "inputs": [tensor], "outputs": [{"name": "class"}]})
    assert answer["id"] == "7" and [output["name"] for output in answer["outputs"]] == ["class"]
    assert answer["outputs"][0]["shape"] == [2] and set(answer["outputs"][0]["data"]) <= set("0123456789")
    card = service.get("v2/models/client-2/card")
    assert card["method"] == "feddrm" and card["client"] == 2 and card["inputs"][0]["name"] == "image"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 400, "not JSON"),
        (b"[1]", 400, "not a JSON object"),
        (b"[" * 100_000, 400, "not JSON"),
        ({}, 400, "no inputs"),
        ({"inputs": 3}, 400, "not a list of objects"),
        ({"inputs": [{"name": "image", "datatype": "UINT7", "shape": [1], "data": [1]}]}, 400, "UINT7"),
        ({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, -1], "data": [1]}]}, 400, "at least 0"),
        ({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1, 2], "data": [1]}]}, 400, "1 values"),
        ({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1], "data": [300]}]}, 400, "range of UINT8"),
        ({"inputs": [{"name": "image", "datatype": "UINT8", "shape": [1], "data": [float("nan")]}]}, 400, "UINT8"),
        ({"inputs": [{"name": "other", "datatype": "UINT8", "shape": [1], "data": [3]}]}, 400, "missing 'image'"),
        ({"inputs": [{"name": "image", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}]}, 400, "1x8x8"),
        ({"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1], "data": ["x"]}]}, 400, "cannot be decoded"),
    ],
)
def test_a_wrong_request_names_its_fault(service: Running, body: Any, status: int, text: str) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(f"http://127.0.0.1:{service.server.http_port}/v2/models/client-0/infer", data)
    assert raised.value.code == status
    assert text in json.load(raised.value)["error"]
    assert infer(service, "http", "client-0", images(1)).as_numpy("class").shape == (1,)


def pooled_test(record: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pooled test samples of the run as pixels, their classes and their clients."""
    workspace = Workspace(read_settings({}, "", record.settings))
    rows = np.concatenate(workspace.partition.test)
    owners = np.repeat(np.arange(len(workspace.partition.test)), [len(part) for part in workspace.partition.test])
    return workspace.dataset.x[rows], workspace.dataset.y[rows], owners


@pytest.mark.parametrize("transport", ["http", "grpc"])
def test_system_accuracy_through_the_service_equals_that_of_the_run(
    service: Running, record: Record, transport: str
) -> None:
    x, y, owners = pooled_test(record)
    result = infer(service, transport, "router", x)
    predicted = np.array([int(name) for name in result.as_numpy("class")])
    routed = np.array([int(name.decode().removeprefix("client-")) for name in result.as_numpy("client")])
    assert (predicted == y).mean() == record.summary["system-accuracy"]
    assert (routed == owners).mean() == record.summary["routing-accuracy"]
