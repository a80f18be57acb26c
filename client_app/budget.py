"""A site's privacy budget, and the ledger that lists every training round with noise, across all runs.

The ledger is a file in the node's ``state-dir``. The node writes a line before it trains, so interrupted rounds and
repeated messages count too.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posy.accounting import Event, fits, ledger_line, read_ledger, spent
from posy.data.policy import Policy
from posy.paths import absolute
from posy.storage import append, exclusive
from posy.strategies.privacy import event_of, planned_events
from posy.strategies.run_settings import CENTRAL, OFF
from posy.strategies.settings import Settings

LEDGER = "privacy-ledger.jsonl"
"""File in a node's ``state-dir`` that lists the training rounds with noise."""


class BudgetExceededError(ValueError):
    """A round or a run would spend more than the site's budget."""


def unprotected(values: Mapping[str, Any]) -> str:
    """Return why a run lacks an (ε, δ) guarantee against the server, or an empty string if it has one."""
    if values["dp"] == OFF:
        return "dp = off; the site has a privacy budget, so a run needs noise"
    if values["dp"] == CENTRAL and not values["secure-aggregation"]:
        return "dp = central without secure-aggregation; the server would see the update without noise"
    if values["dp-scores"] != "withheld":
        return f"dp-scores = {values['dp-scores']}; scores are not part of the budget"
    return ""


class Budget:
    """The privacy budget of a site, and the ledger of its past rounds.

    Parameters
    ----------
    policy : Policy
        The policy, with ``epsilon`` > 0 and ``delta``.
    state_dir : str
        The node's ``state-dir``.
    """

    def __init__(self, policy: Policy, state_dir: str) -> None:
        self._policy = policy
        self._file = absolute(state_dir) / LEDGER

    def check_run(self, settings: Settings, num_train: int) -> None:
        """Check that a run's training rounds all fit into the budget.

        Raises
        ------
        BudgetExceededError
            If they do not fit.
        BudgetError
            If the ledger is damaged, so that the spent budget is unknown.
        """
        self._check(self._past(), planned_events(settings, num_train), "this run")

    def spend(self, settings: Settings, num_train: int, server_round: int) -> float:
        """Record a training round in the ledger, and return the ε that the site has spent, including this round.

        Raises
        ------
        BudgetExceededError
            If the round does not fit into the budget. The ledger then remains unchanged.
        BudgetError
            If the ledger is damaged.
        """
        with exclusive(self._file.with_suffix(".lock")):
            past, event = self._past(), event_of(settings, num_train)
            self._check(past, [event], "this training")
            remove_incomplete_line(self._file)
            append(self._file, ledger_line(event, round=server_round))
        return spent([*past, event], self._policy.delta)

    def _check(self, past: list[Event], planned: list[Event], name: str) -> None:
        policy = self._policy
        if not fits(past, planned, policy.epsilon, policy.delta):
            raise BudgetExceededError(
                f"{name} would spend more than epsilon = {policy.epsilon:g} at delta = {policy.delta:g}; earlier runs "
                f"have spent {spent(past, policy.delta):.4g}"
            )

    def _past(self) -> list[Event]:
        if not self._file.exists():
            return []
        return [event for event, _ in read_ledger(self._file.read_text(encoding="utf-8"))]


def remove_incomplete_line(file: Path) -> None:
    """Remove an incomplete last line, left by an interrupted write. The caller must hold the file's lock."""
    content = file.read_bytes() if file.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    if complete != content:
        file.write_bytes(complete)
