"""Run a grid of methods x variants x seeds, with one process per run, and summarise the results in a table."""

import importlib.util
import itertools
import os
import shlex
import shutil
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import pandas as pd
from filelock import FileLock, Timeout

from posy.commands import archive
from posy.commands.archive import ENDED, clear
from posy.commands.estimate import Estimate
from posy.commands.guide import TUNED, relative
from posy.commands.launch import INTERRUPTED, run_in_process
from posy.commands.warm import WarmProcess
from posy.data.errors import DataError
from posy.forked import cores
from posy.metrics import METRICS, Metric
from posy.report.comparison import (
    Ranks,
    Run,
    average,
    check_metrics,
    compared,
    last_round,
    over_clients,
    per_client,
    ranks,
    scores_by_block,
)
from posy.server_app.progress import POOLED, central_scores, coverage, duration, members_of, metric_in, size
from posy.server_app.resume import CODE, RAN_ON, StoredRun, read_summary
from posy.settings import COMMAND_LINE, Scalar, SettingsError, quoted, set_in
from posy.signals import interruptible
from posy.strategies.methods import METHODS
from posy.strategies.registry import (
    check_own,
    code_digests,
    declared_for,
    effective,
    lowered,
    no_effect,
    normalised,
    owner,
    read_settings,
    relevant_settings,
    with_experiment,
    without_effect,
)
from posy.strategies.run_settings import RunSettings
from posy.words import capitalised, counted
from posy.yaml12 import dump, read_yaml

PARTS: dict[str, type] = {
    "title": str,
    "output": str,
    "settings": dict,
    "runs": list,
    "variants": list,
    "seeds": list,
}
"""Keys of a table file, with the types of their values."""
REJECTED = 2
"""Exit status of a run with invalid settings or unusable data. Other seeds of the same row would fail, too."""
DIVERGED = "it diverged, so the mean over the other seeds would be too favourable"
"""Reason for excluding a diverged run from all means."""
ALL = "all"
"""Value or entry of ``runs`` that creates one row per method."""
ENTRIES = {"runs": ("name", "settings", "variants"), "variants": ("name", "settings")}
"""Keys of an entry in ``runs`` and in ``variants``."""
POINTS = [f"{point}-{w}" for point, w in itertools.product(("served", "local"), ("last", "best", "upper-bound"))]
"""The scores of a run. Served and local models are scored in the last round, in the best round on the validation
splits, and in the best round on the test splits."""
LEGEND = (
    "{metric}: mean over the clients, averaged over the seeds, ± the standard deviation over the seeds (with n - 1). "
    "The number in brackets is the standard deviation over the clients. `served`: the model that a client receives. "
    "`local`: the model after local training. `last`: last round. `best`: best round on the validation splits. `upper"
    " bound`: best round on the test splits; do not report it. `weighted`: mean weighted by the number of training "
    "samples, in the last round. `system`: accuracy of the whole federation on the pooled test sets. `6 of 60 "
    "clients`: the figure covers 6 of the 60 clients of all seeds, because only the clients that train in a round "
    "have a local model. `time`: wall-clock time of one run, while other runs use the machine. `dropped`: number of "
    "unused replies over all seeds. `2 of 3!`: the figure is available for only 2 of 3 seeds, for example because a "
    "model diverged, and the mean covers only these seeds."
)

