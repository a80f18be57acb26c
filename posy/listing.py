"""Tables on the screen: in a terminal laid out to its width, in a pipe one line for each row."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table.

    Parameters
    ----------
    title : str
        What stands above it.
    columns : sequence of str
        Names of the columns.
    rows : sequence of sequences of str
        Rows, each with a text for every column.
    """
    if not sys.stdout.isatty():  # what a person greps must not be broken into pieces
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        print(title)
        for row in (columns, *rows):
            print("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
        print()
        return
    from rich.console import Console  # noqa: PLC0415 - not needed in a pipe

    Console().print(laid_out(title, columns, rows))


def laid_out(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> "Table":
    """Return a table for a console; without a title it has no header either."""
    from rich import box  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    shown = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, show_header=title is not None)
    for number, column in enumerate(columns):
        shown.add_column(column, no_wrap=number == 0, overflow="fold")
    for row in rows:
        shown.add_row(*map(Text, row))
    return shown
