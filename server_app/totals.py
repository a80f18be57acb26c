"""Collect a run's scores and totals over its rounds."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from posy.metrics import Metric, column_of
from posy.settings import key_of
from posy.spread import Evaluation, Spread, best, chosen, evaluations_since_best, over_rounds
from posy.strategies.columns import POINTS, TRAIN_LOSS, Columns
from posy.strategies.replies import LIMITED, LOSS, RoundRecord
from posy.strategies.run_settings import RunSettings
from posy.strategies.score_sums import spreads


@dataclass
class Totals:
    """Totals over a run's finished rounds, which a checkpoint stores under keys derived from the field names."""

    trained: bool = False
    """Whether any client's training has been accepted."""
    asked: int = 0
    evaluated: int = 0
    """Numbers of evaluations that the server has requested and accepted."""
    worst_loss: float = 0.0
    """Highest mean training loss in any round."""
    bytes_up: int = 0
    bytes_down: int = 0
    samples: int = 0
    """Number of training samples that the clients have processed, counted once per pass."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of dropped replies, keyed by reason."""
    delivery: Counter[str] = field(default_factory=Counter)
    """Numbers of resent messages and late replies."""
    clipped: Counter[int] = field(default_factory=Counter)
    discarded: Counter[int] = field(default_factory=Counter)
    down_weighted: Counter[int] = field(default_factory=Counter)
    """Number of rounds per client in which its update was scaled down, given no weight, or given less weight."""
    missing: list[int] = field(default_factory=list)
    """Clients missing from the last evaluation."""
    unreached: list[int] = field(default_factory=list)
    """Members whose last evaluation the server has not accepted."""
    scores: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    loss: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """The metric and the loss at each of :data:`POINTS`, in round order, omitting rounds without an evaluation."""
    validation: list[list[Evaluation]] = field(default_factory=lambda: [[], []])
    """The run's metric on the validation splits, in the same format."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The round of the last evaluation that reported all metrics, and the spreads of these metrics, keyed by column."""
    sums: dict[str, Any] = field(default_factory=dict)
    """The masked sums of the last evaluation at each of :data:`POINTS`: the numbers of ``clients`` and ``samples``, and
    the ``numbers`` of the tally; empty without secure aggregation."""
    patience_ended: int = 0
    """The round after which ``patience`` ran out, so that the next round is the last one; 0 if it has not run out."""
    system: list[tuple[int, float]] = field(default_factory=list)
    """System accuracy, as pairs of round and value, for the rounds in which it was computed."""
    clients: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The last row of each client."""
    last_round: list[int] = field(default_factory=list)
    """Clients that have a row in the last round."""

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read the totals from the result of :meth:`as_json`; ``stored`` may also contain other keys."""
        keys = {f.name: key_of(f.name) for f in dataclasses.fields(cls)}
        stored = {"scores": stored.get("accuracy"), **stored}  # its key in older checkpoints
        # Older checkpoints lack these fields.
        optional_names = ("patience_ended", "system", "metrics", "sums", "unreached", *LIMITED)
        totals = cls(**{name: stored[key] for name, key in keys.items() if name not in optional_names or key in stored})
        totals.dropped, totals.delivery = Counter(totals.dropped), Counter(totals.delivery)
        for name in LIMITED:
            setattr(totals, name, Counter({int(client): n for client, n in getattr(totals, name).items()}))
        totals.scores, totals.loss, totals.validation = (
            [[Evaluation(*evaluation) for evaluation in evaluations] for evaluations in points]
            for points in (totals.scores, totals.loss, totals.validation)
        )
        totals.clients = {int(client): row for client, row in totals.clients.items()}
        return totals

    def as_json(self) -> dict[str, Any]:
        """Return all fields, keyed as in a checkpoint."""
        return {key_of(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}

    def add(self, record: RoundRecord, columns: Columns, *, evaluated: bool) -> dict[str, Spread | None]:
        """Add a round, and return the spread of each score over the clients, from their rows or from masked sums.

        A score in :attr:`Columns.in_every_round` that no client reports is None. ``evaluated`` states whether an
        evaluation was due in the round.
        """
        over_clients = columns.spreads(record) | spreads(record.sums)
        metric = columns.metric.name
        for name, split, points in (
            (metric, "", self.scores),
            (LOSS, "", self.loss),
            (metric, "validation", self.validation),
        ):
            for point, evaluations in zip(POINTS, points, strict=True):
                if values := over_clients.get(column_of(point, name, split)):
                    evaluations.append(Evaluation(record.number, values, len(record.missing)))
        names = (metric, *columns.other_metrics)
        reported = {c: over_clients[c] for point in POINTS for n in names if over_clients.get(c := column_of(point, n))}
        if any(over_clients.get(column_of(point, name)) for point in POINTS for name in columns.other_metrics):
            self.metrics = {"round": record.number, **reported}
        self.sums |= {
            point: {"clients": tally.clients, "samples": tally.samples, "numbers": list(tally.numbers)}
            for point in POINTS
            if (tally := record.sums.get(point)) and tally.metrics
        }
        if trained := over_clients[TRAIN_LOSS]:
            self.trained, self.worst_loss = True, max(self.worst_loss, trained["mean"])
        self.trained |= bool(record.trained)
        if evaluated:
            self.missing, self.unreached = record.missing, record.unreached
        self.asked += record.asked
        self.evaluated += record.evaluated
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down
        self.samples += record.samples
        self.dropped.update(reason for _, reason in record.dropped)
        for name in LIMITED:
            getattr(self, name).update(getattr(record, name))
        self.last_round = sorted(record.clients)
        self.clients = dict(sorted({**self.clients, **record.clients}.items()))
        return over_clients

    def runs_out_of_patience(self, server_round: int, run: RunSettings, point: str, metric: Metric) -> bool:
        """Return whether ``patience`` runs out after a round, so that the next round must be the last one."""
        if not run.patience or self.patience_ended or server_round >= run.num_server_rounds - 1:
            return False
        validation = self.validation[POINTS.index(point)]
        if evaluations_since_best(validation, lower_is_better=metric.lower_is_better) < run.patience:
            return False
        self.patience_ended = server_round
        return True

    def patience_notice(self, run: RunSettings, point: str, metric: Metric) -> str:
        """Return a warning if ``patience`` cannot end the run because no validation split has a score, else ``""``."""
        if not run.patience or not self.evaluated or self.validation[POINTS.index(point)]:
            return ""
        return (
            f"patience = {run.patience} has no effect: the {metric.title} is not defined for any client's validation "
            f"split; set a larger validation-fraction, or another metric"
        )

    def early_stop(self, patience: int, point: str, metric: Metric) -> dict[str, Any]:
        """Return the summary's entry for early stopping, which is empty unless ``patience`` has ended the run."""
        if not self.patience_ended:
            return {}
        reason = f"no improvement in the {metric.title} of the {point} models on the validation splits"
        return {"stopped-early": {"after": self.patience_ended, "patience": patience, "reason": reason}}

    def summary(self, metric: Metric, average_rounds: int = 0) -> dict[str, Any]:
        """Return the totals for the summary of a run.

        ``best`` is the round with the best metric on the validation splits. ``upper-bound`` is the best metric on the
        test splits, for which the test data itself selects the round. If ``average_rounds`` is not 0, ``average`` is
        the mean over the evaluations in the last ``average_rounds`` rounds.
        """
        lower = metric.lower_is_better
        scores: dict[str, Any] = {
            point: {
                "last": _flat(evaluations[-1] if evaluations else None),
                "best": _flat(chosen(evaluations, validation, lower_is_better=lower)),
                "upper-bound": _flat(best(evaluations, lower_is_better=lower)),
            }
            for point, evaluations, validation in zip(POINTS, self.scores, self.validation, strict=True)
        }
        if average_rounds:
            for point, evaluations in zip(POINTS, self.scores, strict=True):
                scores[point]["average"] = over_rounds(evaluations, average_rounds)
            last_values = [value for number, value in self.system if number > self.system[-1][0] - average_rounds]
            if last_values:
                mean, deviation = float(np.mean(last_values)), float(np.std(last_values))
                system = {"evaluations": len(last_values), "mean": mean, "deviation": deviation}
                scores["system-accuracy-average"] = system
        sums = {"bytes-up": self.bytes_up, "bytes-down": self.bytes_down, "samples": self.samples}
        limited = {key_of(name): _by_client(counts) for name in LIMITED if (counts := getattr(self, name))}
        figures = {"metric": metric.name, **scores, "metrics": self.metrics}
        return {**sums, **figures, "dropped": self.dropped, **limited, **self.delivery, "missing": self.missing}


def _by_client(rounds: Mapping[int, int]) -> list[dict[str, int]]:
    """Return an entry for each client with its number of rounds, in client order."""
    return [{"client": client, "rounds": number} for client, number in sorted(rounds.items())]


def _flat(evaluation: Evaluation | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {"round": evaluation.round, **evaluation.over_clients, "missing": evaluation.missing}
