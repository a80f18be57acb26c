"""Checkpoints: all that the server needs to go on after a round, in a folder that is whole or not there."""

import hashlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.client_app.workspace import Workspace
from posy.data.dataset import bytes_of
from posy.server_app.results import RunDirectory
from posy.server_app.resume import PROGRESS, StoredRun, checkpoint_rounds, read_summary
from posy.settings import SettingsError
from posy.storage import DamagedFileError, plain, read_arrays, read_json, sync, write_arrays, write_json
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.settings import Settings

KEPT = 2
"""Checkpoints that are kept: the newest, and one in reserve."""
WRITING_SHARE = 0.02
"""Share of a run's time that checkpoints besides those of checkpoint-every may take: a run that is killed loses at
most 50 times as long as a checkpoint takes to be written."""
ARRAYS = "server.safetensors"


class Checkpoint(NamedTuple):
    """The server after a round: the strategy's state, and what the recorder needs to go on, as JSON holds it."""

    server_round: int
    arrays: Mapping[str, npt.NDArray[np.generic]]
    progress: Mapping[str, Any]

    @property
    def versions(self) -> dict[int, str]:
        """The versions of the clients' states that belong to it."""
        return {int(client): version for client, version in self.progress["versions"].items()}


@dataclass
class Checkpoints:
    """The checkpoints of one run: after every n-th round (0: none) and the last one. The last two are kept."""

    directory: RunDirectory
    every: int
    last_round: int
    flush: Callable[[Mapping[int, str]], None] = lambda versions: None
    """Sees to it that the disk has some versions of clients' states, by client, which this process may hold."""
    versions: dict[int, Mapping[int, str]] = field(default_factory=dict)
    """The versions of the clients' states that belong to each checkpoint, by its round."""
    _written: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    def due(self, server_round: int) -> bool:
        """Tell whether a round is followed by a checkpoint: by its number, or because it costs little by now."""
        if not self.every:
            return False
        cheap = self._seconds < WRITING_SHARE * (time.monotonic() - self._written)
        return cheap or server_round % self.every == 0 or server_round == self.last_round

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that are not kept."""
        begun, number = time.monotonic(), checkpoint.server_round
        self.flush(checkpoint.versions)
        self.directory.sync()
        folder = self._folder(number)
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        written_by = {"run": self.directory.id, "round": str(number)}
        write_arrays(part / ARRAYS, checkpoint.arrays, written_by, durable=True)
        write_json(part / PROGRESS, {**written_by, **checkpoint.progress}, durable=True)
        shutil.rmtree(folder, ignore_errors=True)
        part.rename(folder)
        sync(folder.parent)
        self._keep({**{r: v for r, v in self.versions.items() if r < number}, number: checkpoint.versions})
        self._written = time.monotonic()
        self._seconds = self._written - begun

    def read(self, server_round: int) -> Checkpoint:
        """Read the checkpoint of a round; one that is not whole, or of another run or round, is an error."""
        folder = self._folder(server_round)
        arrays, metadata = read_arrays(folder / ARRAYS)
        progress = read_json(folder / PROGRESS)
        wanted = {"run": self.directory.id, "round": str(server_round)}
        for file, found in ((ARRAYS, metadata), (PROGRESS, progress)):
            if (own := {key: found.get(key) for key in wanted}) != wanted:
                raise DamagedFileError(f"{folder / file} is of run {own['run']} and round {own['round']}, not of these")
        return Checkpoint(server_round, arrays, progress)

    def newest(self, take_up: Callable[[Checkpoint], None]) -> Checkpoint:
        """Return the newest checkpoint that is whole and can be taken up; those that are damaged are set aside."""
        newest, versions, reasons = None, {}, []
        for number in reversed(checkpoint_rounds(self.directory.path)):
            try:
                checkpoint = self.read(number)
                versions[number] = checkpoint.versions
                if newest is None:
                    take_up(checkpoint)
                    newest = checkpoint
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                reasons.append(str(error) if isinstance(error, DamagedFileError | OSError) else repr(error))
                log(WARNING, "the checkpoint of round %s is not used: %s", number, reasons[-1])
                versions.pop(number, None)
                aside = self._folder(number).with_name(f"round-{number}-refused")
                shutil.rmtree(aside, ignore_errors=True)
                self._folder(number).rename(aside)
        if newest is None:
            name = self.directory.path.name
            raise SettingsError(f"resume = {name!r}: no checkpoint of it can be used ({'; '.join(reasons)})")
        self._keep(versions)
        return newest

    def note(self, settings: Mapping[str, Any], resumed: Sequence[Mapping[str, Any]]) -> None:
        """Write into the checkpoints with which settings the run goes on: it may end before the next one."""
        for number in self.versions:
            file = self._folder(number) / PROGRESS
            write_json(file, {**read_json(file), "settings": settings, "resumed": plain(resumed)}, durable=True)

    def _keep(self, versions: Mapping[int, Mapping[int, str]]) -> None:
        """Keep the newest of some checkpoints and remove the others."""
        for old in sorted(versions)[:-KEPT]:
            shutil.rmtree(self._folder(old), ignore_errors=True)
        self.versions = {number: versions[number] for number in sorted(versions)[-KEPT:]}

    def _folder(self, server_round: int) -> Path:
        return self.directory.checkpoints / f"round-{server_round}"


class Resumption(NamedTuple):
    """A run that goes on from one of its checkpoints."""

    directory: RunDirectory
    checkpoints: Checkpoints
    checkpoint: Checkpoint
    history: list[dict[str, Any]]
    """Each resumption, this one last: ``round``, ``time``, the ``changed`` settings, and on which ``machine`` and with
    which ``versions`` the rounds up to it ran."""


def resumption(
    directory: RunDirectory,
    stored: StoredRun,
    changed: Mapping[str, Any],
    settings: Settings,
    strategy: PersonalisedStrategy,
    workspace: Workspace,
) -> Resumption:
    """Find the checkpoint that a run goes on from, and load the strategy with it.

    Raises :class:`SettingsError` if there is none, the run is complete, or the data are not those it began with.
    """
    run = settings.run
    checkpoints = Checkpoints(directory, run.checkpoint_every, run.num_server_rounds)
    if stored.damage:
        log(WARNING, "config.yaml is written anew: %s", stored.damage)
    checkpoint = checkpoints.newest(lambda found: strategy.load_server_state(found.arrays))
    finished, known, now = checkpoint.server_round, checkpoint.progress["data"], data_digests(workspace)
    if other := [what for what in now if known.get(what) != now[what]]:
        raise SettingsError(
            f"resume = {run.resume!r}: {' and '.join(other)} are not those that the run began with, in "
            f"dataset = {settings.data.dataset!r}"
        )
    if finished > run.num_server_rounds:
        raise SettingsError(f"num-server-rounds = {run.num_server_rounds}: {run.resume!r} has finished {finished}")
    if finished == run.num_server_rounds and read_summary(directory.path).get("status") in ("completed", "diverged"):
        raise SettingsError(
            f"resume = {run.resume!r}: its {finished} rounds are complete; a larger num-server-rounds goes further"
        )
    entry = {"round": finished, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": dict(changed), **stored.ran_on}
    history = [*stored.resumed_before, entry]
    checkpoints.note(settings.as_config(), history)
    return Resumption(directory, checkpoints, checkpoint, history)


def data_digests(workspace: Workspace) -> dict[str, str]:
    """Return a digest of the samples, one of the labels, one of which each client has; none of sites' own data."""
    if workspace.of_sites:
        return {}
    digests = {}
    for what, content in (("the samples", workspace.dataset.x), ("the labels", workspace.dataset.y)):
        digest = hashlib.blake2b(f"{content.dtype.str} {content.shape}".encode(), digest_size=16)
        for block in bytes_of(content):
            digest.update(block)
        digests[what] = digest.hexdigest()
    digest = hashlib.blake2b(digest_size=16)
    for split in (workspace.partition.train, workspace.partition.test):
        for indices in split:
            digest.update(np.asarray(indices, np.int64).tobytes() + b"|")
    return {**digests, "the clients' shares": digest.hexdigest()}
