"""The folders in which a node stores the states and models of a run. Only the node's config chooses them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context

from posy.client_app.policy import is_run_folder
from posy.paths import absolute
from posy.settings import SettingsError
from posy.strategies.run_settings import CALIBRATES


def own_places(config: dict[str, Any], context: Context) -> None:
    """Replace the server's folders in a message's config with the folders from the node's config.

    The client's state is saved in the run's folder in ``state-dir``. Predictions are saved in a subfolder of the
    folder for the client's model; see :func:`models_folder`.
    """
    save_to, predictions = config.pop("save-models-to", ""), config.pop("save-predictions-to", "")
    for key in ("state-directory", CALIBRATES):
        config.pop(key, None)
    state = str(context.node_config.get("state-dir", ""))
    if not state and not (save_to or predictions):
        return
    folder = models_folder(context.node_config, str(config["run"]))
    if folder is None:
        return
    if state:
        config["state-directory"] = str(absolute(state) / str(config["run"]))
    if save_to:
        config["save-models-to"], config[CALIBRATES] = str(folder), True
    if predictions:
        config["save-predictions-to"] = str(folder / "predictions")


def models_folder(node_config: Mapping[str, Any], run_name: str) -> Path | None:
    """Return the folder for the models of a run, or None if the node's config names no folder.

    It is the run's folder in ``models`` or, by default, a subfolder of the run's folder in ``state-dir``.

    Raises
    ------
    SettingsError
        If the run's name is not a valid name of a folder.
    """
    state, models = (str(node_config.get(key, "")) for key in ("state-dir", "models"))
    if not state and not models:
        return None
    if not is_run_folder(run_name):
        raise SettingsError(
            f"run = {run_name!r} in the server's message is not a valid folder name; change run-name on the server"
        )
    return absolute(models) / run_name if models else absolute(state) / run_name / "models"
