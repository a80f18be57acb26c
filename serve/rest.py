"""The Open Inference Protocol over HTTP, with JSON and with the binary format of tensors."""

import base64
import binascii
import contextlib
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

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
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class ClientDisconnectedError(Exception):
    """The caller has closed the connection before the end of its request."""


class HttpRequest:
    """A request over HTTP, as an ASGI server passes it.

    Parameters
    ----------
    scope : mapping
        The request's path, headers and caller.
    receive : callable
        Receives the next part of the body.
    """

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.route, self.model, self.version = _split(scope["path"])
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self.caller: str = scope["client"][0] if scope["client"] else ""
        self._receive, self._is_complete = receive, False

    async def chunks(self) -> AsyncIterator[bytes]:
        """Receive the rest of the body in parts."""
        while not self._is_complete:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnectedError
            self._is_complete = not message.get("more_body", False)
            yield message.get("body", b"")


class HttpResponse(NamedTuple):
    """A response over HTTP."""

    body: bytes = b""
    status: int = 200
    media_type: bytes = b"application/json"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    async def send(self, send: Send) -> None:
        """Pass the response to an ASGI server."""
        fields = ((b"content-length", b"%d" % len(self.body)), (b"content-type", self.media_type), *self.headers)
        await send({"type": "http.response.start", "status": self.status, "headers": fields})
        await send({"type": "http.response.body", "body": self.body})


Handler = Callable[[HttpRequest], Awaitable[HttpResponse]]


class Rest:
    """The routes of the service, as an application for an ASGI server.

    Parameters
    ----------
    service : Service
        Answers the requests.
    gate : Gate
        Admits the requests.
    """

    def __init__(self, service: Service, gate: Gate) -> None:
        self.service, self.gate = service, gate
        self._routes: dict[str, tuple[str, Handler]] = {
            "models/infer": ("POST", self.infer),
            "models/ready": ("GET", self.model_ready),
            "models/card": ("GET", self.card),
            "models": ("GET", self.model),
            "/v2/health/live": ("GET", self.live),
            "/v2/health/ready": ("GET", self.ready),
            "/v2": ("GET", self.server),
            "/v2/repository/index": ("POST", self.index),
            "repository/load": ("POST", self.load),
            "repository/unload": ("POST", self.unload),
            "/metrics": ("GET", self.metrics),
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = HttpRequest(scope, receive)
        method, handler = self._routes.get(request.route, ("", None))
        if handler is None:
            response = _json({"error": f"the path {scope['path']!r:.80} does not exist"}, 404)
        elif scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
            response = _json({"error": f"the path needs the method {method}"}, 405, ((b"allow", method.encode()),))
        else:
            response = await self._guarded(handler, request)
        await response.send(send)

    async def _guarded(self, handler: Handler, request: HttpRequest) -> HttpResponse:
        """Check the token and the limits, and return the response of a handler, or the response to its error."""
        result = "cancelled"
        try:
            if handler not in (self.live, self.ready):
                self.gate.check_origin(request.headers.get("origin", ""))
                self.gate.check_token(request.headers.get("authorization", ""))
                if handler != self.metrics:
                    self.gate.check_rate(request.caller)
            response = await handler(request)
            result = "ok"
            return response
        except ClientDisconnectedError:
            return HttpResponse(status=499)
        except Exception as error:
            status = status_of(error)
            result = status.name
            await _discard(request)
            headers = ((b"www-authenticate", b"Bearer"),) if status.http == 401 else ()
            return _json({"error": status.text}, status.http, headers)
        finally:
            if handler == self.infer:
                self.service.meters.ended("http", result)

    # -- health and metadata ----------------------------------------------------------------------------------

    async def live(self, request: HttpRequest) -> HttpResponse:
        """Report that the process answers."""
        return _json({"live": True})

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """Report whether the service accepts requests for predictions."""
        return _json({"ready": self.service.ready}, 200 if self.service.ready else 503)

    async def server(self, request: HttpRequest) -> HttpResponse:
        """Return the name, the version and the extensions of the service."""
        service = self.service
        return _json({"name": service.name, "version": service.version, "extensions": [*service.extensions]})

    async def model(self, request: HttpRequest) -> HttpResponse:
        """Return the metadata of a model."""
        return _json(self.service.metadata(request.model, request.version)._asdict())

    async def model_ready(self, request: HttpRequest) -> HttpResponse:
        """Report whether a model is in service."""
        name, version = request.model, request.version
        try:
            is_ready = self.service.is_ready(name, version)
        except UnknownModelError as error:
            return _json({"name": name, "ready": False, "error": str(error)}, 404)
        return _json({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    async def card(self, request: HttpRequest) -> HttpResponse:
        """Return the model card of a model."""
        return _json(self.service.card(request.model, request.version))

    async def metrics(self, request: HttpRequest) -> HttpResponse:
        """Return the metrics for Prometheus."""
        return HttpResponse(self.service.meters.text(), media_type=self.service.meters.content_type.encode())

    # -- repository -------------------------------------------------------------------------------------------

    async def index(self, request: HttpRequest) -> HttpResponse:
        """Return the models of the run and their states."""
        with self.gate.receiving() as count:
            body = _object(await self._body(request, count) or b"{}")
        return _json([state._asdict() for state in self.service.index(ready=body.get("ready") is True)])

    async def load(self, request: HttpRequest) -> HttpResponse:
        """Read a model again and take it into service."""
        await self.service.repository.load(request.model)
        return HttpResponse()

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """Remove a model from service."""
        await self.service.repository.unload(request.model)
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
        inference = Request(
            request.model,
            await off_loop(length, _inputs_in, content, memoryview(body)[length:]),
            request.version,
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
        async for chunk in request.chunks():
            count(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)


async def _discard(request: HttpRequest) -> None:
    """Receive the rest of a body, because many callers read no answer before they have sent the body."""
    if request.headers.get("expect", "").lower() == "100-continue":
        return
    size = 0
    with contextlib.suppress(ClientDisconnectedError):
        async for chunk in request.chunks():
            size += len(chunk)
            if size > MAX_DISCARDED:
                return


def _split(path: str) -> tuple[str, str, str]:
    """Return a path without the name and the version of its model, and both."""
    match path.split("/"):
        case ["", "v2", "models", name, "versions", version, *action] if len(action) <= 1:
            return "/".join(("models", *action)), name, version
        case ["", "v2", "models", name, *action] if len(action) <= 1:
            return "/".join(("models", *action)), name, ""
        case ["", "v2", "repository", "models", name, action]:
            return f"repository/{action}", name, ""
    return path, "", ""


def _json(content: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> HttpResponse:
    """Return a response in JSON."""
    return HttpResponse(_encoded(content), status, headers=headers)


def _encoded(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


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
    head = _encoded(content)
    if not parts:
        return HttpResponse(head)
    headers = ((HEADER_LENGTH.encode(), b"%d" % len(head)),)
    return HttpResponse(b"".join((head, *parts)), media_type=b"application/octet-stream", headers=headers)
