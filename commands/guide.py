"""Describe a run before it starts, and the commands that use its results."""

import importlib.util
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from posy.extensions import key_prefix
from posy.listing import shortened
from posy.server_app.resume import CONFIG, checkpoint_rounds, depends_on_length, reached
from posy.settings import COMMAND_LINE, Scalar, SettingsError
from posy.storage import read_metadata
from posy.strategies.registry import read_settings
from posy.strategies.run_settings import RunSettings
from posy.strategies.settings import Settings, cohort_size
from posy.words import counted
from posy.yaml12 import read_yaml

INPUTS = {"image": "photo.png", "text": "some text", "series": "samples.npy"}
"""An example of an input for `posy predict`, by kind of samples."""
TABLE = "rows.csv"
"""An example of an input for all other kinds of samples."""
AT_NODES = "posy models STATE-DIR    # on a node: its models"
"""The command that shows the models that a run has left on its nodes."""
TUNED = "-tuned"
"""End of the name of a table that `posy tune` has written."""
SERVICE = ("prometheus_client", "uvicorn")
"""Modules that `posy serve` needs."""


def description(settings: Settings) -> str:
    """Return one line about a new run in this process: its subject, and the folder of its results."""
    run = settings.run
    folder = relative(Path(run.output_dir) / run.run_name) + ("" if run.run_name else "/")
    return f"{subject(settings)}; results in {folder}"


def subject(settings: Settings) -> str:
    """Return the method, data set, clients, rounds, network and seed of a run."""
    run, data = settings.run, settings.data
    cohort = cohort_size(settings)
    clients = counted(data.num_clients, "client")
    parts = [
        clients if cohort == data.num_clients else f"{cohort} of {clients} per round",
        counted(run.num_server_rounds, "round"),
        *([counted(data.folds, "fold")] if data.folds and not data.fold else []),
        "model chosen for the data" if settings.train.model == "auto" else f"model {settings.train.model}",
        f"seed {run.seed}",
    ]
    dataset = relative(Path(data.dataset)) if Path(data.dataset).is_absolute() else data.dataset
    return f"{key_prefix(run.method)} on {shortened(dataset)}: {', '.join(parts)}"


def beginning(run: Path) -> str:
    """Return one line about a run that begins: its network, its device and the directory of its results."""
    try:
        resolved = read_yaml(run / CONFIG).get("resolved", {})
    except SettingsError:  # a cross-validation, whose folds have their own files
        resolved = {}
    network = [f"model {resolved['model']} on {resolved['device']}"] if resolved else []
    return "; ".join([*network, f"results in {relative(run)}"])


def resumption(run: Path, rounds: int | None) -> str:
    """Return one line about a run that is resumed. ``rounds`` is its new number of rounds; None: the stored number."""
    finished, planned = reached(run)
    return f"resuming {relative(run)}" + (f" after round {finished} of {rounds or planned}" if finished else "")


def next_commands(run: Path, settings: Settings, connection: Sequence[str] = ()) -> list[str]:
    """Return at most four commands that use the results of a finished run.

    Parameters
    ----------
    run : Path
        The directory of the run, which may be on another machine.
    settings : Settings
        The settings of the run.
    connection : sequence of str
        The options that select the run's SuperLink; empty if all clients ran in one process.
    """
    commands, on_this_machine = [], run.is_dir()
    folder = run / "fold-1" if (run / "fold-1").is_dir() else run
    name, models, routes = word_for(folder), sorted(folder.glob("models/client-*.safetensors")), settings.method.routes
    if on_this_machine:
        commands.append(["posy", "report", word_for(run)])
    if models:
        client, example = models[0].stem.removeprefix("client-"), INPUTS.get(kind_of(models[0]), TABLE)
        commands.append(["posy", "route", name, example] if routes else ["posy", "predict", name, client, example])
    if models or (on_this_machine and routes and connection):  # the nodes store the models, and answer queries
        installed = all(map(importlib.util.find_spec, SERVICE))
        commands += [["posy", "serve", name, *([] if models else connection)]] * installed
    resumable = checkpoint_rounds(run) if on_this_machine else settings.run.checkpoint_every and not settings.data.folds
    if resumable and not depends_on_length(settings):
        longer = f"num-server-rounds={2 * settings.run.num_server_rounds}"
        commands.append(["posy", "run", f"resume={run.name}", *output_folder(run), longer, *connection])
    at_nodes = [AT_NODES] if connection and not models else []
    return [*map(shlex.join, commands), *at_nodes]


def next_on_superlink(run: Path, config: Mapping[str, Scalar], connection: Sequence[str]) -> list[str]:
    """Return the commands that use the results of a run on a SuperLink, given the submitted settings."""
    stored = None
    try:
        if config.get("resume"):
            stored = read_yaml(run / CONFIG)["settings"]
        return next_commands(run, read_settings({} if stored else config, COMMAND_LINE, stored), connection)
    except (SettingsError, LookupError):  # the stored settings are on another machine
        return []


def kind_of(model: Path) -> str:
    """Return the kind of samples that a stored model takes, such as ``image``."""
    return str(json.loads(read_metadata(model)["preprocessing"])["kind"])


def show_next(commands: Sequence[str], stream: TextIO | None = None) -> None:
    """Print the commands that a user may run next, by default to the standard output."""
    if commands:
        print("\n".join(["next:", *(f"  {command}" for command in commands)]), file=stream, flush=True)


def word_for(run: Path) -> str:
    """Return the word that names a run for `posy report` and other commands: its name in runs/, or its path."""
    return run.name if run.parent == Path(RunSettings.output_dir).absolute() else relative(run)


def output_folder(run: Path) -> list[str]:
    """Return the setting for the folder that contains a run, or an empty list for the default folder."""
    return [] if run.parent == Path(RunSettings.output_dir).absolute() else [f"output-dir={run.parent}"]


def relative(path: Path) -> str:
    """Return a path as text, relative to the working directory if it is below it."""
    working_directory = Path.cwd()
    return str(path.relative_to(working_directory) if path.is_relative_to(working_directory) else path)
