"""Convert the commands of `posy` for sphinx-click, which expects a command of click."""

import typer

from posy.commands.cli import app

command = typer.main.get_command(app)
