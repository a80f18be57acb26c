"""Load the record of a finished run: its tables as data frames, and its clients' models for predictions."""

import json
from collections.abc import Iterable
from functools import cached_property
from logging import INFO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from flwr.common.logger import log

from posy.client_app.stored import ClientModel, Prediction
from posy.metrics import CLASSES
from posy.paths import absolute
from posy.server_app.resume import CONFIG, read_summary
from posy.server_app.system import routing_scores
from posy.settings import SettingsError
from posy.spread import majority_vote
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


class Answer(NamedTuple):
    """The federation's prediction for a sample of unknown origin.

    ``clients`` maps each client to the probability that the sample is from this client, most probable first. If the
    clients vote, ``clients`` is empty, and ``prediction`` contains each class's fraction of the votes.
    """

    prediction: Prediction
    clients: dict[int, float]


def _newest_on_node(folder: Path) -> Path | None:
    """Return the newest folder of models in a node's ``state-dir`` or ``models``, or None if there is none.

    A node stores a run's models in ``<state-dir>/<run>/models`` or in ``<models>/<run>``. ``folder`` may also be one
    run's folder in ``state-dir``.
    """
    patterns = ("models/client-*.safetensors", "*/client-*.safetensors", "*/models/client-*.safetensors")
    files = [
        path
        for pattern in patterns
        for path in folder.glob(pattern)
        if path.is_file() and not (path.parents[1] / CONFIG).is_file()  # not the directory of a server's run
    ]
    return max(files, key=lambda path: path.stat().st_mtime).parent if files else None


