"""Tune every row of a table with the same number of trials, which are scored on the clients' validation splits."""

import json
import math
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

from posy.commands.estimate import Estimate
from posy.commands.table import Cell, Plan, Running, failure_of, locked_output, plan_as_yaml, start, stop, time_left
from posy.data.settings import DataSettings
from posy.metrics import DEFAULTS, METRICS, Metric, column_of
from posy.server_app.progress import duration
from posy.settings import Scalar, SettingsError
from posy.strategies.methods import settings_class
from posy.strategies.registry import declared, unmet_conditions
from posy.strategies.run_settings import AUTO
from posy.words import counted

FRACTION = 0.2
"""Fraction of the training samples that is held out for validation by default."""
DIGITS = 3
"""Significant digits of a tuned number."""
FIRST_TRIALS = 4
"""Number of trials that a study runs to completion before it prunes any trial."""
FIRST_ROUNDS = 2
"""Number of rounds that a trial runs before the study may prune it."""
SEED = 0


@dataclass(frozen=True, eq=False)
class Search:
    """The search for the settings of one row in one variant."""

    cell: Cell
    """The run that every trial repeats with different settings. It uses the table's first seed."""
    space: Mapping[str, BaseDistribution]
    study: optuna.Study

    def done(self) -> int:
        """Return the number of finished trials."""
        return sum(trial.state.is_finished() for trial in self.study.trials)

    def best(self) -> dict[str, Scalar]:
        """Return the settings of the best trial, or an empty mapping if no trial is complete."""
        finished = [trial for trial in self.study.trials if trial.state == TrialState.COMPLETE]
        if not finished:
            return {}
        sign = -1 if metric_for(self.cell).lower_is_better else 1
        best = max(finished, key=lambda trial: (sign * (trial.value or 0.0), -trial.number))
        return rounded(best.params)


def metric_for(cell: Cell) -> Metric:
    """Return the metric of a cell's runs."""
    name = str(cell.config.get("metric", AUTO))
    if name != AUTO:
        return METRICS[name]
    dataset, task = (str(cell.config.get(key, getattr(DataSettings, key))) for key in ("dataset", "task"))
    return METRICS[DEFAULTS[DataSettings(dataset=dataset, task=task).target]]


def tune(plan: Plan, *, trials: int, jobs: int) -> dict[str, Any]:
    """Tune the settings of every row and variant of a table, and return the table with the best settings.

    Parameters
    ----------
    plan : Plan
        The table. All trials use its first seed and, with folds, its first fold.
    trials : int
        Trials per row and variant. The first trial uses the table's settings if they are within the search range.
    jobs : int
        Number of parallel runs.

    Notes
    -----
    Optuna stores the studies in a journal in the folder ``tuning`` of the table's output directory. Posy skips finished
    trials. A lock keeps other processes from tuning the table at the same time. A trial's score is the mean of the
    clients' metric on the validation splits in the last evaluated round, at the method's evaluation point. Optuna
    prunes a trial if its best score so far is worse than the median of the earlier trials at the same round.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    common = {"validation-fraction": fraction_of(plan)}
    first = plan.cells[0].seed, plan.cells[0].fold
    cells = [cell for cell in plan.cells if (cell.seed, cell.fold) == first]
    cells = [replace(cell, config={**cell.config, **common}) for cell in cells]
    print(f"{plan.title}: {counted(len(cells), 'row')}, {counted(trials, 'trial')} each, {jobs} at a time", flush=True)
    with locked_output(folder := plan.output / "tuning"):
        storage = JournalStorage(JournalFileBackend(str(folder / "studies.journal")))
        searches = [opened(cell, folder, storage) for cell in cells]
        run_trials(searches, trials, jobs)
    tuned = {(search.cell.variant, search.cell.row): search.best() for search in searches}
    return plan_as_yaml(plan, tuned, common)


def fraction_of(plan: Plan) -> float:
    """Return the fraction of samples held out for validation, which must be the same in all rows."""
    fractions = {float(cell.config.get("validation-fraction", 0) or FRACTION) for cell in plan.cells}
    if len(fractions) > 1:
        raise SettingsError(
            "validation-fraction has different values in the rows of the table; set one value for all rows"
        )
    if not all(cell.config.get("validation-fraction") for cell in plan.cells):
        print(f"validation-fraction is not set in the table file; the trials and the tuned file use {FRACTION:g}")
    return fractions.pop()


def space_of(method: str, config: Mapping[str, Scalar]) -> dict[str, BaseDistribution]:
    """Return the search space of a row: the settings that declare a range and have an effect in its runs."""
    space: dict[str, BaseDistribution] = {}
    idle = unmet_conditions({**config, "method": method})
    declarations = declared([method])
    values = {**{key: item.default for key, item in declarations.items()}, **config}
    for key, item in declarations.items():
        if item.search is None or key in idle:
            continue
        low, high, log = item.search
        high = min(high, max(low, item.largest(values)))
        if item.kind is int:
            space[key] = IntDistribution(int(low), int(high), log=log)
        else:
            space[key] = FloatDistribution(low, high, log=log)
    return space


def opened(cell: Cell, folder: Path, storage: JournalStorage) -> Search:
    """Return the search for a cell's settings, either new or loaded from the journal."""
    space = space_of(cell.method, cell.config)
    settings = {key: value for key, value in cell.config.items() if key not in ("output-dir", "run-name")}
    study = optuna.create_study(
        study_name=f"{cell.place} {json.dumps(settings, sort_keys=True)}",  # one study per set of settings
        storage=storage,
        load_if_exists=True,
        direction="minimize" if metric_for(cell).lower_is_better else "maximize",
        sampler=optuna.samplers.TPESampler(seed=SEED, multivariate=True),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=FIRST_TRIALS, n_warmup_steps=FIRST_ROUNDS),
    )
    for trial in study.trials:
        if trial.state == TrialState.RUNNING:  # the process that ran it was stopped
            study.tell(trial.number, state=TrialState.FAIL)
    if not study.trials:
        declarations = declared([cell.method])
        first_trial = {key: cell.config.get(key, declarations[key].default) for key in space}
        for key, distribution in space.items():
            if declarations[key].limit and isinstance(distribution, IntDistribution):  # a default may exceed the limit
                first_trial[key] = min(int(first_trial[key]), distribution.high)
        study.enqueue_trial({key: value for key, value in first_trial.items() if _within(space[key], value)})
    output = folder / (cell.variant or "all") / cell.row
    return Search(replace(cell, config={**cell.config, "output-dir": str(output)}), space, study)


