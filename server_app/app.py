"""The ServerApp: read the settings, find the clients, run the method's strategy, keep the record."""

from collections.abc import Mapping
from dataclasses import replace
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.common.logger import log
from flwr.serverapp import Grid, ServerApp

from client_app.workspace import Workspace
from posy.config import Settings, resolve
from posy.flower import absolute
from posy.methods import strategy_class
from posy.settings import DATASETS, SettingsError
from server_app.federation import PollingGrid, WaveGrid, find_members
from server_app.in_process import InProcessGrid
from server_app.recorder import Recorder

NODE_TIMEOUT = 300.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    from posy.deploy.internals import hasten_pulls  # noqa: PLC0415 - what only a run by Flower needs

    hasten_pulls()
    run(grid, context.run_config)


def run(grid: Grid, config: Mapping[str, Any]) -> Recorder:
    """Run an experiment on a grid, whatever delivers its messages.

    Parameters
    ----------
    grid : Grid
        Flower's grid.
    config : Mapping
        Flat settings as in ``[tool.flwr.app.config]``.

    Returns
    -------
    Recorder
        The record of the run; its files lie in ``recorder.directory``.

    Raises
    ------
    SettingsError, DataError
        Before the first round, if a setting or the data is wrong.
    """
    settings = with_absolute_paths(resolve(config))
    workspace = Workspace(settings)
    check_federation(settings, workspace)
    strategy = strategy_class(settings.run.method)(settings, workspace.architecture)
    if settings.run.min_train_replies > (size := len(strategy.cohort(1))):
        raise SettingsError(
            f"min-train-replies = {settings.run.min_train_replies}: {size} clients train in a round, "
            f"so it must be 1 to {size}"
        )
    in_process = settings.run.engine == "in-process"
    waves = WaveGrid(InProcessGrid(settings.data.num_clients)) if in_process else PollingGrid(grid)
    strategy.members = find_members(waves, settings.to_json(), settings.data.num_clients, NODE_TIMEOUT)
    recorder = Recorder(settings, strategy, workspace)
    log(INFO, "Results of this run: %s", recorder.directory.path)
    with recorder:
        strategy.start(
            grid=waves,
            initial_arrays=ArrayRecord(),
            num_rounds=settings.run.num_server_rounds,
            timeout=settings.run.round_timeout,
            evaluate_fn=recorder.finish_round,
        )
    return recorder


def with_absolute_paths(settings: Settings) -> Settings:
    """Resolve relative directories once, on the server, so that all processes mean the same place."""
    data = settings.data
    name = data.dataset
    if name and name not in DATASETS:
        places = (absolute(data.data_dir) / name, absolute(name))
        name = str(next((place for place in places if place.exists()), name))
    file = str(absolute(data.partition_file)) if data.partition_file else ""
    data = replace(data, dataset=name, data_dir=str(absolute(data.data_dir)), partition_file=file)
    return replace(settings, data=data, run=replace(settings.run, output_dir=str(absolute(settings.run.output_dir))))


def check_federation(settings: Settings, workspace: Workspace) -> None:
    """Check what only the data can tell, before any client is asked.

    Raises
    ------
    SettingsError
        If a client would have nothing to train on.
    """
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
