"""The Open Inference Protocol over HTTP, with JSON and with the binary format of tensors."""

import base64
import binascii
import contextlib
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from posy.serve.limits import Gate, TooLargeError
from posy.serve.service import Service, described, off_loop
from posy.serve.statuses import status_of
from posy.serve.tensors import (
    BYTES,
    Array,
    Request,
    RequestError,
    Response,
    UnknownModelError,
    as_objects,
    checked_shape,
    from_raw,
    from_values,
    to_raw,
    to_values,
    utf8,
)

HEADER_LENGTH = "inference-header-content-length"
"""The HTTP header with the length of the JSON before the binary tensors."""
MAX_DISCARDED = 256 << 20
"""Maximum number of bytes of a refused body that the service receives."""
Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Rest:
    """The routes of the service.

    Parameters
    ----------
    service : Service
        Answers the requests.
    gate : Gate
        Admits the requests.
    """

    def __init__(self, service: Service, gate: Gate) -> None:
        self.service, self.gate = service, gate

    def app(self) -> ASGIApp:
        """Return the application for an HTTP server."""
        model = "/v2/models/{name}"
        routes: list[tuple[str, Handler, str]] = []
        for path in (model, f"{model}/versions/{{version}}"):
            routes += [
                (f"{path}/infer", self.infer, "POST"),
                (f"{path}/ready", self.model_ready, "GET"),
                (f"{path}/card", self.card, "GET"),
                (path, self.model, "GET"),
            ]
        routes += [
            ("/v2/health/live", self.live, "GET"),
            ("/v2/health/ready", self.ready, "GET"),
            ("/v2", self.server, "GET"),
            ("/v2/repository/index", self.index, "POST"),
            ("/v2/repository/models/{name}/load", self.load, "POST"),
            ("/v2/repository/models/{name}/unload", self.unload, "POST"),
            ("/metrics", self.metrics, "GET"),
        ]
        return Starlette(routes=[Route(path, self._guarded(each), methods=[verb]) for path, each, verb in routes])

    def _guarded(self, handler: Handler) -> Handler:
        """Return a handler that checks the token and the limits, and turns errors into responses."""
        is_open, is_limited = handler in (self.live, self.ready), handler not in (self.live, self.ready, self.metrics)

        async def guarded(request: HttpRequest) -> HttpResponse:
            result = "cancelled"
            try:
                if not is_open:
                    self.gate.check_origin(request.headers.get("origin", ""))
                    self.gate.check_token(request.headers.get("authorization", ""))
                if is_limited:
                    self.gate.check_rate(request.client.host if request.client else "")
                response = await handler(request)
                result = "ok"
                return response
            except ClientDisconnect:
                return HttpResponse(status_code=499)  # the caller has closed the connection
            except Exception as error:
                status = status_of(error)
                result = status.name
                await _discard(request)
                headers = {"www-authenticate": "Bearer"} if status.http == 401 else {}
                return JSONResponse({"error": status.text}, status.http, headers)
            finally:
                if handler == self.infer:
                    self.service.meters.ended("http", result)

        return guarded

    # -- health and metadata ----------------------------------------------------------------------------------

    async def live(self, request: HttpRequest) -> HttpResponse:
        """Report that the process answers."""
        return JSONResponse({"live": True})

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Report whether the service accepts requests for predictions."""
        return JSONResponse({"ready": self.service.ready}, 200 if self.service.ready else 503)

    async def server(self, request: HttpRequest) -> HttpResponse:
        """Return the name, the version and the extensions of the service."""
        service = self.service
        return JSONResponse({"name": service.name, "version": service.version, "extensions": [*service.extensions]})

    async def model(self, request: HttpRequest) -> HttpResponse:
        """Return the metadata of a model."""
        return JSONResponse(self.service.metadata(*_model_in(request))._asdict())

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Report whether a model is in service."""
        name, version = _model_in(request)
        try:
            is_ready = self.service.is_ready(name, version)
        except UnknownModelError as error:
            return JSONResponse({"name": name, "ready": False, "error": str(error)}, 404)
        return JSONResponse({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    async def card(self, request: HttpRequest) -> HttpResponse:
        """Return the model card of a model."""
        return JSONResponse(self.service.card(*_model_in(request)))

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        """Return the metrics for Prometheus."""
        return HttpResponse(self.service.meters.text(), media_type=self.service.meters.content_type)

    # -- repository -------------------------------------------------------------------------------------------

    async def index(self, request: HttpRequest) -> HttpResponse:
        """Return the models of the run and their states."""
        with self.gate.receiving() as count:
            body = _object(await self._body(request, count) or b"{}")
        return JSONResponse([state._asdict() for state in self.service.index(ready=body.get("ready") is True)])

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Read a model again and take it into service."""
        await self.service.repository.load(request.path_params["name"])
        return HttpResponse()

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """Remove a model from service."""
        await self.service.repository.unload(request.path_params["name"])
        return HttpResponse()

    # -- predictions ------------------------------------------------------------------------------------------

    async def infer(self, request: HttpRequest) -> HttpResponse:
        """Return predictions, in binary format if the request asks for it."""
        with self.gate.receiving() as count:
            body = await self._body(request, count)
            with self.gate.admitted():
                return await self._infer(request, body)

    async def _infer(self, request: HttpRequest, body: bytes) -> HttpResponse:
        """Return predictions, given the body of a request."""
        header = request.headers.get(HEADER_LENGTH)
        length = _header_length(header, len(body)) if header is not None else len(body)
        content = await off_loop(length, _object, body[:length])
        name, version = _model_in(request)
        inference = Request(
            name,
            await off_loop(length, _inputs_in, content, memoryview(body)[length:]),
            version,
            _text(content, "id"),
            [_text(output, "name") for output in _objects(content, "outputs")],
        )
        response = await self.service.infer(inference)
        size = sum(array.nbytes for array in response.outputs.values())
        return await off_loop(size, _response, response, _binary_outputs(content, response))

    async def _body(self, request: HttpRequest, count: Callable[[int], None]) -> bytes:
        """Return the body of a request, and count its bytes with a function that refuses too many of them."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestError("the body is compressed; send it without Content-Encoding")
        most, declared = self.gate.limits.max_bytes, request.headers.get("content-length", "")
        if _number(declared, most) is None and declared:
            raise TooLargeError(f"the request has {declared:.20} bytes; at most {most} are allowed")
        chunks = []
        async for chunk in request.stream():
            count(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)


async def _discard(request: HttpRequest) -> None:
    """Receive the rest of a body, because many callers read no answer before they have sent the body."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    size = 0
    with contextlib.suppress(RuntimeError, ClientDisconnect):  # the complete body was received, or the caller left
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_DISCARDED:
                return


def _model_in(request: HttpRequest) -> tuple[str, str]:
    """Return the name and the version of the model in a path."""
    return request.path_params["name"], request.path_params.get("version", "")


def _header_length(text: str, size: int) -> int:
    """Return the length of the JSON before the binary tensors."""
    if (length := _number(text, size)) is None:
        raise RequestError(f"{HEADER_LENGTH}: {text!r:.40} is not a number from 0 to the {size} bytes of the body")
    return length


def _number(text: str, most: int) -> int | None:
    """Return the whole number in a header, or None if it is not a number from 0 to ``most``."""
    if not text.isdecimal() or len(text) > 20 or int(text) > most:
        return None
    return int(text)


def _object(body: bytes | memoryview) -> dict[str, Any]:
    """Return the JSON object in a body."""
    try:
        content = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise RequestError("the body is not a JSON object")
    return content


def _objects(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the list of objects under a key, which may be absent."""
    entries = content.get(key) or []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RequestError(f"{key}: not a list of objects")
    return entries


def _text(content: Mapping[str, Any], key: str) -> str:
    """Return the text under a key, or an empty string if the key is absent."""
    text = content.get(key, "")
    if not isinstance(text, str):
        raise RequestError(f"{key}: {text!r:.40} is not a string")
    utf8(key, text)
    return text


def _parameters(content: Mapping[str, Any]) -> dict[str, Any]:
    parameters = content.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError("parameters: not an object")
    return parameters


def _inputs_in(content: Mapping[str, Any], raw: memoryview) -> dict[str, Array]:
    """Return the tensors of a request, from JSON or from the bytes after it."""
    arrays: dict[str, Array] = {}
    start = 0
    for entry in _objects(content, "inputs"):
        name, datatype = _text(entry, "name"), _text(entry, "datatype")
        if name in arrays:
            raise RequestError(f"input {name!r:.80} occurs twice")
        sizes = entry.get("shape")
        shape = checked_shape(name, datatype, sizes if isinstance(sizes, list) else [-1])
        parameters = _parameters(entry)
        if "binary_data_size" in parameters:
            size = parameters["binary_data_size"]
            if type(size) is not int or not 0 <= size <= len(raw) - start:
                raise RequestError(f"input {name!r:.80}: binary_data_size exceeds the {len(raw) - start} bytes left")
            arrays[name] = from_raw(name, datatype, shape, raw[start : start + size])
            start += size
        else:
            array = from_values(name, datatype, shape, entry.get("data"))
            is_encoded = datatype == BYTES and parameters.get("content_type") == "base64"
            arrays[name] = _decoded(name, array) if is_encoded else array
    if start != len(raw):
        raise RequestError(f"{len(raw) - start} bytes after the last tensor")
    return arrays


def _decoded(name: str, array: Array) -> Array:
    """Return strings that were encoded with Base64, which JSON needs for files."""
    try:
        return as_objects([base64.b64decode(value, validate=True) for value in array.ravel()], array.shape)
    except binascii.Error as error:
        raise RequestError(f"input {name!r:.80}: not Base64, although content_type is base64") from error


def _binary_outputs(content: Mapping[str, Any], response: Response) -> set[str]:
    """Return the names of the outputs that a request asks for in binary format."""
    default = _parameters(content).get("binary_data_output") is True
    chosen = {
        _text(output, "name"): _parameters(output).get("binary_data", default)
        for output in _objects(content, "outputs")
    }
    return {name for name in response.outputs if chosen.get(name, default) is True}


def _response(response: Response, binary: set[str]) -> HttpResponse:
    """Return the response for HTTP; the tensors in ``binary`` follow the JSON."""
    outputs, parts = [], []
    for name, datatype, shape, array in described(response.outputs):
        entry: dict[str, Any] = {"name": name, "datatype": datatype, "shape": shape}
        if name in binary:
            parts.append(to_raw(array))
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            entry["data"] = [None if isinstance(v, float) and not math.isfinite(v) else v for v in to_values(array)]
        outputs.append(entry)
    content: dict[str, Any] = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    if response.id:
        content["id"] = response.id
    head = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    if not parts:
        return HttpResponse(head, media_type="application/json")
    headers = {HEADER_LENGTH: str(len(head))}
    return HttpResponse(b"".join((head, *parts)), headers=headers, media_type="application/octet-stream")
