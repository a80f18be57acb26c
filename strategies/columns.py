"""The scores that a run records for each client, and their spreads over the clients."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy.typing as npt

from posy.data.task import Task
from posy.metrics import METRICS, Metric, column_of, metrics_for
from posy.scores import Predictions
from posy.spread import Spread, spread
from posy.strategies import schedule
from posy.strategies.replies import LOSS, RoundRecord
from posy.strategies.run_settings import RunSettings, metric_of, positive_class
from posy.strategies.settings import Settings

POINTS = ("served", "local")
"""Evaluation points: a client's served model, and its local model after training."""
TRAIN_LOSS, NODE_SETTINGS = "train_loss", "node_settings"


@dataclass(frozen=True)
class Columns:
    """The columns with scores in a client's row.

    Parameters
    ----------
    metric : Metric
        The metric of the run.
    other_metrics : tuple of str
        Names of the other metrics of the task, which some evaluations report on the test splits; empty with
        ``all-metrics = none``.
    splits : tuple of str
        The scored splits other than the test split: ``validation``, ``training``, both or none.
    """

    metric: Metric
    other_metrics: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()

    @classmethod
    def of(cls, settings: Settings, task: Task) -> Self:
        """Return the columns for a run on a task."""
        metric = metric_of(settings.run, task.target, task.num_classes)
        others = metrics_for(task.target, task.num_classes) if schedule.all_metrics_of(settings) != "none" else []
        return cls(
            metric,
            tuple(other.name for other in others if other != metric),
            tuple(filter(None, settings.scored_splits)),
        )

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that the summary reports, in the order of the tables."""
        return tuple(name for name in METRICS if name == self.metric.name or name in self.other_metrics)

    @cached_property
    def in_every_round(self) -> tuple[str, ...]:
        """The columns that each round summarises over the clients, even if no client reports them."""
        return (TRAIN_LOSS, *(column_of(point, measure) for point in POINTS for measure in (self.metric.name, LOSS)))

    @cached_property
    def further(self) -> tuple[str, ...]:
        """The columns that a round summarises only if a client reports them."""
        splits = [
            column_of(point, measure, split)
            for split in self.splits
            for point in POINTS
            for measure in (self.metric.name, LOSS)
        ]
        return (*splits, *(column_of(point, name) for point in POINTS for name in self.other_metrics))

    @cached_property
    def all(self) -> frozenset[str]:
        """All columns with scores."""
        return frozenset((*self.in_every_round, *self.further))

    def of_clients(self, *, summed: bool = False, chosen_settings: bool = False) -> tuple[str, ...]:
        """Return the columns of ``clients.csv``.

        Parameters
        ----------
        summed : bool
            Whether the server knows only sums of the scores. A client's row then has no scores.
        chosen_settings : bool
            Whether nodes may choose settings.
        """
        first = ("round", "partition", "n_train")
        last = ("bytes_up", "bytes_down", "site", *((NODE_SETTINGS,) if chosen_settings else ()))
        if summed:
            return (*first, *last)
        return (*first, "n_test", *self.in_every_round[1:], *self.further, TRAIN_LOSS, "chosen", *last)

    @cached_property
    def _metric_in(self) -> dict[str, Metric]:
        """The metric in each column that has one; the other columns contain losses."""
        of_run = {column_of(p, self.metric.name, split): self.metric for p in POINTS for split in ("", *self.splits)}
        return of_run | {column_of(p, name): METRICS[name] for p in POINTS for name in self.other_metrics}

    def lower_is_better(self, column: str) -> bool:
        """Return whether lower values of a column are better."""
        metric = self._metric_in.get(column)
        return metric is None or metric.lower_is_better

    def spreads(self, record: RoundRecord) -> dict[str, Spread | None]:
        """Return the spread of each column over a round's clients."""
        rows = dict(sorted(record.clients.items()))  # so that the sums do not depend on the order of the replies
        spreads = {column: self.spread_of(rows.values(), column) for column in self.in_every_round}
        return spreads | {c: values for c in self.further if (values := self.spread_of(rows.values(), c))}

    def spread_of(self, rows: Iterable[Mapping[str, Any]], column: str) -> Spread | None:
        """Return the spread of a column over the clients with a value, weighted by number of training samples."""
        rows_with_value = [row for row in rows if column in row]
        values, weights = ([row[key] for row in rows_with_value] for key in (column, "n_train"))
        return spread(values, weights, lower_is_better=self.lower_is_better(column))


def predictions_with(task: Task, run: RunSettings, y: npt.NDArray[Any], outputs: npt.NDArray[Any]) -> Predictions:
    """Return :class:`Predictions` with the run's positive class and thresholds."""
    positive = positive_class(run, task.class_names)
    return Predictions(task.target, y, outputs, positive, run.threshold, run.fixed_sensitivity)


def newcomer_scores(rows: Mapping[int, Mapping[str, Any]], columns: Columns) -> dict[str, Any]:
    """Return the final scores of the held-out clients for the summary, given their rows; empty without such clients."""
    if not rows:
        return {}
    named = {point: column_of(point, columns.metric.name) for point in POINTS}
    over_clients = {point: columns.spread_of(rows.values(), column) for point, column in named.items()}
    return {"newcomers": {**over_clients, "clients": {str(client): dict(row) for client, row in sorted(rows.items())}}}
