"""What a client keeps between rounds: named arrays that never leave its node unless a method sends them.

Where they are kept is a store's business: in Flower's context, which is lost with the node's process; in a
directory, which survives it and can go back to a checkpoint of the server; or in memory.
"""

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.common.logger import log

from posy.flower import record_of
from posy.settings import SettingsError
from posy.storage import DamagedFileError, is_folder_name, read_arrays, sync, write_arrays

PHASES = (MessageType.TRAIN, MessageType.EVALUATE)
"""The messages of a round, in their order."""

_FILE = re.compile(r"round-(\d+)-(train|evaluate)-(\d+)\.safetensors")


class StateError(RuntimeError):
    """A client's state is lost, damaged, or not the one that a message is meant for."""


class State(MutableMapping[str, npt.NDArray[np.generic]]):
    """The named arrays of one client.

    Parameters
    ----------
    arrays : Mapping, optional
        What it holds; the arrays themselves are not copied.
    lost : str
        Why the state is not there, although it should be: reading it is then an error, while a method that
        keeps nothing does not notice.
    """

    def __init__(self, arrays: Mapping[str, npt.NDArray[np.generic]] | None = None, lost: str = "") -> None:
        self._arrays: dict[str, npt.NDArray[np.generic]] = dict(arrays or {})
        self._lost = lost
        self.changed = False

    def __getitem__(self, name: str) -> npt.NDArray[np.generic]:
        if self._lost and name not in self._arrays:
            raise StateError(self._lost)
        return self._arrays[name]

    def __setitem__(self, name: str, value: npt.NDArray[np.generic]) -> None:
        self._arrays[name] = value
        self.changed = True

    def __delitem__(self, name: str) -> None:
        del self._arrays[name]
        self.changed = True

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return sum(np.asarray(array).nbytes for array in self._arrays.values())


class Generation(NamedTuple):
    """A client's state as the message of one round and phase left it.

    ``phase`` is 0 after training, 1 after an evaluation; ``attempt`` counts how often the run had been
    resumed by then.
    """

    server_round: int
    phase: int
    attempt: int

    @property
    def file(self) -> str:
        """Name of its file."""
        return f"round-{self.server_round}-{PHASES[self.phase]}-{self.attempt}.safetensors"

    @classmethod
    def of(cls, file: str) -> "Generation | None":
        """Return the generation that a file holds, or None."""
        found = _FILE.fullmatch(file)
        return cls(int(found[1]), PHASES.index(found[2]), int(found[3])) if found else None


