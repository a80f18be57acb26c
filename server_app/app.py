"""The ServerApp, which reads the settings, assigns the clients, runs the method's strategy and records the run."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from logging import INFO, WARNING
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid, ServerApp

from posy.client_app.privacy import check_network, check_privacy
from posy.client_app.registry import client_class
from posy.client_app.state import MemoryStore
from posy.client_app.workspace import Workspace, workspace_for
from posy.data.central import check_readable
from posy.data.errors import DataError
from posy.data.settings import SITES
from posy.flower import ErrorsOnOneLine, in_simulation
from posy.metrics import VALUES
from posy.server_app.central import central_test_of
from posy.server_app.checkpoints import Resumption, resumption
from posy.server_app.delivery import PollingGrid
from posy.server_app.federation import Federation
from posy.server_app.final_models import Delivery
from posy.server_app.fold_runs import FoldRun
from posy.server_app.folds import CrossValidation, cross_validation, interrupted
from posy.server_app.grids import WaveGrid
from posy.server_app.in_process import InProcessGrid
from posy.server_app.outcome import check_outcome
from posy.server_app.pace import Pace
from posy.server_app.recorder import Recorder
from posy.server_app.relay import relay
from posy.server_app.results import RunDirectory
from posy.server_app.resume import CONFIG, StoredRun, read_summary
from posy.server_app.run_status import RunStatus, WatchedGrid
from posy.server_app.trackers.tracking import find
from posy.server_app.waiting import WaitLog
from posy.settings import RunError, SettingsError
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.client_settings import check_clients
from posy.strategies.methods import strategy_class
from posy.strategies.registry import defaults, merge_experiment, named_sources, read_settings
from posy.strategies.run_settings import AUTO, OFF, RunSettings, metric_of, positive_class
from posy.strategies.score_sums import MOST_BINNED
from posy.strategies.settings import Settings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    FLOWER_LOGGER.addFilter(ErrorsOnOneLine((SettingsError, DataError, RunError)))
    user_settings = user_settings_in(context.run_config, grid.run.override_config)
    if in_simulation():
        run(grid, user_settings)
        return
    with closing(RunStatus.of_run(context.run_id)) as status:
        if user_settings.get("queries-from"):
            pass_queries(grid, user_settings, status)
        else:
            run(grid, user_settings, status=status)


def user_settings_in(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that the user has set, given a run config with all keys.

    These are the overrides given when the run was submitted, and settings edited in ``pyproject.toml``.
    """
    default_settings = defaults()
    return {
        k: value
        for k, value in config.items()
        if k in overrides or k not in default_settings or value != default_settings[k]
    }


def run(
    grid: Grid | None,
    user_settings: Mapping[str, Any],
    where: str = "the run config",
    begun: Callable[[Path], object] = lambda path: None,
    status: RunStatus | None = None,
) -> Recorder | CrossValidation | Delivery:
    """Run an experiment on a grid; if ``folds`` is set but ``fold`` is not, run one experiment for each fold.

    Parameters
    ----------
    grid : Grid or None
        Flower's grid, or None if all clients run in this process.
    user_settings, where : Mapping, str
        The user's settings, and their source, which error messages name.
    begun : callable
        Called with the run's directory as soon as it exists.
    status : RunStatus, optional
        Publishes the run's progress.

    Raises
    ------
    SettingsError, DataError
        Before the first round, if a setting or the data is invalid.
    RunError
        After the last round, if no client's training or no client's evaluation was accepted, or if training has
        diverged. RunError is also raised if the run's files cannot be written.
    """
    if socket := user_settings.get("queries-from"):
        raise SettingsError(f"queries-from = {socket!r}: only nodes answer queries; use `posy serve RUN --superlink`")
    if (resumed := interrupted(user_settings, where)) is not None:
        changes = {key: value for key, value in user_settings.items() if key not in ("resume", "output-dir")}
        return _cross_validate(grid, {"experiment": str(resumed / CONFIG), **changes}, where, begun, status, resumed)
    fold_run = None
    if not user_settings.get("resume"):
        settings = read_settings(user_settings, where)
        if settings.data.folds and not settings.data.fold:
            return _cross_validate(grid, user_settings, where, begun, status)
        if settings.run.part_of:
            fold_run = FoldRun(settings, Path(settings.run.output_dir) / settings.run.part_of)
            if (state := fold_run.claim()) == "completed":
                return fold_run.update(trained=False)
            user_settings = {**user_settings, **(fold_run.resume() if state == "interrupted" else {})}
    with named_sources(user_settings, where):
        stored = StoredRun.find(user_settings, where)
    stored_settings = stored.settings if stored else None
    settings = read_settings(user_settings, where, stored_settings)
    if notice := merge_experiment(user_settings, where).notice:
        log(WARNING, "%s", notice)
    if grid is None and settings.train.client_bounds:
        log(WARNING, "client-bounds has no effect: only nodes have node configs; use client-settings in this run")
    if settings.run.part_of and fold_run is None and stored is not None:
        fold_run = FoldRun(settings, stored.path.parent)
    with ExitStack() as stack, named_sources(user_settings, where, stored_settings):
        if fold_run is not None:
            stack.callback(fold_run.update)
        return _run(grid, settings, stored, begun, status)


