"""Calibrate the router's flag for queries that are far from every client's data.

After a run of a method that routes queries, the server stores a reference: the mean of each client's training samples
of each class in the method's embeddings, and their covariance. It also stores a threshold for the distance to the
reference, which is calibrated on the clients' validation samples. If the clients are on nodes, each node stores such a
file for its own samples, and never sends it.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from logging import INFO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.common.logger import log
from torch import Tensor

from posy.client_app.stored import ClientModel
from posy.data.client import ClientData
from posy.outliers import Embeddings, Floats, Reference, conformal_threshold, distances, fit_reference
from posy.storage import DamagedFileError, plain, read_arrays, write_arrays

FILE, FILE_OF_CLIENT = "routing.safetensors", "routing-{client}.safetensors"
"""Names of the files with the reference of all clients on the server, and of one client on its node, in the run's
folder of models."""
FORMAT = "1"
ALPHA = 0.05
"""Maximum rate of false alarms for which the threshold is calibrated."""
SMALLEST_THRESHOLD = 1e-6
"""Minimum threshold: smaller distances are rounding errors."""
MAX_SIZE = 4096
"""Maximum size of an embedding, because the covariance has the square of this size."""


@dataclass(frozen=True)
class Calibration:
    """A calibrated distance to the clients' data.

    ``facts`` states the ``alpha`` of the threshold, the number of samples behind it, and the rates of false alarms.
    """

    references: tuple[Reference, ...]
    threshold: float
    facts: Mapping[str, Any]

    def relative(self, model: ClientModel, x: Tensor) -> Floats:
        """Return the distances ``(n,)`` of samples ``(n, *input_shape)``, divided by the threshold.

        No client's data fits a sample with a relative distance above 1.
        """
        return _distances(self.references, model, x) / self.threshold

    def relative_of(self, embeddings: Sequence[Embeddings]) -> Floats:
        """Return the result of :meth:`relative`, given the samples' embeddings ``(n, D)``."""
        return _largest(self.references, embeddings) / self.threshold

    def write(self, models: Path, server_round: int, file: str = FILE) -> None:
        """Write the calibration for the models of a round."""
        arrays = {"threshold": np.array([self.threshold])}
        for number, reference in enumerate(self.references):
            arrays |= {f"{name}-{number}": array for name, array in reference._asdict().items()}
        about = {"format": FORMAT, "round": str(server_round), "facts": json.dumps(self.facts)}
        write_arrays(models / file, arrays, about)

    @classmethod
    def read(cls, models: Path, server_round: int, file: str = FILE) -> "Calibration | None":
        """Return the calibration for the models of a round, or None if the folder has none for this round.

        Raises
        ------
        DamagedFileError
            If the file cannot be read.
        """
        path = models / file
        if not path.is_file():
            return None
        arrays, about = read_arrays(path)
        if about.get("format") != FORMAT:
            raise DamagedFileError(f"{path} has the format {about.get('format')}, but this version reads {FORMAT}")
        if about["round"] != str(server_round):  # the run was resumed, and has newer models
            return None
        count = sum(name.startswith("means-") for name in arrays)
        references = tuple(Reference(arrays[f"whitening-{i}"], arrays[f"means-{i}"]) for i in range(count))
        return cls(references, float(arrays["threshold"][0]), json.loads(about["facts"]))


class NotCalibratedError(ValueError):
    """The distance cannot be calibrated, for the reason in the message."""


def calibrate(
    model: ClientModel, clients: Sequence[int], data_of: Callable[[int], ClientData], alpha: float = ALPHA
) -> Calibration:
    """Return the calibration of the distance to the data of some clients.

    Parameters
    ----------
    model : ClientModel
        A model with the embedding that all clients share, on the device of the data.
    clients : sequence of int
        The clients to which queries can be routed.
    data_of : callable
        Returns the training, validation and test samples of a client.
    alpha : float
        Maximum rate of false alarms.

    Raises
    ------
    NotCalibratedError
        If the method has no embedding, the embedding is too large or not finite, or there are too few validation
        samples.
    """
    needed, count = math.ceil(round(1 / alpha, 9)) - 1, sum(len(data_of(client).y_validation) for client in clients)
    if count < needed:
        remedy = "increase validation-fraction" if count else "repeat the run with validation-fraction = 0.1"
        raise NotCalibratedError(f"the threshold needs at least {needed} validation samples, not {count}; {remedy}")

    train = [data for client in clients if len((data := data_of(client)).y_train)]
    groups = [data.y_train.numpy(force=True) for data in train]
    embeddings = zip(*(_embedded(model, data.x_train) for data in train), strict=True)
    try:
        references = tuple(fit_reference(zip(parts, groups, strict=True)) for parts in embeddings)
    except (ValueError, np.linalg.LinAlgError) as error:
        raise NotCalibratedError(str(error)) from error
    validation, test = dict[int, Floats](), dict[int, Floats]()
    for client, data in ((client, data_of(client)) for client in clients):
        validation[client] = _distances(references, model, data.x_validation)
        test[client] = _distances(references, model, data.x_test)
    threshold = conformal_threshold(np.concatenate([*validation.values()]), alpha)
    assert threshold is not None
    threshold = max(threshold, SMALLEST_THRESHOLD)
    alarms = {client: values > threshold for client, values in test.items() if len(values)}
    facts = {
        "alpha": alpha,
        "threshold": threshold,
        "validation-samples": count,
        "test-samples": sum(map(len, alarms.values())),
        "false-alarm-rate": np.concatenate([*alarms.values()]).mean() if alarms else None,
        "client-false-alarm-rates": {client: values.mean() for client, values in alarms.items()},
    }
    return Calibration(references, threshold, plain(facts))


def _distances(references: Sequence[Reference], model: ClientModel, x: Tensor) -> Floats:
    """Return the largest of the distances in the embeddings, ``(n,)``, for samples ``(n, *input_shape)``."""
    if not len(x):  # not every network accepts an empty batch
        return np.zeros(0)
    return _largest(references, _embedded(model, x))


def _largest(references: Sequence[Reference], embeddings: Sequence[Embeddings]) -> Floats:
    """Return the largest of the distances ``(n,)`` of samples in several embeddings ``(n, D)``."""
    largest: Floats = np.max([distances(*pair) for pair in zip(references, embeddings, strict=True)], axis=0)
    return largest


def calibrate_client(path: Path, client: int, data: ClientData, device: torch.device) -> None:
    """Calibrate the distance to the samples of one client with its stored model, and store it next to the model.

    If the distance cannot be calibrated, the function logs the reason.
    """
    model = ClientModel.load(path).to(device)
    try:
        calibration = calibrate(model, [client], lambda _: data)
    except NotCalibratedError as error:
        log(INFO, "client %s: answers to queries contain no distance: %s", client, error)
        return
    calibration.write(path.parent, model.round, FILE_OF_CLIENT.format(client=client))


@torch.inference_mode()
def _embedded(model: ClientModel, x: Tensor) -> list[Embeddings]:
    """Return the embeddings ``(n, D)`` of samples, or raise :class:`NotCalibratedError` if there are none."""
    embeddings = model.client_embeddings(x)
    if not embeddings:
        raise NotCalibratedError("the method has no client_embeddings")
    if (size := max(embedding.shape[1] for embedding in embeddings)) > MAX_SIZE:
        raise NotCalibratedError(f"an embedding has {size} numbers, more than {MAX_SIZE}")
    return [embedding.float().numpy(force=True) for embedding in embeddings]
