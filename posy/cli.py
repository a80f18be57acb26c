"""The `posy` command: runs, tables of runs, and lists of what there is to choose from."""

import argparse
import ast
import importlib.util
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from data.errors import DataError
from posy import config as configuration
from posy.deploy import commands as deployment
from posy.launch import (
    APP,
    INTERRUPTED,
    LaunchError,
    interruptible,
    run_in_process,
    run_on_superlink,
    run_simulation,
    toml,
)
from posy.methods import METHODS, settings_class
from posy.resume import StoredRun
from posy.settings import (
    DATASETS,
    SITES,
    SITES_NEED_NODES,
    DataSettings,
    Rule,
    RunError,
    RunSettings,
    Scalar,
    SettingsError,
    TrainSettings,
    check_keys,
    fields_of,
    read,
)
from posy.yaml12 import parse

COMMON = (RunSettings, DataSettings, TrainSettings)
"""What can be checked without importing the methods, and PyTorch with them."""

WRONG_USE = 2
WHERE = "the command line"


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command and return the exit status: 0, 1 (failed), 2 (wrong settings), 130 (interrupted)."""
    options = _parser().parse_args(arguments)
    try:
        with interruptible():
            return int(options.command(options))
    except (SettingsError, DataError, LaunchError) as error:
        print(f"posy: {error}", file=sys.stderr)
        return WRONG_USE
    except RunError as error:
        print(f"posy: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left; the interpreter must not try to flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(options: argparse.Namespace) -> int:
    """`posy run`: check the settings, then run."""
    words = list(options.settings)
    if words and ("=" not in words[0] or Path(words[0]).is_file()):
        words[0] = f"experiment={words[0]}"
    given = merged(assignments(words))
    if options.superlink:  # paths are those of its machine
        check(given, WHERE)
        return run_on_superlink(given, deployment.connection(options), verbose=options.verbose)
    config = with_absolute_paths(given)
    check(config, WHERE)
    if name := config.get("resume"):
        stored = StoredRun.find(Path(config["output-dir"]), str(name))
        # Of the paths only what is given stands over the stored one; output-dir says where the run lies.
        config = {key: value for key, value in config.items() if key in given or key == "output-dir"}
        set_keys = config.keys() - {"resume"}
        resumed = stored.resumed({key: config[key] for key in set_keys}, WHERE)
        stored.check(resumed)
        known = resumed.as_config()
        config["resume-keys"] = " ".join(sorted(set_keys))
    else:
        known = {**_common_defaults(), **config}
    if known["dataset"] == SITES:
        raise SettingsError(f"dataset = {SITES!r} on {WHERE}: {SITES_NEED_NODES}")
    if known["engine"] == "in-process":
        return run_in_process(config)
    return run_simulation(config, int(known["num-clients"]), str(known["device"]), verbose=options.verbose)


def table(options: argparse.Namespace) -> int:
    """`posy table`: run a grid of experiments and print the results."""
    from posy import table as grid  # noqa: PLC0415 - imports the methods

    plan = grid.read_plan(Path(options.file), assignments(options.settings), options.output)
    return grid.run_table(plan, jobs=options.jobs, only_print=options.only_print)


def settings(options: argparse.Namespace) -> int:
    """`posy settings`: list the settings, or print or check the block of pyproject.toml."""
    if options.check:
        return _compare(configuration.defaults())
    if options.toml:
        print(toml_block(configuration.defaults()))
        return 0
    if options.method and options.method not in METHODS:
        raise SettingsError(f"method = {options.method!r}: it must be one of {', '.join(METHODS)}")
    groups: list[tuple[str, type, str]] = [(cls.__name__.removesuffix("Settings").lower(), cls, "") for cls in COMMON]
    chosen = [options.method] if options.method else list(METHODS)
    for title, cls, prefix in groups + [(method, settings_class(method), method) for method in chosen]:
        if rows := [
            (key, toml(default), rule.describe(type(default)), rule.help)
            for key, (default, rule) in _declared(cls, prefix).items()
        ]:
            _print_table(title, ("key", "default", "allowed", "meaning"), rows)
    return 0


def methods(options: argparse.Namespace) -> int:
    """`posy methods`: list the methods."""
    _print_table("methods", ("name", "about"), [(name, _about(name)) for name in METHODS])
    return 0


def datasets(options: argparse.Namespace) -> int:
    """`posy datasets`: list the data sets."""
    from data.datasets import describe  # noqa: PLC0415

    _print_table("data sets", ("name", "what it holds", "what to put into data-dir", "downloads"), describe())
    return 0


def assignments(words: Sequence[str]) -> dict[str, Scalar]:
    """Read `key=value` words; the type of a value is that of its setting.

    Raises
    ------
    SettingsError
        If a word is not of that form, or a key is unknown or given twice.
    """
    values: dict[str, str] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SettingsError(f"{word!r} on {WHERE}: settings are given as key=value")
        if key in values:
            raise SettingsError(f"{key} is given twice on {WHERE}")
        values[key] = text
    known = _common_defaults()
    if not values.keys() <= known.keys():
        known = configuration.defaults()
        check_keys(values, known, WHERE)
    return {key: typed(text, type(known[key])) for key, text in values.items()}


def typed(text: str, kind: type) -> Scalar:
    """Return a YAML scalar in the type of its setting; the text itself where it is not of that type.

    So ``on`` is a text where a text is wanted, and ``010`` is ten, as in files of settings.
    """
    if kind is str and text[:1] not in ("'", '"'):
        return text
    try:
        value: Any = parse(text)
        value = float(value) if kind is float and type(value) is int else value
    except (ValueError, OverflowError):
        return text
    return cast("Scalar", value) if type(value) is kind else text


def merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with those of their experiment file under them; here it is known which keys are set.

    Raises
    ------
    SettingsError
        If there is no such file, or it holds what is not a setting.
    """
    name = str(config.get("experiment", ""))
    if not name:
        return dict(config)
    path = configuration.experiment_path(name)
    from_file = configuration.read_experiment(path)
    if "experiment" in from_file:
        raise SettingsError(f"experiment in {path}: an experiment file cannot name another one")
    check(from_file, str(path))
    return {**from_file, **{key: value for key, value in config.items() if key != "experiment"}}


