"""`posy models`: list the models of a site's runs, remove old runs, and choose the current run."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from posy.client_app.library import Library, RunFolder, StoredModel, as_dict, date_of
from posy.listing import print_table
from posy.server_app.progress import size
from posy.server_app.resume import read_summary
from posy.settings import SettingsError
from posy.words import title

COLUMNS = ("run", "date", "client", "method", "model", "round", "score", "test samples", "size", "")


def library_in(folder: Path) -> Library:
    """Return the runs in a folder, or raise :class:`SettingsError` if there are none."""
    library = Library(folder)
    if not library.runs:
        raise SettingsError(
            f"{folder} contains no run; name the state-dir or models folder of a node, a run's folder, or runs/"
        )
    return library


def show(library: Library, *, as_json: bool = False) -> None:
    """Print a row for each stored model, newest runs first."""
    if as_json:
        models = [as_dict(library, run, model) for run in library.runs for model in run.stored.values()]
        print(json.dumps(models, indent=2, ensure_ascii=False))
        return
    rows = [row for run in library.runs for row in _rows(library, run)]
    print_table(f"models in {library.path}", COLUMNS, rows)


def _rows(library: Library, run: RunFolder) -> list[tuple[str, ...]]:
    """Return the table's rows for a run: one for each client, or a single row if no model is stored."""
    notes = ["may be in progress"] if run.in_progress and (run.of_server or not run.is_final) else []
    if run.of_server:
        notes.append(str(read_summary(run.path).get("status", "")))
    if not run.stored:
        return [(run.name, date_of(run.date), *[""] * 6, size(run.size), _join("no models", *notes))]
    return [_row(library, run, model, notes) for model in run.stored.values()]


def _row(library: Library, run: RunFolder, model: StoredModel, notes: Sequence[str]) -> tuple[str, ...]:
    score = model.scores.get(model.metric.name)
    is_current = library.current(model.name) is run
    marks = [*(["current"] if is_current else []), *(["pinned"] if library.pinned == run.name else [])]
    return (
        run.name,
        date_of(model.time),
        title(model.client, model.site),
        model.method,
        model.point,
        f"{model.round} of {model.rounds}",
        "" if score is None else f"{model.metric.title} {model.metric.format(score)}",
        str(model.num_test or ""),
        size(run.size),
        _join(*marks, *(() if model.final else ("not final",)), *notes),
    )


def _join(*notes: str) -> str:
    return ", ".join(filter(None, notes))


def use(library: Library, word: str) -> None:
    """Pin a run as the current one; an empty string removes the pin."""
    run = library.find(word) if word else None
    library.pin(run)
    print(f"{run.name} is the current run" if run else "the newest final model is the current one")


def remove(library: Library, words: Sequence[str], keep: int | None, *, confirmed: bool) -> int:
    """Remove runs by name, or all but the ``keep`` newest and the current ones, and return the exit status.

    Without ``confirmed``, only print which runs would be removed.

    Raises
    ------
    SettingsError
        If a named run does not exist, or may be in progress.
    """
    runs = [library.find(word) for word in words]
    for run in runs:
        if run.in_progress:
            raise SettingsError(f"{run.path} may be in progress ({run.in_progress}); remove it later")
    for run in library.runs[keep:] if keep is not None else []:
        if reason := "it is the current run" if library.is_current(run) else run.in_progress:
            print(f"posy: {run.name} stays: {reason}", file=sys.stderr)
        elif run not in runs and (run.stored or not run.of_server):
            runs.append(run)
    for run in runs:
        content = "its models; its record stays" if run.of_server else "its models, predictions and states"
        current = "; this is the current run" if library.is_current(run) else ""
        print(f"{'removed' if confirmed else 'would remove'} {run.path}: {content} ({size(run.size)}){current}")
        if confirmed:
            run.remove()
            if library.pinned == run.name:
                library.pin(None)
    if runs and not confirmed:
        print("posy: nothing is removed without --yes", file=sys.stderr)
        return 1
    return 0
