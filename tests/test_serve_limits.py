"""The service under attack: malformed tensors, large, slow and half-sent requests, and too many requests."""

import asyncio
import contextlib
import io
import json
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from test_serve import Running, images, infer, record  # noqa: F401 - a fixture

from posy.serve import connections
from posy.serve.batcher import Batcher
from posy.serve.limits import Limits
from posy.serve.messages import MESSAGES
from posy.serve.run_models import load_endpoints
from posy.serve.server import Options
from posy.serve.tensors import RequestError
from posy.server_app.record import Record

Code = grpc.StatusCode
INFER = "/v2/models/client-0/infer"
MAX_BYTES = 1_000_000


@pytest.fixture(scope="module")
def service(record: Record) -> Iterator[Running]:  # noqa: F811
    """Serve the models of the run with small limits."""
    limits = Limits(max_bytes=MAX_BYTES, concurrency=64)
    running = Running(record.path, Options(http_port=0, grpc_port=0, limits=limits))
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def still_answers(service: Running) -> Iterator[None]:
    """After each test, check that the service answers on both transports."""
    yield
    for transport in ("http", "grpc"):
        assert infer(service, transport, "client-0", images(2)).as_numpy("class").shape == (2,)


def post(service: Running, data: Any, path: str = INFER, **headers: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the JSON of the answer to a body."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request = Request(f"http://127.0.0.1:{service.server.http_port}{path}", data, fields, method="POST")
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except HTTPError as error:
        return error.code, json.load(error)


def call(service: Running, message: bytes, method: str = "ModelInfer", **options: Any) -> tuple[grpc.StatusCode, str]:
    """Return the status and the text of the answer to a message."""
    with grpc.insecure_channel(
        f"127.0.0.1:{service.server.grpc_port}", [("grpc.max_send_message_length", -1)]
    ) as channel:
        answer = channel.unary_unary(f"/inference.GRPCInferenceService/{method}").future(message, timeout=60, **options)
        return answer.code(), answer.details()


def tensor(datatype: str, shape: Sequence[int], data: Any = None, name: str = "image", **parameters: Any) -> bytes:
    """Return the JSON of a request with one tensor."""
    fields = {"name": name, "datatype": datatype, "shape": list(shape)}
    fields |= {"data": data} if "binary_data_size" not in parameters else {}
    fields |= {"parameters": parameters} if parameters else {}
    return json.dumps({"inputs": [fields]}).encode()


def message(datatype: str, shape: Sequence[int], raw: bytes, name: str = "image", model: str = "client-0") -> bytes:
    """Return a protobuf message with one binary tensor."""
    request = MESSAGES["ModelInferRequest"](model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw)
    serialised: bytes = request.SerializeToString()
    return serialised


def png(width: int, height: int) -> bytes:
    """Return an image file with one colour."""
    file = io.BytesIO()
    Image.new("L", (width, height)).save(file, "png")
    return file.getvalue()


ONES = [1] * 64
SHAPES: dict[str, tuple[str, Sequence[int], int, str]] = {
    # data type, shape, number of bytes, text
    "product overflows": ("UINT8", (2**62, 2**62), 64, "at most"),
    "product overflows, with 0": ("UINT8", (0, 2**31, 2**31), 0, "more than"),
    "product overflows 63 bits, with 0": ("UINT8", (0, 2**62, 2**62), 0, "at most"),
    "axes": ("UINT8", (1,) * 100, 1, "100 sizes"),
    "negative": ("UINT8", (-1, -64), 64, "at least 0"),
    "too few bytes": ("UINT8", (1, 1, 8, 8), 63, "63 bytes"),
    "no axis": ("UINT8", (), 1, "single value"),
    "empty samples": ("UINT8", (5, 1, 0, 8), 0, "expects a batch"),
    "strings": ("BYTES", (3,), 8, "3 strings"),
    "too many strings": ("BYTES", (200_000,), 800_000, "at most 100000"),
    "unknown type": ("COMPLEX", (1,), 8, "not one of"),
    "pixels from 0 to 1": ("FP32", (1, 1, 8, 8), 256, "the model expects pixels from 0 to 255"),
}


@pytest.mark.parametrize(("datatype", "shape", "size", "text"), SHAPES.values(), ids=SHAPES.keys())
def test_malformed_binary_tensors(service: Running, datatype: str, shape: Sequence[int], size: int, text: str) -> None:
    raw = b"\1" * size
    code, details = call(service, message(datatype, shape, raw))
    assert code == Code.INVALID_ARGUMENT and text in details
    head = tensor(datatype, shape, binary_data_size=size)
    status, answer = post(service, head + raw, Inference_Header_Content_Length=str(len(head)))
    assert status == 400 and text in answer["error"]


@pytest.mark.parametrize("size", [-1, 65, 2**70, 1.5, "64", True, None])
def test_a_wrong_binary_data_size(service: Running, size: Any) -> None:
    head = tensor("UINT8", (1, 1, 8, 8), binary_data_size=size)
    status, answer = post(service, head + bytes(64), Inference_Header_Content_Length=str(len(head)))
    assert status == 400 and "binary_data_size" in answer["error"]


@pytest.mark.parametrize("header", ["-1", "9" * 5000, "1e2", "²", "100000"])
def test_a_wrong_length_of_the_header(service: Running, header: str) -> None:
    status, answer = post(service, b"{}", Inference_Header_Content_Length=header)
    assert status == 400 and "inference-header-content-length" in answer["error"]


EMPTY = b'{"name": "image", "datatype": "UINT8", "shape": [0], "data": []}'
BODIES: dict[str, tuple[bytes, str]] = {
    "half of a surrogate pair in the id": (b'{"id": "\\ud800", "inputs": []}', "Unicode"),
    "half of a surrogate pair in a string": (tensor("BYTES", [1], ["\ud800"]), "Unicode"),
    "deep JSON": (b'{"inputs": ' + b"[" * 100_000, "not JSON"),
    "deep data": (tensor("UINT8", [1], [7]).replace(b"[7]", b"[" * 600 + b"7" + b"]" * 600), "not numbers"),
    "one string among numbers": (tensor("UINT8", [65], [*ONES, "x" * 100_000]), "not numbers"),
    "long numbers": (b'{"inputs": [' + b"9" * 5000 + b"]}", "not JSON"),
    "numbers beyond 64 bits": (tensor("UINT8", [64], [2**70] * 64), "UINT8"),
    "objects as data": (tensor("UINT8", [1], [{}]), "not numbers"),
    "no data": (tensor("UINT8", [1], None), "not numbers"),
    "a shape of text": (b'{"inputs": [{"name": "image", "datatype": "UINT8", "shape": "11"}]}', "at least 0"),
    "a list as the type": (b'{"inputs": [{"name": "image", "datatype": [], "shape": [1]}]}', "not a string"),
    "invalid UTF-8": (b'{"id": "\xff\xfe"}', "not JSON"),
    "a long name": (tensor("UINT8", [1], [1], name="x" * 500_000), "missing 'image'"),
    "the same input twice": (b'{"inputs": [%s, %s]}' % (EMPTY, EMPTY), "occurs twice"),
    "an unknown output": (b'{"inputs": [%s], "outputs": [{"name": "y"}]}' % EMPTY, "output 'y' does not exist"),
    "not Base64": (tensor("BYTES", [1], ["é"], content_type="base64"), "not Base64"),
}


@pytest.mark.parametrize(("body", "text"), BODIES.values(), ids=BODIES.keys())
def test_malformed_json(service: Running, body: bytes, text: str) -> None:
    status, answer = post(service, body)
    assert status == 400 and text in answer["error"] and len(answer["error"]) <= 500


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"\xff\xff\xff", "not valid"),
        (b"\x0a\x02\xff\xfe", "not valid"),
        (message("UINT8", (1,), b"1", model="ü" * 3000), "ü"),
        (MESSAGES["ModelInferRequest"](model_name="client-0").SerializeToString(), "no inputs"),
        (
            MESSAGES["ModelInferRequest"](model_name="client-0", raw_input_contents=[b"1"]).SerializeToString(),
            "0 inputs",
        ),
        (message("UINT8", (1,), b"1", name="é" * 3000), "missing 'image'"),
    ],
)
def test_malformed_protobuf(service: Running, content: bytes, text: str) -> None:
    code, details = call(service, content)
    assert code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND) and text in details


