"""Keep a run's privacy ledger, which records the noise added in each training round, and compute the (ε, δ) spent."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from posy.accounting import BudgetError, Event, Unit, ledger_line, read_ledger, spent
from posy.data.settings import SITES
from posy.settings import RunError
from posy.storage import append
from posy.strategies.cohorts import most_trainings
from posy.strategies.privacy import noise_multiplier
from posy.strategies.run_settings import OFF, SAMPLE
from posy.strategies.settings import Settings

LEDGER = "privacy.jsonl"
"""Ledger file in a run's directory. It is never truncated, because rounds that a resumed run repeats count twice."""
PROTECTED = {
    "local": "the data of each client, from the server and all others",
    "central": "the participation of each client, from all but the server",
    "sample": "each sample, from the server and all others",
}
"""The data that the noise protects in each mode, and the parties from which the noise hides it."""


class PrivacyLedger:
    """The privacy events of a run's clients.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    directory : Path
        The run's directory. A resumed run continues the ledger in it.
    event_for : callable
        Returns the privacy event of one round of a client's training.
    """

    def __init__(self, settings: Settings, directory: Path, event_for: Callable[[int], Event]) -> None:
        self.settings = settings
        self.path = directory / LEDGER
        self._event_for = event_for
        self._unit: Unit = "sample" if settings.train.dp == SAMPLE else "client"
        self._events: dict[int, Counter[Event]] = defaultdict(Counter)
        if settings.train.dp != OFF and self.path.is_file():
            try:
                for event, facts in read_ledger(self.path.read_text(encoding="utf-8")):
                    self._add(event, facts["clients"])
            except (BudgetError, OSError, KeyError, TypeError) as error:
                raise RunError(
                    f"{self.path}: the privacy ledger of this run is damaged ({error}), so the epsilon of the run is "
                    "unknown; start a new run"
                ) from error

    def note(self, server_round: int, clients: Sequence[int]) -> None:
        """Record on disk that clients are about to train, before the server sends any message."""
        if self.settings.train.dp == OFF or not clients:
            return
        by_event: dict[Event, list[int]] = defaultdict(list)
        for client in clients:
            by_event[self._event_for(client)].append(client)
        lines = [ledger_line(event, round=server_round, clients=group) for event, group in by_event.items()]
        append(self.path, "".join(lines))
        for event, group in by_event.items():
            self._add(event, group)

    def _add(self, event: Event, clients: Sequence[int]) -> None:
        one_training = Event(event.mode, event.noise_multiplier, 1, event.sampling)
        for client in clients:
            self._events[int(client)][one_training] += event.count

    def epsilon(self) -> float:
        """Return the largest ε that any client has spent so far, at δ = ``dp-delta``."""
        sequences = {tuple(sorted(events.items(), key=repr)) for events in self._events.values()}
        totals = [[Event(e.mode, e.noise_multiplier, n, e.sampling) for e, n in events] for events in sequences]
        return max((spent(events, self.settings.train.dp_delta, self._unit) for events in totals), default=0.0)

    def round_row(self) -> dict[str, Any]:
        """Return a round's privacy entries for ``rounds.jsonl``, or an empty dictionary if ``dp`` is off."""
        if self.settings.train.dp == OFF:
            return {}
        return {"dp_epsilon": self.epsilon(), "dp_delta": self.settings.train.dp_delta}

    def summary(self) -> dict[str, Any]:
        """Return the entry for ``summary.json``: the guarantee, and the values that the guarantee does not cover."""
        train = self.settings.train
        if train.dp == OFF:
            return {}
        uncovered = ["numbers of training and test samples"]
        if self.settings.data.dataset == SITES:
            uncovered.append("statistics of the data that sites send when they join")
        if not train.withholds_scores:
            uncovered.append("training losses and scores")
        entry: dict[str, Any] = {
            "mode": train.dp,
            "protects": PROTECTED[train.dp],
            "epsilon": self.epsilon(),
            "delta": train.dp_delta,
            "planned-epsilon": train.dp_epsilon,
            "planned-trainings": most_trainings(self.settings),
            "clip": train.dp_clip,
            "not-covered": uncovered,
        }
        if train.dp != SAMPLE:
            entry["noise-multiplier"] = noise_multiplier(self.settings)
        return {"privacy": entry}