@dataclass(frozen=True)
class Moment:
    """The place of a message in a run: it decides which generation a client sees.

    Attributes
    ----------
    server_round, phase : int
        Round and position in :data:`PHASES` of the message.
    checkpoints : tuple of int
        Rounds of the checkpoints that the server may still go back to.
    resumed_from : tuple of int
        The round from which each resumption of the run went on, in their order.
    """

    server_round: int
    phase: int
    checkpoints: tuple[int, ...] = ()
    resumed_from: tuple[int, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Self:
        """Read what a message of the server says."""
        config: Mapping[str, Any] = message.content.config_records["config"]
        return cls(
            int(config["server-round"]),
            PHASES.index(message.metadata.message_type),
            tuple(config.get("checkpoints", ())),
            tuple(config.get("resumed-from", ())),
        )

    @property
    def generation(self) -> Generation:
        """What is written at this moment."""
        return Generation(self.server_round, self.phase, len(self.resumed_from))

    def counts(self, generation: Generation) -> bool:
        """Tell whether a generation belongs to the run: not if a resumption has gone back behind it."""
        later = self.resumed_from[generation.attempt :]
        return all(generation.server_round <= begun for begun in later)


class StateStore(ABC):
    """Keeps the states of clients."""

    @abstractmethod
    def load(self, client: int, moment: Moment) -> State:
        """Return a client's state as it was before a moment; an empty one where nothing was kept.

        Raises
        ------
        StateError
            If it is damaged, or a later message has been answered already.
        """

    @abstractmethod
    def save(self, client: int, moment: Moment, state: State) -> None:
        """Keep a client's state, if it has changed."""


class ContextStore(StateStore):
    """Keeps states in a node's Flower context (a node may host several clients); it knows the latest only."""

    def __init__(self, context: Context) -> None:
        self._records = context.state

    def load(self, client: int, moment: Moment) -> State:
        """Return the latest state; in a resumed run, whose earlier contexts are gone, it may be lost.

        Raises
        ------
        StateError
            If this message has been answered already: the state from before it is gone.
        """
        record = self._records.array_records.get(f"client-{client}")
        if record is not None:
            kept = self._records.config_records[f"client-{client}-kept"]
            if (kept["round"], kept["phase"]) >= (moment.server_round, moment.phase):
                raise StateError(
                    f"client {client}: this message of round {moment.server_round} came twice and has been answered "
                    "once; only a node that is started with a state-dir in its node config can answer it again"
                )
            return State({name: array.numpy() for name, array in record.items()})
        if moment.resumed_from:
            return State(
                lost=f"the state of client {client} from before the run was resumed is not on this node: only one "
                "that is started with a state-dir in its node config keeps it"
            )
        return State()

    def save(self, client: int, moment: Moment, state: State) -> None:
        """Put the state into the context."""
        if state.changed:
            self._records[f"client-{client}"] = record_of({name: np.asarray(value) for name, value in state.items()})
            self._records[f"client-{client}-kept"] = ConfigRecord({"round": moment.server_round, "phase": moment.phase})
            state.changed = False


class DirectoryStore(StateStore):
    """Keeps one safetensors file for each client and generation.

    Kept are the newest generation, and for each checkpoint that the server may go back to the one it needs.

    Parameters
    ----------
    path : Path
        Directory of the run; made when something is kept.
    durable : bool
        Whether a file must survive a loss of power.
    repeats : bool
        Whether the latest message may come a second time: the generation before the newest is kept too, so that
        the answer is the same.
    """

    def __init__(self, path: Path, *, durable: bool = True, repeats: bool = False) -> None:
        self.path = path
        self._durable = durable
        self._repeats = repeats

    def load(self, client: int, moment: Moment) -> State:
        """Return the newest generation that is older than the moment.

        Those that a resumption of the run has gone back behind are removed.
        """
        folder = self._folder(client)
        for abandoned in folder.glob(".*.part"):  # by a process that was killed while it wrote
            abandoned.unlink(missing_ok=True)
        newest = None
        for generation in self._generations(client):
            if generation.attempt > len(moment.resumed_from):
                raise StateError(f"client {client}: the run was resumed since this message was sent")
            if not moment.counts(generation):
                (folder / generation.file).unlink(missing_ok=True)
            elif generation[:2] > moment.generation[:2]:
                raise StateError(
                    f"client {client}: this message of round {moment.server_round} comes too late, "
                    f"one of round {generation.server_round} has been answered"
                )
            elif generation[:2] < moment.generation[:2]:
                newest = generation
        if newest is None:
            return State()
        try:
            return State(read_arrays(folder / newest.file)[0])
        except (DamagedFileError, OSError) as error:
            # The generation before it would be a wrong state.
            raise StateError(f"the state of client {client} cannot be read: {error}") from error

    def save(self, client: int, moment: Moment, state: State, *, at_once: bool = True) -> None:
        """Write the generation of the moment, then remove those that are not needed any more.

        A file that must survive a loss of power does so at once, or else from :meth:`sync` on.
        """
        if not state.changed:
            return
        folder = self._folder(client)
        folder.mkdir(parents=True, exist_ok=True)
        write_arrays(folder / moment.generation.file, state, durable=self._durable and at_once)
        state.changed = False
        generations = self._generations(client)
        needed = {generations[-1]}
        if self._repeats:
            needed |= set([g for g in generations if g[:2] < moment.generation[:2]][-1:])
        for checkpoint in moment.checkpoints:
            needed |= set([g for g in generations if g.server_round <= checkpoint][-1:])
        for generation in set(generations) - needed:
            (folder / generation.file).unlink(missing_ok=True)

    def sync(self, client: int) -> None:
        """Wait until the disk has a client's files, if they must survive a loss of power."""
        if self._durable:
            folder = self._folder(client)
            for generation in self._generations(client):
                sync(folder / generation.file)
            sync(folder)

    def _folder(self, client: int) -> Path:
        return self.path / f"client-{client}"

    def _generations(self, client: int) -> list[Generation]:
        """Return what is there, oldest first."""
        folder = self._folder(client)
        found = (Generation.of(file.name) for file in folder.iterdir()) if folder.is_dir() else ()
        return sorted(generation for generation in found if generation is not None)


class MemoryStore(StateStore):
    """Keeps states in memory by reference; the least recently used ones beyond a limit go to files.

    Several threads may use it. Whoever reads an array must not write into it. An interrupt may come in the middle
    of a round: what the newest checkpoint that a message names would need is kept beside what has replaced it.

    Parameters
    ----------
    files : DirectoryStore
        Where states beyond the limit go, and all of them at a checkpoint.
    limit : int
        Bytes that states may take in memory; 0: no limit.
    """

    def __init__(self, files: DirectoryStore, limit: int = 0) -> None:
        self.files = files
        self.limit = limit
        self.nbytes = 0
        """Bytes that the states in memory take."""
        # The moment says when a state that is not in the files yet was kept; None: it is there.
        self._kept: OrderedDict[int, tuple[State, Moment | None]] = OrderedDict()
        # Of the states in memory that have changed in this round, those that the round began with.
        self._before: dict[int, tuple[State, Moment]] = {}
        self._round = 0
        self._unsynced: set[int] = set()
        self._warned = False
        self._lock = Lock()

    def load(self, client: int, moment: Moment) -> State:
        """Return the state; its arrays are those that were kept, not copies."""
        with self._lock:
            if client in self._kept:
                self._kept.move_to_end(client)
                return State(self._kept[client][0])
            state = self.files.load(client, moment)
            self._keep(client, state, None)
            self._spill()
            return State(state)

    def save(self, client: int, moment: Moment, state: State) -> None:
        """Keep the state in memory."""
        if state.changed:
            with self._lock:
                self._set_aside(client, moment)
                self._keep(client, State(state), moment)
                self._spill()
            state.changed = False

    def flush(self, server_round: int) -> None:
        """Write all states that are not in the files yet as a round has left them, so that a checkpoint can be made.

        What later messages have changed is given up.
        """
        with self._lock:
            self._rewind(server_round)
            for client, (state, moment) in self._kept.items():
                if moment is not None:
                    self._write(client, state, moment)
                    self._kept[client] = state, None
            for client in self._unsynced:
                self.files.sync(client)
            self._unsynced.clear()

    # An interrupt may come between any two lines: what holds a state is set before what held it is dropped.

    def _set_aside(self, client: int, moment: Moment) -> None:
        """Hold on to a client's state from before this round, if a checkpoint may still be made of it."""
        if moment.server_round != self._round:
            for state, _ in self._before.values():
                self.nbytes -= state.nbytes
            self._before = {}
            self._round = moment.server_round
        begun, kept = self._kept.get(client, (State(), None))
        if kept is not None and kept.server_round <= max(moment.checkpoints, default=0):
            self._before[client] = begun, kept
            self.nbytes += begun.nbytes

    def _rewind(self, server_round: int) -> None:
        for client, (_, moment) in list(self._kept.items()):
            if moment is not None and moment.server_round > server_round:
                if client in self._before:
                    self._keep(client, *self._before[client])
                else:  # the files have it, or there was none
                    self._forget(client)
        self._before = {}

    def _keep(self, client: int, state: State, moment: Moment | None) -> None:
        replaced = self._kept[client][0].nbytes if client in self._kept else 0
        self._kept[client] = state, moment
        self._kept.move_to_end(client)
        self.nbytes += state.nbytes - replaced

    def _forget(self, client: int) -> None:
        self.nbytes -= self._kept.pop(client)[0].nbytes

    def _spill(self) -> None:
        while self.limit and self.nbytes > self.limit:
            client = next(iter(self._kept))
            state, moment = self._kept[client]
            try:
                if client in self._before:
                    self._write(client, *self._before[client])
                    self.nbytes -= self._before.pop(client)[0].nbytes
                if moment is not None:
                    self._write(client, state, moment)
            except OSError as error:  # it is another client's whose turn it is, and nothing is lost yet
                if not self._warned:
                    log(WARNING, "states of clients stay in memory, beyond state-memory: %s", error)
                self._warned = True
                return
            self._forget(client)

    def _write(self, client: int, state: State, moment: Moment) -> None:
        state.changed = True
        self.files.save(client, moment, state, at_once=False)
        self._unsynced.add(client)


def run_folder(state_dir: Path, run: str) -> Path:
    """Return the folder of a run in a node's state directory.

    Raises
    ------
    SettingsError
        If the name, which comes from the server, is not that of a folder in it.
    """
    if not is_folder_name(run):
        raise SettingsError(f"run = {run!r} in the server's message: it must be the name of a folder")
    return state_dir / run