POOLED_LEGEND = f"`{POOLED}`: with secure aggregation, the score is over the test samples of all clients."
CENTRAL_LEGEND = "`central`: score on the central test set, averaged over the models at the method's evaluation point."
FOLDS_LEGEND = (
    "With folds, each fold of a seed is one run: `seeds` counts runs, and deviations are over seeds and folds."
)


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a table, identified by its variant (data set and partition; may be empty), row (method) and seed."""

    variant: str
    row: str
    seed: int
    config: Mapping[str, Scalar]
    """The settings of the run."""
    where: str = ""
    """Source of the settings, for error messages."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Sources of settings that do not come from ``where``."""
    fold: int = 0
    """The cross-validation fold that serves as the test split; 0 without folds."""

    @property
    def place(self) -> str:
        """Names of the variant and the row."""
        return " / ".join(filter(None, (self.variant, self.row)))

    @property
    def name(self) -> str:
        """Name of the cell in messages."""
        return f"{self.place} / seed {self.seed}" + (f" / fold {self.fold}" if self.fold else "")

    @property
    def method(self) -> str:
        """The method of the run."""
        return str(self.config.get("method", RunSettings.method))

    @property
    def rounds(self) -> int:
        """Number of rounds of the run."""
        return int(self.config.get("num-server-rounds", RunSettings.num_server_rounds))

    @property
    def path(self) -> Path:
        """Directory of the run."""
        return Path(str(self.config["output-dir"])) / str(self.config["run-name"])

    @property
    def log(self) -> Path:
        """File with the output of the run."""
        return self.path.with_suffix(".log")

    def summary(self, *status: str) -> dict[str, Any] | None:
        """Return the summary of the run if it has finished with the same settings, else None.

        A run has finished if its status is one of ``status``, by default ``completed``.
        """
        summary = read_summary(self.path)
        if summary.get("status") not in (status or ("completed",)):
            return None
        try:
            config = read_yaml(self.path / "config.yaml")
            run_settings: dict[str, Any] = config["settings"]
        except (SettingsError, LookupError):  # missing or damaged: Posy repeats the run
            return None
        # A run writes its status before it computes the system accuracy. A diverged run has no system accuracy.
        lacks_accuracy = run_settings.get("system-accuracy") == "on" and run_settings.get("save-models", True)
        lacks_accuracy = lacks_accuracy and summary["system-accuracy"] is None and summary["status"] == "completed"
        return summary if self.fits(run_settings, config.get(CODE)) and not lacks_accuracy else None

    @cached_property
    def code(self) -> dict[str, str]:
        """Digests of the cell's custom code, keyed by setting."""
        return code_digests({key: value for key, (value, _) in self.decisive.items()})

    def fits(self, ran: Mapping[str, Any], code: Mapping[str, str] | None = None) -> bool:
        """Return whether a run's settings match this cell in every key that affects the results.

        If the record of the run contains digests of its custom code, they must match, too.
        """
        if code is not None and code != self.code:
            return False
        if ran.get("method") != self.decisive["method"][0]:
            return False
        decided = normalised(ran)
        return all(decided.get(key, before) == wanted for key, (wanted, before) in self.decisive.items())

    @property
    def changed_code(self) -> list[str]:
        """The settings whose custom code has changed since the cell's run finished with these settings."""
        if read_summary(self.path).get("status") not in ENDED:
            return []
        try:
            config = read_yaml(self.path / "config.yaml")
            code = config.get(CODE, self.code) if self.fits(config["settings"]) else self.code
        except (SettingsError, LookupError):  # missing or damaged
            return []
        return [key for key in self.code if code.get(key) != self.code[key]]

    @property
    def resume_settings(self) -> dict[str, Scalar] | None:
        """The settings that resume an interrupted run from its checkpoint; None if there is no checkpoint."""
        if not self.config.get("checkpoint-every") or read_summary(self.path).get("status") in ENDED:
            return None
        config = dict(self.config)
        config["resume"] = config.pop("run-name")
        try:
            stored = StoredRun.find(config, self.name)
        except SettingsError:  # no usable checkpoint
            return None
        return config if stored is not None and self.fits(stored.settings, stored.ran_on.get(CODE)) else None

    @cached_property
    def decisive(self) -> dict[str, tuple[Scalar, Scalar]]:
        """Settings that affect the results, each with its value in this cell and in runs that predate the setting."""
        values = read_settings(self.config, self.where or self.name, sources=self.sources).as_config()
        declarations = declared_for(values)
        return {key: (values[key], declarations[key].before) for key in values if declarations[key].decides}


@dataclass(frozen=True)
class Plan:
    """The runs of a table file."""

    title: str
    output: Path
    cells: tuple[Cell, ...]
    content: Mapping[str, Any] = field(default_factory=dict)
    """Content of the file."""
    collect: Callable[[Path], None] | None = None
    """Function to call with the directory of each completed run, before Posy deletes the run's models."""
    overrides: Mapping[str, Scalar] = field(default_factory=dict)
    """Settings on the command line, which override the file."""

    @property
    def size(self) -> str:
        """The number of runs, and of the rows, variants and seeds that they combine."""
        parts = {name: len({getattr(cell, name) for cell in self.cells}) for name in ("row", "variant", "seed", "fold")}
        combined = ", ".join(counted(number, name) for name, number in parts.items() if number > 1)
        return counted(len(self.cells), "run") + (f" ({combined})" if combined else "")


class Running(Protocol):
    """A running cell, in a process on this machine or another machine."""

    def poll(self) -> int | None:
        """Return the exit status, or None if the cell is still running."""

    def terminate(self) -> None:
        """Ask the run to stop."""

    def wait(self) -> int:
        """Wait for the run to end, and return the exit status."""


Start = Callable[[Cell], Running]
"""Type of a function that starts a cell's run."""