def _within(space: BaseDistribution, value: Any) -> bool:
    assert isinstance(space, IntDistribution | FloatDistribution)
    return bool(space.low <= value <= space.high)


def rounded(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """Return settings with floats rounded to ``DIGITS`` significant digits."""
    return {key: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for key, v in values.items()}


@dataclass(eq=False)
class Attempt:
    """A running trial."""

    search: Search
    trial: Trial
    cell: Cell
    process: Running
    rounds_read: int = 0
    score: float = math.nan
    """The metric on the validation splits in the last evaluated round; NaN before the first evaluation."""

    def look(self) -> bool:
        """Read the new rounds and return whether to prune the trial."""
        point = settings_class(self.cell.method).point
        file = self.cell.path / "rounds.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        for line in lines[self.rounds_read :]:
            if not line.endswith("\n"):  # the run is still writing this line
                break
            self.rounds_read += 1
            row = json.loads(line)
            if scores := row.get(column_of(point, metric_for(self.cell).name, "validation")):
                self.score = scores["mean"]
                self.trial.report(self.score, row["round"])
        return self.rounds_read > 0 and self.trial.should_prune()


def run_trials(searches: list[Search], trials: int, jobs: int) -> None:
    """Run the missing trials of all searches, ``jobs`` at a time, alternating between the rows."""
    total, running, estimate = trials * len(searches), list[Attempt](), Estimate(jobs)
    try:
        while True:
            while len(running) < jobs and (search := next_of(searches, running, trials)):
                running.append(attempt := begun(search, jobs))
                estimate.begin(attempt.cell.path, attempt.cell.rounds)
            if not running:
                return
            done = sum(min(search.done(), trials) for search in searches)
            for attempt in list(running):
                if ended(attempt):
                    running.remove(attempt)
                    estimate.end(attempt.cell.path)
                    done = sum(min(search.done(), trials) for search in searches)
                    remaining = time_left(estimate.remaining_time([""] * (total - done - len(running))))
                    print(f"[{done}/{total}] {describe_trial(attempt)}{remaining}", flush=True)
            if (seconds := estimate.first([""] * (total - done - len(running)))) is not None:
                print(f"the first rounds have ended{time_left(seconds)}", flush=True)
            time.sleep(0.1)
    finally:
        stop([attempt.process for attempt in running])


def next_of(searches: list[Search], running: list[Attempt], trials: int) -> Search | None:
    """Return the search with the fewest finished and running trials, or None if no search needs further trials.

    If searches tie, prefer the one with the fewest running trials.
    """

    def trials_of(search: Search) -> tuple[int, int]:
        under_way = sum(attempt.search is search for attempt in running)
        return search.done() + under_way, under_way

    search = min(searches, key=trials_of)
    return search if trials_of(search)[0] < trials else None


def begun(search: Search, jobs: int) -> Attempt:
    """Start a trial."""
    trial = search.study.ask(dict(search.space))
    trial_settings = {**rounded(trial.params), "save-models": False, "system-accuracy": "off"}
    name = f"trial-{trial.number}"
    cell = replace(search.cell, config={**search.cell.config, **trial_settings, "run-name": name})
    return Attempt(search, trial, cell, start(cell, jobs))


def ended(attempt: Attempt) -> bool:
    """Poll a trial, record the outcome if it has ended, and return whether it has ended."""
    study, trial = attempt.search.study, attempt.trial
    status = attempt.process.poll()
    has_ended = status is not None
    pruned = attempt.look() and not has_ended
    if pruned:
        stop([attempt.process])
        study.tell(trial, state=TrialState.PRUNED)
    elif status == 0 and not math.isnan(attempt.score):
        study.tell(trial, attempt.score)
    elif has_ended:  # for example, it diverged because the learning rate is too large
        study.tell(trial, state=TrialState.FAIL)
    if has_ended or pruned:
        shutil.rmtree(attempt.cell.path, ignore_errors=True)
    return has_ended or pruned


def describe_trial(attempt: Attempt) -> str:
    """Return the log line of a trial that has ended."""
    trial: FrozenTrial = attempt.search.study.trials[attempt.trial.number]
    trial_settings = ", ".join(f"{key}={value}" for key, value in rounded(trial.params).items())
    outcomes = {
        TrialState.COMPLETE: f"{metric_for(attempt.cell).format(attempt.score)} on validation",
        TrialState.PRUNED: f"pruned in round {attempt.rounds_read}",
        TrialState.FAIL: f"failed: {failure_of(attempt.process.wait(), attempt.cell.log)}",
    }
    trial_time = duration(trial.duration.total_seconds()) if trial.duration else ""
    return f"{attempt.cell.place}, trial {trial.number} ({trial_settings}): {outcomes[trial.state]}, {trial_time}"
