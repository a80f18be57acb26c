"""The stored models of several runs in one folder, and the choice of a site's current model.

A node stores a run's models in ``<state-dir>/<run>/models`` or in ``<models>/<run>``. Several nodes may share a folder.
A site's current model is its newest final model, from the last round of a run. If it has none, its newest model is the
current one. A pinned run overrides this choice. Importing this module does not import PyTorch.
"""

import json
import shutil
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from posy.metrics import CLASSES, DEFAULTS, METRICS, Metric
from posy.settings import SettingsError
from posy.storage import DamagedFileError, is_locked, read_json, read_metadata, write_json

CONFIG, PINNED_STATE = "config.yaml", "run.json"
"""A file in the folder of a server's run, and a file in a run's folder on a node with data."""
PIN = ".current-run.json"
"""The file that names the pinned run. A run's folder on a node cannot have a name that starts with a dot."""
UNFINISHED_SECONDS, FINISHED_SECONDS = 86_400.0, 600.0
"""Seconds since the last change after which a run without, or with, a final model is not in progress."""


@dataclass(frozen=True)
class StoredModel:
    """A client's stored model, as its file describes it."""

    path: Path
    client: int
    site: str
    point: str
    round: int
    rounds: int
    """The run's number of rounds. ``patience`` may end a run earlier."""
    final: bool
    """Whether the model is from the last round of its run."""
    method: str
    metric: Metric
    scores: dict[str, float]
    """The model's scores on the client's test split; empty if the run or an early version of Posy withholds them."""
    num_test: int
    time: float

    @property
    def name(self) -> str:
        """The site's name, or else the client's number."""
        return self.site or str(self.client)

    @classmethod
    def read(cls, path: Path) -> "StoredModel":
        """Read a file's metadata, or raise :class:`DamagedFileError`."""
        metadata = read_metadata(path)
        try:
            settings, preprocessing = (json.loads(metadata[key]) for key in ("settings", "preprocessing"))
            number, rounds = int(metadata["round"]), int(settings.get("num-server-rounds", 0))
            written = metadata.get("time", "")
            name = settings.get("metric", "auto")
            return cls(
                path=path,
                client=int(metadata["client"]),
                site=metadata["site"],
                point=metadata["point"],
                round=number,
                rounds=rounds,
                final=metadata.get("final", str(number >= rounds)) == str(True),
                method=str(settings.get("method", "")),
                metric=METRICS.get(name) or METRICS[DEFAULTS[preprocessing.get("target", CLASSES)]],
                scores=json.loads(metadata.get("scores", "{}")),
                num_test=int(metadata.get("num-test", 0)),
                time=datetime.fromisoformat(written).timestamp() if written else path.stat().st_mtime,
            )
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"{path} does not describe its model: {error!r}") from error

    @property
    def age(self) -> str:
        """A warning for a model that is not final, or an empty string."""
        if self.final:
            return ""
        return (
            f"this model is of round {self.round} of {self.rounds}, so it is not the final model of its run; if the "
            "run has ended, the server can deliver the final model with `posy run resume=RUN`"
        )


@dataclass(frozen=True)
class RunFolder:
    """A run's folder on a node or on the server; ``models`` is the folder that contains the models."""

    path: Path
    models: Path
    of_server: bool

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.path.name

    @cached_property
    def stored(self) -> dict[int, StoredModel]:
        """The model by which each client is scored, keyed by client. Damaged files are skipped with a warning."""
        models: dict[int, StoredModel] = {}
        for path in sorted(self.models.glob("client-*.safetensors")):
            number = path.stem.partition("-")[2]
            served = path.with_name(f"served-{number}.safetensors")
            try:
                if number.isdecimal():
                    models[int(number)] = StoredModel.read(served if served.is_file() else path)
            except DamagedFileError as error:
                log(WARNING, "%s", error)
        return dict(sorted(models.items()))

    def model_of(self, client: str) -> StoredModel | None:
        """Return the model of a client with this number or site name, or None. The empty string means any client."""
        models = list(self.stored.values())
        if not client:
            return max(models, key=_rank, default=None)
        named = [model for model in models if model.site == client]
        return next(iter(named or [model for model in models if str(model.client) == client]), None)

    @cached_property
    def _removable(self) -> Path:
        return self.models if self.of_server else self.path  # the record of a server's run stays

    @cached_property
    def size(self) -> int:
        """The number of bytes that :meth:`remove` frees."""
        return sum(path.lstat().st_size for path in self._removable.rglob("*") if path.is_file())

    @cached_property
    def changed(self) -> float:
        """The time of the last change."""
        return max(path.lstat().st_mtime for path in (self.path, *self.path.rglob("*")))

    @property
    def date(self) -> float:
        """The time of the newest model, or of the last change if there are no models."""
        return max((model.time for model in self.stored.values()), default=self.changed)

    @property
    def in_progress(self) -> str:
        """Why the run may still be in progress, or an empty string."""
        if self.of_server:
            return "a process uses it" if is_locked(self.path) else ""
        limit = FINISHED_SECONDS if self.is_final else UNFINISHED_SECONDS
        if time.time() - self.changed > limit:
            return ""
        text = f"{limit / 60:g} minutes" if self.is_final else f"{limit / 3600:g} hours"
        return f"it has changed within the last {text}"

    @property
    def is_final(self) -> bool:
        """Whether all stored models are final, and there are any."""
        return bool(self.stored) and all(model.final for model in self.stored.values())

    def remove(self) -> None:
        """Delete the run's folder on a node, with models, predictions and states; on the server, only the models."""
        shutil.rmtree(self._removable)


