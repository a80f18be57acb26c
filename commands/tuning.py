"""Tuning: the same number of trials for every row of a table, scored on the clients' validation splits alone."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from posy.commands.table import Cell, Plan, Running, alone, failure_of, plan_as_yaml, start, stop
from posy.server_app.progress import duration
from posy.settings import Scalar, SettingsError
from posy.strategies.methods import settings_class
from posy.strategies.registry import declared, unmet_conditions

FRACTION = 0.2
"""Fraction of the training samples that are for validation where a table does not say it."""
DIGITS = 3
"""Digits to which a tried number is rounded, so that it can be written down."""
FIRST_TRIALS = 4
"""Trials of a study that are carried out to the end before any is given up."""
FIRST_ROUNDS = 2
"""Rounds before which none is."""
SEED = 0


@dataclass(frozen=True, eq=False)
class Search:
    """The search for the settings of one row in one variant."""

    cell: Cell
    """The run that is made again and again, of the table's first seed, with other settings."""
    space: Mapping[str, BaseDistribution]
    study: optuna.Study

    def done(self) -> int:
        """Return how many trials count."""
        return sum(trial.state.is_finished() for trial in self.study.trials)

    def best(self) -> dict[str, Scalar]:
        """Return the settings of the best trial; nothing if none has come to its end."""
        finished = [trial for trial in self.study.trials if trial.state == TrialState.COMPLETE]
        if not finished:
            return {}
        best = max(finished, key=lambda trial: (trial.value, -trial.number))
        return rounded(best.params)


def tune(plan: Plan, *, trials: int, jobs: int) -> dict[str, Any]:
    """Search the settings of every row and variant of a table, and return the table with what was found.

    Parameters
    ----------
    plan : Plan
        The table; its first seed is the one that is tuned on.
    trials : int
        Trials of each row and variant; the first one has the settings of the table, where they are in the range.
    jobs : int
        Runs at a time.

    Notes
    -----
    What is finished is not done again, and nobody else may search meanwhile: the studies lie in ``tuning/`` of the
    table's output (Optuna's journal). A trial is scored by the mean accuracy on the validation splits in its last
    round, which is what a table shows, at the point at which its method is meant to be used. It is given up early
    where its best accuracy so far is below the median of the trials before it in the same round.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    common = {"validation-fraction": fraction_of(plan)}
    seed = plan.cells[0].seed
    cells = [replace(cell, config={**cell.config, **common}) for cell in plan.cells if cell.seed == seed]
    with alone(folder := plan.output / "tuning"):
        storage = JournalStorage(JournalFileBackend(str(folder / "studies.journal")))
        searches = [opened(cell, folder, storage) for cell in cells]
        run_trials(searches, trials, jobs)
    found = {(search.cell.variant, search.cell.row): search.best() for search in searches}
    return plan_as_yaml(plan, found, common)


def fraction_of(plan: Plan) -> float:
    """Return the fraction of the samples for validation, which is one for all."""
    found = {float(cell.config.get("validation-fraction", 0) or FRACTION) for cell in plan.cells}
    if len(found) > 1:
        raise SettingsError("validation-fraction: the rows of a table that is tuned must all have the same")
    return found.pop()


def space_of(method: str, config: Mapping[str, Scalar]) -> dict[str, BaseDistribution]:
    """Return the search space of a row: the numbers with a declared range that have an effect in its runs."""
    space: dict[str, BaseDistribution] = {}
    idle = unmet_conditions({**config, "method": method})
    for key, item in declared([method]).items():
        if item.search is None or key in idle:
            continue
        low, high, log = item.search
        if item.kind is int:
            space[key] = IntDistribution(int(low), int(high), log=log)
        else:
            space[key] = FloatDistribution(low, high, log=log)
    return space


def opened(cell: Cell, folder: Path, storage: JournalStorage) -> Search:
    """Return the search of a cell, begun or taken up again."""
    space = space_of(cell.method, cell.config)
    settings = {key: value for key, value in cell.config.items() if key not in ("output-dir", "run-name")}
    study = optuna.create_study(
        study_name=f"{cell.place} {json.dumps(settings, sort_keys=True)}",  # other settings are another study
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=SEED, multivariate=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=FIRST_ROUNDS),
    )
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:  # of a process that was stopped
            study.tell(trial.number, state=TrialState.FAIL)
    if not study.trials:
        known = declared([cell.method])
        given = {key: cell.config.get(key, known[key].default) for key in space}
        study.enqueue_trial({key: value for key, value in given.items() if _within(space[key], value)})
    output = folder / (cell.variant or "all") / cell.row
    return Search(replace(cell, config={**cell.config, "output-dir": str(output)}), space, study)


def _within(space: BaseDistribution, value: Any) -> bool:
    assert isinstance(space, IntDistribution | FloatDistribution)
    return bool(space.low <= value <= space.high)


def rounded(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return numbers with as many digits as a person would write."""
    return {key: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for key, v in values.items()}


