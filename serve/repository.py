"""The models in service: loading, replacing and unloading without a failed request."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from logging import INFO, WARNING
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.common.logger import log

from posy.serve.batcher import Batcher
from posy.serve.endpoints import Endpoint
from posy.serve.meters import Meters
from posy.serve.tensors import UnavailableError, UnknownModelError
from posy.settings import SettingsError


class Entry(NamedTuple):
    """A model in service, and its queue."""

    endpoint: Endpoint
    batcher: Batcher


class ModelState(NamedTuple):
    """A model's entry in the index of the repository."""

    name: str
    version: str
    state: str
    reason: str = ""


def _use_one_thread() -> None:
    """Set PyTorch's number of threads, which OpenMP keeps for each calling thread."""
    torch.set_num_threads(1)


class Repository:
    """The models in service, keyed by name.

    Parameters
    ----------
    load : callable
        Reads all models of the run, keyed by name.
    workers : int
        Number of threads that run models.
    """

    def __init__(self, load: Callable[[], Mapping[str, Endpoint]], workers: int = 1) -> None:
        self._load = load
        self._executor = ThreadPoolExecutor(workers, "model", initializer=_use_one_thread)
        self._loader = ThreadPoolExecutor(1, "loader")
        self._entries: dict[str, Entry] = {}
        self._unloaded: dict[str, str] = {}  # versions, keyed by name
        self._changing = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """The names of the models in service."""
        return list(self._entries)

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a model."""
        return sum(entry.batcher.waiting for entry in self._entries.values())

    def __getitem__(self, name: str) -> Entry:
        """Return a model in service; raise :class:`UnknownModelError` or :class:`UnavailableError`."""
        if (entry := self._entries.get(name)) is not None:
            return entry
        if name in self._unloaded:
            raise UnavailableError(f"model {name!r} is not loaded")
        raise UnknownModelError(f"model {name!r} does not exist; the models are {', '.join(self._entries)}")

    def index(self) -> list[ModelState]:
        """Return all models of the run, including models that are not loaded."""
        loaded = [ModelState(name, entry.endpoint.version, "READY") for name, entry in self._entries.items()]
        return loaded + [ModelState(n, version, "UNAVAILABLE", "unloaded") for n, version in self._unloaded.items()]

    async def refresh(self) -> None:
        """Read all models again, and replace the models in service; unloaded models remain unloaded.

        Requests in a queue are answered by the model that they were sent to.
        """
        async with self._changing:
            endpoints = await asyncio.get_running_loop().run_in_executor(self._loader, self._load)
            replaced = list(self._entries.values())
            loaded = {name: endpoint for name, endpoint in endpoints.items() if name not in self._unloaded}
            self._entries = {name: self._entry(endpoint) for name, endpoint in loaded.items()}
            self._unloaded = {name: endpoints[name].version for name in self._unloaded if name in endpoints}
            versions = {endpoint.version for endpoint in endpoints.values()}
            log(INFO, "%s models loaded, of round %s", len(loaded), ", ".join(sorted(versions, key=int)))
        await asyncio.gather(*(entry.batcher.close() for entry in replaced))

    async def load(self, name: str) -> None:
        """Read a model again and take it into service; raise :class:`UnknownModelError` if the run lacks it.

        Raise :class:`UnavailableError` if the run's files cannot be read, for example while the run replaces them.
        """
        async with self._changing:
            try:
                endpoints = await asyncio.get_running_loop().run_in_executor(self._loader, self._load)
            except Exception as error:
                log(WARNING, "model %s cannot be loaded: %s", name, error)
                raise UnavailableError("the models cannot be loaded now; the service's log has the reason") from error
            if name not in endpoints:
                raise UnknownModelError(f"model {name!r} does not exist; the models are {', '.join(endpoints)}")
            replaced = self._entries.get(name)
            self._entries[name] = self._entry(endpoints[name])
            self._unloaded.pop(name, None)
        if replaced:
            await replaced.batcher.close()

    async def unload(self, name: str) -> None:
        """Remove a model from service after it has answered the requests in its queue."""
        async with self._changing:
            entry = self[name]
            self._unloaded[name] = entry.endpoint.version
            del self._entries[name]
        await entry.batcher.close()

    async def close(self) -> None:
        """Answer the requests in all queues, and end the threads."""
        await asyncio.gather(*(entry.batcher.close() for entry in self._entries.values()))
        self._executor.shutdown()
        self._loader.shutdown()

    def _entry(self, endpoint: Endpoint) -> Entry:
        return Entry(endpoint, Batcher(endpoint.predict, self._executor))


def signature_of(paths: Iterable[Path]) -> object:
    """Return a value that changes with the given files."""
    states = [(path, path.stat()) for path in paths]
    return [(path, state.st_ino, state.st_mtime_ns, state.st_size) for path, state in states]


async def follow(
    reload: Callable[[], Awaitable[None]], signature: Callable[[], object], loaded: object, seconds: float
) -> None:
    """Reload files whenever they have changed and are complete.

    Parameters
    ----------
    reload : callable
        Reads the files again.
    signature : callable
        Returns a value that changes with the files.
    loaded : object
        The value before the files were read.
    seconds : float
        Time between two looks at the files. Files that are still changing between two looks are incomplete.
    """
    previous = loaded
    while True:
        await asyncio.sleep(seconds)
        try:
            current = await asyncio.to_thread(signature)
        except (OSError, SettingsError) as error:
            current = str(error)  # the files were removed, or a file disappeared between two steps
        if current == previous and current != loaded:
            loaded = current
            await reload()
        previous = current


async def reload_models(repository: Repository, meters: Meters) -> None:
    """Refresh a repository, or log why the service keeps the current models."""
    try:
        await repository.refresh()
    except Exception as error:
        log(WARNING, "the new models cannot be loaded, so the service keeps the current models: %s", error)
        meters.reloaded(failed=True)
    else:
        meters.reloaded(failed=False)
