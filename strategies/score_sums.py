"""Scores under secure aggregation: each client adds integers to a masked sum, and the server sees only the sum.

The server never receives an individual client's loss, metrics or number of processed samples. The settings, the task
and the message alone determine the layout of the integers, so the layout is the same for all clients.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from posy.binned import STEPS, BinnedScores
from posy.data.task import Task
from posy.metrics import LABELS, VALUES, column_of, metrics_for
from posy.scores import Predictions
from posy.spread import Spread
from posy.strategies.replies import LOSS
from posy.strategies.run_settings import RunSettings, metric_of, positive_class
from posy.strategies.settings import Settings
from posy.value_sums import count_of, metrics_of, value_sums

MOST_BINNED = 50
"""Maximum number C of classes or labels for which masked sums contain binned scores, whose size grows with C²."""
TRAIN = "train"
"""Key of the tally of the training loss."""


class Tally(NamedTuple):
    """Scores of one model on one split, summed over samples and clients."""

    clients: int = 0
    """Number of clients with samples in the split."""
    samples: int = 0
    loss: int = 0
    """Sum of the samples' losses, in units of 1 / :data:`posy.binned.STEPS`."""
    metrics: Mapping[str, float] = {}
    """The metrics over all samples, keyed by name."""
    numbers: tuple[int, ...] = ()
    """The sums from which :func:`metrics_in` computes the metrics."""

    def spread(self, measure: str) -> Spread | None:
        """Return the ``loss`` or a metric over all samples, or None if it is not defined.

        The values of individual clients are not available, so all other statistics are None.
        """
        if not self.samples:
            return None
        value = self.loss / STEPS / self.samples if measure == LOSS else self.metrics.get(measure)
        if value is None:
            return None
        return Spread(
            mean=value,
            std=None,
            min=None,
            max=None,
            tenth=None,
            weighted=None,
            jain=None,
            clients=self.clients,
            samples=self.samples,
        )


