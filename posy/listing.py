"""Print tables: fitted to the width of a terminal, or with one line per row if the output is piped."""

import io
import sys
from collections.abc import Collection, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH = 100
"""Width of wrapped text in characters."""
UNLIMITED = 100_000
"""Width of a console that does not wrap rows."""


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Each row contains a string for every column."""
    if sys.stdout.isatty():
        Console().print(laid_out(title, columns, rows))
        return
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    print(title)
    for row in (columns, *rows):  # one line for each row, so that grep returns complete rows
        print("  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())
    print()


def laid_out(
    title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> Table:
    """Return a table for a console; a table without a title has no header. Columns in ``right`` are right-aligned."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, show_header=title is not None)
    for number, column in enumerate(columns):
        key = number == 0 and max((len(row[0]) for row in rows), default=0) < WIDTH // 2  # do not break names
        table.add_column(column, justify="right" if column in right else "left", no_wrap=key, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def as_lines(table: Table) -> list[str]:
    """Return a table as plain text, with each row on one line for line-based searches."""
    file = io.StringIO()
    Console(file=file, width=UNLIMITED, color_system=None, force_terminal=False).print(table)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def shortened(text: str, length: int = WIDTH // 2) -> str:
    """Return text, truncated to ``length`` characters with an ellipsis at the end if it is longer."""
    return text if len(text) <= length else f"{text[: length - 1]}…"
