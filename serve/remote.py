"""The Open Inference Protocol over gRPC."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError

from posy.serve.limits import Gate, TooSlowError
from posy.serve.messages import MESSAGES, METHODS, SERVICE
from posy.serve.service import Service, described, off_loop
from posy.serve.statuses import status_of
from posy.serve.tensors import (
    BYTES,
    Array,
    Request,
    RequestError,
    UnknownModelError,
    checked_shape,
    from_raw,
    from_values,
    to_raw,
)

OPEN = ("ServerLive", "ServerReady")
"""The methods that need no token."""
CONTENTS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", BYTES: "bytes_contents",
}  # fmt: skip
"""The field of a message that contains the values of a tensor, for each data type."""
Answer = Callable[[Any], Awaitable[Any]]


class Remote:
    """The methods of the gRPC service.

    Parameters
    ----------
    service : Service
        Answers the requests.
    gate : Gate
        Admits the requests.
    """

    def __init__(self, service: Service, gate: Gate) -> None:
        self.service, self.gate = service, gate

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the handler for a gRPC server."""
        answers: dict[str, Answer] = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.infer,
            "RepositoryIndex": self.index,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                # A handler of streams checks the token before it receives the message.
                name: grpc.stream_unary_rpc_method_handler(
                    self._guarded(name, answers[name]),
                    response_serializer=MESSAGES[f"{name}Response"].SerializeToString,
                )
                for name in METHODS
            },
        )

    def _guarded(self, name: str, answer: Answer) -> Callable[[object, Any], Awaitable[Any]]:
        """Return a method that checks the token and the limits, and turns errors into statuses."""
        infers, parse = name == "ModelInfer", MESSAGES[f"{name}Request"].FromString

        async def guarded(_: object, context: Any) -> Any:
            result = "cancelled"
            try:
                if name not in OPEN:
                    metadata = dict(context.invocation_metadata() or ())
                    self.gate.check_token(str(metadata.get("authorization", "")))
                    self.gate.check_rate(_caller(context))
                with self.gate.receiving() as count:
                    request = parse(await self._message(context, count))
                    with self.gate.admitted() if infers else nullcontext():
                        response = await answer(request)
                result = "ok"
                return response
            except Exception as error:
                status = status_of(_as_request_error(error))
                result = status.name
                await context.abort(status.grpc, status.text)
            finally:
                if infers:
                    self.service.meters.ended("grpc", result)

        return guarded

    async def _message(self, context: Any, count: Callable[[int], None]) -> bytes:
        """Return the message of a request, and count its bytes."""
        try:
            async with asyncio.timeout(self.gate.limits.receive_seconds):
                message = await context.read()
        except TimeoutError as error:
            raise TooSlowError("the request did not arrive in time") from error
        if not isinstance(message, bytes):  # the end of the stream
            raise RequestError("the request has no message")
        count(len(message))
        return message

    async def server_live(self, request: Any) -> Any:
        """Report that the process answers."""
        return MESSAGES["ServerLiveResponse"](live=True)

    async def server_ready(self, request: Any) -> Any:
        """Report whether the service accepts requests for predictions."""
        return MESSAGES["ServerReadyResponse"](ready=self.service.ready)

    async def model_ready(self, request: Any) -> Any:
        """Report whether a model is in service; a model that does not exist is not."""
        try:
            is_ready = self.service.is_ready(request.name, request.version)
        except UnknownModelError:
            is_ready = False
        return MESSAGES["ModelReadyResponse"](ready=is_ready)

    async def server_metadata(self, request: Any) -> Any:
        """Return the name, the version and the extensions of the service."""
        service = self.service
        return MESSAGES["ServerMetadataResponse"](
            name=service.name, version=service.version, extensions=service.extensions
        )

    async def model_metadata(self, request: Any) -> Any:
        """Return the metadata of a model."""
        metadata = self.service.metadata(request.name, request.version)
        return MESSAGES["ModelMetadataResponse"](**metadata._asdict())

    async def index(self, request: Any) -> Any:
        """Return the models of the run and their states."""
        states = self.service.index(ready=request.ready)
        return MESSAGES["RepositoryIndexResponse"](models=[state._asdict() for state in states])

    async def load(self, request: Any) -> Any:
        """Read a model again and take it into service."""
        await self.service.repository.load(request.model_name)
        return MESSAGES["RepositoryModelLoadResponse"]()

    async def unload(self, request: Any) -> Any:
        """Remove a model from service."""
        await self.service.repository.unload(request.model_name)
        return MESSAGES["RepositoryModelUnloadResponse"]()

    async def infer(self, request: Any) -> Any:
        """Return predictions; the tensors of the response are in binary format."""
        outputs = [output.name for output in request.outputs]
        inputs = await off_loop(request.ByteSize(), _inputs_in, request)
        inference = Request(request.model_name, inputs, request.model_version, request.id, outputs)
        answer = await self.service.infer(inference)
        response = MESSAGES["ModelInferResponse"](model_name=answer.model, model_version=answer.version, id=answer.id)
        for name, datatype, shape, array in described(answer.outputs):
            response.outputs.add(name=name, datatype=datatype, shape=shape)
            response.raw_output_contents.append(to_raw(array))
        return response


def _caller(context: Any) -> str:
    """Return the address of a caller without its port, as for HTTP."""
    return unquote(str(context.peer()).partition(":")[2].rpartition(":")[0]).strip("[]")


def _as_request_error(error: Exception) -> Exception:
    """Return the error for a message that is not a valid protobuf message."""
    return RequestError("the message is not valid") if isinstance(error, DecodeError) else error


def _inputs_in(request: Any) -> dict[str, Array]:
    """Return the tensors of a request, all in binary format or all as lists of values."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise RequestError(f"raw_input_contents: {len(raw)} entries for {len(request.inputs)} inputs")
    arrays: dict[str, Array] = {}
    for number, tensor in enumerate(request.inputs):
        name = tensor.name
        if name in arrays:
            raise RequestError(f"input {name!r:.80} occurs twice")
        shape = checked_shape(name, tensor.datatype, tensor.shape)
        if raw:
            arrays[name] = from_raw(name, tensor.datatype, shape, raw[number])
            continue
        if tensor.datatype not in CONTENTS:
            raise RequestError(f"input {name!r:.80}: {tensor.datatype!r:.80} needs raw_input_contents")
        values = list(getattr(tensor.contents, CONTENTS[tensor.datatype]))
        arrays[name] = from_values(name, tensor.datatype, shape, values)
    return arrays
