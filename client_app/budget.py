"""The privacy budget of a site: a ledger on the node of all trainings with noise, over all runs.

The ledger is a file in the node's ``state-dir``. The node writes a line before it trains, so an interrupted training
counts, and so does each repetition of a message.
"""

import fcntl
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posy.accounting import Event, fits, ledger_line, read_ledger, spent
from posy.data.policy import Policy
from posy.paths import absolute
from posy.strategies.privacy import event_of, planned_events
from posy.strategies.settings import CENTRAL, OFF, Settings

LEDGER = "privacy-ledger.jsonl"
"""File in a node's ``state-dir`` with the trainings under noise."""


def unprotected(values: Mapping[str, Any]) -> str:
    """Return why the settings of a run give no (ε, δ) against the server, or an empty text if they do."""
    if values["dp"] == OFF:
        return "dp = off; the site has a privacy budget, so a run needs noise"
    if values["dp"] == CENTRAL and not values["secure-aggregation"]:
        return "dp = central without secure-aggregation; the server would see the update without noise"
    if values["dp-scores"] != "withheld":
        return f"dp-scores = {values['dp-scores']}; scores are not part of the budget"
    return ""


class Budget:
    """The ledger of a site and its limit.

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

    def spent(self) -> float:
        """Return the ε that all trainings of the site have spent, for the policy's δ."""
        return spent(self._past(), self._policy.delta)

    def refuses(self, settings: Settings, num_train: int) -> str:
        """Return why a whole run exceeds the budget, or an empty text if it fits.

        Raises
        ------
        BudgetError
            If the ledger is damaged: a budget cannot be computed from it.
        """
        return self._refusal(planned_events(settings, num_train), "this run")

    def spend(self, settings: Settings, num_train: int, server_round: int) -> str:
        """Record one training in the ledger; return why it exceeds the budget, or an empty text if it is recorded."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.with_suffix(".lock").open("w") as locked:
            fcntl.flock(locked, fcntl.LOCK_EX)
            event = event_of(settings, num_train)
            if refusal := self._refusal([event], "this training"):
                return refusal
            with self._file.open("a", encoding="utf-8") as file:
                file.write(ledger_line(event, round=server_round))
                file.flush()
                os.fsync(file.fileno())
            return ""

    def _refusal(self, planned: list[Event], name: str) -> str:
        past, policy = self._past(), self._policy
        if fits(past, planned, policy.epsilon, policy.delta):
            return ""
        return (
            f"{name} would spend more than epsilon = {policy.epsilon:g} at delta = {policy.delta:g}; earlier runs have "
            f"spent {spent(past, policy.delta):.4g}"
        )

    def _past(self) -> list[Event]:
        if not self._file.exists():
            return []
        return [event for event, _ in read_ledger(_whole_lines(self._file))]


def _whole_lines(file: Path) -> str:
    """Return the text of a ledger; a last line that an interrupted write left without its end is removed first."""
    text = file.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, encoding="utf-8")
    return whole