@dataclass(eq=False)
class Attempt:
    """A trial that is under way."""

    search: Search
    trial: Trial
    cell: Cell
    process: Running
    told: int = 0
    score: float = -1.0
    """Accuracy in the last round that was evaluated."""

    def look(self) -> bool:
        """Read the rounds that are new; tell whether the trial is to be given up."""
        point = settings_class(self.cell.method).point
        file = self.cell.path / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        for line in lines[self.told :]:
            if not line.endswith("\n"):  # not all of it is written yet
                break
            self.told += 1
            row = json.loads(line)
            if found := row.get(f"{point}_validation_accuracy"):
                self.score = found["mean"]
                self.trial.report(self.score, row["round"])
        return self.told > 0 and self.trial.should_prune()


def run_trials(searches: list[Search], trials: int, jobs: int) -> None:
    """Carry out what the searches lack, some at a time, one of each row after the other."""
    total, running = trials * len(searches), list[Attempt]()
    try:
        while True:
            while len(running) < jobs and (search := next_of(searches, running, trials)):
                running.append(begun(search, jobs))
            if not running:
                return
            for attempt in list(running):
                if ended(attempt):
                    running.remove(attempt)
                    done = sum(min(search.done(), trials) for search in searches)
                    print(f"[{done}/{total}] {told(attempt)}", flush=True)
            time.sleep(0.1)
    finally:
        stop([attempt.process for attempt in running])


def next_of(searches: list[Search], running: list[Attempt], trials: int) -> Search | None:
    """Return the search with the fewest trials, done or under way, if any lacks some; of equals one that rests."""

    def trials_of(search: Search) -> tuple[int, int]:
        under_way = sum(one.search is search for one in running)
        return search.done() + under_way, under_way

    search = min(searches, key=trials_of)
    return search if trials_of(search)[0] < trials else None


def begun(search: Search, jobs: int) -> Attempt:
    """Start a trial."""
    trial = search.study.ask(dict(search.space))
    own = {**rounded(trial.params), "save-models": False, "system-accuracy": "off"}
    name = f"trial-{trial.number}"
    cell = replace(search.cell, config={**search.cell.config, **own, "run-name": name})
    return Attempt(search, trial, cell, start(cell, jobs))


def ended(attempt: Attempt) -> bool:
    """Look after a trial; note its outcome if it is over."""
    study, trial = attempt.search.study, attempt.trial
    status = attempt.process.poll()
    over = status is not None
    pruned = attempt.look() and not over
    if pruned:
        stop([attempt.process])
        study.tell(trial, state=TrialState.PRUNED)
    elif status == 0 and attempt.score >= 0:
        study.tell(trial, attempt.score)
    elif over:  # it has diverged, as with too large a learning rate
        study.tell(trial, state=TrialState.FAIL)
    if over or pruned:
        shutil.rmtree(attempt.cell.path, ignore_errors=True)
    return over or pruned


def told(attempt: Attempt) -> str:
    """Return a line about a trial that is over."""
    trial: FrozenTrial = attempt.search.study.trials[attempt.trial.number]
    tried = ", ".join(f"{key}={value}" for key, value in rounded(trial.params).items())
    words = {
        TrialState.COMPLETE: f"{100 * attempt.score:.2f} % on validation",
        TrialState.PRUNED: f"given up in round {attempt.told}",
        TrialState.FAIL: f"failed: {failure_of(attempt.process.wait(), attempt.cell.log)}",
    }
    took = duration(trial.duration.total_seconds()) if trial.duration else ""
    return f"{attempt.cell.place}, trial {trial.number} ({tried}): {words[trial.state]}, {took}"
