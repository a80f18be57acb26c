"""Checkpoints: all that the server needs to go on after a round, in a folder that is whole or not there."""

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from client_app.workspace import Workspace
from posy.config import Settings
from posy.results import GROWING, RunDirectory
from posy.resume import StoredRun
from posy.settings import SettingsError
from posy.storage import DamagedFileError, read_arrays, read_json, sync, write_arrays, write_json
from strategies.base import PersonalisedStrategy

KEPT = 2
ARRAYS, PROGRESS = "server.safetensors", "progress.json"
_FOLDER = re.compile(r"round-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """The server after a round.

    Attributes
    ----------
    server_round : int
        The last finished round.
    arrays : Mapping of str to numpy.ndarray
        The strategy's state.
    progress : Mapping
        What the recorder needs, as JSON holds it.
    """

    server_round: int
    arrays: Mapping[str, npt.NDArray[np.generic]]
    progress: Mapping[str, Any]


@dataclass
class Checkpoints:
    """The checkpoints of one run; the last two are kept.

    Attributes
    ----------
    directory : RunDirectory
        Directory of the run.
    every : int
        Rounds between checkpoints; 0: none.
    last_round : int
        The last round of the run, which is always followed by one.
    flush : callable
        Writes the clients' states that are held in this process.
    rounds : list of int
        Rounds to which the server may still go back.
    """

    directory: RunDirectory
    every: int
    last_round: int
    flush: Callable[[], None] = lambda: None
    rounds: list[int] = field(default_factory=list)

    def due(self, server_round: int) -> bool:
        """Tell whether a round is followed by a checkpoint."""
        return self.every > 0 and (server_round % self.every == 0 or server_round == self.last_round)

    def write(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint, then remove those that are not kept."""
        self.flush()
        number = checkpoint.server_round
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
        self.rounds = [*(r for r in self.rounds if r < number), number]
        self._remove_old()

    def read(self, server_round: int) -> Checkpoint:
        """Read the checkpoint of a round.

        Raises
        ------
        DamagedFileError
            If it is not whole, or that of another run or round.
        """
        folder = self._folder(server_round)
        try:
            arrays, metadata = read_arrays(folder / ARRAYS)
            progress = read_json(folder / PROGRESS)
        except OSError as error:
            raise DamagedFileError(f"{folder} cannot be read: {error}") from error
        wanted = {"run": self.directory.id, "round": str(server_round)}
        for file, found in ((ARRAYS, metadata), (PROGRESS, progress)):
            if differing := [key for key, value in wanted.items() if found.get(key) != value]:
                own = ", ".join(f"{key} {found.get(key)}" for key in differing)
                raise DamagedFileError(f"{folder / file} is of {own}, not of this run and round")
        return Checkpoint(server_round, arrays, progress)

    def newest(self, take_up: Callable[[Checkpoint], None]) -> Checkpoint:
        """Return the newest checkpoint that is whole and can be taken up; those newer than it are set aside.

        Raises
        ------
        SettingsError
            If there is none.
        """
        found = [_FOLDER.fullmatch(path.name) for path in self.directory.checkpoints.glob("round-*")]
        self.rounds = sorted(int(name[1]) for name in found if name)
        reasons = []
        while self.rounds:
            try:
                checkpoint = self.read(self.rounds[-1])
                take_up(checkpoint)
                self._remove_old()
                return checkpoint
            except (ValueError, LookupError, TypeError) as error:  # DamagedFileError is a ValueError
                reasons.append(str(error) if isinstance(error, DamagedFileError) else repr(error))
                log(WARNING, "the checkpoint of round %s is not used: %s", self.rounds[-1], reasons[-1])
                refused = self._folder(self.rounds.pop())
                aside = refused.with_name(f"{refused.name}-refused")
                shutil.rmtree(aside, ignore_errors=True)
                refused.rename(aside)
        name = self.directory.path.name
        if reasons:
            raise SettingsError(f"resume = {name!r}: no checkpoint of it can be used ({'; '.join(reasons)})")
        raise SettingsError(
            f"resume = {name!r}: it has no checkpoint: the first one follows checkpoint-every rounds. Start it anew"
        )

    def _remove_old(self) -> None:
        for old in self.rounds[:-KEPT]:
            shutil.rmtree(self._folder(old), ignore_errors=True)
        self.rounds = self.rounds[-KEPT:]

    def _folder(self, server_round: int) -> Path:
        return self.directory.checkpoints / f"round-{server_round}"


@dataclass(frozen=True)
class Resumption:
    """What is known of a run that goes on.

    Attributes
    ----------
    directory : RunDirectory
        Its directory.
    checkpoints : Checkpoints
        Those that are left.
    checkpoint : Checkpoint
        The one that it goes on from.
    history : list of dict
        Each resumption, this one last: ``round``, ``time`` and the ``changed`` settings.
    """

    directory: RunDirectory
    checkpoints: Checkpoints
    checkpoint: Checkpoint
    history: list[dict[str, Any]]


def resumption(
    stored: StoredRun,
    changed: Mapping[str, Any],
    settings: Settings,
    strategy: PersonalisedStrategy,
    workspace: Workspace,
) -> Resumption:
    """Find the checkpoint that a run goes on from, and load the strategy with it.

    Raises
    ------
    SettingsError
        If there is none, the run is complete, a process is at work in it, or the data are not those it began with.
    """
    directory = RunDirectory.existing(stored.path, str(stored.record["id"]))
    run = settings.run
    checkpoints = Checkpoints(directory, run.checkpoint_every, run.num_server_rounds)

    def take_up(checkpoint: Checkpoint) -> None:
        present = {name: (directory.path / name).stat().st_size for name in GROWING if (directory.path / name).exists()}
        for name, size in checkpoint.progress["files"].items():
            if present.get(name, 0) < size:
                raise DamagedFileError(f"{directory.path / name} has {present.get(name, 0)} bytes of {size}")
        strategy.load_server_state(checkpoint.arrays)

    try:
        checkpoint = checkpoints.newest(take_up)
        if checkpoint.progress["data"] != data_digest(workspace):
            raise SettingsError(f"resume = {run.resume!r}: the data or their partition are not those of the run")
        if checkpoint.server_round > run.num_server_rounds:
            raise SettingsError(
                f"num-server-rounds = {run.num_server_rounds}: {run.resume!r} has finished {checkpoint.server_round}"
            )
        status = json.loads((directory.path / "summary.json").read_text(encoding="utf-8"))["status"]
        if status == "completed" and checkpoint.server_round == run.num_server_rounds:
            raise SettingsError(
                f"resume = {run.resume!r}: its {run.num_server_rounds} rounds are complete; a larger num-server-rounds "
                "goes further"
            )
    except BaseException:
        directory.release()
        raise
    entry = {"round": checkpoint.server_round, "time": time.strftime("%Y-%m-%d %H:%M:%S"), "changed": dict(changed)}
    return Resumption(directory, checkpoints, checkpoint, [*stored.record.get("resumed", []), entry])


def data_digest(workspace: Workspace) -> str:
    """Return a digest of which samples each client has, and of the labels; sites with their own data keep them."""
    if workspace.of_sites:
        return ""
    digest = hashlib.sha256(np.ascontiguousarray(workspace.dataset.y).tobytes())
    for split in (workspace.partition.train, workspace.partition.test):
        for indices in split:
            digest.update(np.asarray(indices, np.int64).tobytes() + b"|")
    return digest.hexdigest()
