"""The `posy` command: runs, tables of runs, and lists of what there is to choose from."""

import argparse
import ast
import importlib.util
import itertools
import os
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from posy.commands.deploy import commands as deployment
from posy.commands.launch import (
    APP,
    INTERRUPTED,
    LaunchError,
    interruptible,
    run_in_process,
    run_on_superlink,
    toml,
)
from posy.data.errors import DataError
from posy.data.settings import SITES
from posy.listing import print_table
from posy.paths import is_file
from posy.settings import SettingsError, meant, nearest
from posy.strategies import registry as configuration
from posy.strategies.methods import METHODS, check_method
from posy.strategies.registry import parse_words, read_settings, with_experiment

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
    given = parse_words(words, WHERE)
    if options.superlink:  # paths are those of its machine
        if not given.get("resume"):
            read_settings(given, WHERE)
        return run_on_superlink(with_experiment(given, WHERE), deployment.connection(options), verbose=options.verbose)
    return run_in_process(given)


def table(options: argparse.Namespace) -> int:
    """`posy table`: run a grid of experiments and print the results."""
    from posy.commands import table as grid  # noqa: PLC0415 - imports the methods

    plan = grid.read_plan(Path(options.file), parse_words(options.settings, WHERE), options.output)
    return grid.run_table(plan, jobs=options.jobs, only_print=options.only_print)


def settings(options: argparse.Namespace) -> int:
    """`posy settings`: list the settings."""
    if options.method:
        check_method(options.method)
    for title, group in configuration.groups([options.method] if options.method else METHODS).items():
        if rows := [(key, toml(s.default), s.allowed(), s.help) for key, s in group.items()]:
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
    given = parse_words([word for word in options.words if word not in node], WHERE)
    known = read_settings({**given, "dataset": SITES}, WHERE)
    node_config = {key: text for key, _, text in (word.partition("=") for word in node)}
    site.show(site.check_site(node_config, known.data, known.run.seed))
    return 0


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
            known = configuration.declared() if takes_settings else {}
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
  posy run                                           FedFew on scikit-learn's digits
  posy run method=ppfe dataset=mnist num-clients=20  another method, other data
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
            "Run an experiment in this process with a live progress bar, or on the nodes of a running SuperLink. "
            "Without settings: FedFew on scikit-learn's digits."
        ),
        formatter_class=Help,
        epilog=f"""{EXAMPLES}
  posy run num-server-rounds=5
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
