"""What a client does to its reply for the sake of privacy, and which methods can bear it.

Local differential privacy works as Flower's ``LocalDpMod`` does: the change that a client's training made is
clipped to an L2 norm, and Gaussian noise of the standard deviation sensitivity · √(2 ln(1.25/δ)) / ε is added.
It is done inside the client, not by the mod itself, because the mod wants replies with the very arrays that
were received (FedFew and PPFE send others), divides by zero where nothing has changed, and draws from NumPy's
global generator, which processes forked from a warm one would share.
"""

import math
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.logger import log

from posy.settings import SettingsError
from posy.strategies.settings import Settings, TrainSettings

Arrays = list[npt.NDArray[np.generic]]

NO_NOISE = {
    "cwfedavg": "class distributions are read off the norms of the output weights, which noise makes all alike",
    "fedacs": "it decides who collaborates by the cosine similarity of single models, which noise brings to zero",
    "fedamp": "it decides who collaborates by the distance of single models, which noise makes all alike",
    "ifca": "each client names its cluster beside its model, and a name cannot be noised",
    "local": "its clients send no model",
}
"""Methods whose mathematics do not allow local differential privacy, and why."""


def check_privacy(settings: Settings) -> None:
    """Check that the method, and Flower, can do what the settings ask for.

    Raises
    ------
    SettingsError
        If they cannot, with the reason.
    """
    method, train = settings.run.method, settings.train
    if not train.dp_clip:
        return
    if method in NO_NOISE:
        allowed = "it must be 0 for this method"
        raise SettingsError(f"dp-clip = {train.dp_clip:g} with method = {method!r}: {NO_NOISE[method]}; {allowed}")
    if train.model == "resnet18-bn":
        raise SettingsError(
            f"dp-clip = {train.dp_clip:g} with model = 'resnet18-bn': noise makes running variances negative; "
            "resnet18-gn has none"
        )
    if train.dp_epsilon > 1:
        log(
            WARNING,
            "dp-epsilon = %g: the noise of the Gaussian mechanism is proven for epsilon up to 1 only",
            train.dp_epsilon,
        )


def noised(arrays: Arrays, references: Arrays, settings: TrainSettings) -> Arrays:
    """Clip and noise the change that a reply makes, if the settings ask for it.

    Parameters
    ----------
    arrays : list of numpy.ndarray
        A client's reply.
    references : list of numpy.ndarray
        What the first arrays of the reply are changes of, of the same shapes; further arrays of the reply
        are left as they are.
    settings : TrainSettings
        ``dp_clip`` (0: nothing is done), ``dp_epsilon``, ``dp_delta``, ``dp_sensitivity``.

    Returns
    -------
    list of numpy.ndarray
        reference + min(1, C / ‖Δ‖) Δ + noise, float32, with ‖Δ‖ over all of the first arrays; then the rest.
    """
    if not settings.dp_clip:
        return arrays
    generator = np.random.default_rng()  # not of the seed, which the server knows and could subtract the noise by
    changed = list(zip(arrays, references, strict=False))
    changes = [np.asarray(array, np.float64) - np.asarray(reference, np.float64) for array, reference in changed]
    norm = math.sqrt(sum(float(np.square(change).sum()) for change in changes))
    factor = min(1.0, settings.dp_clip / norm) if norm else 1.0
    deviation = noise_deviation(settings)
    result: list[Any] = [
        (np.asarray(reference, np.float64) + factor * change + generator.normal(0.0, deviation, change.shape)).astype(
            np.float32
        )
        for (_, reference), change in zip(changed, changes, strict=True)
    ]
    return [*result, *arrays[len(result) :]]


def noise_deviation(settings: TrainSettings) -> float:
    """Return the standard deviation of the noise, sensitivity · √(2 ln(1.25/δ)) / ε.

    Whatever two data sets a client may have, its clipped changes lie at most twice the clipping norm apart:
    that is the sensitivity unless the settings give another.
    """
    sensitivity = settings.dp_sensitivity or 2 * settings.dp_clip
    return sensitivity * math.sqrt(2 * math.log(1.25 / settings.dp_delta)) / settings.dp_epsilon