def run_table(plan: Plan, *, jobs: int, only_print: bool = False, begin: Start | None = None) -> int:
    """Run the missing cells of a table, print and write the table, and return the exit status.

    Parameters
    ----------
    plan : Plan
        The table.
    jobs : int
        Number of parallel runs.
    only_print : bool
        Whether to print the table without starting any runs.
    begin : callable, optional
        Function that starts a run. By default, it starts a process on this machine.

    Raises
    ------
    SettingsError
        If another process runs the table, or the directory of a run contains other files.
    """
    archive.restore(plan.output, plan.cells)
    if not only_print:
        print(f"{plan.title}: {plan.size}, {jobs} at a time; results in {relative(plan.output)}", flush=True)
    failures = {} if only_print else fill(plan, jobs=jobs, begin=begin)
    results = {cell: summary for cell in plan.cells if (summary := cell.summary()) is not None}
    for cell in plan.cells:
        if cell not in results:
            finished = read_summary(cell.path).get("status") in ENDED
            reason = "finished with other settings or other code" if finished else "not finished"
            failures.setdefault(cell.name, DIVERGED if cell.summary("diverged") else reason)
    table = aggregate(results)
    every_run = [Run(c.variant, c.row, c.method, c.seed, summary, c.path, c.fold) for c, summary in results.items()]
    runs = [run for run in every_run if run.comparable]
    diverged = [(c.variant, c.seed, c.row) for c in plan.cells if c not in results and c.summary("diverged")]
    check_metrics(every_run)
    clients, ranked = over_clients(runs), ranks(scores_by_block(runs, diverged))
    metric = every_run[0].metric if every_run else METRICS["accuracy"]
    failures = {name: reason.replace(f"{plan.output}{os.sep}", "") for name, reason in failures.items()}
    text = markdown(plan, results, table, failures, metric) + compared(clients, ranked, metric)
    text += per_client(runs, metric)
    print(text)
    if results:
        archive.store(plan.output, ended(plan))
        (plan.output / "table.md").write_text(text, encoding="utf-8")
        table.to_csv(plan.output / "table.csv", index=False, lineterminator="\n")
        clients.to_csv(plan.output / "clients.csv", index=False, lineterminator="\n")
        written = ["table.md", "table.csv", "clients.csv", *_draw(plan, runs, ranked)]
        print(f"written to {plan.output}: {', '.join(written)}")
    return 1 if failures else 0


def next_commands(plan: Plan, file: Path) -> list[str]:
    """Return the commands that use a complete table, which a file describes.

    The first command reports the runs of the first variant. A pattern of the shell selects their directories.
    """
    if not plan.cells:
        return []
    runs = shlex.quote(relative(plan.output / plan.cells[0].variant)) + "/*/seed-*/"
    tuned = file.stem.endswith(TUNED) or not importlib.util.find_spec("optuna")
    return [f"posy report {runs}", *([] if tuned else [shlex.join(["posy", "tune", str(file)])])]


def _draw(plan: Plan, runs: Sequence[Run], ranked: Ranks | None) -> list[str]:
    """Draw the ranks and the clients' gains over local training, and return the names of the files."""
    from posy.report.table_figures import draw_gains, draw_ranks  # noqa: PLC0415 - matplotlib takes a second

    if ranked is not None:
        draw_ranks(ranked, plan.output / "ranks.png", plan.title, {cell.row: cell.method for cell in plan.cells})
    draw_gains(runs, plan.output / "gains.png", plan.title)
    return [name for name in ("ranks.png", "gains.png") if (plan.output / name).exists()]


def fill(plan: Plan, *, jobs: int, begin: Start | None = None) -> dict[str, str]:
    """Run the missing cells of a table and add them to its archive; return the reasons for failures, keyed by cell.

    Raises
    ------
    SettingsError
        If another process runs the table, or the directory of a run contains other files.
    """
    with locked_output(plan.output):
        archive.store(plan.output, ended(plan))  # rewrite the archive before run_cells appends to it
        return run_cells(plan, jobs, begin)


@contextmanager
def locked_output(output: Path) -> Iterator[None]:
    """Create and lock an output folder; raise :class:`SettingsError` if another process has locked it."""
    output.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise SettingsError(
            f"another `posy table`, `posy tune` or `posy paper` is using {output}; wait until it exits"
        ) from None
    try:
        yield
    finally:
        lock.release()


def ended(plan: Plan) -> list[Cell]:
    """Return the cells of a table whose runs have finished. Posy does not repeat these runs."""
    return [cell for cell in plan.cells if cell.summary(*ENDED) is not None]


def read_plan(file: Path, overrides: Mapping[str, Scalar] | None = None, output: str | None = None) -> Plan:
    """Read a table file and check the settings of all its cells.

    A table file contains ``runs`` and ``seeds``. Optional keys are ``variants``, ``settings`` for all cells, ``title``
    and ``output`` (a directory; default: ``results/FILE``). Each entry of ``runs`` is a row with ``name``,
    ``settings`` and ``variants``, which maps names of variants to settings. ``runs: all``, or an entry ``all``, creates
    one row per method. Each entry of ``variants`` has a ``name`` and ``settings``.

    A variant's settings override the common settings, and a row's settings override both. A row's settings for one
    variant override all others. The settings ``overrides`` from the command line override the file, and so does
    ``output``.

    Each group of settings applies to several cells. A cell ignores settings that have no effect in it, such as
    ``dirichlet-alpha`` in a variant with the partition ``classes``. It is an error if a setting has no effect in any
    of its cells.

    Raises
    ------
    SettingsError
        If a part of the file is missing, misspelt or wrong, or a setting has no effect in any cell.
    """
    if not file.is_file():
        raise SettingsError(
            f"the table {file} does not exist; pass a YAML file, such as benchmarks/tables/compare-digits.yaml"
        )
    return plan_of(read_yaml(file), file, overrides or {}, output)


