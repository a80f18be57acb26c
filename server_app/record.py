"""Load the record of a finished run: its tables as data frames, and its clients' models for predictions."""

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posy.client_app.library import Library, RunFolder
from posy.client_app.stored import ClientModel
from posy.paths import absolute
from posy.server_app import routing
from posy.server_app.resume import CONFIG, read_summary
from posy.server_app.routing import Answer
from posy.settings import SettingsError
from posy.storage import read_metadata
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.columns import POINTS
from posy.strategies.run_settings import RunSettings
from posy.words import title
from posy.yaml12 import read_yaml

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 10
"""Maximum number of clients that a message names."""


def _without_model(folder: Path, runs: list[RunFolder], client: str) -> str:
    """Return the error message for a node's folder whose runs have no model of a client."""
    sites = sorted({model.name for run in runs for model in run.stored.values()})
    if sites:
        return f"client {client!r}: {folder} has the models of {', '.join(sites)}"
    return (
        f"the runs in {folder} have no models: a node stores its model in the last round, and at intervals before it. "
        "If the node config sets models, name this folder instead"
    )


class Record:
    """A run's files, which are read on demand.

    Attributes
    ----------
    path : Path
        The run's folder.
    strategy : PersonalisedStrategy or None
        The server's strategy, if the run took place in this process and has no folds.
    """

    _run_on_node: RunFolder

    def __init__(self, path: Path, strategy: PersonalisedStrategy | None = None) -> None:
        self.path, self.strategy = path, strategy
        self.library: Library | None = None
        """The runs in the node's folder in which :meth:`find` has found this run; None for a run on the server."""

    @classmethod
    def find(cls, run: str | Path, client: str = "") -> "Record":
        """Return the record of a run, given its folder or its name in ``runs``; see :func:`posy.load`.

        In a node's ``state-dir`` or ``models``, it is the run with the current model of ``client``, or of any client.
        """
        candidates = [absolute(str(run)), absolute(RunSettings.output_dir) / run]
        for folder in candidates:
            if (folder / CONFIG).is_file():
                return cls(folder)
            library = Library(folder)
            if current := library.current(client):
                record = cls(current.models)
                record.library, record._run_on_node = library, current
                return record
            if on_node := [stored for stored in library.runs if not stored.of_server]:
                raise SettingsError(_without_model(folder, on_node, client))
        raise SettingsError(f"no run in {' or '.join(map(str, dict.fromkeys(candidates)))}; name the folder of a run")

    def __repr__(self) -> str:
        return f"Record({str(self.path)!r})"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``, or an empty dictionary if the file cannot be read."""
        return read_summary(self.path)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """All settings, by key."""
        if (self.path / CONFIG).is_file():
            settings: dict[str, Any] = read_yaml(self.path / CONFIG)["settings"]
            return settings
        return dict(json.loads(read_metadata(next(iter(self.files.values())))["settings"]))

    @cached_property
    def rounds(self) -> "DataFrame":
        """The rows of ``rounds.jsonl``, with nested keys joined as in ``served_accuracy_mean``.

        A run with folds has no rounds; each fold's folder has its own.
        """
        import pandas as pd  # noqa: PLC0415 - takes half a second

        lines = self._file("rounds.jsonl").read_text(encoding="utf-8").splitlines()
        return pd.json_normalize([json.loads(line) for line in lines], sep="_")

    @cached_property
    def clients(self) -> "DataFrame":
        """The rows of ``clients.csv``, one per client and round; ``partition`` is the client.

        A run with folds has one row per client, whose scores cover the test samples of all finished folds.
        """
        import pandas as pd  # noqa: PLC0415

        return pd.read_csv(self._file("clients.csv"), dtype={"chosen": str, "site": str})

    @property
    def name(self) -> str:
        """The name of the run, also for a folder of models on a node."""
        is_models = self.path.name == "models" and not self.of_server
        return self.path.parent.name if is_models else self.path.name

    @cached_property
    def titles(self) -> dict[int, str]:
        """The display names of all clients of the run. A node knows only the sites whose models it stores."""
        names = dict.fromkeys(range(int(self.settings["num-clients"])), "")
        if (self.path / "clients.csv").is_file():
            rows = self.clients[self.clients["site"].notna()] if "site" in self.clients else self.clients[:0]
            names |= dict(zip(rows["partition"], rows["site"], strict=True))
        names |= {client: name for client, name in self.stored_names.items() if name}
        return {client: title(client, name) for client, name in names.items()}

    @property
    def stored_names(self) -> dict[int, str]:
        """The result of :attr:`names`, or an empty dictionary if no client's model is stored."""
        return self.names if any(self.models.glob("client-*.safetensors")) else {}

    def warnings(self, client: str) -> list[str]:
        """Return warnings about a site's model: it is not final, or a newer model exists in the node's folder."""
        if self.library is None or (model := self._run_on_node.model_of(client)) is None:
            return []
        texts = [model.age] if model.age else []
        newest = self.library.newer(client)
        if newest is not None and (newer := newest.model_of(client)) is not None:
            reason = "another run is pinned" if self.library.pinned == self._run_on_node.name else newer.age
            texts.append(
                f"the model of {self._run_on_node.name} is used, although {newest.name} is newer ({reason}); "
                f"`posy models {self.library.path} --use {newest.name}` selects it"
            )
        return texts

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the clients whose models are stored, keyed by client; empty for clients without a name."""
        return {client: read_metadata(path).get("site", "") for client, path in self.files.items()}

    def predictor(self, client: int | str, point: str = "") -> ClientModel:
        """Return a client's model for predictions.

        Parameters
        ----------
        client : int or str
            The client's number, from 0, or the name of its site.
        point : str
            ``served`` for the model before the client's training, ``local`` for the model after it, or empty for the
            model by which the method is scored.

        Raises
        ------
        SettingsError
            If the client does not exist, or its model was not stored.
        DamagedFileError
            If the file cannot be read.
        """
        if point not in ("", *POINTS):
            raise SettingsError(f"point = {point!r}: it must be {' or '.join(POINTS)}")
        number = self._number(client)
        served = self.models / f"served-{number}.safetensors"
        path = served if point != "local" and served.is_file() else self.files[number]
        model = ClientModel.load(path)
        if point and model.point != point:
            raise SettingsError(
                f"point = {point!r}: {self.models} has the {model.point} model of {title(number, model.site)}"
            )
        return model

    def router(self) -> ClientModel:
        """Return the model that prepares samples for :meth:`route`, and ranks the clients if the method routes.

        Raise :class:`SettingsError` if the folder does not contain this model.
        """
        return routing.router_of(self)

    def scores(self, model: ClientModel) -> dict[str, float]:
        """Return a model's scores on the client's test samples, keyed by metric.

        They are empty in the folder of a node, and if the server has not evaluated the model.
        """
        if not (self.path / "clients.csv").is_file():
            return {}
        rows = self.clients[(self.clients["partition"] == model.client) & (self.clients["round"] == model.round)]
        prefix = f"{model.point}_"
        columns = [column for column in rows.columns if column.startswith(prefix)]
        values = rows[columns].iloc[-1].dropna().items() if len(rows) else ()
        return {str(column).removeprefix(prefix).replace("_", "-"): float(value) for column, value in values}

    def route(self, samples: Iterable[Any]) -> list[Answer]:
        """Classify samples of unknown origin, as for system accuracy.

        A method with ``routes`` ranks the clients for each sample, and the model of the first one classifies the sample
        if it is stored in this folder. With any other method, the local models vote.

        Parameters
        ----------
        samples : iterable
            Samples that :class:`~posy.data.inputs.Preprocessing` accepts.

        Raises
        ------
        SettingsError
            If the models that rank the clients, or at least two models that vote, are not stored in this folder.
        """
        return routing.route(self, list(samples))

    @property
    def of_server(self) -> bool:
        """Whether this is the run's folder on the server, and not a folder of models on a node."""
        return (self.path / CONFIG).is_file()

    @property
    def models(self) -> Path:
        """The folder that contains the models; :class:`SettingsError` for a run with folds, which has several."""
        if self._has_folds and self.settings.get("save-models", True):
            raise SettingsError(f"{self.path} has no clients' models: {self._of_each_fold('models')}")
        return self.path / "models" if self.of_server else self.path

    @property
    def _has_folds(self) -> bool:
        """Whether the run is a cross-validation, whose folds are runs in folders of this folder."""
        return self.of_server and self.settings.get("folds", 0) > 1 and not self.settings.get("fold", 0)

    def _of_each_fold(self, content: str) -> str:
        """Return the reason why a run with folds lacks some content, and the remedy."""
        folders = sorted(path for path in self.path.glob("fold-*") if path.is_dir())
        if not folders:
            return "no fold has started"
        return f"each fold of the run has its own {content}; use the folder of a fold, such as {folders[0]}"

    @cached_property
    def files(self) -> dict[int, Path]:
        """The clients' stored model files, keyed by client; :class:`SettingsError` if there are none."""
        numbered_paths = ((path.stem.partition("-")[2], path) for path in self.models.glob("client-*.safetensors"))
        files = {int(number): path for number, path in numbered_paths if number.isdecimal()}
        if files:
            return dict(sorted(files.items()))
        if not self.settings.get("save-models", True):
            reason = "the run had save-models = false"
        elif (self.models / "server.safetensors").is_file():
            reason = (
                "the models stay on the clients' nodes, in the folder that the node config sets (models or state-dir)"
            )
        else:
            reason = "models are stored in the last round, and at intervals before it"
        raise SettingsError(f"{self.path} has no clients' models: {reason}")

    def _number(self, client: int | str) -> int:
        """Return the number of a client with a stored model, given its number or name."""
        number_by_name = {name: number for number, name in self.names.items() if name}
        text = str(client)
        number = number_by_name.get(text, int(text) if text.isdecimal() else -1)
        if number in self.files:
            return number
        first_clients = ", ".join(number_by_name or map(str, list(self.files)[:SHOWN]))
        more = "" if number_by_name or len(self.files) <= SHOWN else f", … {max(self.files)}"
        raise SettingsError(f"client {client!r}: {self.models} has the models of {first_clients}{more}")

    def _file(self, name: str) -> Path:
        """Return the path of a file in the run's record, or raise :class:`SettingsError` if it does not exist."""
        path = self.path / name
        if path.is_file():
            return path
        if not self.of_server:
            reason = "this file is in the run's folder on the server"
        elif not self._has_folds:
            reason = "no round of the run has finished"
        elif name == "rounds.jsonl":
            reason = self._of_each_fold("rounds")
        elif self.settings["secure-aggregation"]:
            reason = "with secure-aggregation, the server knows only sums of the clients' scores"
        else:
            reason = "no fold of the run has finished"
        raise SettingsError(f"{path} does not exist: {reason}")
