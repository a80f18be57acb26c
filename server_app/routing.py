"""Answer queries of unknown origin: rank the clients with a routing network, or let the clients' models vote."""

from collections.abc import Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.none_fits import Calibration
from posy.client_app.predictors import Member, Predictor
from posy.client_app.stored import ClientModel, Prediction
from posy.client_app.workspace import Workspace, plain_architecture
from posy.data.central import agreed_preprocessing
from posy.data.inputs import Preprocessing
from posy.data.settings import SITES
from posy.metrics import CLASSES
from posy.server_app.system import routing_scores
from posy.settings import SettingsError
from posy.spread import majority_vote, vote_shares
from posy.storage import read_arrays, read_metadata
from posy.strategies.cohorts import members_of
from posy.strategies.registry import read_settings
from posy.strategies.settings import Settings
from posy.words import listed

if TYPE_CHECKING:
    from pandas import DataFrame

SERVER = "server.safetensors"
"""The file of the server's state in a run's folder of models."""


class StoredRun(Protocol):
    """The files of a run, as :class:`posy.server_app.record.Record` reads them."""

    path: Path

    @property
    def of_server(self) -> bool:
        """Whether the files are in the run's folder on the server."""

    @property
    def models(self) -> Path:
        """The folder that contains the models."""

    @property
    def files(self) -> dict[int, Path]:
        """The clients' models, keyed by client."""

    @property
    def stored_names(self) -> dict[int, str]:
        """The names of the clients whose models are stored."""

    @property
    def titles(self) -> dict[int, str]:
        """The display names of all clients."""

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, by key."""

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""

    @property
    def clients(self) -> "DataFrame":
        """The rows of ``clients.csv``."""

    def predictor(self, client: int | str, point: str = "") -> ClientModel:
        """Return a client's model for predictions."""


class Answer(NamedTuple):
    """The federation's prediction for a sample of unknown origin.

    ``clients`` maps each client to the probability that the sample is from this client, most probable first. If the
    first client's model is not in the folder, ``prediction`` is None. If the clients vote, ``clients`` is empty, and
    ``prediction`` contains each class's fraction of the votes. ``distance`` is the sample's relative distance to the
    clients' data, if the run has a :class:`~posy.client_app.none_fits.Calibration`.
    """

    prediction: Prediction | None
    clients: dict[int, float]
    distance: float | None = None

    @property
    def none_fits(self) -> bool | None:
        """Whether the sample is far from every client's data, or None if the distance is not calibrated."""
        return None if self.distance is None else self.distance > 1


def router_of(record: StoredRun) -> ClientModel:
    """Return the model that prepares the samples and, if the method routes, ranks the clients.

    The network of the newest served model contains the server's layers. Without such a file, the layers come from
    the server's file.

    Raises
    ------
    SettingsError
        If neither exists, the clients do not predict classes, or each client has its own scale.
    """
    settings = settings_of(record)
    served = {path: int(read_metadata(path)["round"]) for path in record.models.glob("served-*.safetensors")}
    if settings.method.routes and not served and (record.models / SERVER).is_file():
        model = _server_model(record, settings)
    else:
        path = max(sorted(served), key=lambda path: served[path], default=None)
        model = ClientModel.load(path or next(iter(record.files.values())))
    if model.preprocessing.task.target != CLASSES:
        raise SettingsError(f"{record.path}: its clients do not predict classes, so they cannot vote on a sample")
    if settings.method.routes and settings.data.scaling == "client":
        raise SettingsError(
            f"{record.path}: its clients standardise features differently (scaling = client), so the routing network "
            "cannot compare them; repeat the run with scaling = federation"
        )
    return model


def route(record: StoredRun, samples: Sequence[Any]) -> list[Answer]:
    """Return the answers for samples; see :meth:`posy.server_app.record.Record.route`."""
    router = router_of(record)
    return _routed(record, router, samples) if router.settings.method.routes else _voted(record, router, samples)


def settings_of(record: StoredRun) -> Settings:
    """Return the settings of a run."""
    return read_settings({}, str(record.path), record.settings)


def _server_model(record: StoredRun, settings: Settings) -> ClientModel:
    """Return a model with the server's shared layers. Its personal layers are zero, so it does not predict classes."""
    path = record.models / SERVER
    if settings.data.dataset == SITES:
        preprocessing = agreed_preprocessing(settings.data)
    else:
        preprocessing = Preprocessing.of(Workspace(settings).dataset, 0)
    plain = plain_architecture(replace(settings, train=replace(settings.train, weights="")), preprocessing.task)
    network = settings.method.network(plain, settings.data.num_clients)
    shared = network.divided(settings.method.personal(network))[0]
    layers = read_arrays(path)[0].get("model")
    if layers is None or layers.shape != (shared.size,):
        raise SettingsError(f"{path} does not contain the layers that rank the clients; run `posy route` at a site")
    parameters = np.zeros(network.layout.size, np.float32)
    shared.put(parameters, layers)
    about = {"client": "-1", "round": str(record.summary.get("rounds", 0)), "site": "", "point": "served", "chosen": ""}
    return ClientModel(Predictor([Member(torch.from_numpy(parameters), network)]), preprocessing, settings, about)