def plan_of(
    content: dict[str, Any],
    file: Path,
    command_line: Mapping[str, Scalar],
    output: str | None = None,
    reduced: Mapping[str, Scalar] | None = None,
    strict: bool = True,
) -> Plan:
    """Return the runs that a table file's content describes; see :func:`read_plan`.

    The settings ``reduced`` of a reduced run override the content, and ``command_line`` overrides both. If ``strict``
    is false, Posy accepts overrides that have no effect in any cell.
    """
    overrides = {**(reduced or {}), **command_line}
    _expand_all(content)
    _check_parts(content, file)
    seeds = content["seeds"]
    rows = _named(content.get("runs", []), "runs", file)
    variants = _named(content["variants"], "variants", file) if "variants" in content else {"": {}}
    special = {entry["name"]: entry.get("variants", {}) for entry in content["runs"]}
    if unknown := {name for row_settings in special.values() for name in row_settings} - variants.keys():
        names = ", ".join(sorted(unknown))
        raise SettingsError(f"runs in {file} use the variants {names}, which the list `variants` does not contain")
    folder = Path(output or content.get("output", f"results/{file.stem}")).expanduser().absolute()
    declarations = declared_for(command_line)
    with_experiment(
        {key: value for key, value in command_line.items() if key in declarations}, COMMAND_LINE
    )  # report invalid overrides with the command line as their source
    typed = dict.fromkeys(command_line, COMMAND_LINE)
    sources = dict.fromkeys(overrides, f"the settings of reduced runs in {file}") | typed
    cells, methods, effects = [], set(), Effects()
    for (variant, of_variant), (row, of_row) in itertools.product(variants.items(), rows.items()):
        where = f"{file}, " + " / ".join(filter(None, (variant, row)))
        groups = {
            f"the settings of {file}": content.get("settings", {}),
            f"the settings of variant {variant} in {file}": of_variant,
            f"the settings of {row} in {file}": of_row,
            where: special[row].get(variant, {}),
        }
        merged = {key: value for group in (*groups.values(), overrides) for key, value in group.items()}
        if clash := sorted(merged.keys() & {"seed", "output-dir", "run-name"}):
            source = set_in(typed.get(clash[0], where))
            raise SettingsError(f"{clash[0]} {source}: the table sets this value for each cell; remove {clash[0]}")
        config = _cell_config(groups, overrides, sources, effects)
        method = str(config.get("method", RunSettings.method))
        check_own({**of_row, **special[row].get(variant, {})}, method, where)
        for seed in seeds:
            for fold in _folds(config):
                name = f"seed-{seed}" + (f"-fold-{fold}" if fold else "")
                paths = {"seed": seed, "output-dir": str(folder / variant / row), "run-name": name}
                paths |= {"fold": fold} if fold else {}
                cells.append(cell := Cell(variant, row, seed, config | paths, where, typed, fold))
                cell.decisive  # noqa: B018 - raise an error now if the settings are invalid
        methods.add(method)
    effects.check(() if strict else overrides)
    if foreign := [key for key in sorted(overrides) if owner(key) not in (None, *methods)]:
        source = set_in(typed.get(foreign[0], str(file)))
        raise SettingsError(f"{foreign[0]} {source} is a setting of {owner(foreign[0])}, which no row of {file} uses")
    return Plan(content.get("title", file.stem), folder, tuple(cells), content, overrides=command_line)


def _expand_all(content: dict[str, Any]) -> None:
    """Replace the entry `all` in a table's runs with one row per method."""
    runs = content.get("runs")
    if runs == ALL or (isinstance(runs, list) and ALL in runs):
        every_method = [{"name": method, "settings": {"method": method}} for method in METHODS]
        entries = [ALL] if runs == ALL else runs
        content["runs"] = [row for entry in entries for row in (every_method if entry == ALL else [entry])]


def _folds(config: Mapping[str, Any]) -> Sequence[int]:
    """Return the folds to run for a row of a table: all of them, the chosen one, or 0 without folds."""
    folds, fold = config.get("folds", 0), config.get("fold", 0)
    return range(1, folds + 1) if type(folds) is int and folds > 1 and not fold else [fold]


