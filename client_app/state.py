"""A client's state between rounds: named arrays that never leave its node unless a method sends them.

The server names each version of a state. Each message names the version to start from, the version to write if the
state changes, and the versions to keep for checkpoints. A repeated message therefore starts from the same state again,
and a lost reply is harmless. A resumed run starts from earlier versions.
"""

import re
from abc import ABC, abstractmethod
from collections import OrderedDict, UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from logging import WARNING
from pathlib import Path
from threading import RLock
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Context
from flwr.common.logger import log
from torch import Tensor

from posy.flower import record_of
from posy.settings import SettingsError
from posy.storage import DamagedFileError, read_arrays, sync, write_arrays

Arrays = Mapping[str, npt.NDArray[np.generic]]

_VERSION = re.compile(r"[0-9]{1,9}(-[0-9]{1,9}){0,3}")
_SUFFIX = ".safetensors"


class StateError(RuntimeError):
    """A client's state cannot be read."""


class MissingStateError(StateError):
    """The version that a message starts from does not exist."""


class State(UserDict[str, npt.NDArray[np.generic]]):
    """Named arrays of one client, stored without copying. ``changed`` is True once an array has been set or deleted."""

    def __init__(self, arrays: Arrays | None = None) -> None:
        super().__init__(arrays)
        self.changed = False

    def __setitem__(self, name: str, value: npt.NDArray[np.generic]) -> None:
        super().__setitem__(name, value)
        self.changed = True

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self.changed = True


class StoredTensors(MutableMapping[str, Tensor]):
    """The arrays of a client's state as tensors on a device.

    Parameters
    ----------
    state : State
        The client's state.
    device : torch.device
        The device of the tensors.
    """

    def __init__(self, state: State, device: torch.device) -> None:
        self._state = state
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._state[name]).to(self._device)

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        # A view is copied so that the larger tensor behind it can be freed.
        is_view = tensor.untyped_storage().nbytes() > tensor.nbytes
        self._state[name] = (tensor.clone() if is_view else tensor).detach().cpu().numpy()

    def __delitem__(self, name: str) -> None:
        del self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


class Versions(NamedTuple):
    """The versions of a client's state that a message names.

    ``start`` is the version to start from, or an empty string if the client has no state yet. ``to`` is the version to
    write if the state changes. ``keep`` contains other versions to keep.
    """

    start: str
    to: str
    keep: tuple[str, ...] = ()

    @classmethod
    def take(cls, config: dict[str, Any]) -> Self:
        """Remove and return the versions in a message's config. Raise :class:`SettingsError` if any is invalid."""
        versions = cls(config.pop("state-from"), config.pop("state-to"), tuple(config.pop("state-keep")))
        for version in (versions.to, *filter(None, (versions.start, *versions.keep))):
            if not _VERSION.fullmatch(version):
                raise SettingsError(f"the server's message names the state {version!r}: it must have the form 0-12-1")
        return versions


class StateStore(ABC):
    """Storage for the versions of clients' states."""

    def load(self, client: int, named: Versions) -> State:
        """Return the state that a message starts from.

        Versions that are older than the version to write are removed, unless the message names them. Newer versions are
        kept, because the message may have been delayed, and a later message may need them.

        Raises
        ------
        MissingStateError
            If the version does not exist.
        StateError
            If the version cannot be read. The client cannot continue from a different version.
        """

        def numbers(version: str) -> list[int]:
            return [int(number) for number in version.split("-")]

        stored = self.versions(client)
        for version in stored.difference((named.start,), named.keep):
            if numbers(version) < numbers(named.to):
                self._remove(client, version)
        if named.start and named.start not in stored:
            raise MissingStateError(f"the state {named.start} of client {client} is not on this node")
        return State(self._read(client, named.start) if named.start else None)

    def save(self, client: int, named: Versions, state: State) -> str:
        """Store a client's state if it has changed, and return the client's current version."""
        if not state.changed:
            return named.start
        self._write(client, named.to, state)
        state.changed = False
        return named.to

    @abstractmethod
    def versions(self, client: int) -> set[str]:
        """Return the client's stored versions."""

    @abstractmethod
    def _read(self, client: int, version: str) -> Arrays: ...

    @abstractmethod
    def _write(self, client: int, version: str, arrays: Arrays) -> None: ...

    @abstractmethod
    def _remove(self, client: int, version: str) -> None: ...


class ContextStore(StateStore):
    """Stores states in a node's Flower context, which is lost when the node's process exits.

    A node may host several clients. A resumed run has a new context, so this store does not keep versions for
    checkpoints.
    """

    def __init__(self, context: Context) -> None:
        self._records = context.state

    def load(self, client: int, named: Versions) -> State:
        """Return the state to start from, and remove all other versions that are older than the version to write."""
        return super().load(client, named._replace(keep=()))

    def versions(self, client: int) -> set[str]:
        """Return the client's versions in the context."""
        prefix = f"client-{client}/"
        return {name.removeprefix(prefix) for name in self._records.array_records if name.startswith(prefix)}

    def _read(self, client: int, version: str) -> Arrays:
        return {name: a.numpy() for name, a in self._records.array_records[f"client-{client}/{version}"].items()}

    def _write(self, client: int, version: str, arrays: Arrays) -> None:
        self._records[f"client-{client}/{version}"] = record_of({name: np.asarray(a) for name, a in arrays.items()})

    def _remove(self, client: int, version: str) -> None:
        del self._records[f"client-{client}/{version}"]


