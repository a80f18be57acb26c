"""The ServerApp: read the settings, find the clients, run the method's strategy, keep the record."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from logging import INFO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from posy.client_app.privacy import check_privacy
from posy.client_app.state import DirectoryStore, MemoryStore
from posy.client_app.workspace import Workspace, workspace_for
from posy.data.partitions import as_used
from posy.data.sites import check_site_settings
from posy.flower import absolute, in_simulation
from posy.paths import exists
from posy.server_app.checkpoints import resumption
from posy.server_app.grids import PollingGrid, WaveGrid
from posy.server_app.in_process import InProcessGrid
from posy.server_app.members import Federation
from posy.server_app.recorder import Recorder
from posy.server_app.resume import StoredRun, given_keys
from posy.settings import DATASETS, SITES, SITES_NEED_NODES, Settings, SettingsError
from posy.strategies.methods import strategy_class
from posy.strategies.registry import resolve

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    if not in_simulation():
        from posy.flower import hasten_pulls  # noqa: PLC0415 - what only a run over a network needs

        hasten_pulls()
    run(grid, context.run_config)


def run(grid: Grid | None, config: Mapping[str, Any], begun: Callable[[Path], object] = lambda path: None) -> Recorder:
    """Run an experiment on a grid, whatever delivers its messages.

    Parameters
    ----------
    grid : Grid or None
        Flower's grid; not needed where ``engine`` is ``in-process``, which makes its own.
    config : Mapping
        Flat settings as in ``[tool.flwr.app.config]``.
    begun : callable
        Called with the directory of the run when it is there.

    Returns
    -------
    Recorder
        The record of the run; its files lie in ``recorder.directory``.

    Raises
    ------
    SettingsError, DataError
        Before the first round, if a setting or the data is wrong.
    RunError
        After the last, if no client's training or no evaluation was accepted, or the training has diverged; before,
        if the directory of the run cannot be written.
    """
    where = "the run config"
    changed: dict[str, Any] = {}
    stored = None
    if not config.get("resume"):
        settings = with_absolute_paths(resolve(config, where))
        settings = replace(settings, data=as_used(settings.data))
    else:
        stored = StoredRun.find(absolute(str(config["output-dir"])), str(config["resume"]))
        settings = with_absolute_paths(stored.resumed(given_keys(config, where), where))
        changed = stored.check(settings)
    check_together(settings)
    if settings.run.engine == "in-process":
        grid = InProcessGrid(settings.data.num_clients)
    if grid is None:
        raise SettingsError(f"engine = {settings.run.engine!r} runs on a grid of Flower's: start it with `flwr run`")
    waves = WaveGrid(grid) if isinstance(grid, InProcessGrid) else PollingGrid(grid)
    federation = Federation(waves, settings)
    check_site_settings(settings.data)
    if settings.data.dataset == SITES:
        check_engine(settings)
        settings = federation.agree()
    workspace = workspace_for(settings.to_json(), "")  # that of the clients, where they are in this process
    check_federation(settings, workspace)
    strategy = strategy_class(settings.run.method)(settings, workspace.architecture)
    if settings.run.min_train_replies > (size := len(strategy.cohort(1))):
        raise SettingsError(
            f"min-train-replies = {settings.run.min_train_replies}: {size} clients train in a round, "
            f"so it must be 1 to {size}"
        )
    with ExitStack() as stack:
        resumed = None
        if stored is not None:
            resumed = resumption(stored, changed, settings, strategy, workspace)
            stack.callback(resumed.directory.release)
            federation.restore(resumed.checkpoint.progress["sites"])
        strategy.members = federation.join()
        strategy.refresh = federation.refresh
        recorder = Recorder(settings, strategy, workspace, federation, resumed)
        stack.callback(recorder.directory.release)
        begun(recorder.directory.path)
        if isinstance(grid, InProcessGrid):
            grid.states = stack.enter_context(states_in_memory(recorder, settings))
        recorder.tell_clients(one_file_system=in_simulation())
        log(INFO, "Results of this run: %s", recorder.directory.path)
        stack.enter_context(recorder)
        strategy.start(
            grid=waves,
            initial_arrays=ArrayRecord(),
            num_rounds=settings.run.num_server_rounds,
            timeout=settings.run.round_timeout,
            evaluate_fn=recorder.finish_round,
        )
        recorder.check_outcome()
    return recorder


@contextmanager
def states_in_memory(recorder: Recorder, settings: Settings) -> Iterator[MemoryStore]:
    """Provide what keeps the clients' states in this process; what does not fit lies in the run's directory."""
    limit = settings.run.state_memory << 20
    if settings.run.checkpoint_every or settings.run.resume:
        states = MemoryStore(DirectoryStore(recorder.directory.state), limit)
        recorder.checkpoints.flush = states.flush
        yield states
        return
    with TemporaryDirectory(dir=recorder.directory.path, prefix="state-") as folder:
        yield MemoryStore(DirectoryStore(Path(folder), durable=False), limit)


def with_absolute_paths(settings: Settings) -> Settings:
    """Resolve relative directories once, on the server, so that all processes mean the same place."""
    data = settings.data
    name = data.dataset
    if name and name not in (*DATASETS, SITES):
        places = (absolute(data.data_dir) / name, absolute(name))
        name = str(next((place for place in places if exists(place)), name))
    file = str(absolute(data.partition_file)) if data.partition_file else ""
    data = replace(data, dataset=name, data_dir=str(absolute(data.data_dir)), partition_file=file)
    return replace(settings, data=data, run=replace(settings.run, output_dir=str(absolute(settings.run.output_dir))))


def check_together(settings: Settings) -> None:
    """Raise :class:`SettingsError` for settings that do not go with each other."""
    check_privacy(settings)
    if settings.run.system_accuracy == "on" and not settings.run.save_models:
        raise SettingsError("system-accuracy = 'on' needs save-models = true: the stored models answer the queries")
    if settings.run.min_clients > settings.data.num_clients:
        raise SettingsError(
            f"min-clients = {settings.run.min_clients}: it must be 0 to num-clients = {settings.data.num_clients}"
        )


def check_engine(settings: Settings) -> None:
    """Raise :class:`SettingsError` for an engine that has no sites with data of their own."""
    if settings.run.engine == "in-process" or in_simulation():
        raise SettingsError(f"dataset = {SITES!r}: {SITES_NEED_NODES}")


def check_federation(settings: Settings, workspace: Workspace) -> None:
    """Check what only the data can tell, before any client is asked.

    Raises
    ------
    SettingsError
        If a client would have nothing to train on.
    """
    if workspace.of_sites:  # they check their data themselves
        return
    partition = workspace.partition
    if len(partition.train) != settings.data.num_clients:
        raise SettingsError(
            f"num-clients = {settings.data.num_clients}, but the partition has {len(partition.train)} clients"
        )
    for client, indices in enumerate(partition.train):
        if not len(indices):
            raise SettingsError(
                f"client {client} has no training sample; fewer num-clients or a larger "
                "dirichlet-alpha give every client some"
            )