def _cell_config(
    groups: Mapping[str, Mapping[str, Any]],
    overrides: Mapping[str, Scalar],
    sources: Mapping[str, str],
    effects: "Effects",
) -> dict[str, Any]:
    """Return the settings that have an effect in a cell, and record in ``effects`` which settings do.

    Parameters
    ----------
    groups : mapping
        Groups of settings, keyed by source. Each group overrides the earlier ones. The last source is the cell itself.
    overrides : mapping
        Settings that override all groups.
    sources : mapping
        Source of each override.
    effects : Effects
        Record of the settings with and without an effect; updated in place.
    """
    *_, where = groups
    in_file = {key: value for group in groups.values() for key, value in group.items()}
    # Most cells take only minutes, so they write no checkpoints. An interrupted cell restarts from its first round.
    config = {"checkpoint-every": 0} | with_experiment({**in_file, **overrides}, where)
    # Drop shared settings that belong to another row's method.
    config = relevant_settings(config, str(config.get("method", RunSettings.method)))
    reasons = without_effect(config)
    # It is not an error if an override disables a setting in the file.
    reasons_in_file = without_effect(with_experiment(in_file, where)) if overrides else reasons
    for source, group in groups.items():
        effects.note(source, group, config, {key: reasons[key] for key in reasons.keys() & reasons_in_file.keys()})
    for key, value in overrides.items():
        effects.note(sources[key], {key: value}, config, reasons)
    # An override may lower a limit below a value in the file. Without the override, such a value is an error.
    return lowered(effective(config), overrides or config)


@dataclass
class Effects:
    """Settings in a table that have an effect (``useful``) or no effect (``idle``) in at least one cell.

    Both collections are keyed by source and setting. ``idle`` contains the error messages.
    """

    useful: set[tuple[str, str]] = field(default_factory=set)
    idle: dict[tuple[str, str], str] = field(default_factory=dict)

    def note(
        self, source: str, group: Mapping[str, Any], config: Mapping[str, Any], reasons: Mapping[str, str]
    ) -> None:
        """Record which settings of a group have an effect in a cell.

        Parameters
        ----------
        source : str
            Source of the group, for error messages.
        group : mapping
            Settings that apply to several cells.
        config : mapping
            The settings of the cell, without the settings of other methods.
        reasons : mapping
            Reasons why settings have no effect in the cell, keyed by setting.
        """
        for key in group.keys() & config.keys():
            if key in reasons:
                self.idle[source, key] = no_effect(key, group[key], source, reasons[key])
            else:
                self.useful.add((source, key))

    def check(self, ignored: Collection[str] = ()) -> None:
        """Raise :class:`SettingsError` for a setting that has no effect in any cell, unless it is in ``ignored``."""
        for source, key in sorted(self.idle.keys() - self.useful):
            if key not in ignored:
                raise SettingsError(self.idle[source, key])


def plan_as_yaml(
    plan: Plan, tuned: Mapping[tuple[str, str], Mapping[str, Scalar]], common: Mapping[str, Scalar]
) -> dict[str, Any]:
    """Return a table file's content, with the tuned settings of each (variant, row) and the ``common`` settings."""
    content: dict[str, Any] = {**plan.content}
    content["title"] = f"{plan.title}, tuned"
    # Keep a relative path relative, so that the tuned table contains no machine-specific path.
    content["output"] = f"{content.get('output', f'results/{plan.output.name}')}-tuned"
    content["settings"] = {**content.get("settings", {}), **common}
    content["runs"] = runs = [dict(entry) for entry in content["runs"]]
    for entry in runs:
        row_values = {
            variant: dict(values) for (variant, row), values in tuned.items() if row == entry["name"] and values
        }
        if "variants" in content:
            old_values = entry.get("variants", {})
            entry["variants"] = old_values | {
                variant: {**old_values.get(variant, {}), **row_values[variant]} for variant in row_values
            }
        else:
            entry["settings"] = {**entry.get("settings", {}), **row_values.get("", {})}
    return content


