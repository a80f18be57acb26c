"""Compute statistics over clients: the distribution of a measure, and the majority vote."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt


class Spread(TypedDict):
    """Summary of a measure over M clients, with one value a_i for each client. ``clients`` is M.

    ``std`` is the population standard deviation (divided by M). ``tenth`` is the mean of the worst tenth of the values
    (at least one value). ``weighted`` is the mean, weighted by the clients' weights. ``jain`` is Jain's index
    J = (Σ a_i)² / (M Σ a_i²), or None if every a_i is 0.

    With secure aggregation, the values of individual clients are not available. ``mean`` is then the mean over all
    samples, ``samples`` is the number of samples, and ``std`` to ``jain`` are None.
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


def spread(values: Sequence[float], weights: Sequence[float], *, lower_is_better: bool = False) -> Spread | None:
    """Return a summary of a measure over clients, or None if there are no clients.

    Parameters
    ----------
    values, weights : sequence of float, length M
        The value of each client, for example its accuracy in 0..1, and its weight n_i. Weights are not negative, and
        not all are 0.
    lower_is_better : bool
        Whether lower values are better.

    Raises
    ------
    ValueError
        If a value or weight is NaN or infinite, the lengths differ, a weight is negative, or all weights are 0.

    References
    ----------
    R. Jain, D. Chiu, W. Hawe: A Quantitative Measure of Fairness and Discrimination for Resource
    Allocation in Shared Computer Systems, 1984, Eq. 2.
    """
    a, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    if a.ndim != 1 or a.shape != w.shape:
        raise ValueError(
            f"values and weights must be lists of equal length, but have the shapes {a.shape} and {w.shape}"
        )
    if not len(a):
        return None
    if not np.isfinite(a).all():
        raise ValueError(f"the values of clients {np.flatnonzero(~np.isfinite(a)).tolist()} are NaN or infinite")
    if not np.isfinite(w).all() or (w < 0).any() or not w.any():
        raise ValueError("weights must be finite, not negative, and not all 0")
    low, high = float(a.min()), float(a.max())
    scale = max(abs(low), abs(high)) or 1.0
    scaled = a / scale  # squares of a diverged loss would overflow
    # Clip the means, because rounding can move them out of [min, max].
    worst = np.sort(-a if lower_is_better else a)[: math.ceil(len(a) / 10)]
    worst_mean = -worst.mean() if lower_is_better else worst.mean()
    mean, tenth, weighted = (float(np.clip(x, low, high)) for x in (a.mean(), worst_mean, a @ (w / w.sum())))
    std, squares = scale * float(scaled.std()), float(scaled @ scaled)
    jain = min(1.0, float(scaled.sum()) ** 2 / (len(a) * squares)) if squares else None
    return Spread(mean=mean, std=std, min=low, max=high, tenth=tenth, weighted=weighted, jain=jain, clients=len(a))


def majority_vote(predictions: Iterable[npt.NDArray[np.integer]], num_classes: int) -> npt.NDArray[np.int64]:
    """Return the class that most models predict for each sample, ``(n,)``. Ties go to the lowest class index.

    ``predictions`` contains each model's predicted classes ``(n,)``, 0..C-1. At least one model is required.
    """
    votes: Any = sum(np.eye(num_classes, dtype=np.int32)[predicted] for predicted in predictions)  # (n, C)
    winners: npt.NDArray[np.int64] = votes.argmax(axis=1)  # the first maximum
    return winners


def vote_shares(votes: npt.NDArray[np.integer], num_classes: int) -> npt.NDArray[np.float64]:
    """Return each class's fraction of the votes for each sample ``(n, C)``, given the votes of V models ``(V, n)``."""
    return np.stack([(votes == number).mean(axis=0) for number in range(num_classes)], axis=1)


class Evaluation(NamedTuple):
    """A measure over the clients in one round."""

    round: int
    over_clients: Spread
    missing: int = 0
    """Number of clients without a result, because no node hosted them or the server dropped their reply."""


def best(evaluations: Sequence[Evaluation], *, lower_is_better: bool = False) -> Evaluation | None:
    """Return the evaluation with the best mean, or None if there is none. Ties go to the earliest round.

    The function skips evaluations with fewer than nine tenths as many clients as the largest evaluation. Otherwise, the
    best of many small cohorts would depend more on the cohort than on the models.
    """
    most = max((e.over_clients["clients"] for e in evaluations), default=0)
    comparable = [e for e in evaluations if 10 * e.over_clients["clients"] >= 9 * most]
    sign = -1 if lower_is_better else 1
    return max(comparable, key=lambda e: sign * e.over_clients["mean"], default=None)


def chosen(
    evaluations: Sequence[Evaluation], validation: Sequence[Evaluation], *, lower_is_better: bool = False
) -> Evaluation | None:
    """Return the evaluation of the round that is best on the validation splits, or None if there is none."""
    selected = best(validation, lower_is_better=lower_is_better)
    return None if selected is None else next((e for e in evaluations if e.round == selected.round), None)


def evaluations_since_best(evaluations: Sequence[Evaluation], *, lower_is_better: bool = False) -> int:
    """Return the number of evaluations after the best one (:func:`best`), or 0 if there are none."""
    selected = best(evaluations, lower_is_better=lower_is_better)
    return 0 if selected is None else sum(e.round > selected.round for e in evaluations)


def over_rounds(evaluations: Sequence[Evaluation], rounds: int) -> dict[str, Any] | None:
    """Return the mean of each measure over the evaluations of the last rounds, or None if there are none.

    The entry ``evaluations`` is the number of these evaluations. ``deviation`` contains the standard deviations of
    ``mean`` and ``weighted`` over these evaluations. A measure is None if one of its values is None.

    Parameters
    ----------
    evaluations : sequence of Evaluation
        In the order of the rounds.
    rounds : int
        Number of rounds, counted back from the round of the last evaluation, including rounds without an evaluation.
    """
    last: list[dict[str, Any]] = [dict(e.over_clients) for e in evaluations if e.round > evaluations[-1].round - rounds]
    if not last:
        return None
    means: dict[str, Any] = {"evaluations": len(last)}
    for measure in last[0]:
        values = [each[measure] for each in last]
        means[measure] = None if None in values else float(np.mean(values))
    means["deviation"] = {
        m: float(np.std([each[m] for each in last])) for m in ("mean", "weighted") if means[m] is not None
    }
    return means
