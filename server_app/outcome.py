"""Check whether a run has a usable result."""

import math
import re

from posy.client_app.training.work import advice_on_divergence
from posy.data.task import Task
from posy.server_app.totals import Totals
from posy.settings import DivergedError, NothingTrainedError, RunError
from posy.strategies.columns import TRAIN_LOSS
from posy.strategies.replies import RoundRecord
from posy.strategies.score_sums import spreads
from posy.strategies.settings import Settings

_DIVERGED = re.compile(r"NaN or Inf|diverged|loss is -?(nan|inf)")
"""Pattern that matches the reason for dropping a reply if the reason indicates divergence."""


def check_outcome(totals: Totals, last: RoundRecord, settings: Settings, task: Task) -> None:
    """Raise an error if the rounds have no usable result.

    Parameters
    ----------
    totals : Totals
        The totals over all rounds.
    last : RoundRecord
        The record of the last round.
    settings : Settings
        The settings of the run.
    task : Task
        The task of the run.

    Raises
    ------
    NothingTrainedError
        If no client's training was accepted. The results then describe the initial model.
    RunError
        If evaluations were requested but none was accepted.
    DivergedError
        If training has diverged by the last round.
    """
    reasons = "; ".join(f"{count} x {reason}" for reason, count in totals.dropped.most_common(3))
    if not totals.trained:
        raise NothingTrainedError(f"no client's training was accepted in any round: {reasons}")
    if totals.asked and not totals.evaluated:
        raise RunError(f"no client's evaluation was accepted in any round: {reasons}")
    losses = [row[TRAIN_LOSS] for row in last.clients.values() if TRAIN_LOSS in row]
    if spread := spreads(last.sums).get(TRAIN_LOSS):
        losses = [spread["mean"]]
    diverged = {c for c, reason in last.dropped if c in last.cohort and _DIVERGED.search(reason)} - last.trained
    # The loss from guessing is ln C, plus ln M if the method also classifies clients.
    guessing = math.log(max(task.num_classes, 2) * max(settings.data.num_clients, 2))
    loss = sum(losses) / len(losses) if losses else 0.0
    problem = ""
    if 2 * len(diverged) >= max(len(last.cohort), 1):
        cohort = f"the {len(last.cohort)} clients that trained in the last round"
        problem = f"{len(diverged)} of {cohort} did not send finite numbers"
    elif totals.worst_loss > 100 * guessing and loss > 3 * guessing:
        problem = f"its mean loss was {totals.worst_loss:.3g} in the worst round and is {loss:.3g} in the last"
    if problem:
        raise DivergedError(f"the training has diverged: {problem}; {advice_on_divergence(settings.train)}")