def run_cells(plan: Plan, jobs: int, begin: "Start | None" = None) -> dict[str, str]:
    """Run the unfinished cells, ``jobs`` at a time; return the reason for each failure, keyed by cell name.

    Run all cells of one seed before the cells of the next seed, so that an interrupted table contains complete seeds.
    """
    seed_order = {seed: index for index, seed in enumerate(dict.fromkeys(cell.seed for cell in plan.cells))}
    summaries = {cell: cell.summary(*ENDED) for cell in plan.cells}
    unfinished = (cell for cell, summary in summaries.items() if summary is None)
    waiting = deque(sorted(unfinished, key=lambda cell: seed_order[cell.seed]))
    total, done = len(plan.cells), len(plan.cells) - len(waiting)
    if done:
        print(f"{done} of {total} runs are already finished", flush=True)
    repeated = {cell: keys for cell in waiting if (keys := cell.changed_code)}
    if repeated:
        codes = sorted({f"{key} = {cell.decisive[key][0]}" for cell, keys in repeated.items() for key in keys})
        print(f"{counted(len(repeated), 'run')} will be repeated, because the code has changed: {', '.join(codes)}")
    running: dict[Cell, Running] = {}
    failures: dict[str, str] = {}
    ended: dict[str, list[float]] = {}
    for cell, summary in summaries.items():
        if summary is not None and summary["status"] == "completed":
            ended.setdefault(cell.place, []).append(float(summary["seconds"]))
    estimate = Estimate(jobs, ended)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.popleft()
                running[cell] = begin(cell) if begin else start(cell, jobs)
                # The directory no longer contains the files of another run.
                estimate.begin(cell.path, cell.rounds, cell.place)
            for cell, process in list(running.items()):
                if (status := process.poll()) is None:
                    continue
                del running[cell]
                estimate.end(cell.path)
                done += 1
                _keep(plan, cell)
                outcome = _outcome(plan, cell, status, failures)
                if status == REJECTED and cell.name in failures:
                    repetitions = [other for other in waiting if other.place == cell.place]
                    failures |= {other.name: f"not started, because {cell.name} failed" for other in repetitions}
                    waiting = deque(other for other in waiting if other not in repetitions)
                    done += len(repetitions)
                remaining = time_left(estimate.remaining_time([other.place for other in waiting]))
                print(f"[{done}/{total}] {cell.name}: {outcome}{remaining}", flush=True)
            if (seconds := estimate.first([other.place for other in waiting])) is not None:
                print(f"the first rounds have ended{time_left(seconds)}", flush=True)
            time.sleep(0.05)
    finally:
        stop(running.values())
        for cell in running:  # a run may have ended since the last poll
            _keep(plan, cell)
    return failures


def time_left(seconds: float | None) -> str:
    """Return the end of a line about a table's progress: the time left, unless it is unknown or 0."""
    return f"; about {duration(seconds)} left" if seconds else ""


def _outcome(plan: Plan, cell: Cell, status: int, failures: dict[str, str]) -> str:
    """Describe the outcome of a run that has ended, and add the reason of a failure to ``failures``."""
    if (summary := cell.summary()) is None:
        reason = f"{failure_of(status, cell.log)} ({cell.log.relative_to(plan.output)})"
        failures[cell.name] = DIVERGED if cell.summary("diverged") else reason
        return f"failed, {failures[cell.name]}"
    means = (
        f"{point} {metric_in(summary).format(last['mean'])}"
        for point in ("served", "local")
        if (last := last_round(summary, point))
    )
    return ", ".join([*means, duration(summary["seconds"])])


def _keep(plan: Plan, cell: Cell) -> None:
    """Add a cell whose run has ended to the table's archive; delete the models and checkpoints of a completed run."""
    if cell.summary() is not None:
        if plan.collect is not None:
            plan.collect(cell.path)
        for part in ("models", "checkpoints", "state"):
            shutil.rmtree(cell.path / part, ignore_errors=True)
    if cell.summary(*ENDED) is not None:
        archive.add(plan.output, cell)


