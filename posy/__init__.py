"""Personalised federated learning on Flower; the parts that every method shares."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from posy.settings import Scalar
    from server_app.recorder import Recorder


def run(**settings: "Scalar") -> "Recorder":
    """Run an experiment in this process, as ``posy run engine=in-process`` does, for notebooks and scripts.

    Parameters
    ----------
    **settings
        Settings that differ from their defaults, with underscores: ``posy.run(method="ppfe", num_clients=20)``.

    Returns
    -------
    Recorder
        The record of the run: ``summary`` holds what ``summary.json`` does, ``strategy`` the server's state, and
        the files lie in ``directory.path``.

    Raises
    ------
    SettingsError, DataError
        Before the first round, if a setting or the data is wrong.
    """
    from posy.launch import record_in_process  # noqa: PLC0415 - imports PyTorch

    return record_in_process({name.replace("_", "-"): value for name, value in settings.items()})