def pass_queries(grid: Grid, user_settings: Mapping[str, Any], status: RunStatus) -> None:
    """Let the nodes of a stored run answer the queries of a service, until the service ends.

    Raises
    ------
    SettingsError
        If the run does not exist, or the service does not accept the connection.
    """
    where = "the run config"
    with named_sources(user_settings, where):
        stored = StoredRun.find(user_settings, where)
    if stored is None:
        raise SettingsError("queries-from needs resume, which names the run whose clients answer the queries")
    settings = read_settings(user_settings, where, stored.settings)
    path, settings = settings.run.queries_from, replace(settings, run=replace(settings.run, queries_from=""))
    waves = wave_grid(grid, settings, status)
    assert isinstance(waves, PollingGrid)
    federation = Federation(waves, settings, status)
    owners = dict(enumerate(read_summary(stored.path).get("sites", ())))
    federation.restore({"owners": {c: name for c, name in owners.items() if name}, "fingerprints": {}})
    relay(path, waves, federation, f"{stored.path.name}-{stored.id}")


def _cross_validate(
    grid: Grid | None,
    user_settings: Mapping[str, Any],
    where: str,
    begun: Callable[[Path], object],
    status: RunStatus | None,
    resumed: Path | None = None,
) -> CrossValidation:
    """Run an experiment for each fold; ``resumed`` is the directory of an interrupted cross-validation."""
    settings = read_settings(user_settings, where)
    if settings.data.dataset == SITES:
        raise SettingsError(
            f"folds = {settings.data.folds}: a site accepts only one split per run; `posy run --superlink HOST:PORT "
            f"folds={settings.data.folds}` submits a run for each fold; with `flwr run`, submit them with part-of = "
            f"'NAME' and fold = 1 to fold = {settings.data.folds}"
        )

    def train(changes: Mapping[str, Any]) -> Recorder:
        base = {} if "resume" in changes else user_settings
        recorder = run(grid, {**base, **changes}, where, status=status)
        assert isinstance(recorder, Recorder)
        return recorder

    validation = cross_validation(settings, resumed)
    begun(validation.directory.path)
    validation.run(train)
    return validation


def _run(
    grid: Grid | None,
    settings: Settings,
    stored: StoredRun | None,
    begun: Callable[[Path], object],
    status: RunStatus | None,
) -> Recorder | Delivery:
    """Run an experiment with checked settings; see :func:`run`."""
    changed = stored.check(settings) if stored else {}
    check_privacy(settings)
    find(settings.run.track)  # reports a missing tracker before the run begins
    check_readable(settings.data)
    if grid is None:
        grid = InProcessGrid(settings.data.num_clients)
    waves = wave_grid(grid, settings, status)
    federation = Federation(waves, settings, status)
    if settings.data.dataset == SITES:
        settings = federation.agree()
    workspace = checked_workspace(settings, in_this_process=isinstance(grid, InProcessGrid))
    central = central_test_of(workspace)
    strategy = make_strategy(settings, workspace)
    with ExitStack() as stack:
        resumed = None
        if stored is not None:
            directory = RunDirectory(stored.path, stored.id)
            stack.callback(directory.release)
            resumed = resumption(directory, stored, changed, settings, strategy, workspace)
            federation.restore(resumed.checkpoint.progress["sites"])
            if resumed.deliver_to:
                return _deliver(waves, resumed, strategy, federation, workspace, begun)
        strategy.clients = federation.join(workspace.architecture.fingerprint)
        if workspace.of_sites:
            check_site_names(settings, federation)
        strategy.exchange.refresh = federation.refresh
        recorder = Recorder(settings, strategy, workspace, federation, resumed, status, central)
        stack.callback(recorder.directory.release)
        begun(recorder.directory.path)
        if isinstance(waves, PollingGrid):
            waves.on_wait = WaitLog(federation, status)
        if isinstance(grid, InProcessGrid):
            grid.states = stack.enter_context(states_in_memory(recorder, settings))
            grid.on_trained = recorder.progress.note_trained
            stack.callback(grid.end)
        in_this_process = isinstance(grid, InProcessGrid)
        recorder.prepare_messages(shares_files=in_this_process or in_simulation(), one_file_system=in_simulation())
        log(INFO, "Results of this run: %s", recorder.directory.path)
        stack.enter_context(recorder)
        strategy.start(
            grid=waves,
            initial_arrays=ArrayRecord(),
            num_rounds=settings.run.num_server_rounds,
            timeout=settings.run.timeout,
            evaluate_fn=recorder.finish_round,
        )
        check_outcome(recorder.totals, strategy.record, settings, workspace.task)
    return recorder