def run_folder(path: Path) -> RunFolder | None:
    """Return a folder as the folder of one run, or None if it is not one."""
    if (path / CONFIG).is_file():
        return RunFolder(path, path / "models", of_server=True)
    for models in (path / "models", path):
        if any(file.is_file() for file in models.glob("client-*.safetensors")):
            return RunFolder(path, models, of_server=False)
    has_states = (path / PINNED_STATE).is_file() or any(folder.is_dir() for folder in path.glob("client-*"))
    return RunFolder(path, path / "models", of_server=False) if has_states else None


class Library:
    """The runs in a folder, newest first: a node's ``state-dir`` or ``models``, or a server's ``runs``.

    ``path`` may also be the folder of one run.
    """

    def __init__(self, path: Path) -> None:
        single = run_folder(path)
        self.path = path.parent if single else path
        children = sorted(path.iterdir()) if single is None and path.is_dir() else []
        folders = [single, *(run_folder(child) for child in children if child.is_dir())]
        self.runs = sorted((run for run in folders if run), key=lambda run: (-run.date, run.name))

    @property
    def pinned(self) -> str:
        """The name of the pinned run, or an empty string."""
        try:
            return str(read_json(self.path / PIN)["run"])
        except (OSError, LookupError, DamagedFileError):
            return ""

    def pin(self, run: RunFolder | None) -> None:
        """Make a run the current one, or remove the pin.

        Raises
        ------
        SettingsError
            If the run has no models, or is a server's run.
        """
        if run is None:
            (self.path / PIN).unlink(missing_ok=True)
            return
        if run.of_server:
            raise SettingsError(f"{run.path} is a server's run; name its folder in `posy predict` instead")
        if not run.stored:
            raise SettingsError(f"{run.path} has no models")
        write_json(self.path / PIN, {"run": run.name}, durable=True)

    def current(self, client: str = "") -> RunFolder | None:
        """Return the run with the current model of a client, given its number or name, or None if there is none."""
        models = {run.name: model for run in self.runs if not run.of_server and (model := run.model_of(client))}
        if not models:
            return None
        chosen = self.pinned if self.pinned in models else max(models, key=lambda name: _rank(models[name]))
        return next(run for run in self.runs if run.name == chosen)

    @property
    def current_models(self) -> list[tuple[RunFolder, StoredModel]]:
        """The current model of each client in the folder, and its run; sorted by client."""
        stored = [model for run in self.runs if not run.of_server for model in run.stored.values()]
        clients = sorted({(model.client, model.site) for model in stored})
        current: dict[Path, tuple[RunFolder, StoredModel]] = {}
        for number, site in clients:
            client = site or str(number)
            if (run := self.current(client)) is not None and (model := run.model_of(client)) is not None:
                current[model.path] = run, model
        return list(current.values())

    def newer(self, client: str) -> RunFolder | None:
        """Return the newest run of a client if it is newer than the current one, or None."""
        current = self.current(client)
        model = current.model_of(client) if current else None
        if model is None:
            return None
        candidates = [(other.time, run) for run in self.runs if not run.of_server and (other := run.model_of(client))]
        newest, run = max(candidates, key=lambda pair: pair[0])
        return run if newest > model.time else None

    def is_current(self, run: RunFolder) -> bool:
        """Return whether a run has the current model of any client."""
        return any(self.current(model.name) is run for model in run.stored.values())

    def find(self, word: str) -> RunFolder:
        """Return the run whose folder has this name, with or without the id at its end.

        Raises
        ------
        SettingsError
            If no run, or several runs, have the name.
        """
        exact = [run for run in self.runs if run.name == word]
        matching = exact or [run for run in self.runs if not run.of_server and run.name.rpartition("-")[0] == word]
        if len(matching) == 1:
            return matching[0]
        if matching:
            raise SettingsError(f"{word!r} is the name of several runs: {', '.join(run.name for run in matching)}")
        names = ", ".join(run.name for run in self.runs[:5]) or "none"
        raise SettingsError(f"{word!r}: no run in {self.path} has this name; newest runs: {names}")


def _rank(model: StoredModel) -> tuple[bool, float]:
    return model.final, model.time


def date_of(seconds: float) -> str:
    """Return a time as local date and time."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def as_dict(library: Library, run: RunFolder, model: StoredModel) -> dict[str, Any]:
    """Return the facts about a model as JSON."""
    return {
        "run": run.name,
        "date": datetime.fromtimestamp(model.time, UTC).isoformat(timespec="seconds"),
        "client": model.client,
        "site": model.site,
        "method": model.method,
        "model": model.point,
        "round": model.round,
        "rounds": model.rounds,
        "final": model.final,
        "scores": model.scores,
        "num-test": model.num_test,
        "size": run.size,
        "current": library.current(model.name) is run,
        "pinned": library.pinned == run.name,
        "path": str(model.path),
    }
