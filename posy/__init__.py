"""Personalised federated learning on Flower: the public API and the code that all methods share."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

# By default, OpenBLAS's idle threads keep the cores busy for about 50 ms, which slows down the clients' training.
# OpenBLAS reads the variable when NumPy is loaded, so Posy must be imported before NumPy, as in Posy's commands.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

_HERE = Path(__file__).resolve().parent
if not (_HERE / "server_app").is_dir():
    # In a checkout, this folder contains links to data/, models/ and the other packages. In a wheel, it contains the
    # packages themselves. Flower's app bundle contains them in the parent folder, which Posy adds to the search path.
    __path__.append(str(_HERE.parent))

from posy.data.errors import DataError  # noqa: E402
from posy.settings import RunError, SettingsError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from posy.models.own import Described
    from posy.server_app.record import Record
    from posy.settings import Scalar

__all__ = ["DataError", "RunError", "SettingsError", "load", "network", "run"]


def run(**settings: "Scalar") -> "Record":
    """Run an experiment in this process, as ``posy run`` does, for notebooks and scripts.

    Parameters
    ----------
    **settings
        Settings that differ from their defaults, with underscores: ``posy.run(method="ppfe", num_clients=20)``.

    Returns
    -------
    Record
        The record, as returned by :func:`load`. Its ``strategy`` also holds the server's state, except with ``folds``.

    Raises
    ------
    SettingsError, DataError
        If a setting or the data is invalid. Posy raises the error before the first round.
    """
    from posy.commands.launch import record_in_process  # noqa: PLC0415 - imports PyTorch

    config = {name.replace("_", "-"): value for name, value in settings.items()}
    return record_in_process(config, "the arguments of posy.run").record()


def load(run: "str | Path") -> "Record":
    """Return the record of a run: its rounds and clients as data frames, and its clients' models for prediction.

    Parameters
    ----------
    run : str or Path
        A run's folder or its name in ``runs``, or the folder in which a node stores its clients' models.

    Raises
    ------
    SettingsError
        If the run does not exist.
    """
    from posy.server_app.record import Record  # noqa: PLC0415 - imports PyTorch

    return Record.find(run)


def network(module: "nn.Module", layers: "Sequence[str]" = (), head: str = "") -> "Described":
    """Describe a custom network. The function named in ``model="file:function"`` must return this description.

    Parameters
    ----------
    module : torch.nn.Module
        The network, which maps samples ``(B, *input_shape)`` to logits ``(B, C)``.
    layers : sequence of str
        Names of its modules, as in ``named_modules``, from input to output, excluding the head. Together they contain
        all parameters except the head's. By default, the children of the module, in order.
    head : str
        Name of the linear output layer. By default, the last ``nn.Linear``.
    """
    from posy.models.own import Described  # noqa: PLC0415 - imports PyTorch

    return Described(module, tuple(layers), head)