class Record:
    """A run's files, which are read on demand.

    Attributes
    ----------
    path : Path
        The run's folder.
    strategy : PersonalisedStrategy or None
        The server's strategy, if the run took place in this process and has no folds.
    """

    def __init__(self, path: Path, strategy: PersonalisedStrategy | None = None) -> None:
        self.path, self.strategy = path, strategy

    @classmethod
    def find(cls, run: str | Path) -> "Record":
        """Return the record of a run, given its folder or its name in ``runs``; see :func:`posy.load`."""
        candidates = [absolute(str(run)), absolute(RunSettings.output_dir) / run]
        for folder in candidates:
            if (folder / CONFIG).is_file() or any(folder.glob("client-*.safetensors")):
                return cls(folder)
            if models := _newest_on_node(folder):
                log(INFO, "Using the models of the newest run in %s: %s", folder, models)
                return cls(models)
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
        return dict(json.loads(read_metadata(next(iter(self._files.values())))["settings"]))

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

    @cached_property
    def names(self) -> dict[int, str]:
        """The names of the clients whose models are stored, keyed by client; empty for clients without a name."""
        return {client: read_metadata(path).get("site", "") for client, path in self._files.items()}

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
        path = served if point != "local" and served.is_file() else self._files[number]
        model = ClientModel.load(path)
        if point and model.point != point:
            raise SettingsError(
                f"point = {point!r}: {self.models} has the {model.point} model of {title(number, model.site)}"
            )
        return model

    def route(self, samples: Iterable[Any]) -> list[Answer]:
        """Classify samples of unknown origin, as for system accuracy.

        A method with ``routes`` chooses a client for each sample. With any other method, the local models vote.

        Parameters
        ----------
        samples : iterable
            Samples that :class:`~posy.data.inputs.Preprocessing` accepts.

        Raises
        ------
        SettingsError
            If no model is stored, or the folder belongs to a node, which does not have the other clients' models.
        """
        queries, members = list(samples), self._members()
        first = self.predictor(members[0])
        if first.preprocessing.task.target != CLASSES:
            raise SettingsError(f"{self.path}: its clients do not predict classes, so they cannot vote on a sample")
        if first.settings.data.scaling == "client" and first.settings.method.routes:
            raise SettingsError(
                f"{self.path}: its clients standardise features differently (scaling = client), so the routing network "
                "cannot compare them; repeat the run with scaling = federation"
            )
        if first.settings.method.routes:
            return self._routed(first, queries, members)
        votes = [[p.label for p in ClientModel.load(self._files[c]).predict_all(queries)] for c in members]
        names = first.class_names
        chosen = np.array([[names.index(label) for label in labels] for labels in votes]).reshape(len(votes), -1)
        winners = majority_vote(chosen, len(names))
        shares = np.stack([(chosen == number).mean(axis=0) for number in range(len(names))], axis=1)
        return [
            Answer(Prediction(names[winner], dict(zip(names, row.tolist(), strict=True))), {})
            for winner, row in zip(winners, shares, strict=True)
        ]

    @torch.no_grad()
    def _routed(self, first: ClientModel, samples: list[Any], members: list[int]) -> list[Answer]:
        """Return the chosen clients' predictions; the choice depends only on layers that all clients share."""
        logits = first.client_logits(first.prepare(samples))
        sizes = np.ones(logits.shape[1])  # the clients' weights in the averaged loss, used as priors
        if first.settings.run.client_weights == "samples":
            for client, counts in self.clients.groupby("partition")["n_train"]:
                sizes[client] = counts.iloc[-1]
        absent = [client for client in range(logits.shape[1]) if client not in members]
        probabilities = routing_scores(first.settings.method, logits, sizes, absent).softmax(dim=-1)
        models = {client: self.predictor(client) for client in set(probabilities.argmax(dim=-1).tolist())}
        answers = []
        for sample, row in zip(samples, probabilities, strict=True):
            ranked = {c: float(row[c]) for c in row.argsort(descending=True, stable=True).tolist() if c in members}
            answers.append(Answer(models[next(iter(ranked))].predict(sample), ranked))
        return answers

    @property
    def models(self) -> Path:
        """The folder that contains the models; :class:`SettingsError` for a run with folds, which has several."""
        if self._has_folds and self.settings.get("save-models", True):
            raise SettingsError(f"{self.path} has no clients' models: {self._of_each_fold('models')}")
        return self.path / "models" if self._is_on_server else self.path

    @property
    def _is_on_server(self) -> bool:
        """Whether the folder contains the server's files of a run, rather than models on a node."""
        return (self.path / CONFIG).is_file()

    @property
    def _has_folds(self) -> bool:
        """Whether the run is a cross-validation, whose folds are runs in folders of this folder."""
        return self._is_on_server and self.settings.get("folds", 0) > 1 and not self.settings.get("fold", 0)

    def _of_each_fold(self, content: str) -> str:
        """Return the reason why a run with folds lacks some content, and the remedy."""
        folders = sorted(path for path in self.path.glob("fold-*") if path.is_dir())
        if not folders:
            return "no fold has started"
        return f"each fold of the run has its own {content}; use the folder of a fold, such as {folders[0]}"

    @cached_property
    def _files(self) -> dict[int, Path]:
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
        if number in self._files:
            return number
        first_clients = ", ".join(number_by_name or map(str, list(self._files)[:SHOWN]))
        more = "" if number_by_name or len(self._files) <= SHOWN else f", … {max(self._files)}"
        raise SettingsError(f"client {client!r}: {self.models} has the models of {first_clients}{more}")

    def _members(self) -> list[int]:
        """Return the clients that took part in the last round and whose models are stored."""
        stored = self._files.keys()
        if not len(self.clients):
            raise SettingsError(f"{self.path} has no finished round")
        last_rows = self.clients[self.clients["round"] == self.clients["round"].max()]
        members = set(last_rows[last_rows["n_train"].notna()]["partition"]) & stored
        return sorted(members)

    def _file(self, name: str) -> Path:
        """Return the path of a file in the run's record, or raise :class:`SettingsError` if it does not exist."""
        path = self.path / name
        if path.is_file():
            return path
        if not self._is_on_server:
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
