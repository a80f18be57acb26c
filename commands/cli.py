"""The `posy` command: runs, tables of runs, and lists of what there is to choose from."""

import argparse
import ast
import importlib.util
import itertools
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, cast

from posy.commands.deploy import commands as deployment
from posy.commands.launch import (
    APP,
    INTERRUPTED,
    LaunchError,
    interruptible,
    run_in_process,
    run_on_superlink,
    run_simulation,
    toml,
)
from posy.data.errors import DataError
from posy.listing import print_table
from posy.paths import exists, expanded, is_file
from posy.server_app.resume import StoredRun
from posy.settings import (
    DATASETS,
    SITES,
    SITES_NEED_NODES,
    DataSettings,
    Rule,
    RunSettings,
    Scalar,
    SettingsError,
    TrainSettings,
    check_keys,
    fields_of,
    meant,
    nearest,
    read,
)
from posy.strategies import registry as configuration
from posy.strategies.methods import METHODS, check_method, settings_class
from posy.yaml12 import parse

COMMON = (RunSettings, DataSettings, TrainSettings)
"""What can be checked without importing the methods, and PyTorch with them."""

WRONG_USE = 2
EXAMPLES = "examples:"
WHERE = "the command line"


def main(arguments: Sequence[str] | None = None) -> int:
    """Carry out a command and return the exit status: 0, 1 (failed), 2 (wrong settings), 130 (interrupted)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = _parser().parse_args(words)
        with interruptible():
            return int(options.command(options))
    except (SettingsError, DataError, LaunchError) as error:
        print(f"posy: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has left; the interpreter must not try to flush into it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def run(options: argparse.Namespace) -> int:
    """`posy run`: check the settings, then run."""
    words = list(options.settings)
    if words and words[0] and ("=" not in words[0] or is_file(Path(words[0]))):
        words[0] = f"experiment={words[0]}"
    given = merged(assignments(words))
    if not given.get("resume"):
        check_own(given, WHERE)
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
        configuration.check_own(set_keys, resumed.run.method, WHERE)
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
    from posy.commands import table as grid  # noqa: PLC0415 - imports the methods

    plan = grid.read_plan(Path(options.file), assignments(options.settings), options.output)
    return grid.run_table(plan, jobs=options.jobs, only_print=options.only_print)


def settings(options: argparse.Namespace) -> int:
    """`posy settings`: list the settings, or print or check the block of pyproject.toml."""
    if options.check:
        return _compare(configuration.defaults())
    if options.toml:
        print(toml_block(configuration.defaults()))
        return 0
    if options.method:
        check_method(options.method)
    groups: list[tuple[str, type, str]] = [(cls.__name__.removesuffix("Settings").lower(), cls, "") for cls in COMMON]
    chosen = [options.method] if options.method else list(METHODS)
    for title, cls, prefix in groups + [(method, settings_class(method), method) for method in chosen]:
        if rows := [
            (key, toml(default), rule.describe(type(default)), rule.help)
            for key, (default, rule) in _declared(cls, prefix).items()
        ]:
            print_table(title, ("key", "default", "allowed", "meaning"), rows)
    return 0


def methods(options: argparse.Namespace) -> int:
    """`posy methods`: list the methods."""
    print_table("methods", ("name", "about"), [(name, _about(name)) for name in METHODS])
    return 0


def datasets(options: argparse.Namespace) -> int:
    """`posy datasets`: list the data sets."""
    from posy.data.datasets import describe  # noqa: PLC0415

    print_table("data sets", ("name", "what it holds", "what to put into data-dir", "downloads"), describe())
    return 0


def check_site(options: argparse.Namespace) -> int:
    """`posy check-site`: show what a node finds in a site's data."""
    from posy.commands import check_site as site  # noqa: PLC0415 - imports PyTorch

    node = [word for word in options.words if word.partition("=")[0] in site.NODE_KEYS]
    config = merged(assignments([word for word in options.words if word not in node]))
    check(config, WHERE)
    data = read(DataSettings, {**config, "dataset": SITES}, where=WHERE)
    node_config = {key: text for key, _, text in (word.partition("=") for word in node)}
    site.show(site.check_site(node_config, data, read(RunSettings, config, where=WHERE).seed))
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
        if not equals or not key:
            setting = configuration.setting_of(word)
            hint = f"; did you mean {setting}={word}?" if setting else ""
            raise SettingsError(f"{word!r} on {WHERE}: settings are given as key=value{hint}")
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
    if not from_file.keys() <= _common_defaults().keys():  # an experiment may be run with another method
        from_file = configuration.pertinent(from_file, str({**from_file, **config}.get("method", RunSettings.method)))
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
        check_keys(config, configuration.defaults(), where)
        configuration.read_all(config, where)


def check_own(given: Mapping[str, Any], where: str) -> None:
    """Check that no setting of another method is given.

    Raises
    ------
    SettingsError
        If one is.
    """
    if not given.keys() <= _common_defaults().keys():
        configuration.check_own(given, str(given.get("method", RunSettings.method)), where)


def with_absolute_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose paths mean the same place in every process."""
    known = {**_common_defaults(), **config}
    result = dict(config)
    for key in ("data-dir", "output-dir", "partition-file"):
        if known[key]:
            result[key] = str(_absolute(known[key]))
    name = str(known["dataset"])
    if name and name not in (*DATASETS, SITES):
        places = [Path(result["data-dir"]) / name, _absolute(name)]
        result["dataset"] = next((str(place) for place in places if exists(place)), name)
    return result


def toml_block(defaults: Mapping[str, Scalar]) -> str:
    """Return settings as the table that pyproject.toml holds."""
    return "\n".join(["[tool.flwr.app.config]", *(f"{key} = {toml(value)}" for key, value in defaults.items())])


class Help(argparse.HelpFormatter):
    """Leaves the lines of examples as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith(EXAMPLES):
            return text
        return super()._fill_text(text, width, indent)


