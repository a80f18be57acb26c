"""Local differential privacy: what a client does to its reply.

It works as Flower's ``LocalDpMod`` does, but inside the client: the mod wants replies with the very arrays that
were received (FedFew and PPFE send others), divides by zero where nothing has changed, and draws from NumPy's
global generator, which processes forked from a warm one would share.
"""

import math
from logging import WARNING

import numpy as np
from flwr.common.logger import log
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.settings import SettingsError
from posy.strategies.replies import changes, norm_of
from posy.strategies.settings import Settings, TrainSettings

DEVIATIONS = 8
"""Standard deviations that the noise is never beyond: once in 10^15 numbers."""


def check_privacy(settings: Settings) -> None:
    """Raise :class:`SettingsError` if the method or the model cannot bear the noise or the sums of the settings."""
    train = settings.train
    if settings.run.secure_aggregation:
        _check_sums(settings)
    if not train.dp_clip:
        return
    if settings.method.noise:
        raise SettingsError(
            f"dp-clip = {train.dp_clip:g} with method = {settings.run.method!r}: {settings.method.noise.why}; "
            "it must be 0 for this method"
        )
    if train.dp_epsilon > 1:
        proven = "dp-epsilon = %g: the noise of the Gaussian mechanism is proven for epsilon up to 1 only"
        log(WARNING, proven, train.dp_epsilon)


def check_network(settings: Settings, network: Architecture) -> None:
    """Raise :class:`SettingsError` for a network that cannot bear the noise of the settings."""
    if settings.train.dp_clip and not all(entry.trainable for entry in network.layout.entries):
        raise SettingsError(
            f"dp-clip = {settings.train.dp_clip:g} with model = {network.model!r}: noise makes BatchNorm's running "
            "variances negative; GroupNorm, as in resnet18-gn, has none"
        )


def noised(arrays: NDArrays, references: NDArrays, settings: TrainSettings) -> NDArrays:
    """Clip the change Δ that a reply makes to C = ``dp_clip``, and add noise to it.

    The references are what the first arrays of the reply are changes of, of the same shapes. Returned are
    reference + min(1, C / ‖Δ‖) Δ + noise, float32, with ‖Δ‖ over all of the first arrays; then the rest as it was.
    """
    generator = np.random.default_rng()  # without the seed: the server knows it, and could subtract the noise
    changed = changes(arrays, references)
    norm, deviation = norm_of(changed), noise_deviation(settings)
    factor = min(1.0, settings.dp_clip / norm) if norm else 1.0
    noisy = [
        reference + factor * change + generator.normal(0.0, deviation, change.shape)
        for reference, change in zip(references, changed, strict=False)
    ]
    return [*(array.astype(np.float32) for array in noisy), *arrays[len(noisy) :]]


def noise_deviation(settings: TrainSettings) -> float:
    """Return the standard deviation of the noise, sensitivity · √(2 ln(1.25/δ)) / ε.

    Whatever two data sets a client may have, its clipped changes lie at most twice the clipping norm apart:
    that is the sensitivity unless the settings give another.
    """
    sensitivity = settings.dp_sensitivity or 2 * settings.dp_clip
    return sensitivity * math.sqrt(2 * math.log(1.25 / settings.dp_delta)) / settings.dp_epsilon


def _check_sums(settings: Settings) -> None:
    """Raise :class:`SettingsError` if a run cannot do with the weighted sum of its clients' updates."""
    run, train = settings.run, settings.train
    on = "secure-aggregation = true"
    if settings.method.sums:
        raise SettingsError(f"{on} with method = {run.method!r}: {settings.method.sums.why}; it must be false")
    if run.max_update_norm:
        raise SettingsError(
            f"{on} with max-update-norm = {run.max_update_norm:g}: the server sees no single update whose norm it "
            "could measure; it must be 0 (a client itself refuses what changes a parameter by more than secure-range)"
        )
    if math.ceil(run.fraction_train * settings.data.num_clients - 1e-9) < 2:
        raise SettingsError(f"{on}: two clients or more must train in a round, the sum of one is its own update")
    if train.dp_clip and (least := train.dp_clip + DEVIATIONS * noise_deviation(train)) > run.secure_range:
        raise SettingsError(
            f"secure-range = {run.secure_range:g} with dp-clip = {train.dp_clip:g}: the noise may go beyond it; it "
            f"must be >= {least:.4g}"
        )
