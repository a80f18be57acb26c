"""Score models on the server's central test set. These scores are not used to select a round or a setting."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.common.logger import log

from posy.bootstrap import intervals
from posy.client_app.hooks import ClientHooks
from posy.client_app.predictors import Member, Predictor, predictions_of
from posy.client_app.registry import client_class
from posy.client_app.training.batches import Samples
from posy.client_app.workspace import Workspace
from posy.data.central import CentralTest, central_test
from posy.metrics import metrics_for
from posy.models.parameters import FloatArray
from posy.randomness import numpy_generator
from posy.scores import Predictions, values_of
from posy.server_app.system import ON_NODES, models_withheld, outputs_of
from posy.spread import spread
from posy.storage import load_arrays, read_metadata
from posy.strategies import schedule
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.columns import POINTS
from posy.strategies.run_settings import metric_of

UNSCORED = "the %s models have no scores on the central test set: %s"
"""A warning, given the evaluation point and the reason."""
MEASURES = ("mean", "std", "min", "max", "clients")
"""The entries of :class:`posy.spread.Spread` that a summary contains for each metric on the central test set."""
Models = Iterable[tuple[Predictor, int]]
"""Models, each with the number of clients that use it."""


def central_test_of(workspace: Workspace) -> CentralTest | None:
    """Return a run's central test set, or None if it has none; see :func:`posy.data.central.central_test`."""
    settings = workspace.settings
    return central_test(settings.data, None if workspace.of_sites else workspace.dataset, settings.run.seed)


class CentralScores:
    """Scores models on the central test set.

    Parameters
    ----------
    test : CentralTest
        The central test set.
    strategy : PersonalisedStrategy
        The strategy, which serves the models.
    workspace : Workspace
        The server's workspace.
    models : Path
        The folder with the clients' models, if the clients share a file system with the server.
    """

    def __init__(self, test: CentralTest, strategy: PersonalisedStrategy, workspace: Workspace, models: Path) -> None:
        self.test = test
        self.strategy = strategy
        self.workspace = workspace
        self.models = models
        task = workspace.task
        run = workspace.settings.run
        self._metric = metric_of(run, task.target, task.num_classes).name
        self._names = [metric.name for metric in metrics_for(task.target, task.num_classes)]
        if run.all_metrics == "none":  # not with auto: for the server's own samples, sites need not allow any metric
            self._names = [self._metric]

    def of_round(self, server_round: int) -> dict[str, float]:
        """Return metrics of the served model, keyed by name, or an empty mapping unless all clients share the model.

        The result contains the run's metric or, if the evaluation reports all metrics on the test splits, all metrics.
        """
        settings = self.strategy.settings
        reports_all = schedule.reports_all_metrics(settings, server_round)
        names = self._names if reports_all else [self._metric]
        served = served_models(self.strategy)
        if served is None or len(served) != 1:
            return {}
        predictions = self._predictions(served[0][0])
        return {} if predictions is None else values_of(predictions, names)

    def of_last_round(self, server_round: int) -> dict[str, Any]:
        """Return the entry for the summary, with the metrics of the served and the local models.

        The entry contains the mean, standard deviation, minimum and maximum of each metric over the clients' models.
        With ``all-metrics = none``, this is only the run's metric. If all clients share one model, the entry also
        contains bootstrap intervals over the samples. The log states the reason if the models by which the method is
        scored are not available, unless :attr:`notice` states it.
        """
        entry: dict[str, Any] = {"samples": len(self.test.y), "round": server_round}
        withheld = self._withheld
        stored = {} if withheld else stored_models(self.models, self.strategy.members, server_round)
        served = served_models(self.strategy)
        for point in POINTS:
            models: Models = ((self._load(path), 1) for path in stored.get(point, ()))
            scores = self._scores(served if point == "served" and served is not None else models)
            if scores:
                entry[point] = scores
            elif point == self.strategy.method.point and not self.notice:
                log(WARNING, UNSCORED, point, withheld or ON_NODES)
        return entry

    @property
    def notice(self) -> str:
        """Why the models by which the method is scored will have no scores, if this is known before the first round."""
        point = self.strategy.method.point
        reason = self._withheld
        if not reason or (point == "served" and _has_served_models(self.strategy)):
            return ""
        text = UNSCORED % (point, reason)
        if point == "local" and _has_served_models(self.strategy):
            return f"{text}; the server scores the served models instead"
        return f"{text}; {self._remedy}"

    def _scores(self, models: Models) -> dict[str, Any]:
        """Return the number of models, and the spread of each metric over the clients that use them."""
        values: list[dict[str, float]] = []
        count, last = 0, None
        for predictor, clients in models:
            if (predictions := self._predictions(predictor)) is not None:
                count, last = count + 1, predictions
                values += [values_of(predictions, self._names)] * clients
        if last is None:
            return {}
        scores: dict[str, Any] = {"models": count, "metrics": {}}
        for name in self._names:
            if defined := [each[name] for each in values if name in each]:
                scores["metrics"][name] = central_spread(defined)
        if count == 1:
            rng = numpy_generator(self.workspace.settings.run.seed, "central-bootstrap")
            scores["intervals"] = intervals(last, list(scores["metrics"]), rng)
        return scores

    def _predictions(self, predictor: Predictor) -> Predictions | None:
        """Return a model's predictions for the central test set, or None if its outputs contain NaN."""
        outputs = outputs_of(self.workspace, predictor, self._samples)
        if bool(torch.isnan(outputs).any()):
            log(WARNING, "a model has no scores on the central test set: its outputs contain NaN")
            return None
        return predictions_of(outputs, self.test.y, self.workspace.task, self.workspace.settings.run)

    def _load(self, path: Path) -> Predictor:
        arrays: dict[str, FloatArray] = load_arrays(path)
        return Predictor.from_arrays(arrays, self.strategy.architecture, self.strategy.method)

    @cached_property
    def _samples(self) -> Samples:
        return Samples(*(tensor.to(self.workspace.device) for tensor in self.test))

    @property
    def _withheld(self) -> str:
        """Why the clients store no models for the server, or an empty string."""
        settings = self.workspace.settings
        if settings.train.withholds_scores:
            return f"dp-scores = {settings.train.dp_scores!r} withholds the scores of the clients' models"
        return models_withheld(settings, self.workspace)

    @property
    def _remedy(self) -> str:
        """How to obtain scores although the clients store no models for the server."""
        settings, method = self.workspace.settings, "choose a method whose server has complete models"
        if self.workspace.of_sites:
            return method
        needed = {
            "secure-aggregation = false": settings.run.secure_aggregation,
            "dp-scores = 'exact'": settings.train.withholds_scores,
            "save-models = true": not settings.run.save_models,
        }
        return f"set {' and '.join(text for text, is_needed in needed.items() if is_needed)}, or {method}"


