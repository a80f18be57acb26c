"""Handle a message on a client: the method trains or evaluates, then Posy scores the model and protects the reply."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.hooks import Steps, result_of
from posy.client_app.jobs import Jobs
from posy.client_app.none_fits import calibrate_client
from posy.client_app.predictors import Predictor, array_of, loss_of, predictions_of
from posy.client_app.privacy import UnprotectedError, noised
from posy.client_app.secure_aggregation import Masking
from posy.client_app.state import StateError
from posy.client_app.training.work import Split, TrainingDivergedError, advice_on_divergence
from posy.metrics import METRICS, metrics_for
from posy.models.parameters import Layout
from posy.predictions import write_predictions
from posy.scores import Predictions, values_of
from posy.storage import write_arrays
from posy.strategies.arrays import RETURNS, UNIFORM_WEIGHTS, Arrays, check_names, dimensions, shape_of
from posy.strategies.masking import OutOfRangeError, Words
from posy.strategies.privacy import BELOW
from posy.strategies.replies import LOSS, Update
from posy.strategies.run_settings import (
    ALL_METRICS,
    CALIBRATES,
    CENTRAL,
    DELIVERY,
    LAST_ROUND,
    LOCAL,
    OFF,
    SAMPLE,
    UNIFORM,
    metric_of,
)
from posy.strategies.score_sums import ScoreSums
from posy.strategies.secure_aggregation import MASKED

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""The splits of a client's samples."""
LARGEST_LOSS = 1e6
"""Maximum loss that a masked sum includes. A larger loss counts as missing."""
Reply = tuple[Arrays | float, int, dict[str, Any]]
"""The arrays or the loss, the number of samples, and the metrics."""


