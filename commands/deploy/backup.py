"""Back up and restore what a SuperLink must not lose: the keys that are registered, and its list of runs."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from posy.settings import SettingsError
from posy.storage import lock, replace

DATABASE = "state.db"
"""Name of the database in the directory of a SuperLink's state."""
MINE = 0o700
"""Mode of that directory: who reads the database can act for any run."""


@contextmanager
def held(state: Path) -> Iterator[int]:
    """Lock the directory of a SuperLink's state, which is made if need be; give the descriptor that holds the lock.

    It is a :class:`SettingsError` if another SuperLink, or a process that one has left, uses it.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(MINE)
        descriptor = lock(state)
    except BlockingIOError:
        users = [str(process) for process in users_of(state)]
        which = f" (process {', '.join(users)}): kill {' '.join(users)}" if users else "; end that first"
        raise SettingsError(f"--state {state}: a SuperLink is at work with it{which}") from None
    except OSError as error:
        raise SettingsError(f"--state {state}: it must be a directory that you own: {error}") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def users_of(directory: Path) -> list[int]:
    """Return the processes of this user that have a directory open, as Linux lists them; elsewhere none."""
    target, users = directory.stat(), set[int]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has ended, or is another user's
            opened = link.stat()
            if (opened.st_dev, opened.st_ino) == (target.st_dev, target.st_ino):
                users.add(int(link.parts[2]))
    return sorted(users - {os.getpid()})


def back_up(state: Path, file: Path) -> None:
    """Write a copy of a SuperLink's database as it is at one moment, also while the SuperLink is at work.

    It is a :class:`SettingsError` if there is no database, it is damaged, or the file cannot be written.
    """
    database = state / DATABASE
    if not database.is_file():
        raise SettingsError(f"--state {state}: there is no {DATABASE}; with --volatile a SuperLink keeps none")

    def copy(part: Path) -> None:
        part.unlink(missing_ok=True)
        part.touch(0o600)  # nobody else may read it, from the start
        with closing(_opened(database)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # one file, whatever the original's mode
        _check(part)

    try:
        replace(file, copy, durable=True)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(f"{database} cannot be copied to {file}: {error}") from error


def restore(state: Path, file: Path) -> Path | None:
    """Put a backup in the place of a SuperLink's database; return where the database before it is now, if any.

    It is a :class:`SettingsError` if a SuperLink is at work with it, or the file is no backup.
    """
    database, old = state / DATABASE, None
    try:
        _check(file)
        with held(state):
            if database.exists():
                old = database.with_name(database.name + time.strftime(".%Y%m%d-%H%M%S"))
                for end in ("", "-wal", "-shm"):  # what SQLite keeps beside it must not be taken for the new one's
                    with suppress(FileNotFoundError):
                        Path(f"{database}{end}").replace(f"{old}{end}")

            def copy(part: Path) -> None:
                part.unlink(missing_ok=True)
                part.touch(0o600)
                part.write_bytes(file.read_bytes())

            replace(database, copy, durable=True)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(f"{file} cannot be restored to {database}: {error}") from error
    return old


def _opened(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)


def _check(database: Path) -> None:
    """Raise what SQLite does, or :class:`SettingsError`, if a file is no whole database of a SuperLink."""
    with closing(_opened(database)) as opened:
        found = [row for (row,) in opened.execute("PRAGMA quick_check(1)")]
        tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if found != ["ok"] or not {"node", "run"} <= tables:
        raise SettingsError(f"{database} is no whole database of a SuperLink: {found[0]}, tables: {len(tables)}")