def central_spread(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean, standard deviation, minimum, maximum and number of the values in a nonempty sequence."""
    over_clients = spread(values, [1.0] * len(values))
    assert over_clients is not None
    return {key: value for key, value in over_clients.items() if key in MEASURES}


def served_models(strategy: PersonalisedStrategy) -> list[tuple[Predictor, int]] | None:
    """Return the distinct served models, each with the number of clients that use it.

    The result is None if only the clients have the complete models, because a part of each stays on its client, or
    because clients compute them from the arrays that they receive.
    """
    if not _has_served_models(strategy):
        return None
    arrays = [strategy.serve(member)["model"] for member in strategy.members]
    if any(array.shape != (strategy.size,) for array in arrays):
        return None
    groups: dict[int, list[FloatArray]] = {}  # keyed by identity: clients of one model receive the same array
    for array in arrays:
        groups.setdefault(id(array), []).append(array)
    models = []
    for same in groups.values():
        parameters = np.empty(strategy.size, np.float32)
        strategy.shared.put(parameters, same[0])
        models.append((Predictor([Member(torch.from_numpy(parameters), strategy.architecture)]), len(same)))
    return models


def _has_served_models(strategy: PersonalisedStrategy) -> bool:
    """Return whether the clients use complete models as the server sends them."""
    client = client_class(strategy.settings.run.method)
    hooks = (ClientHooks.served_model, ClientHooks.assembled)
    is_sent = (client.served_model, client.assembled) == hooks and "model" in strategy.method.sent
    return is_sent and strategy.shared.size == strategy.size


def stored_models(folder: Path, clients: Sequence[int], server_round: int) -> dict[str, list[Path]]:
    """Return the files of the models that clients stored in a round, keyed by evaluation point."""
    files: dict[str, dict[int, Path]] = {point: {} for point in POINTS}
    for client in clients:
        for name in ("client", "served"):
            path = folder / f"{name}-{client}.safetensors"
            if path.is_file() and (metadata := read_metadata(path))["round"] == str(server_round):
                files[metadata["point"]][client] = path
    return {point: list(paths.values()) for point, paths in files.items()}
