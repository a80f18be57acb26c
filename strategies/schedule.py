"""The rounds in which a run evaluates, and the learning rate of each round."""

import math
from collections.abc import Callable

from posy.data.settings import SITES
from posy.strategies.run_settings import AUTO, RunSettings
from posy.strategies.settings import Settings


def learning_rate(settings: Settings, server_round: int) -> float:
    """Return the learning rate of a round, counted from 1; the cosine schedule ends near 0."""
    train, finished_rounds = settings.train, server_round - 1
    if train.lr_schedule == "cosine":
        return train.lr * 0.5 * (1 + math.cos(math.pi * finished_rounds / settings.run.num_server_rounds))
    steps = {"constant": 0, "exponential": finished_rounds, "step": finished_rounds // train.lr_step}[train.lr_schedule]
    return train.lr * float(train.lr_decay**steps)


def evaluates(run: RunSettings, server_round: int) -> bool:
    """Return whether clients evaluate in a round."""
    return server_round % run.evaluate_every == 0 or server_round == run.num_server_rounds


def all_metrics_of(settings: Settings) -> str:
    """Return the value of ``all-metrics``, where ``auto`` is resolved to ``none`` or ``last``."""
    if settings.run.all_metrics != AUTO:
        return settings.run.all_metrics
    return "none" if settings.data.dataset == SITES else "last"


def reports_all_metrics(settings: Settings, server_round: int) -> bool:
    """Return whether the evaluation of a round reports all metrics of the task."""
    run, which = settings.run, all_metrics_of(settings)
    is_chosen = which == "every" or (which == "last" and server_round == run.num_server_rounds)
    return is_chosen and evaluates(run, server_round)


def in_average(run: RunSettings, server_round: int) -> bool:
    """Return whether a round is one of the last ``average-rounds`` rounds."""
    return server_round > run.num_server_rounds - run.average_rounds


def notices(settings: Settings, num_rounds: int, cohort: Callable[[int], list[int]]) -> tuple[str, ...]:
    """Return warnings to log before round 1 about shared settings that have no effect in the run's rounds.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    num_rounds : int
        The number of rounds.
    cohort : callable
        Returns the clients that train in a round.
    """
    train, run, warnings = settings.train, settings.run, []
    rates = {learning_rate(settings, number) for number in range(1, num_rounds + 1)}
    if train.lr_schedule != "constant" and rates == {train.lr}:
        remedy = "choose more rounds"
        if num_rounds > 1:
            remedy = "set lr-decay below 1" if train.lr_decay == 1 else f"set lr-step below {num_rounds}"
        warnings.append(
            f"lr-schedule = {train.lr_schedule!r} has no effect: lr is {train.lr:g} in all rounds from 1 to "
            f"{num_rounds}; {remedy}"
        )
    neighbours = max(len(cohort(number)) for number in (1, num_rounds)) - 1
    if run.secure_aggregation and run.secure_neighbours > neighbours:
        warnings.append(
            f"secure-neighbours = {run.secure_neighbours}: a round has at most {neighbours} other clients, and each "
            f"client shares secrets with all of them; set secure-neighbours to at most {neighbours}"
        )
    return tuple(warnings)