def stop(processes: Collection[Running]) -> None:
    """Stop all cells in ``processes``, and wait until they have ended."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def aggregate(results: Mapping[Cell, Mapping[str, Any]]) -> pd.DataFrame:
    """Average the summaries over the seeds; return one line per variant and row, with accuracies between 0 and 1.

    ``X`` is the mean over the seeds, or NaN if no seed has a value. ``X-seeds-std`` is the sample standard deviation
    over the seeds (NaN for one seed). ``X-clients-std`` is the mean over the seeds of the standard deviation over the
    clients. ``X-measured`` is the number of seeds with a value of ``X``. ``X-scored`` is the number of clients that
    these values cover, summed over the seeds. ``members`` is the number of clients that a round can evaluate. ``last``
    always refers to the last round, even if the last evaluation was earlier.
    """
    columns: dict[str, Any] = {"seeds": ("seconds", "size")}
    columns["members"] = ("members", "mean")
    for point in POINTS:
        columns[f"{point}-measured"] = (point, "count")
        columns[f"{point}-scored"] = (f"{point}-scored", "sum")
        columns |= {point: (point, average), f"{point}-seeds-std": (point, _std)}
        columns[f"{point}-clients-std"] = (f"{point}-clients-std", average)
        weighted = f"{point}-weighted"
        columns |= {weighted: (weighted, average), f"{weighted}-seeds-std": (weighted, _std)}
        columns[f"{point}-round"] = (f"{point}-round", average)
    for name in ("system", "central"):
        columns |= {name: (name, average), f"{name}-seeds-std": (name, _std)}
    columns |= {key: (key, average) for key in ("seconds", "bytes-up", "bytes-down")} | {"dropped": ("dropped", "sum")}
    runs = pd.DataFrame([_figures(cell, summary) for cell, summary in results.items()])
    return runs.groupby(["variant", "method"], sort=False).agg(**columns).reset_index() if results else runs


def markdown(
    plan: Plan,
    results: Mapping[Cell, Mapping[str, Any]],
    table: pd.DataFrame,
    failures: Mapping[str, str],
    metric: Metric,
) -> str:
    """Return the table as Markdown, one section per variant."""
    has_best_round = len(table) and table[["served-best", "local-best"]].notna().any(axis=None)
    points = [point for point in POINTS if not point.endswith("upper-bound" if has_best_round else "best")]
    header = ["method", "seeds", *(point.replace("-", " ") for point in points), "served weighted", "local weighted"]
    has_central = bool(len(table) and table["central"].notna().any())
    header += ["system", *["central"] * has_central, "time", "up", "down", "dropped"]
    parts = [f"# {plan.title}"]
    if plan.overrides:
        parts.append(f"With `{as_words(plan.overrides)}` from the command line.")
    for variant, rows in table.groupby("variant", sort=False) if len(table) else ():
        if variant:
            parts.append(f"## {variant}")
        lines = [header, ["---", *["---:"] * (len(header) - 1)]]
        for row in rows.to_dict("records"):
            seeds = sum((cell.variant, cell.row) == (variant, row["method"]) for cell in plan.cells)
            cells = [row["method"], f"{row['seeds']}/{seeds}"]
            cells += [
                _score(row, point, metric, clients=True) + _measured(row, point) + _covered(row, point)
                for point in points
            ]
            for point in ("served-last", "local-last"):
                weighted = _score(row, f"{point}-weighted", metric)
                cells.append(weighted + (_covered(row, point) if weighted else ""))
            cells.append(_score(row, "system", METRICS["accuracy"]))
            cells += [_score(row, "central", metric)] * has_central
            cells += [duration(row["seconds"]), size(row["bytes-up"]), size(row["bytes-down"]), str(row["dropped"])]
            lines.append(cells)
        parts.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    if any(cell.fold for cell in plan.cells):
        parts.append(FOLDS_LEGEND)
    parts.append(LEGEND.format(metric=capitalised(metric.title) + " in %" * metric.in_percent))
    parts += [POOLED_LEGEND] * any("client-scores" in summary for summary in results.values())
    parts += [CENTRAL_LEGEND] * has_central
    parts += [f"Machine: {line}." for line in machines(results)]
    if failures:
        parts.append("\n".join(["Missing:", "", *(f"- {name}: {reason}" for name, reason in failures.items())]))
    return "\n\n".join(parts) + "\n"


def _check_parts(content: Mapping[str, Any], file: Path) -> None:
    """Raise :class:`SettingsError` for an unknown key, a value of the wrong type, or invalid seeds in a table file."""
    for key, value in content.items():
        if key not in PARTS:
            raise SettingsError(f"{key} in {file} is not a key of a table file; use only {', '.join(PARTS)}")
        if not isinstance(value, PARTS[key]):
            raise SettingsError(f"{key} = {value!r} in {file}: it must be a {PARTS[key].__name__}")
    seeds = content.get("seeds", [])
    if not seeds or len(set(map(str, seeds))) < len(seeds) or not all(type(seed) is int for seed in seeds):
        raise SettingsError(f"seeds in {file}: it must be a list of distinct whole numbers")


def as_words(settings: Mapping[str, Scalar]) -> str:
    """Return settings as ``key=value`` words for a command."""
    texts = {key: str(value).lower() if isinstance(value, bool) else str(value) for key, value in settings.items()}
    return shlex.join(f"{key}={text}" for key, text in texts.items())


def _named(entries: Sequence[Any], key: str, file: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of rows or variants, keyed by name."""
    named: dict[str, dict[str, Any]] = {}
    allowed = ", ".join(f"`{part}`" for part in ENTRIES[key])
    for number, entry in enumerate(entries, 1):
        where = f"entry {number} in {key} of {file}"
        if not isinstance(entry, dict):
            raise SettingsError(f"{where} is {quoted(entry)}, not a mapping; use the keys {allowed}")
        if unknown := sorted(map(str, entry.keys() - set(ENTRIES[key]))):
            raise SettingsError(f"{where} has the unknown key {unknown[0]}; use only {allowed}")
        if "name" not in entry:
            raise SettingsError(f"{where} has no name; add `name: ...`")
        name, settings = entry["name"], entry.get("settings", {})
        by_variant = entry.get("variants", {})
        if not isinstance(by_variant, dict) or not all(
            isinstance(overrides, dict) for overrides in by_variant.values()
        ):
            raise SettingsError(f"variants of {name} in {key} of {file}: it must map names of variants to settings")
        if not isinstance(name, str) or not name.strip() or name.startswith(".") or set(name) & set("/\\|"):
            raise SettingsError(f"name = {name!r} in {key} of {file}: it must be a valid folder name without `|`")
        if name in named:
            raise SettingsError(f"{name} appears twice in {key} of {file}; rename one of the two")
        if not isinstance(settings, dict):
            raise SettingsError(f"settings of {name} in {file}: it must contain `key: value` lines")
        named[name] = settings
    if not named:
        raise SettingsError(f"{key} in {file} is empty; add at least one entry")
    return named


