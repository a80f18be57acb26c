"""Numbers over clients: how a measure spreads over them, and their majority vote."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt


class Spread(TypedDict):
    """A measure over M clients, ``clients`` in number: one value for each client, summarised.

    ``std`` is the standard deviation of the population (divided by M),
    ``tenth`` the mean of the lowest tenth (of one client at least),
    ``weighted`` the mean weighted by the clients' weights, ``jain`` Jain's index J = (Σ a_i)² / (M Σ a_i²), None where
    every a_i is 0.

    With secure aggregation no value of a single client is available. ``mean`` is then the mean over all samples, whose
    number is ``samples``, and ``std`` to ``jain`` are None.
    """

    mean: float
    std: float | None
    min: float | None
    max: float | None
    tenth: float | None
    weighted: float | None
    jain: float | None
    clients: int
    samples: NotRequired[int]


def spread(values: Sequence[float], weights: Sequence[float]) -> Spread | None:
    """Summarise a measure over clients; return None without clients.

    Parameters
    ----------
    values, weights : sequence of float, length M
        One value a client, for instance its accuracy in 0..1, and its weight (n_i), not negative, not all 0.

    Raises
    ------
    ValueError
        If a value or weight is NaN or infinite, the lengths differ, or the weights are no weights.

    References
    ----------
    R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness and Discrimination for Resource
    Allocation in Shared Computer Systems, 1984, Eq. 2.
    """
    a, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if a.ndim != 1 or a.shape != w.shape:
        raise ValueError(f"values and weights must be two lists of one length, not of shapes {a.shape} and {w.shape}")
    if not len(a):
        return None
    if not np.isfinite(a).all():
        raise ValueError(f"the values of clients {np.flatnonzero(~np.isfinite(a)).tolist()} are NaN or infinite")
    if not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError("weights must be finite, not negative, and not all 0")
    low, high = float(a.min()), float(a.max())
    scale = max(abs(low), abs(high)) or 1.0
    unit = a / scale  # squares of a diverged loss would overflow
    # Rounding could carry a mean out of [min, max].
    lowest = np.sort(a)[: math.ceil(len(a) / 10)]
    mean, tenth, weighted = (float(np.clip(x, low, high)) for x in (a.mean(), lowest.mean(), a @ (w / w.sum())))
    std, squares = scale * float(unit.std()), float(unit @ unit)
    jain = min(1.0, float(unit.sum()) ** 2 / (len(a) * squares)) if squares else None
    return Spread(mean=mean, std=std, min=low, max=high, tenth=tenth, weighted=weighted, jain=jain, clients=len(a))


def majority_vote(predictions: Iterable[npt.NDArray[np.integer]], num_classes: int) -> npt.NDArray[np.int64]:
    """Return the class ``(n,)`` that most of the models predict for each sample; of equals the lowest class.

    ``predictions`` holds the classes ``(n,)``, 0..C-1, that each of at least one model predicts.
    """
    votes: Any = sum(np.eye(num_classes, dtype=np.int32)[predicted] for predicted in predictions)  # (n, C)
    winners: npt.NDArray[np.int64] = votes.argmax(axis=1)  # the first of equals
    return winners


class Evaluation(NamedTuple):
    """A measure over the clients in one round."""

    round: int
    over_clients: Spread
    missing: int = 0
    """Clients that should have been among them: they had no node, or their reply was dropped."""


def best(evaluations: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation with the highest mean, of equals the earliest, or None where there are none.

    Rounds that were evaluated on fewer than nine tenths of the clients of the fullest are skipped: the
    best of many small cohorts would say more of the cohorts than of the models.
    """
    most = max((e.over_clients["clients"] for e in evaluations), default=0)
    comparable = [e for e in evaluations if 10 * e.over_clients["clients"] >= 9 * most]
    return max(comparable, key=lambda e: e.over_clients["mean"], default=None)


def chosen(evaluations: Sequence[Evaluation], validation: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation of the round that is best on the validation splits, or None where there is none."""
    found = best(validation)
    return None if found is None else next((e for e in evaluations if e.round == found.round), None)


def over_rounds(evaluations: Sequence[Evaluation], rounds: int) -> dict[str, Any] | None:
    """Return the mean of each measure over the evaluations of the last rounds; None where there are none.

    ``evaluations`` is their number, ``deviation`` the standard deviation over them of the clients' ``mean`` and of
    their ``weighted`` mean. A measure is None where one of its values is.

    Parameters
    ----------
    evaluations : sequence of Evaluation
        In the order of the rounds.
    rounds : int
        Rounds to look back, the one of the last evaluation included, whether they were evaluated or not.
    """
    last: list[dict[str, Any]] = [dict(e.over_clients) for e in evaluations if e.round > evaluations[-1].round - rounds]
    if not last:
        return None
    found: dict[str, Any] = {"evaluations": len(last)}
    for measure in last[0]:
        values = [each[measure] for each in last]
        found[measure] = None if None in values else float(np.mean(values))
    found["deviation"] = {
        m: float(np.std([each[m] for each in last])) for m in ("mean", "weighted") if found[m] is not None
    }
    return found
