"""Personalised federated learning on Flower; the parts that every method shares."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

# NumPy's threads otherwise wait for their next work with the cores running, some 50 ms long: those that train clients.
# It is read when NumPy is loaded, so it helps where Posy is imported first, as in its own commands.
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")

_HERE = Path(__file__).resolve().parent
if not (_HERE / "server_app").is_dir():
    # In a checkout links in this folder lead to data/, models/ and the others beside it, and a wheel holds them here.
    # Flower's bundle of the app carries no links: there they are found where they lie.
    __path__.append(str(_HERE.parent))

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from posy.models.own import Described
    from posy.server_app.record import Record
    from posy.settings import Scalar


def run(**settings: "Scalar") -> "Record":
    """Run an experiment in this process, as ``posy run`` does, for notebooks and scripts.

    Parameters
    ----------
    **settings
        Settings that differ from their defaults, with underscores: ``posy.run(method="ppfe", num_clients=20)``.

    Returns
    -------
    Record
        What :func:`load` returns; ``strategy`` has the server's state besides.

    Raises
    ------
    SettingsError, DataError
        Before the first round, if a setting or the data is wrong.
    """
    from posy.commands.launch import record_in_process  # noqa: PLC0415 - imports PyTorch

    given = {name.replace("_", "-"): value for name, value in settings.items()}
    return record_in_process(given, "the arguments of posy.run").record()


def load(run: "str | Path") -> "Record":
    """Return the record of a run: its rounds and clients as frames, and its clients' models ready to predict.

    Parameters
    ----------
    run : str or Path
        The folder of a run, or the name of one in ``runs``; or a folder in which a node keeps its clients' models.

    Raises
    ------
    SettingsError
        If there is no such run.
    """
    from posy.server_app.record import Record  # noqa: PLC0415 - imports PyTorch

    return Record.find(run)


def network(module: "nn.Module", layers: "Sequence[str]" = (), head: str = "") -> "Described":
    """Describe a network of your own, where the function that ``model="file:function"`` names returns it.

    Parameters
    ----------
    module : torch.nn.Module
        It maps samples ``(B, *input_shape)`` to logits ``(B, C)``.
    layers : sequence of str
        Names of its modules, as ``named_modules`` has them, from input to output and without the head; together they
        hold all other parameters. By default its children in order.
    head : str
        Name of the linear layer that comes last. By default the last ``nn.Linear``.
    """
    from posy.models.own import Described  # noqa: PLC0415 - imports PyTorch

    return Described(module, tuple(layers), head)
