"""Answer the requests of the Open Inference Protocol, independent of the transport."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from posy.flower import versions
from posy.serve.endpoints import PLATFORM, Endpoint
from posy.serve.meters import Meters
from posy.serve.repository import Entry, ModelState, Repository
from posy.serve.tensors import Array, Request, RequestError, Response, UnavailableError, UnknownModelError, datatype_of

EXTENSIONS = ("binary_tensor_data", "model_repository")
"""The extensions of the protocol that the service supports."""
Result = TypeVar("Result")
LARGE = 1 << 20
"""Size in bytes from which the service converts messages in a thread, so that it still answers other requests."""


class Metadata(NamedTuple):
    """The metadata of a model; each tensor has a name, a data type and a shape."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[dict[str, Any]]
    outputs: list[dict[str, Any]]


class Service:
    """The models of a run as a service.

    Parameters
    ----------
    repository : Repository
        The models in service.
    meters : Meters
        Counts requests and measures their times.
    """

    name = "posy"
    extensions = EXTENSIONS

    def __init__(self, repository: Repository, meters: Meters) -> None:
        self.repository, self.meters = repository, meters
        self.stopping = False

    @property
    def version(self) -> str:
        """The version of Posy."""
        return str(versions()["posy"])

    @property
    def ready(self) -> bool:
        """Whether the service accepts requests for at least one model."""
        return bool(self.repository.names) and not self.stopping

    def is_ready(self, model: str, version: str = "") -> bool:
        """Return whether a model is in service; raise :class:`UnknownModelError` if it does not exist."""
        try:
            self._entry(model, version)
        except UnavailableError:
            return False
        return not self.stopping

    def metadata(self, model: str, version: str = "") -> Metadata:
        """Return the metadata of a model in service."""
        endpoint = self._entry(model, version).endpoint
        inputs, outputs = (
            [{"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)} for spec in specs]
            for specs in (endpoint.inputs, endpoint.outputs)
        )
        return Metadata(model, [endpoint.version], PLATFORM, inputs, outputs)

    def card(self, model: str, version: str = "") -> dict[str, Any]:
        """Return the model card of a model in service, for JSON."""
        endpoint = self._entry(model, version).endpoint
        return {"name": model, "version": endpoint.version} | endpoint.card

    async def infer(self, request: Request) -> Response:
        """Return the predictions for a request.

        Raises
        ------
        RequestError
            If the request is wrong; an :class:`UnknownModelError` if its model or version does not exist.
        UnavailableError, OverloadedError
            If the model cannot answer now.
        """
        begun = time.perf_counter()
        endpoint, batcher = self._entry(request.model, request.version)
        _check_outputs(request, endpoint)
        try:
            outputs = await batcher.submit(request.inputs)
        except UnavailableError:  # the model was replaced after the lookup
            endpoint, batcher = self._entry(request.model, request.version)
            outputs = await batcher.submit(request.inputs)
        outputs = await endpoint.complete(outputs)
        chosen = {name: outputs[name] for name in request.outputs} if request.outputs else outputs
        self.meters.answered(request.model, time.perf_counter() - begun, _count(outputs))
        return Response(request.model, endpoint.version, request.id, chosen)

    def index(self, *, ready: bool = False) -> list[ModelState]:
        """Return the index of the models, or with ``ready`` only the models in service."""
        return [state for state in self.repository.index() if state.state == "READY" or not ready]

    async def stop(self, seconds: float) -> None:
        """Report that the service is not ready, then wait so that load balancers notice it."""
        self.stopping = True
        await asyncio.sleep(seconds)

    def _entry(self, model: str, version: str) -> Entry:
        """Return a model in service, or raise an error if this version of it does not exist."""
        entry = self.repository[model]
        if version and version != entry.endpoint.version:
            raise UnknownModelError(f"model {model!r} has version {entry.endpoint.version}, not {version!r:.40}")
        return entry


def _check_outputs(request: Request, endpoint: Endpoint) -> None:
    """Raise :class:`RequestError` if a request has no inputs, or asks for outputs that do not exist."""
    if not request.inputs:
        raise RequestError("the request has no inputs")
    names = [spec.name for spec in endpoint.outputs]
    if unknown := [name for name in request.outputs if name not in names]:
        raise RequestError(f"output {unknown[0]!r:.80} does not exist; the outputs are {', '.join(names)}")


def _count(outputs: dict[str, Array]) -> int:
    """Return the number of samples in the outputs."""
    return len(next(iter(outputs.values())))


def described(tensors: dict[str, Array]) -> Sequence[tuple[str, str, list[int], Array]]:
    """Return the name, data type, shape and values of each tensor."""
    return [(name, datatype_of(array), list(array.shape), array) for name, array in tensors.items()]


async def off_loop(size: int, convert: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of a function that converts a message of a size in bytes, in a thread if it is large."""
    if size < LARGE:
        return convert(*arguments)
    return await asyncio.to_thread(convert, *arguments)