def _deliver(
    waves: WaveGrid,
    resumed: Resumption,
    strategy: PersonalisedStrategy,
    federation: Federation,
    workspace: Workspace,
    begun: Callable[[Path], object],
) -> Delivery:
    """Deliver the final models of a completed run to the clients that lack them."""
    strategy.clients = federation.join(workspace.architecture.fingerprint, resumed.deliver_to)
    delivery = Delivery(resumed, strategy, federation)
    begun(delivery.directory.path)
    delivery.run(waves, one_file_system=not isinstance(waves, PollingGrid) or in_simulation())
    return delivery


def wave_grid(grid: Grid, settings: Settings, status: RunStatus | None) -> WaveGrid:
    """Return the grid for a run, or raise :class:`SettingsError` if the run needs sites but the grid has none."""
    in_this_process = isinstance(grid, InProcessGrid)
    if settings.data.dataset == SITES and (in_this_process or in_simulation()):
        raise SettingsError(
            f"dataset = {SITES!r}: a simulation has no nodes with data; start a SuperLink and a SuperNode at each "
            "site, and name the SuperLink with --superlink"
        )
    if settings.method.pools_data and not (in_this_process or in_simulation()):
        raise SettingsError(
            f"method = {settings.run.method!r}: it trains on the data of all clients in one place, but nodes keep "
            "their data; run it in this process (without --superlink), or in a simulation"
        )
    if in_this_process:
        return WaveGrid(grid)
    return polling(WatchedGrid(grid, status) if status is not None else grid, settings.run)


def checked_workspace(settings: Settings, *, in_this_process: bool) -> Workspace:
    """Check the data and the code, and return the server's workspace, which clients in this process share."""
    workspace = workspace_for(settings, "")
    if in_this_process:
        workspace.client_cache.processes = 1
    if not workspace.of_sites:  # sites check their data themselves
        _ = workspace.partition
    task = workspace.task
    metric = metric_of(settings.run, task.target, task.num_classes)
    is_binned = settings.run.secure_aggregation and metric.name != "accuracy" and task.target != VALUES
    if is_binned and task.num_classes > MOST_BINNED:
        raise SettingsError(
            f"metric = {settings.run.metric!r} with secure-aggregation = true: masked sums support it for at most "
            f"{MOST_BINNED} classes, and the task has {task.num_classes}; set metric = 'accuracy'"
        )
    positive_class(settings.run, task.class_names)
    check_network(settings, workspace.architecture)
    client_class(settings.run.method)
    _ = workspace.criterion
    return workspace


def make_strategy(settings: Settings, workspace: Workspace) -> PersonalisedStrategy:
    """Return a run's strategy, with the clients' names if the data contains them.

    Raise :class:`SettingsError` if a round needs more replies than the number of clients that train in it.
    """
    strategy: PersonalisedStrategy = strategy_class(settings.run.method)(settings, workspace.architecture)
    if not workspace.of_sites:
        strategy.exchange.client_names = dict(enumerate(workspace.partition.names))
    names = None if workspace.of_sites else workspace.partition.names  # sites name themselves when they join
    check_clients(settings.train, settings.data.num_clients, names)
    if settings.run.min_train_replies > (size := len(strategy.rounds.cohort(1))):
        raise SettingsError(
            f"min-train-replies = {settings.run.min_train_replies}: {size} clients train in a round, so "
            f"min-train-replies must be 1 to {size}"
        )
    rule, run = strategy.influence.rule, settings.run
    size = min(size, math.ceil(run.fraction_train * len(strategy.members) - 1e-9))
    if rule and rule.least > size:
        raise SettingsError(
            f"max-attackers = {run.max_attackers} with robust = {run.robust!r}: a round needs {rule.least} replies, "
            f"but only {size} clients train in it; lower max-attackers, or choose another rule"
        )
    return strategy


def check_site_names(settings: Settings, federation: Federation) -> None:
    """Check the names of sites in ``client-settings``.

    Raise :class:`SettingsError` for an unknown name if all sites have joined; otherwise, warn.
    """
    num_clients = settings.data.num_clients
    try:
        check_clients(settings.train, num_clients, [*federation.owners.values()])
    except SettingsError as error:
        if len(federation.owners) == num_clients:
            raise
        log(WARNING, "%s; a site with this name may join later", error)


def polling(grid: Grid, run: RunSettings) -> PollingGrid:
    """Return a grid that waits for replies according to a run's settings."""
    polling = PollingGrid(
        grid, Pace(automatic=run.round_timeout == AUTO and not in_simulation()), real=not in_simulation()
    )
    polling.enough, polling.grace = run.min_train_replies, None if run.grace == OFF else float(run.grace)
    return polling


@contextmanager
def states_in_memory(recorder: Recorder, settings: Settings) -> Iterator[MemoryStore]:
    """Yield a store that keeps clients' states in memory; states beyond its limit go to the run's directory."""
    limit = settings.run.state_memory << 20
    if settings.run.checkpoint_every or settings.run.resume:
        states = MemoryStore(recorder.directory.state, limit)
        recorder.checkpoints.flush = states.flush
        yield states
        return
    with TemporaryDirectory(dir=recorder.directory.path, prefix="state-") as folder:
        yield MemoryStore(Path(folder), limit)