class DirectoryStore(StateStore):
    """Stores one safetensors file per client and version in a run's directory.

    A file is either complete or absent. ``durable`` specifies whether a written file must survive a power failure.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path = path
        self._durable = durable

    def versions(self, client: int) -> set[str]:
        """Return the client's versions that have files."""
        folder = self._path / f"client-{client}"
        files = folder.iterdir() if folder.is_dir() else ()
        return {file.stem for file in files if file.suffix == _SUFFIX and _VERSION.fullmatch(file.stem)}

    def _read(self, client: int, version: str) -> Arrays:
        try:
            return read_arrays(self._file(client, version))[0]
        except (DamagedFileError, OSError) as error:
            raise StateError(f"the state of client {client} cannot be read: {error}") from error

    def _write(self, client: int, version: str, arrays: Arrays) -> None:
        file = self._file(client, version)
        file.parent.mkdir(parents=True, exist_ok=True)
        for partial_file in file.parent.glob(".*.part"):  # from a process that was killed during a write
            partial_file.unlink(missing_ok=True)
        write_arrays(file, arrays, durable=self._durable)

    def _remove(self, client: int, version: str) -> None:
        self._file(client, version).unlink(missing_ok=True)

    def _file(self, client: int, version: str) -> Path:
        return self._path / f"client-{client}" / f"{version}{_SUFFIX}"


class MemoryStore(DirectoryStore):
    """Stores states in memory by reference. Beyond a limit, it moves the least recently used clients' states to files.

    The store is thread-safe. Do not write to loaded arrays. ``limit`` is in bytes, and 0 means no limit. States that
    checkpoints need are also written to files.
    """

    def __init__(self, path: Path, limit: int = 0) -> None:
        super().__init__(path, durable=False)
        self.nbytes = 0  # size of the states in memory
        self._limit = limit
        self._states: OrderedDict[int, dict[str, Arrays]] = OrderedDict()
        # Each client's versions, in memory or in files. They are cached, because listing a folder is slow.
        self._versions: dict[int, set[str]] = {}
        self._unwritten: set[tuple[int, str]] = set()
        self._unsynced: set[tuple[int, str]] = set()
        self._warned = False
        self._lock = RLock()

    def versions(self, client: int) -> set[str]:
        """Return the client's versions, in memory and in files."""
        with self._lock:
            return self._versions_of(client).copy()

    def _read(self, client: int, version: str) -> Arrays:
        with self._lock:
            arrays = self._states.get(client, {}).get(version)
            if arrays is None:
                arrays = super()._read(client, version)
            self._cache(client, version, arrays)
            return arrays

    def _write(self, client: int, version: str, arrays: Arrays) -> None:
        with self._lock:
            self._unwritten.add((client, version))
            self._unsynced.add((client, version))
            self._versions_of(client).add(version)
            self._cache(client, version, dict(arrays))

    def _remove(self, client: int, version: str) -> None:
        with self._lock:
            self.nbytes -= _size(self._states.get(client, {}).pop(version, {}))
            if (client, version) not in self._unwritten:
                super()._remove(client, version)
            self._unwritten.discard((client, version))
            self._unsynced.discard((client, version))
            self._versions_of(client).discard(version)

    def flush(self, versions: Mapping[int, str]) -> None:
        """Write and sync the given version of each client's state, so that a checkpoint can safely refer to it."""
        with self._lock:
            for client, version in self._unsynced.intersection(versions.items()):
                self._write_file(client, version)
                file = self._file(client, version)
                sync(file)
                sync(file.parent)
                self._unsynced.discard((client, version))

    def _versions_of(self, client: int) -> set[str]:
        if client not in self._versions:
            self._versions[client] = super().versions(client)
        return self._versions[client]

    def _cache(self, client: int, version: str, arrays: Arrays) -> None:
        versions = self._states.setdefault(client, {})
        self.nbytes += _size(arrays) - _size(versions.get(version, {}))
        versions[version] = arrays
        self._states.move_to_end(client)
        while self._limit and self.nbytes > self._limit:
            client, versions = next(iter(self._states.items()))
            try:
                for stored_version in versions:
                    self._write_file(client, stored_version)
            except OSError as error:  # this client's state stays in memory, and the current call continues
                if not self._warned:
                    log(WARNING, "client states stay in memory beyond state-memory; writing them failed: %s", error)
                self._warned = True
                return
            self.nbytes -= sum(map(_size, versions.values()))
            del self._states[client]

    def _write_file(self, client: int, version: str) -> None:
        if (client, version) in self._unwritten:
            super()._write(client, version, self._states[client][version])
            self._unwritten.discard((client, version))


def _size(arrays: Arrays) -> int:
    return sum(np.asarray(array).nbytes for array in arrays.values())