class ScoreSums:
    """The layout of the numbers that the clients add to a masked sum in one phase.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    task : Task
        The task of the run.
    training : bool
        Whether the clients reply to a training message.
    all_metrics : bool
        Whether the clients report all metrics on the test splits.
    """

    def __init__(self, settings: Settings, task: Task, *, training: bool, all_metrics: bool = False) -> None:
        self.settings, self.task, self.training = settings, task, training
        self.metric = metric_of(settings.run, task.target, task.num_classes).name
        self._all_metrics = all_metrics

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The keys of the tallies in order, such as ``served-validation``."""
        points = ("local",) if self.training else ("served", "local")
        keys = tuple(point + suffix for suffix in self.splits for point in points)
        return (TRAIN, *keys) if self.training else keys

    @cached_property
    def splits(self) -> dict[str, str]:
        """The scored splits, keyed by the suffix in the scores' keys."""
        return {f"-{word}" if word else "": split for word, split in self.settings.scored_splits.items()}

    def split_of(self, key: str) -> str:
        """Return the split that a tally covers."""
        return "train" if key == TRAIN else self.splits[key.removeprefix(key.partition("-")[0])]

    def has_sums(self, key: str) -> bool:
        """Return whether the tally for a key contains the result of :meth:`sums_of`, instead of the accuracy alone."""
        if key == TRAIN:
            return False
        if self.task.target == VALUES:
            return True
        if self.task.num_classes > MOST_BINNED:
            return False
        return self.reported(key) != ("accuracy",)

    def reported(self, key: str) -> tuple[str, ...]:
        """Return the names of the metrics that the server reports for a tally, although its sums may give others."""
        if self._all_metrics and self.split_of(key) == "test":
            return tuple(metric.name for metric in metrics_for(self.task.target, self.task.num_classes))
        return (self.metric,)

    def sums_of(self, key: str, predictions: Predictions) -> list[int] | None:
        """Return the sums for a tally, from which metrics can be computed; None if the sums would be too large.

        These are :class:`~posy.binned.BinnedScores` for classes; the same for labels, followed by the number of samples
        whose labels are all predicted correctly; and the sums of :mod:`posy.value_sums` for values. Sums that the
        reported metrics do not need are 0.
        """
        reported = self.reported(key)
        if self.task.target == VALUES:
            sums = value_sums(predictions, self.task.value_mean, self.task.value_std, r2="r2" in reported)
            size = self.task.num_classes
            # The loss already reveals the mean squared error.
            return sums if sums is None or "mae" in reported else [*[0] * size, *sums[size:]]
        numbers = BinnedScores.of(predictions).only(self.task.target, reported).numbers
        if self.task.target == LABELS:
            correct = int((predictions.predicted == predictions.y).all(axis=1).sum())
            numbers.append(correct if "accuracy" in reported else 0)
        return numbers

    @cached_property
    def count(self) -> int:
        """Number of integers that a client adds: three or more per tally, and one for its processed samples."""
        return sum(len(self._empty(key)) for key in self.keys) + 1

    def numbers(
        self, metrics: Mapping[str, Any], sizes: Mapping[str, int], sums: Mapping[str, Sequence[int] | None]
    ) -> list[int]:
        """Return a client's numbers for the masked sum.

        Parameters
        ----------
        metrics : mapping
            The client's scores by key, ``samples``, and after training ``train-loss``. A missing score adds nothing.
        sizes : mapping
            The client's number of samples in each split, keyed by the split's name.
        sums : mapping
            The client's results of :meth:`sums_of`, keyed by tally.

        Raises
        ------
        ArithmeticError
            If a loss is not finite.
        """
        numbers: list[int] = []
        for key in self.keys:
            loss = metrics.get(f"{key}-{LOSS}")
            count = sizes[self.split_of(key)]
            scores = sums.get(key) if self.has_sums(key) else []
            if loss is None or not count or scores is None:
                numbers += self._empty(key)
                continue
            numbers += [1, count, round(count * float(loss) * STEPS)]
            numbers += scores
            if key != TRAIN and not self.has_sums(key):
                numbers.append(round(count * float(metrics.get(f"{key}-accuracy", 0.0))))
        return [*numbers, int(metrics.get("samples", 0))]

    def _empty(self, key: str) -> list[int]:
        """Return the zeros that a client adds to a tally of a split without samples."""
        if key == TRAIN:
            return [0] * 3
        if not self.has_sums(key):
            return [0] * 4
        size = self.task.num_classes
        if self.task.target == VALUES:
            return [0] * (3 + count_of(size, r2="r2" in self.reported(key)))
        return [0] * (3 + BinnedScores.count(size) + (self.task.target == LABELS))

    def tallies(self, numbers: Sequence[int]) -> tuple[dict[str, Tally], int]:
        """Split the sums of :meth:`numbers` into tallies, keyed by name, and the number of processed samples."""
        tallies, start = {}, 0
        for key in self.keys:
            end = start + len(self._empty(key))
            clients, samples, loss, *scores = numbers[start:end]
            metrics = metrics_in(scores, samples, self.task, self.settings.run)
            reported = {name: value for name, value in metrics.items() if name in self.reported(key)}
            tallies[key] = Tally(clients, samples, loss, reported, tuple(scores))
            start = end
        return tallies, numbers[-1]


def metrics_in(numbers: Sequence[int], samples: int, task: Task, run: RunSettings) -> dict[str, float]:
    """Return the metrics in the sums of a tally, keyed by name; empty without samples or if the sums are impossible.

    Parameters
    ----------
    numbers : sequence of int
        The number of correct predictions, or sums as :meth:`ScoreSums.sums_of` returns them. Empty for a training loss.
    samples : int
        The number of samples.
    task, run : Task, RunSettings
        The task and the settings of the run.
    """
    if not samples or not numbers:
        return {}
    if len(numbers) == 1:
        return {"accuracy": numbers[0] / samples}
    if task.target == VALUES:
        return metrics_of(numbers, samples, task.value_std)
    if max(numbers) >= 1 << 53:  # the mask hides which client added the impossible numbers
        return {}
    exact = numbers[BinnedScores.count(task.num_classes) :]  # empty unless the task has labels
    scores = BinnedScores.from_numbers(numbers[: len(numbers) - len(exact)], task.num_classes)
    if not scores.is_consistent(task.target, samples) or any(count > samples for count in exact):
        return {}
    values = scores.values(task.target, positive_class(run, task.class_names), run.fixed_sensitivity)
    return {**values, "accuracy": exact[0] / samples} if exact else values


def spreads(sums: Mapping[str, Tally]) -> dict[str, Spread]:
    """Return the loss and each metric over all samples, keyed by column, such as ``train_loss``."""
    columns = {}
    for key, tally in sums.items():
        point, _, split = key.partition("-")
        for measure in (LOSS, *tally.metrics):
            if (values := tally.spread(measure)) is not None:
                columns[column_of(point, measure, split)] = values
    return columns