class LocalRun:
    """One client's training round or evaluation.

    Parameters
    ----------
    jobs : Jobs
        The client's jobs.
    received : dict
        The message's arrays, keyed by name.
    config : mapping
        The message's config.
    masking : Masking, optional
        The masks for the reply, if the run uses secure aggregation.
    """

    def __init__(self, jobs: Jobs, received: Arrays, config: Mapping[str, Any], masking: Masking | None = None) -> None:
        self.jobs = jobs
        self.client = client = jobs.client
        self.settings, self.method = client.settings, client.method
        self.config = config
        self.masking = masking
        self.task = client.workspace.task
        self._score_sums: dict[
            str, list[int] | None
        ] = {}  # sums over the samples, keyed by score, if the run uses secure aggregation
        self.jobs.moments, self.jobs.samples_private = None, False
        client.round = int(config["server-round"])
        client.lr = float(config.get("lr", self.settings.train.lr))
        if client.settings is not client.workspace.settings:  # the message contains the run's rate for this round
            client.lr *= client.settings.train.lr / client.workspace.settings.train.lr
        self._keep_once(received)
        self.received = {name: received[name] for name in self.method.sent if name in received}
        """The arrays that the method's hooks receive."""

    # -- training --------------------------------------------------------------------------------------

    def train(self) -> Steps[tuple[Arrays, int, dict[str, Any]]]:
        """Train, and score the local model on the client's test split if the config has ``evaluate-local``."""
        client, train = self.client, self.settings.train
        self.jobs.moments = {} if train.optimizer_state == "kept" else None
        self.jobs.samples_private = train.dp == SAMPLE
        update, local = yield from self._update()
        loss = float(update.loss)
        if not (np.isfinite(loss) or train.withholds_scores or self.masking):
            advice = advice_on_divergence(train)
            raise TrainingDivergedError(f"training diverged: the training loss is {loss}; {advice}")
        self.jobs.keep_moments()
        metrics: dict[str, Any] = {**update.metrics, "num-test": len(client.data.y_test)}
        if not train.withholds_scores:
            metrics["train-loss"] = loss
        if local is not None:
            if self.config.get("evaluate-local"):
                metrics |= yield from self._scores("local", local)
            save_model(self.jobs, self.config, local, "local", metrics)
        metrics |= {"samples": self.jobs.processed}
        arrays = self._named(update)
        if train.dp in (LOCAL, CENTRAL):
            self._check_protected(update.metrics)
            arrays, metrics = self._protected(arrays, metrics)
        if self.masking:
            if update.metrics:
                raise ValueError(
                    f"the method sends {', '.join(update.metrics)}, which secure aggregation does not mask"
                )
            arrays, metrics = {MASKED: self._masked_update(arrays, metrics)}, {}
        return arrays, client.num_train, metrics

    def _update(self) -> Steps[tuple[Update, Predictor | None]]:
        """Return the method's update and the local model.

        If training diverges and an error would reveal this, the update is replaced by one that changes nothing.
        """
        try:
            update, local = yield from self.client.local_round(self._tensors, self.config)
            return update, self.client.plain(local) if isinstance(local, Tensor) else local
        except TrainingDivergedError as error:
            if not (self.masking or self.settings.train.withholds_scores):
                raise
            log(WARNING, "client %s sends a zero update in round %s: %s", self.client.client, self.client.round, error)
            return Update(dict(self._unchanged()), np.nan), None

    def _named(self, update: Update) -> Arrays:
        """Return an update's arrays in the declared order. Raise :class:`TypeError` if their names do not match.

        The entries for BatchNorm's running statistics are set to 0 if an array's declaration excludes them.
        """
        expected, kind = self._expected(), type(self.method).__name__
        check_names("the update has", update.arrays, expected, f"{kind}.returned")
        arrays = {name: array_of(update.arrays[name]) for name in expected}
        for name, array in arrays.items():
            if not self.method.returned[name].has_statistics:
                arrays[name] = without_statistics(array, self.client.layout)
        return arrays

    def _expected(self) -> tuple[str, ...]:
        """Return the names of the arrays that the server expects."""
        names = self.config.get(RETURNS)
        return tuple(self.method.returned) if names is None else tuple(name for name in str(names).split(",") if name)

    def _unchanged(self) -> Arrays:
        """Return the arrays of an update that changes nothing."""
        client = self.client
        sizes = dimensions(client.architecture, client.shared.size)
        shapes = {
            name: shape_of(self.method.returned[name], self.received, sizes, self.method) for name in self._expected()
        }
        zeros = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        return self.method.reference(client.architecture, self.received, zeros)

    def _references(self, arrays: Arrays) -> list[npt.NDArray[Any]]:
        """Return each array's reference, from which the array's change is measured.

        Raises :class:`TypeError` if a reference is missing.
        """
        start = self.method.reference(self.client.architecture, self.received, arrays)
        check_names("reference returns", start, tuple(arrays), f"{type(self.method).__name__}.returned")
        return [start[name] for name in arrays]

    def _check_protected(self, metrics: Mapping[str, float]) -> None:
        """Raise :class:`UnprotectedError` if the method sends metrics, because no noise is added to them."""
        if metrics:
            raise UnprotectedError(
                f"method = {self.settings.run.method!r}: its clients send metrics without noise; the method must "
                f"reject dp = {self.settings.train.dp!r}"
            )

    def _protected(self, arrays: Arrays, metrics: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
        """Return a reply's arrays and metrics, protected by local or central differential privacy."""
        train = self.settings.train
        adaptive = train.dp == CENTRAL and train.dp_clip_quantile > 0
        # With local noise, a clipping norm from the server would break the guarantee.
        clip = float(self.config["dp-clip"]) if adaptive else train.dp_clip
        threshold = self.masking.threshold if self.masking else 0
        references = self._references(arrays)
        noisy, norm = noised(list(arrays.values()), references, self.settings, clip=clip, threshold=threshold)
        if adaptive:
            metrics[BELOW] = float(norm <= clip)
        return dict(zip(arrays, noisy, strict=True)), metrics

    # -- masks -----------------------------------------------------------------------------------------

    def _masked_update(self, arrays: Arrays, metrics: dict[str, Any]) -> Words:
        """Return the masked words of an update and its scores."""
        try:
            return self._masked(arrays, self._numbers(metrics, training=True))
        except OutOfRangeError as error:  # raised before the masks are used
            log(WARNING, "client %s sends a zero update in round %s: %s", self.client.client, self.client.round, error)
            numbers = self._numbers({"samples": self.jobs.processed}, training=True)
            return self._masked(self._unchanged(), numbers)

    def _masked(self, arrays: Arrays, numbers: Sequence[int]) -> Words:
        """Return the masked words of an update and of scores. For an evaluation, the update is empty."""
        assert self.masking is not None
        references, limit = self._references(arrays), self.settings.run.secure_range
        uniform = self.config.get(UNIFORM_WEIGHTS) or self.settings.run.client_weights == UNIFORM or not arrays
        weight = 1 if uniform else self.client.num_train
        common = [*self.received.values(), *self._stored_once()]
        return self.masking.mask_reply(list(arrays.values()), references, weight, limit, common, numbers)

    def _numbers(self, metrics: Mapping[str, Any], *, training: bool) -> list[int]:
        """Return the client's scores as whole numbers for the masked sum.

        A loss that the sum cannot represent counts as missing, because an error would reveal it.
        """
        invalid_keys = {
            key for key, value in metrics.items() if key.endswith("-loss") and not 0 <= value <= LARGEST_LOSS
        }
        valid_metrics = {key: value for key, value in metrics.items() if key not in invalid_keys}
        sizes: dict[str, int] = {split: len(self.jobs.samples(split).y) for split in SPLITS}
        return self._sums(training=training).numbers(valid_metrics, sizes, self._score_sums)

    def _sums(self, *, training: bool) -> ScoreSums:
        """Return the layout of the scores in a masked sum."""
        all_metrics = bool(self.config.get(ALL_METRICS))
        return ScoreSums(self.settings, self.task, training=training, all_metrics=all_metrics)

    # -- evaluation ------------------------------------------------------------------------------------

    def evaluate(self) -> Steps[Reply]:
        """Score the served model and, with ``evaluate-personal``, the local model on the client's test split.

        With ``delivery``, the client stores its model, and the result contains nothing about the client.
        """
        if not self.config.get(DELIVERY):
            return (yield from self._evaluated())
        try:
            yield from self._evaluated()
        except TrainingDivergedError as error:
            if not (self.settings.run.secure_aggregation or self.settings.train.withholds_scores):
                raise
            log(WARNING, "client %s has no final model: %s", self.client.client, error)  # an error would reveal this
        return 0.0, 0, {}

    def _evaluated(self) -> Steps[Reply]:
        """Return the result of an evaluation.

        With secure aggregation, the result contains only masked words, instead of the loss and the metrics.
        """
        client = self.client
        metrics: dict[str, Any] = {"num-train": client.num_train}
        best, point = None, "served"
        if self.received:
            best = served = yield from result_of(client.served_model(self._tensors, self.config))
            if not self.settings.train.withholds_scores:
                metrics["chosen"] = served.chosen
            metrics |= yield from self._scores("served", served)
            if self.method.point == "served":
                path = save_model(self.jobs, self.config, served, "served", metrics, "served")
                self._calibrate(path)
        if client.personal_in_every_evaluation or self.config.get("evaluate-personal"):
            personal = yield from self._personal_model()
            if personal is not None:
                best, point = personal, "local"
                metrics |= yield from self._scores("local", personal)
            if best is not None:
                save_model(self.jobs, self.config, best, point, metrics)
        metrics |= {"samples": self.jobs.processed}
        if self.masking:
            if not client.personal_in_every_evaluation:  # the sum would cover only the clients that have a local model
                metrics = {key: value for key, value in metrics.items() if not key.startswith("local")}
            return {MASKED: self._masked({}, self._numbers(metrics, training=False))}, 0, {}
        return metrics.get("served-loss", 0.0), len(client.data.y_test), metrics

    def _calibrate(self, path: Path | None) -> None:
        """Calibrate the distance to the client's samples after the last round, if the node keeps its final model.

        With noise, means of training samples would exceed the privacy guarantee.
        """
        is_final = bool(self.config.get(LAST_ROUND)) and bool(self.config.get(CALIBRATES))
        if path is None or not is_final or not self.method.routes or self.settings.train.dp != OFF:
            return
        calibrate_client(path, self.client.client, self.client.data, self.client.device)

    def _personal_model(self) -> Steps[Predictor | None]:
        """Return the local model, or None if its training diverged. The served model's scores are still reported."""
        try:
            return (yield from result_of(self.client.personal_model(self._tensors, self.config)))
        except TrainingDivergedError as error:
            log(WARNING, "client %s has no local model in round %s: %s", self.client.client, self.client.round, error)
            return None

    def _scores(self, point: str, predictor: Predictor) -> Steps[dict[str, float]]:
        """Return a predictor's scores on each configured split that has samples, keyed by name.

        The training split is scored only with ``evaluate-training``. A run with noise reports no scores by default.
        """
        values: dict[str, float] = {}
        if self.settings.train.withholds_scores:
            return values
        advice = advice_on_divergence(self.settings.train)
        for word, split in self.settings.scored_splits.items():
            key = f"{point}-{word}" if word else point
            if len(labels := self.jobs.samples(split).y):
                outputs = yield from self.client.predict(predictor, split)
                if self.masking and bool(torch.isnan(outputs).any()):
                    client, number = self.client.client, self.client.round
                    log(WARNING, "client %s has no %s scores in round %s: its outputs contain NaN", client, key, number)
                    continue  # an error would reveal the NaN
                values[f"{key}-{LOSS}"] = loss_of(outputs, labels, advice, self.task.target)
                y = getattr(self.client.data, f"y_{split}")
                predictions = predictions_of(outputs, y, self.task, self.settings.run)
                sums = self._sums(training=point == "local")
                if self.masking and sums.has_sums(key):
                    self._score_sums[key] = sums.sums_of(key, predictions)
                if key == point:
                    save_predictions(self.jobs, self.config, predictions, point)
                scores = values_of(predictions, self._metrics(split))
                values |= {f"{key}-{name}": score for name, score in scores.items()}
                if split == "test" and self.client.workspace.of_sites:
                    log_scores(self.client.round, point, scores, values[f"{key}-{LOSS}"], len(labels))
        return values

    def _metrics(self, split: Split) -> list[str]:
        """Return the names of the metrics to report for a split.

        By default, this is the run's metric. For the test split, the config can request all metrics for the target.
        """
        size = self.task.num_classes
        if split == "test" and self.config.get(ALL_METRICS):
            return [metric.name for metric in metrics_for(self.task.target, size)]
        return [metric_of(self.settings.run, self.task.target, size).name]

    # -- received arrays -------------------------------------------------------------------------------

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        """The received arrays on the device. Do not write to them."""
        return {name: self.client.workspace.tensor(np.asarray(array)) for name, array in self.received.items()}

    def _keep_once(self, received: Arrays) -> None:
        """Store in the client's state the arrays that the server does not resend.

        Raises
        ------
        StateError
            If the message lacks an array that the client has not stored, for example because the client lost its state.
            It is also raised if an array's values differ from those in an earlier message.
        """
        prefix, client = f"{self.method.sent_once}-", self.client
        if not self.method.sent_once:
            return
        new_arrays = {
            int(name.removeprefix(prefix)): array for name, array in received.items() if name.startswith(prefix)
        }
        for number, array in sorted(new_arrays.items()):
            name, count = f"{prefix}{number}", len(self._stored_once())
            if number > count + 1:
                raise StateError(f"client {client.client} stores {count} arrays, but the message begins with {name}")
            if number == count + 1:
                client.state[name] = np.array(array)
            elif not np.array_equal(client.state[name], array):
                raise StateError(f"the array {name} differs from the same array in an earlier message")

    def _stored_once(self) -> list[npt.NDArray[Any]]:
        """Return, in order, the stored arrays that the server sends only once."""
        prefix, state = f"{self.method.sent_once}-", self.client.state
        if not self.method.sent_once:
            return []
        numbers = sorted(int(name.removeprefix(prefix)) for name in state if name.startswith(prefix))
        return [np.asarray(state[f"{prefix}{number}"]) for number in numbers]


def without_statistics(array: npt.NDArray[Any], layout: Layout) -> npt.NDArray[Any]:
    """Return ``array`` with the entries for BatchNorm's running statistics set to 0."""
    parameters = layout.trainable
    if parameters.size == layout.size or array.shape[-1:] != (layout.size,):
        return array
    return parameters.put(np.zeros_like(array), parameters.take(array))


def log_scores(server_round: int, point: str, scores: Mapping[str, float], loss: float, count: int) -> None:
    """Log a site's unrounded test scores. The log stays at the site, whose policy may hide the scores."""
    texts = [*(f"{name} {METRICS[name].format(score)}" for name, score in scores.items()), f"loss {loss:.4g}"]
    log(INFO, "round %s, %s model: %s on %s test samples", server_round, point, ", ".join(texts), count)


def save_model(
    jobs: Jobs,
    config: Mapping[str, Any],
    predictor: Predictor,
    point: str,
    metrics: Mapping[str, Any],
    file: str = "client",
) -> Path | None:
    """Write a model with its settings and preprocessing to the folder that ``save-models-to`` names, if any.

    The file also contains the scores in ``metrics``, unrounded, because it stays with the client. The function returns
    its path, or None.

    ``client-<i>`` is the local model, or the served model if the client has no local model. ``served-<i>`` is the
    served model of a method whose ``point`` is ``served``.
    """
    folder, client = config.get("save-models-to"), jobs.client
    if not folder:
        return None
    path = Path(str(folder)) / f"{file}-{client.client}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    scores = {name: metrics[key] for name in (*METRICS, LOSS) if (key := f"{point}-{name}") in metrics}
    metadata = {
        "client": str(client.client),
        "site": str(config.get("site", "")),
        "round": str(client.round),
        "point": point,
        "chosen": predictor.chosen,
        "final": str(bool(config.get(LAST_ROUND))),
        "scores": json.dumps(scores),
        "num-test": str(len(client.data.y_test)),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "settings": client.settings.to_json(),
        "preprocessing": client.workspace.preprocessing(client.client),
    }
    write_arrays(path, predictor.as_arrays(), metadata)
    return path


def save_predictions(jobs: Jobs, config: Mapping[str, Any], predictions: Predictions, point: str) -> None:
    """Write the predictions for the test split to the folder that ``save-predictions-to`` names, if any."""
    if folder := config.get("save-predictions-to"):
        workspace, client = jobs.client.workspace, jobs.client.client
        samples = workspace.partition.test[workspace.part_of(client)]
        path = Path(str(folder)) / f"{point}-{client}.csv"
        write_predictions(path, predictions, samples, workspace.task.class_names)