def test_no_message(service: Running) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{service.server.grpc_port}") as channel:
        answer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(iter(()), timeout=60)
        assert answer.code() == Code.INVALID_ARGUMENT and "no message" in answer.details()


def test_zero_samples_are_a_valid_batch(service: Running) -> None:
    for transport in ("http", "grpc"):
        for model in ("client-0", "router"):
            result = infer(service, transport, model, np.empty((0, 1, 8, 8), np.uint8))
            assert result.as_numpy("probabilities").shape == (0, 10) and result.as_numpy("class").shape == (0,)


@pytest.mark.parametrize(
    "file",
    [png(8000, 8000), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", png(60, 60)[:60], b"\x89PNG\r\n\x1a\n" * 9],
)
def test_image_files_that_cannot_be_decoded(service: Running, file: bytes) -> None:
    strings = struct.pack("<I", len(file)) + file
    code, details = call(service, message("BYTES", (1,), strings))
    assert code == Code.INVALID_ARGUMENT and ("cannot be decoded" in details or "8000x8000 pixels" in details)


def test_many_small_files_of_large_images(service: Running) -> None:
    file = png(7000, 7000)  # below the limit for one image
    strings = (struct.pack("<I", len(file)) + file) * 9
    assert len(strings) < MAX_BYTES
    started = time.monotonic()
    code, details = call(service, message("BYTES", (9,), strings))
    assert code == Code.INVALID_ARGUMENT and "in all images" in details
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("has_length", [True, False])
def test_a_body_beyond_the_limit(service: Running, has_length: bool) -> None:
    parts = [bytes(1_000_000)] * 100
    status, answer = post(service, b"".join(parts) if has_length else iter(parts))
    assert status == 413 and str(MAX_BYTES) in answer["error"]


def test_a_body_beyond_the_limit_is_not_sent_if_the_caller_asks_first(service: Running) -> None:
    with socket.create_connection(("127.0.0.1", service.server.http_port), 30) as connection:
        head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {10**8}\r\nExpect: 100-continue\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_message_beyond_the_limit(service: Running) -> None:
    code, details = call(service, bytes(100_000_000))
    assert code == Code.RESOURCE_EXHAUSTED and "larger than max" in details


def test_compressed_messages(service: Running) -> None:
    gzip = grpc.Compression.Gzip
    assert call(service, message("UINT8", (9, 1, 8, 8), bytes(576)), compression=gzip)[0] == Code.OK
    code, details = call(service, bytes(100_000_000), compression=gzip)  # it is sent with 100 kB
    assert code == Code.RESOURCE_EXHAUSTED and "larger than max" in details
    status, answer = post(service, b"x", Content_Encoding="gzip")
    assert status == 400 and "compressed" in answer["error"]


def test_unexpected_paths_and_methods(service: Running) -> None:
    assert call(service, b"", "ModelTrain")[0] == Code.UNIMPLEMENTED
    for path, status in (
        ("/v2/models/%ff%00/infer", 404),
        ("/v2/models/..%2f..%2fetc/infer", 404),
        (INFER + "?" + "x" * 9000, 400),
    ):
        with pytest.raises(HTTPError) as raised:
            urlopen(Request(f"http://127.0.0.1:{service.server.http_port}{path}", b"{}"), timeout=60)
        assert raised.value.code == status


def test_endless_headers_end_the_connection(service: Running) -> None:
    with socket.create_connection(("127.0.0.1", service.server.http_port), 30) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\n")
        with pytest.raises(OSError):
            for number in range(100_000):
                connection.sendall(f"x-{number}: {'x' * 1000}\r\n".encode())


def test_half_sent_bodies_and_idle_connections_are_closed(service: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "RECEIVE_SECONDS", 0.1)
    starts = [b"", b"POST /v2", f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()]
    sockets = [socket.create_connection(("127.0.0.1", service.server.http_port), 30) for _ in range(30)]
    for connection, start in zip(sockets, starts * 10, strict=True):
        connection.sendall(start)
    for connection in sockets:
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1000) == b""
        connection.close()