class Version(argparse.Action):
    """Shows the versions of what runs, without importing it."""

    def __call__(self, parser: argparse.ArgumentParser, *others: object) -> NoReturn:
        """Print and exit."""
        file = APP / "pyproject.toml"
        own = (
            tomllib.loads(file.read_text(encoding="utf-8"))["project"]["version"] if file.is_file() else version("posy")
        )
        print(f"posy {own} (flwr {version('flwr')}, torch {version('torch')}, Python {sys.version.partition(' ')[0]})")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """Tells what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Tell in one line what is wrong."""
        raise SettingsError(f"{message}; `{self.prog} --help` tells more")


class MainParser(Parser):
    """Tells what is meant by a command that there is not."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check the command before all else, and show what there is if none is given."""
        if not args:
            self.print_help()
            self.exit(WRONG_USE)
        word = next((word for word in args if not word.startswith("-")), None)
        [commands] = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        if word is not None and word not in commands:
            if "=" in word or configuration.setting_of(word):
                raise SettingsError(f"{word!r} is no command; did you mean `posy run {_setting(word)}`?")
            near = nearest(word, commands)
            raise SettingsError(
                f"{word!r} is no command; "
                + (f"did you mean `posy {near}`?" if near else f"there are {', '.join(commands)}")
            )
        return super().parse_known_args(args, namespace)


class CommandParser(Parser):
    """Takes settings before, between and after options; a stock parser gives up after the first group of words."""

    _inside = False

    def check_options(self, words: Sequence[str]) -> None:
        """Raise :class:`SettingsError` for an option that there is not: ``--method fedavg`` is a setting."""
        takes_settings = any(action.dest == "settings" for action in self._actions)
        for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
            option, equals, value = word.partition("=")
            if not option.startswith("--") or any(name.startswith(option) for name in self._option_string_actions):
                continue
            known = configuration.defaults() if takes_settings else {}
            near = nearest(option, self._option_string_actions, 0.8)
            key = meant(option[2:], known).partition(" or ")[0]
            if near and key != option[2:]:
                raise SettingsError(f"{option} is no option of `{self.prog}`; did you mean {near}?")
            if key:
                value = value if equals else ("..." if following.startswith("-") or not following else following)
                raise SettingsError(f"{word} on {WHERE}: settings are given as key=value: {key}={value}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse intermixed, which comes back here for each group of words."""
        if self._inside:
            return super().parse_known_args(args, namespace)
        self._inside = True
        self.check_options(args)
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


def _parser() -> argparse.ArgumentParser:
    parser = MainParser(
        prog="posy",
        description="Personalised federated learning on Flower.",
        formatter_class=Help,
        epilog=f"""{EXAMPLES}
  posy run engine=in-process                         FedFew on scikit-learn's digits, in this process
  posy run method=ppfe dataset=mnist num-clients=20  with Flower's simulation
  posy run ppfe-cifar10-s2 data-dir=datasets         a paper's setting (experiments/)
  posy settings fedfew                               what can be set
  posy COMMAND --help                                more about a command""",
    )
    parser.add_argument("-V", "--version", action=Version, nargs=0, help="show the versions and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)

    command = commands.add_parser(
        "run",
        help="run an experiment",
        description=(
            "Run an experiment, in Flower's simulation or, with engine=in-process, in this process with a live "
            "progress bar, or on the nodes of a running SuperLink. Without settings: FedFew on scikit-learn's digits."
        ),
        formatter_class=Help,
        epilog=f"""{EXAMPLES}
  posy run engine=in-process num-server-rounds=5
  posy run method=fedavg dataset=mnist partition=classes classes-per-client=2 num-clients=20
  posy run fedfew-agnews method=fedavg                             an experiment with another method
  posy run my.yaml lr=0.01 seed=1                                  settings over those of a file
  posy run resume=my-run                                           go on with runs/my-run
  posy run --superlink localhost:8000 dataset=sites num-clients=3  on the nodes of a federation""",
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

    command = commands.add_parser(
        "check-site",
        help="check a site's data before any run",
        description=(
            "Do on a site's data what its node would do in a run with dataset=sites, and show what is found: kind, "
            "shape, classes, split, warnings, files that cannot be read. Nothing is sent anywhere."
        ),
    )
    command.add_argument(
        "words",
        nargs="+",
        metavar="key=value",
        help="node config (data, name, skip-unreadable), and the settings of the run as far as they are known",
    )
    command.set_defaults(command=check_site)

    deployment.add_commands(commands)
    commands.add_parser("methods", help="list the methods").set_defaults(command=methods)
    commands.add_parser("datasets", help="list the data sets").set_defaults(command=datasets)
    return parser


def _setting(word: str) -> str:
    """Return a word as a setting: ``fedavg`` is ``method=fedavg``."""
    return word if "=" in word else f"{configuration.setting_of(word)}={word}"


def _common_defaults() -> dict[str, Scalar]:
    return {key: default for cls in COMMON for key, (default, _) in _declared(cls).items()}


def _declared(cls: type, prefix: str = "") -> dict[str, tuple[Any, Rule]]:
    """Return default and rule of each setting of a group."""
    return {key: (field.default, field.metadata["rule"]) for key, field in fields_of(cls, prefix).items()}


def _absolute(path: str) -> Path:
    return expanded(path).absolute()


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
    spec = importlib.util.find_spec("posy.strategies." + method.replace("-", "_"))
    assert spec is not None and spec.origin is not None
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: it must be a whole number >= 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
