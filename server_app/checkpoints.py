"""Save and load checkpoints of the server's state after a round. A checkpoint is either complete or absent."""

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
from posy.server_app.resume import CONFIG, PROGRESS, WITHOUT_MODEL, StoredRun, checkpoint_rounds, read_summary
from posy.settings import SettingsError
from posy.storage import DamagedFileError, plain, read_arrays, read_json, sync, write_arrays, write_json
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.server_state import load_state
from posy.strategies.settings import Settings
from posy.words import counted

MAX_CHECKPOINTS = 2
"""Number of checkpoints kept on disk: the newest and a spare."""
WRITING_SHARE = 0.02
"""Maximum fraction of a run's time that Posy spends on checkpoints not scheduled by checkpoint-every. A killed run
therefore loses at most about 50 times the time that it takes to write a checkpoint."""
ARRAYS = "server.safetensors"


class Checkpoint(NamedTuple):
    """The server's state after a round: the strategy's state as arrays, and the recorder's state as JSON."""

    server_round: int
    arrays: Mapping[str, npt.NDArray[np.generic]]
    progress: Mapping[str, Any]

    @property
    def versions(self) -> dict[int, str]:
        """The version of each client's state in the checkpoint, keyed by client."""
        return {int(client): version for client, version in self.progress["versions"].items()}


@dataclass
class Checkpoints:
    """A run's checkpoints. Only the newest two are kept.

    Posy writes a checkpoint after every n-th round (``every``; 0: no checkpoints) and after the last round. It writes
    one after any other round if writing is cheap.
    """

    directory: RunDirectory
    every: int
    last_round: int
    flush: Callable[[Mapping[int, str]], None] = lambda versions: None
    """Writes the given versions of clients' states, keyed by client, to disk if they exist only in memory."""
    versions: dict[int, Mapping[int, str]] = field(default_factory=dict)
    """The versions of the clients' states in each checkpoint, keyed by round."""
    _written: float = field(default_factory=time.monotonic)
    _seconds: float = 0.0

    def due(self, server_round: int) -> bool:
        """Return whether a checkpoint is due after a round, because it is scheduled or cheap to write."""
        if not self.every:
            return False
        is_cheap = self._seconds < WRITING_SHARE * (time.monotonic() - self._written)
        return is_cheap or server_round % self.every == 0 or server_round == self.last_round

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove all but the newest ones."""
        started, number = time.monotonic(), checkpoint.server_round
        self.flush(checkpoint.versions)
        self.directory.sync()
        folder = self._folder(number)
        temporary = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        written_by = {"run": self.directory.id, "round": str(number)}
        write_arrays(temporary / ARRAYS, checkpoint.arrays, written_by, durable=True)
        write_json(temporary / PROGRESS, {**written_by, **checkpoint.progress}, durable=True)
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        sync(folder.parent)
        self._keep({**{r: v for r, v in self.versions.items() if r < number}, number: checkpoint.versions})
        self._written = time.monotonic()
        self._seconds = self._written - started

    def read(self, server_round: int) -> Checkpoint:
        """Return a round's checkpoint, or raise an error if it is incomplete or belongs to another run or round."""
        folder = self._folder(server_round)
        arrays, metadata = read_arrays(folder / ARRAYS)
        progress = read_json(folder / PROGRESS)
        expected = {"run": self.directory.id, "round": str(server_round)}
        for file, header in ((ARRAYS, metadata), (PROGRESS, progress)):
            if (origin := {key: header.get(key) for key in expected}) != expected:
                raise DamagedFileError(
                    f"{folder / file} belongs to run {origin['run']} and round {origin['round']}, not to "
                    f"run {expected['run']} and round {expected['round']}"
                )
        return Checkpoint(server_round, arrays, progress)

    def newest(self, load: Callable[[Checkpoint], None]) -> Checkpoint:
        """Return the newest complete checkpoint that ``load`` accepts, and rename the folders of damaged ones."""
        newest, versions, reasons = None, {}, []
        for number in reversed(checkpoint_rounds(self.directory.path)):
            try:
                checkpoint = self.read(number)
                versions[number] = checkpoint.versions
                if newest is None:
                    load(checkpoint)
                    newest = checkpoint
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
                reasons.append(str(error) if isinstance(error, DamagedFileError | OSError) else repr(error))
                log(WARNING, "the checkpoint of round %s is not used: %s", number, reasons[-1])
                versions.pop(number, None)
                refused_folder = self._folder(number).with_name(f"round-{number}-refused")
                shutil.rmtree(refused_folder, ignore_errors=True)
                self._folder(number).rename(refused_folder)
        if newest is None:
            name = self.directory.path.name
            raise SettingsError(f"resume = {name!r}: no checkpoint of the run can be used ({'; '.join(reasons)})")
        self._keep(versions)
        return newest

    def note(self, settings: Mapping[str, Any], resumed: Sequence[Mapping[str, Any]]) -> None:
        """Write a resumed run's settings into its checkpoints, because it may end before it writes a new one.

        The caller must then write ``config.yaml``. This function first removes the file, because an interruption must
        not leave a file that contradicts the checkpoints.
        """
        (self.directory.path / CONFIG).unlink(missing_ok=True)
        sync(self.directory.path)
        for number in self.versions:
            file = self._folder(number) / PROGRESS
            write_json(file, {**read_json(file), "settings": settings, "resumed": plain(resumed)}, durable=True)

    def _keep(self, versions: Mapping[int, Mapping[int, str]]) -> None:
        """Record the newest checkpoints in ``versions``, and remove the others."""
        for old in sorted(versions)[:-MAX_CHECKPOINTS]:
            shutil.rmtree(self._folder(old), ignore_errors=True)
        self.versions = {number: versions[number] for number in sorted(versions)[-MAX_CHECKPOINTS:]}

    def _folder(self, server_round: int) -> Path:
        return self.directory.checkpoints / f"round-{server_round}"