def test_all_bodies_together_have_a_limit(service: Running) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BYTES}\r\n\r\n".encode()
    statuses: Counter[bytes] = Counter()
    with contextlib.ExitStack() as stack:
        address = ("127.0.0.1", service.server.http_port)
        sockets = [stack.enter_context(socket.create_connection(address, 30)) for _ in range(40)]
        for connection in sockets:
            connection.sendall(head + bytes(MAX_BYTES - 10))
        time.sleep(1)
        for connection in sockets:
            connection.sendall(bytes(10))
            statuses[connection.recv(1000).split()[1]] += 1
    # The limit is 16 times the size of one body. A refused body no longer counts.
    assert set(statuses) == {b"400", b"429"} and statuses[b"429"] >= 10
    assert post(service, bytes(MAX_BYTES))[0] == 400


def test_web_pages_cannot_call_a_service_without_tokens(service: Running) -> None:
    for path in (INFER, "/v2/repository/models/client-0/unload"):
        assert post(service, b"{}", path, Origin="https://example.org")[0] == 403
        assert post(service, b"{}", path, Origin="null")[0] == 403


def test_an_output_that_is_not_a_number_is_an_error(record: Record) -> None:  # noqa: F811
    for endpoint in load_endpoints(record).values():
        for model in endpoint.models.values():
            for parameter in model.parameters():
                parameter.data.fill_(torch.nan)
        with pytest.raises(RequestError, match="not a number"):
            endpoint.predict([{"image": images(1)}])