def start(cell: Cell, jobs: int = 1) -> WarmProcess:
    """Start a cell's run as `posy run FILE` does, on 1 / ``jobs`` of the cores."""
    return WarmProcess(run_file, str(prepared(cell)), log=cell.log, cores=max(1, cores() // jobs))


def run_file(file: str) -> int:
    """Run a cell in this process as `posy run FILE` does, and return the exit status."""
    try:
        with interruptible():
            return run_in_process({"experiment": file}, "the table")
    except (SettingsError, DataError) as error:
        print(f"posy: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED


def prepared(cell: Cell) -> Path:
    """Clear the directory of a cell's run, write the cell's settings into a file next to it, and return the file.

    If an interrupted run has a checkpoint, keep its directory, and write settings that resume the run.
    """
    config = cell.resume_settings
    if config is None:
        config = dict(cell.config)
        clear(cell.path)
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    file = cell.path.with_suffix(".yaml")
    file.write_text(dump(config), encoding="utf-8")
    return file


def failure_of(status: int, log: Path) -> str:
    """Describe why a run ended with a non-zero exit status."""
    lines = list(filter(None, map(str.strip, log.read_text(encoding="utf-8", errors="replace").splitlines())))
    reasons = [
        line for line in lines if not line.startswith("posy: failed ")
    ]  # this line contains only the command that resumes the run
    last = (reasons or lines or ["no output"])[-1]
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}: {last}"


def _figures(cell: Cell, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a table shows for one run, with None for missing values."""
    figures = {"variant": cell.variant, "method": cell.row, "dropped": sum(summary["dropped"].values())}
    figures |= {key: summary[key] for key in ("seconds", "bytes-up", "bytes-down")}
    figures |= {"system": summary["system-accuracy"], "members": members_of(summary)}
    central = central_scores(summary)
    metric = metric_in(summary).name
    figures["central"] = central[1]["metrics"].get(metric, {}).get("mean") if central else None
    for point in POINTS:
        model, _, round_name = point.partition("-")
        spread = last_round(summary, model) if round_name == "last" else summary[model][round_name] or {}
        keys = {"": "mean", "-clients-std": "std", "-weighted": "weighted", "-round": "round", "-scored": "clients"}
        figures |= {point + name: spread.get(key) for name, key in keys.items()}
    return figures


def _std(values: "pd.Series[float]") -> float:
    """Return the sample standard deviation, ignoring NaN values and avoiding the rounding errors of pandas."""
    return statistics.stdev(numbers) if len(numbers := values.dropna()) > 1 else float("nan")


def _score(row: Mapping[str, Any], key: str, metric: Metric, *, clients: bool = False) -> str:
    if pd.isna(row[key]):
        return ""
    text = metric.number(row[key])
    if not pd.isna(row[f"{key}-seeds-std"]):
        text += f" ± {metric.number(row[f'{key}-seeds-std'])}"
    over_clients = clients and not pd.isna(row[f"{key}-clients-std"])  # secure aggregation hides this number
    return text + (f" ({metric.number(row[f'{key}-clients-std'])})" if over_clients else "")


def _measured(row: Mapping[str, Any], point: str) -> str:
    """Return how many of the finished seeds have a value, or an empty string if all of them do."""
    measured, measured_once = row[f"{point}-measured"], row[f"{point.partition('-')[0]}-upper-bound-measured"]
    if measured == row["seeds"] or not (measured or measured_once):
        return ""
    return f" {measured} of {row['seeds']}!".removeprefix("" if measured else " ")


def _covered(row: Mapping[str, Any], point: str) -> str:
    """Return how many clients a value covers over all seeds, and whether it is a score over all samples.

    The text is empty for a mean over all clients.
    """
    scored, members = round(row[f"{point}-scored"]), round(row["members"] * row[f"{point}-measured"])
    label = f", {POOLED}" if not pd.isna(row[point]) and pd.isna(row[f"{point}-clients-std"]) else ""
    return (f", {coverage(scored, members)} clients" if 0 < scored < members else "") + label


def machines(results: Mapping[Cell, Mapping[str, Any]]) -> list[str]:
    """Return one line for each machine and set of versions, with the date of its last run."""
    days: dict[str, str] = {}
    for cell in results:
        record = read_yaml(cell.path / "config.yaml")
        day = time.strftime("%Y-%m-%d", time.localtime((cell.path / "summary.json").stat().st_mtime))
        for part in (*record.get("resumed", []), record):  # a resumed run may have started on another machine
            if not part.keys() >= set(RAN_ON):
                continue
            machine, versions = part["machine"], part["versions"]
            key = (
                f"{machine['cpu']}, {machine['cpus']} cores, {machine['gpu'] or 'no GPU'}; torch {versions['torch']}, "
                f"flwr {versions['flwr']}, Python {versions['python']}"
            )
            days[key] = max(day, days.get(key, ""))
    return [f"{key}; {day}" for key, day in days.items()]
