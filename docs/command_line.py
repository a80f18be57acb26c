"""Convert the commands of `posy` for sphinx-click, which expects click's commands, in the groups of `posy --help`."""

import click
import typer

from posy.commands.cli import app
from posy.commands.help import GROUPS

_command = typer.main.get_command(app)
assert isinstance(_command, click.Group)
_groups = {title: click.Group(title) for title in GROUPS}
for _subcommand in _command.commands.values():
    _groups[getattr(_subcommand, "rich_help_panel", "")].add_command(_subcommand)
command = click.CommandCollection("posy", sources=list(_groups.values()), help=_command.help)
