"""The runs of single folds at sites, whose results belong to one cross-validation.

A site accepts only one split per Flower run, so each fold is a Flower run. All folds write into one directory. The
ServerApp of each fold updates the summary of the finished folds.
"""

import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from posy.client_app.workspace import workspace_for
from posy.data.settings import DataSettings
from posy.data.task import Task
from posy.server_app.folds import CrossValidation, fold_directory, without_folders
from posy.server_app.progress import results_table
from posy.server_app.results import RunDirectory, Status
from posy.server_app.resume import CONFIG, checkpoint_rounds, read_summary, refused_changes
from posy.settings import RunError, SettingsError, build
from posy.storage import exclusive, is_folder_name, is_locked
from posy.strategies.registry import current_keys
from posy.strategies.settings import Settings
from posy.yaml12 import read_yaml

LOCK = ".summary.lock"
"""File in the directory of a cross-validation. A run holds its lock while it changes the directory."""


@dataclass(frozen=True)
class FoldRun:
    """The run of one fold.

    Parameters
    ----------
    settings : Settings
        The settings of the run, before the sites have agreed on a task.
    directory : Path
        The directory of the cross-validation.
    """

    settings: Settings
    directory: Path

    @property
    def path(self) -> Path:
        """The folder of the fold."""
        return fold_directory(self.directory, self.settings.data.fold)

    def claim(self) -> Literal["new", "interrupted", "completed"]:
        """Return the state of the fold; delete its folder if it ended before its first checkpoint.

        Raises
        ------
        SettingsError
            If the directory belongs to another run or to a cross-validation with other settings, or if a process uses
            the folder of the fold.
        """
        if not is_folder_name(name := self.settings.run.part_of):
            raise SettingsError(f"part-of = {name!r}: it must be the name of a folder in output-dir")
        with self._exclusive():
            self._check_directory()
            if read_summary(self.path).get("status") == "completed":
                return "completed"
            if self.path.is_dir() and is_locked(self.path):
                raise SettingsError(
                    f"part-of = {name!r}: another run of fold {self.settings.data.fold} still uses {self.path}; wait "
                    "for this run to end, or stop it"
                )
            if checkpoint_rounds(self.path):
                return "interrupted"
            shutil.rmtree(self.path, ignore_errors=True)
            return "new"

    def resume(self) -> dict[str, str]:
        """Return the settings that resume the fold."""
        return {"resume": self.path.name, "output-dir": str(self.directory)}

    def update(self, *, trained: bool = True) -> CrossValidation:
        """Write the summary of all finished folds, and print its table once all folds have finished.

        ``trained`` is False if the fold had finished before this run. The table then follows the last fold only.
        """
        try:
            with self._exclusive():
                validation = CrossValidation(self.settings, RunDirectory(self.directory, ""))
                without_folders(validation.directory)
                try:
                    validation.summarise(self._status(), self._task())
                finally:
                    validation.directory.release()
        except OSError as error:
            raise RunError(f"the summary in {self.directory} cannot be written: {error}") from error
        fold, folds = self.settings.data.fold, self.settings.data.folds
        if not trained:
            print(f"fold {fold} of {self.directory.name} has finished before; this run does not repeat it", flush=True)
        if len(validation.summary["runs"]) == folds and (trained or fold == folds):
            print(results_table(validation.summary, self.directory), flush=True)
        return validation

    def _status(self) -> Status:
        """Return the status of the cross-validation after this run."""
        folds = range(1, self.settings.data.folds + 1)
        statuses = [read_summary(fold_directory(self.directory, fold)).get("status") for fold in folds]
        if all(status == "completed" for status in statuses):
            return "completed"
        status: Status = statuses[self.settings.data.fold - 1] or "failed"
        return "running" if status == "completed" else status

    def _task(self) -> Task | None:
        """Return the task on which the sites have agreed, from a finished fold; None if no fold has finished."""
        for fold in range(self.settings.data.folds, 0, -1):
            path = fold_directory(self.directory, fold)
            if read_summary(path).get("status") == "completed":
                data = build(DataSettings, current_keys(read_yaml(path / CONFIG)["settings"]))
                return workspace_for(replace(self.settings, data=data), "").task
        return None

    def _check_directory(self) -> None:
        """Create the directory with its ``config.yaml``, or check that its cross-validation has the same settings."""
        of_all_folds: dict[str, Any] = {**self.settings.as_config(), "fold": 0, "part-of": "", "resume": ""}
        file, name = self.directory / CONFIG, self.settings.run.part_of
        if not file.is_file():
            directory = RunDirectory(self.directory, secrets.token_hex(4))
            without_folders(directory)
            directory.write_config(of_all_folds)
            directory.release()
            return
        stored: Mapping[str, Any] = read_yaml(file)["settings"]
        if not stored.get("folds") or stored.get("fold"):
            raise SettingsError(f"part-of = {name!r}: {self.directory} contains another run; choose another name")
        current = {key: self.settings.as_config()[key] for key in ("fold", "part-of")}
        _, refusals = refused_changes({**current_keys(stored), **current, "run-name": ""}, self.settings)
        if refusals:
            raise SettingsError(
                f"part-of = {name!r}: {'; '.join(refusals)}. All folds of a cross-validation need the same settings; "
                "choose another name, or restore the settings"
            )

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold the lock of the directory, which is created if necessary. Wait until other runs release the lock."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(f"output-dir: {self.directory} must be a writable directory ({error})") from error
        with exclusive(self.directory / LOCK):
            yield