class Resumption(NamedTuple):
    """A run that resumes from one of its checkpoints."""

    directory: RunDirectory
    checkpoints: Checkpoints
    checkpoint: Checkpoint
    history: list[dict[str, Any]]
    """All resumptions, ending with this one: ``round``, ``time``, the ``changed`` settings, and the ``machine`` and
    ``versions`` used for the preceding rounds. A delivery of final models is not a resumption."""
    deliver_to: tuple[int, ...] = ()
    """The clients that lack the final model of a completed run, to which Posy delivers it instead of training."""


def resumption(
    directory: RunDirectory,
    stored: StoredRun,
    changed: Mapping[str, Any],
    settings: Settings,
    strategy: PersonalisedStrategy,
    workspace: Workspace,
) -> Resumption:
    """Load a run's newest checkpoint into the strategy, and return the data needed to resume the run.

    This function changes no settings in the run's files, because the clients may still refuse them.

    Raise :class:`SettingsError` if the run has no usable checkpoint, if its data has changed, or if the run is complete
    and all clients have their final models.
    """
    run = settings.run
    checkpoints = Checkpoints(directory, run.checkpoint_every, run.num_server_rounds)
    if stored.damage:
        log(WARNING, "config.yaml is rewritten: %s", stored.damage)
    checkpoint = checkpoints.newest(lambda stored_checkpoint: load_state(strategy, stored_checkpoint.arrays))
    last_round, stored_digests, digests = (
        checkpoint.server_round,
        checkpoint.progress["data"],
        data_digests(workspace),
    )
    if changed_parts := [part for part in digests if stored_digests.get(part) != digests[part]]:
        raise SettingsError(
            f"resume = {run.resume!r}: {' and '.join(changed_parts)} have changed since the run "
            f"began (dataset = {settings.data.dataset!r})"
        )
    if last_round > run.num_server_rounds:
        raise SettingsError(
            f"num-server-rounds = {run.num_server_rounds}: {run.resume!r} has already finished {last_round} rounds"
        )
    ended = checkpoint.progress.get("patience-ended", 0)
    end = ended + 1 if ended else 0
    summary = read_summary(directory.path)
    if last_round in (run.num_server_rounds, end) and summary.get("status") in ("completed", "diverged"):
        if clients := tuple(client for client in strategy.members if client in summary.get(WITHOUT_MODEL, ())):
            return Resumption(directory, checkpoints, checkpoint, stored.resumed_before, clients)
        raise SettingsError(
            f"resume = {run.resume!r}: all of the run's {last_round} rounds are complete"
            + ("; patience has ended it" if end else "; to continue the run, set a larger num-server-rounds")
        )
    if note := stored.code_note(settings):
        log(WARNING, "%s; it has trained %s with the earlier code", note, counted(last_round, "round"))
    entry = {
        "round": last_round,
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
        "changed": dict(changed),
        **stored.ran_on,
    }
    return Resumption(directory, checkpoints, checkpoint, [*stored.resumed_before, entry])


def data_digests(workspace: Workspace) -> dict[str, str]:
    """Return digests of the samples, the labels and the partition, or an empty mapping if the sites hold the data."""
    if workspace.of_sites:
        return {}
    digests = {}
    for part, content in (("the samples", workspace.dataset.x), ("the labels", workspace.dataset.y)):
        digest = hashlib.blake2b(f"{content.dtype.str} {content.shape}".encode(), digest_size=16)
        for block in bytes_of(content):
            digest.update(block)
        digests[part] = digest.hexdigest()
    digest = hashlib.blake2b(digest_size=16)
    for split in (workspace.partition.train, workspace.partition.test):
        for indices in split:
            digest.update(np.asarray(indices, np.int64).tobytes() + b"|")
    return {**digests, "the clients' shares": digest.hexdigest()}