@torch.no_grad()
def _routed(record: StoredRun, router: ClientModel, samples: Sequence[Any]) -> list[Answer]:
    """Return the ranked clients, and the prediction of the first one if its model is in the folder."""
    x = router.prepare(samples)
    logits, calibration = router.client_logits(x), Calibration.read(record.models, router.round)
    distances = [None] * len(x) if calibration is None else calibration.relative(router, x).tolist()
    candidates, weights = candidates_of(record, router.settings)
    absent = [client for client in range(logits.shape[1]) if client not in candidates]
    probabilities = routing_scores(router.settings.method, logits, weights, absent).softmax(dim=-1)
    stored = record.stored_names
    models = {client: record.predictor(client) for client in _firsts(probabilities) if client in stored}
    answers = []
    for sample, row, distance in zip(samples, probabilities, distances, strict=True):
        ranked = {c: float(row[c]) for c in row.argsort(descending=True, stable=True).tolist() if c in candidates}
        model = models.get(next(iter(ranked)))
        answers.append(Answer(model.predict(sample) if model else None, ranked, distance))
    return answers


def _firsts(probabilities: Tensor) -> set[int]:
    return set(probabilities.argmax(dim=-1).tolist())


def candidates_of(record: StoredRun, settings: Settings) -> tuple[set[int], npt.NDArray[np.float64]]:
    """Return the clients to which a sample may be routed, and each client's weight in the averaged loss ``(M,)``."""
    members, weights = set(members_of(settings)), np.ones(settings.data.num_clients)
    if record.of_server:
        rows = record.clients[record.clients["n_train"].notna()]
        members &= set(rows["partition"])
        if settings.run.client_weights == "samples":
            for client, counts in rows.groupby("partition")["n_train"]:
                weights[client] = counts.iloc[-1]
    elif settings.run.client_weights == "samples" and _uses_weights(settings):
        log(
            WARNING,
            "a site does not know how many samples the other sites have, so the ranking favours sites with many "
            "samples; `posy route` on the server corrects for this",
        )
    return members, weights


def _uses_weights(settings: Settings) -> bool:
    """Return whether a method's ranking depends on the clients' weights."""
    count = settings.data.num_clients
    scores = [
        settings.method.client_scores(torch.zeros(1, count), n) for n in (np.ones(count), np.arange(1.0, count + 1))
    ]
    return not torch.allclose(scores[0] - scores[0][:, :1], scores[1] - scores[1][:, :1])


def _voted(record: StoredRun, router: ClientModel, samples: Sequence[Any]) -> list[Answer]:
    """Return each class's fraction of the votes of the local models."""
    members = voters_of(record, router.settings)
    votes = [[p.label for p in ClientModel.load(record.files[client]).predict_all(samples)] for client in members]
    names = router.class_names
    chosen = np.array([[names.index(label) for label in labels] for labels in votes]).reshape(len(votes), -1)
    winners = majority_vote(chosen, len(names))
    shares = vote_shares(chosen, len(names))
    return [
        Answer(Prediction(names[winner], dict(zip(names, row.tolist(), strict=True))), {})
        for winner, row in zip(winners, shares, strict=True)
    ]


def voters_of(record: StoredRun, settings: Settings) -> list[int]:
    """Return the clients that vote: they took part in the last round, and their models are in the folder.

    Raises
    ------
    SettingsError
        If fewer than two of several clients can vote.
    """
    expected = set(members_of(settings))
    if record.of_server:
        if not len(record.clients):
            raise SettingsError(f"{record.path} has no finished round")
        last_rows = record.clients[record.clients["round"] == record.clients["round"].max()]
        expected = set(last_rows[last_rows["n_train"].notna()]["partition"])
    voters, missing = sorted(expected & record.files.keys()), sorted(expected - record.files.keys())
    if not missing:
        return voters
    titles = listed([record.titles[client] for client in missing])
    if len(voters) < 2:
        raise SettingsError(
            f"{record.models} lacks the models of {titles}: with method = {settings.run.method!r}, the clients' models "
            "vote, so they must be in one folder; in a federation they stay at the sites. `posy predict` uses one model"
        )
    log(WARNING, "%s of %s clients vote: the models of %s are missing", len(voters), len(expected), titles)
    return voters
