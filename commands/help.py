"""Lay out the help of Posy's commands as plain text, with the commands in groups.

The text is the same in a terminal and in a pipe, and with all versions of Typer that Posy supports.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import typer
import typer.core

F = TypeVar("F", bound=Callable[..., Any])

typer.core.HAS_RICH = False  # Typer's rich help escapes brackets, and draws boxes in a pipe

EXPERIMENTS = "Experiments"
RESULTS = "Results"
MODELS = "Trained models"
SERVER = "Federation: server"
SITE = "Federation: site"
GROUPS = (EXPERIMENTS, RESULTS, MODELS, SERVER, SITE)
"""Groups of commands, in the order of the help."""
_RANGE = r"(?:-?[\d.]+<=?)?x(?:[<>]=?-?[\d.]+)?"
_RANGES = re.compile(rf"; {_RANGE}(?=\]$)| *\[{_RANGE}\]$")
"""Pattern for the range of a number in Typer's help of an option. The error for a wrong number shows it."""


class Command(typer.core.TyperCommand):
    """A command whose help shows its arguments as declared, and no ranges of numbers."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        assert self.callback is not None
        annotations = inspect.get_annotations(inspect.unwrap(self.callback))
        for item in self.params:
            if item.param_type_name == "argument":  # Typer 0.20 loses its help with click 8.4 or newer
                declared: list[str] = [info.help for info in annotations[item.name or ""].__metadata__]
                item.help = declared[0]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command."""
        arguments = (item.metavar or "" for item in self.params if item.param_type_name == "argument")
        return ["[OPTIONS]", *arguments]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section with the arguments and a section with the options."""
        arguments, options = [], []
        for item in self.get_params(ctx):
            if item.param_type_name == "argument":
                arguments.append((item.metavar or "", item.help))
            elif (record := item.get_help_record(ctx)) is not None:
                options.append((record[0], _RANGES.sub("", record[1])))
        for title, rows in (("Arguments", arguments), ("Options", options)):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(typer.core.TyperGroup):
    """A group of commands whose help has one section for each of :data:`GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the sections, with one line per command."""
        width = max(map(len, self.commands))
        limit = formatter.width - width - 6  # the indentation, and the gap between the columns
        for title in GROUPS:
            rows = [
                (f"{name:<{width}}", command.get_short_help_str(limit))
                for name, command in self.commands.items()
                if getattr(command, "rich_help_panel", None) == title
            ]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


def commands_in(app: typer.Typer, group: str | None = None) -> Callable[..., Callable[[F], F]]:
    """Return a decorator that adds a command to an app, in a group of the help."""
    return partial(app.command, cls=Command, rich_help_panel=group)