def test_a_batch_answers_each_request_as_alone(record: Record) -> None:  # noqa: F811
    file = np.array([png(8, 8)] * 6, object)
    pixels = [images(n) for n in (1, 3, 2)]
    for endpoint in load_endpoints(record).values():
        batch = [{"image": x} for x in (*pixels, pixels[1].transpose(0, 2, 3, 1), file, file.reshape(2, 3))]
        expected = [endpoint.predict([inputs])[0] for inputs in batch]
        # The second wrong request has the same format as the image files, so Posy reads them together.
        wrong = [{"image": pixels[0], "other": pixels[0]}, {"image": np.array([b"x"], object)}]
        answers = endpoint.predict([*batch, *wrong])
        assert all(isinstance(answer, RequestError) for answer in answers[6:])
        for answer, single in zip(answers[:6], expected, strict=True):
            assert isinstance(answer, dict) and isinstance(single, dict) and answer.keys() == single.keys()
            for name, array in single.items():
                if array.dtype == object:
                    assert answer[name].tolist() == array.tolist()
                else:
                    np.testing.assert_allclose(answer[name], array, atol=1e-5)


def test_the_scale_of_pixels_is_checked_in_each_request_of_a_batch(record: Record) -> None:  # noqa: F811
    pixels = images(2).astype(np.float32)
    for endpoint in load_endpoints(record).values():
        good, wrong = endpoint.predict([{"image": pixels}, {"image": pixels / 255}])
        assert isinstance(good, dict)
        assert isinstance(wrong, RequestError) and "the model expects pixels from 0 to 255" in str(wrong)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v3", 404, "/v3' does not exist"),
        ("GET", "/v2/models", 404, "does not exist"),
        ("GET", "/v2/models/client-0/versions", 404, "does not exist"),
        ("GET", "/v2/models/client-0/infer/more", 404, "does not exist"),
        ("GET", INFER, 405, "POST"),
        ("POST", "/v2/models/client-0/versions/2", 405, "GET"),
    ],
)
def test_a_wrong_path_or_method(service: Running, method: str, path: str, status: int, text: str) -> None:
    request = Request(f"http://127.0.0.1:{service.server.http_port}{path}", method=method)
    with pytest.raises(HTTPError) as raised:
        urlopen(request, timeout=60)
    assert raised.value.code == status and text in json.load(raised.value)["error"]
    request = Request(f"http://127.0.0.1:{service.server.http_port}/v2/models/client-0/versions/2", method="HEAD")
    assert urlopen(request, timeout=60).status == 200


def test_a_caller_that_leaves_is_no_error(service: Running, caplog: pytest.LogCaptureFixture) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", service.server.http_port), 30) as connection:
            connection.sendall(head)
    with grpc.insecure_channel(f"127.0.0.1:{service.server.grpc_port}") as channel:
        method = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(50):
            method.future(message("UINT8", (500, 1, 8, 8), bytes(32_000))).cancel()
    time.sleep(0.5)
    assert "a request has failed" not in caplog.text
    metrics = urlopen(f"http://127.0.0.1:{service.server.http_port}/metrics").read().decode()
    assert "posy_active_requests 0.0" in metrics and 'result="internal"' not in metrics


def test_one_request_that_makes_the_model_fail_does_not_fail_the_others() -> None:
    def predict(batch: Sequence[Any]) -> list[Any]:
        if any(len(inputs["x"]) == 3 for inputs in batch):
            raise MemoryError
        return [{"y": inputs["x"]} for inputs in batch]

    async def answers() -> list[Any]:
        batcher = Batcher(predict, ThreadPoolExecutor(1))
        return await asyncio.gather(*(batcher.submit({"x": np.zeros(n)}) for n in (1, 3, 2)), return_exceptions=True)

    first, second, third = asyncio.run(answers())
    assert len(first["y"]) == 1 and isinstance(second, MemoryError) and len(third["y"]) == 2
