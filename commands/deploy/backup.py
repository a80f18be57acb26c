"""Back up and restore the state of a SuperLink: the registered keys and the list of runs."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from posy.settings import SettingsError
from posy.storage import lock, replace

DATABASE = "state.db"
"""Name of the database in a SuperLink's state directory."""
VERSION_TABLE = "alembic_version"
"""Table in which Alembic stores the version of the database schema."""
OWNER_ONLY = 0o700
"""Mode of the state directory. A user who can read the database can impersonate every run."""


@contextmanager
def locked_state(state: Path) -> Iterator[int]:
    """Create a SuperLink's state directory if it is missing, lock it, and yield the descriptor of the lock.

    Raises
    ------
    SettingsError
        If another user owns the directory, or if a SuperLink or one of its leftover processes uses it.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(OWNER_ONLY)
        descriptor = lock(state)
    except BlockingIOError:
        users = [str(process) for process in users_of(state)]
        user = f" (process {', '.join(users)})" if users else ""
        hint = f"end it with `kill {' '.join(users)}`" if users else "stop that SuperLink first"
        raise SettingsError(f"--state {state} is in use by a running SuperLink{user}; {hint}") from None
    except OSError as error:
        raise SettingsError(f"--state {state} must be a directory that you own ({error})") from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def users_of(directory: Path) -> list[int]:
    """Return the ids of this user's other processes that have a directory open.

    On systems other than Linux, the list is empty.
    """
    target, users = directory.stat(), set[int]()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # the process has exited, or belongs to another user
            opened = link.stat()
            if (opened.st_dev, opened.st_ino) == (target.st_dev, target.st_ino):
                users.add(int(link.parts[2]))
    return sorted(users - {os.getpid()})


def back_up(state: Path, file: Path) -> None:
    """Write a consistent copy of a SuperLink's database; the SuperLink may be running.

    Raises
    ------
    SettingsError
        If the database is missing or damaged, or the file cannot be written.
    """
    database = state / DATABASE
    if not database.is_file():
        raise SettingsError(f"--state {state} contains no {DATABASE}; a SuperLink with --volatile writes no database")

    def copy(part: Path) -> None:
        part.unlink(missing_ok=True)
        part.touch(0o600)  # other users must never be able to read the copy
        with closing(_opened(database)) as source, closing(sqlite3.connect(part)) as target:
            source.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # a single file, regardless of the original's journal mode
        _check(part)

    try:
        replace(file, copy, durable=True)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(f"{database} cannot be copied to {file}: {error}") from error


def restore(state: Path, file: Path) -> Path | None:
    """Replace a SuperLink's database with a backup; return the new path of the previous database, or None.

    Raises
    ------
    SettingsError
        If a running SuperLink uses the database, or the file is not a backup.
    """
    database, previous = state / DATABASE, None
    try:
        _check(file)
        with locked_state(state):
            if database.exists():
                previous = database.with_name(database.name + time.strftime(".%Y%m%d-%H%M%S"))
                for suffix in ("", "-wal", "-shm"):  # SQLite would apply an old write-ahead log to the new database
                    with suppress(FileNotFoundError):
                        Path(f"{database}{suffix}").replace(f"{previous}{suffix}")

            def copy(part: Path) -> None:
                part.unlink(missing_ok=True)
                part.touch(0o600)
                part.write_bytes(file.read_bytes())

            replace(database, copy, durable=True)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(f"{file} cannot be restored to {database}: {error}") from error
    return previous


def _opened(database: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True, timeout=30.0)


def _check(database: Path) -> None:
    """Raise :class:`SettingsError` or an SQLite error if a file is not a complete database of a SuperLink."""
    with closing(_opened(database)) as opened:
        problems = [row for (row,) in opened.execute("PRAGMA quick_check(1)")]
        tables = {name for (name,) in opened.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if problems != ["ok"] or VERSION_TABLE not in tables:
        raise SettingsError(
            f"{database} is not a complete database of a SuperLink: {problems[0]}, {len(tables)} tables"
        )