def check(config: Mapping[str, Any], where: str) -> None:
    """Check settings, without importing the methods as long as none of their own keys is set.

    Raises
    ------
    SettingsError
        For an unknown key or method, a wrong type, or a value out of range.
    """
    for cls in COMMON:
        read(cls, config, where=where)
    if not config.keys() <= _common_defaults().keys() or config.get("method", RunSettings.method) not in METHODS:
        configuration.resolve(config, where)


def with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose paths mean the same place in every process."""
    known = {**_common_defaults(), **config}
    result = dict(config)
    for key in ("data-dir", "output-dir", "partition-file"):
        if known[key]:
            result[key] = str(_absolute(known[key]))
    name = str(known["dataset"])
    if name not in (*DATASETS, SITES):
        places = [Path(result["data-dir"]) / name, _absolute(name)]
        result["dataset"] = next((str(place) for place in places if place.exists()), name)
    return result


def toml_block(defaults: Mapping[str, Scalar]) -> str:
    """Return settings as the table that pyproject.toml holds."""
    return "\n".join(["[tool.flwr.app.config]", *(f"{key} = {toml(value)}" for key, value in defaults.items())])


class CommandParser(argparse.ArgumentParser):
    """Takes settings before, between and after options; a stock parser gives up after the first group of words."""

    _inside = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse intermixed, which comes back here for each group of words."""
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="posy", description="Personalised federated learning on Flower.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    command = commands.add_parser(
        "run",
        help="run an experiment",
        description=(
            "Run an experiment, in Flower's simulation or, with engine=in-process, in this process with a live "
            "progress bar, or on the nodes of a running SuperLink. Without settings: FedFew on scikit-learn's digits."
        ),
    )
    command.add_argument(
        "settings",
        nargs="*",
        metavar="[EXPERIMENT] key=value",
        help="a file of settings (a name in experiments/ or a path), and settings over it",
    )
    command.add_argument("-v", "--verbose", action="store_true", help="show the whole log of Flower")
    deployment.add_connection(command, optional=True)
    command.set_defaults(command=run)

    command = commands.add_parser(
        "table",
        help="run a grid of experiments and tabulate the results",
        description=(
            "Run every row x variant x seed of a table, each in a process of its own. What is finished is not run "
            "again."
        ),
    )
    command.add_argument("file", help="YAML file of the table, as in benchmarks/tables/")
    command.add_argument("settings", nargs="*", metavar="key=value", help="settings over those of the file")
    command.add_argument(
        "-j",
        "--jobs",
        type=_positive,
        default=os.cpu_count() or 1,
        metavar="N",
        help="runs at a time (default: the number of cores)",
    )
    command.add_argument("-o", "--output", metavar="DIR", help="directory of the results (default: the file's)")
    command.add_argument("--only-print", action="store_true", help="run nothing; tabulate what is finished")
    command.set_defaults(command=table)

    command = commands.add_parser("settings", help="list all settings")
    command.add_argument("method", nargs="?", help="list the settings of this method only, and the common ones")
    form = command.add_mutually_exclusive_group()
    form.add_argument("--toml", action="store_true", help="print the table of defaults that pyproject.toml holds")
    form.add_argument("--check", action="store_true", help="compare the defaults with pyproject.toml")
    command.set_defaults(command=settings)

    deployment.add_commands(commands)
    commands.add_parser("methods", help="list the methods").set_defaults(command=methods)
    commands.add_parser("datasets", help="list the data sets").set_defaults(command=datasets)
    return parser


def _common_defaults() -> dict[str, Scalar]:
    return {key: default for cls in COMMON for key, (default, _) in _declared(cls).items()}


def _declared(cls: type, prefix: str = "") -> dict[str, tuple[Any, Rule]]:
    """Return default and rule of each setting of a group."""
    return {key: (field.default, field.metadata["rule"]) for key, field in fields_of(cls, prefix).items()}


def _absolute(path: str) -> Path:
    return Path(path).expanduser().absolute()


def _compare(defaults: Mapping[str, Scalar]) -> int:
    path = APP / "pyproject.toml"
    if not path.is_file():
        raise LaunchError(f"there is no {path}: --check works in a checkout")
    written = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["flwr"]["app"]["config"]
    differences = [
        f"{key}: {toml(written[key]) if key in written else 'missing'} in {path.name}, "
        f"{toml(defaults[key]) if key in defaults else 'not a setting'}"
        for key in dict.fromkeys([*defaults, *written])
        if key not in defaults or key not in written or toml(defaults[key]) != toml(written[key])
    ]
    print("\n".join(differences) or f"{path.name} agrees with the settings")
    return 1 if differences else 0


def _about(method: str) -> str:
    """Return the first sentence of a method's module, without importing it."""
    spec = importlib.util.find_spec("strategies." + method.replace("-", "_"))
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box  # noqa: PLC0415
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        shown.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    Console().print(shown)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


if __name__ == "__main__":
    sys.exit(main())
