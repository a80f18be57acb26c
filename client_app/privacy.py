"""Differential privacy on a client: checks of a run's settings, and the noise in a reply.

The mechanisms are in :mod:`posy.strategies.privacy`, the noise in :mod:`posy.noise`, the accountant in
:mod:`posy.accounting`, and DP-SGD in :mod:`posy.client_app.training.private`.
"""

import math

import numpy as np
from flwr.common.typing import NDArrays
from torch import nn

from posy.accounting import accountant_library
from posy.models.architecture import Architecture
from posy.settings import SettingsError
from posy.strategies.masking import ONE
from posy.strategies.privacy import clipped, reply_deviation, with_noise
from posy.strategies.run_settings import CENTRAL, LOCAL, OFF, SAMPLE
from posy.strategies.secure_aggregation import fraction_of, threshold_of
from posy.strategies.settings import Settings

DEVIATIONS = 8
"""Number of standard deviations that the noise exceeds with a probability of about 10⁻¹⁵."""
SMOOTH = 8
"""Minimum standard deviation of a client's noise, in integer steps of the masked sum. Rounding the noise then changes
the distribution of the sum by less than 10⁻²⁰⁰ (Kairouz et al., 2021, Theorem 1)."""


class UnprotectedError(RuntimeError):
    """A reply contains arrays or metrics to which no noise has been added."""


def check_privacy(settings: Settings) -> None:
    """Raise :class:`SettingsError` if the method does not support the noise or masks that the settings require."""
    if settings.train.dp != OFF:
        _check_noise(settings)
    if settings.run.secure_aggregation:
        _check_sums(settings)


def _check_noise(settings: Settings) -> None:
    run, train, data = settings.run, settings.train, settings.data
    mode = f"dp = {train.dp!r}"
    if refusal := settings.method.refused_privacy(train.dp):
        raise SettingsError(f"{mode} with method = {run.method!r}: {refusal.why}; choose another method or mode")
    if not train.dp_clip:
        raise SettingsError(f"{mode} with dp-clip = 0: the noise needs a clipping norm; set dp-clip above 0")
    if data.share_class_counts:
        raise SettingsError(
            f"{mode} with share-class-counts = true: the class counts are sent without noise; set "
            "share-class-counts = false"
        )
    if train.dp == CENTRAL:
        _check_central(settings)
    if train.dp == SAMPLE:
        accountant_library()
        if train.class_weights != "none":
            raise SettingsError(
                f"{mode} with class-weights = {train.class_weights!r}: a weight depends on all samples of the class, "
                "so the clipped gradients of two samples are not independent; set class-weights = 'none'"
            )
        if train.precision == "bfloat16":
            raise SettingsError(
                f"{mode} with precision = 'bfloat16': rounding makes sums of clipped gradients exceed their bound; set "
                "precision = 'float32'"
            )


def _check_central(settings: Settings) -> None:
    run = settings.run
    if run.client_weights != "uniform":
        raise SettingsError(
            f"dp = 'central' with client-weights = {run.client_weights!r}: the weight of a client in the sum would "
            "depend on its data; set client-weights = 'uniform'"
        )
    if run.max_update_norm:
        raise SettingsError(
            f"dp = 'central' with max-update-norm = {run.max_update_norm:g}: dropping an update because of its norm "
            f"reveals the norm, and dp-clip already bounds each update; set max-update-norm = 0"
        )
    if run.secure_aggregation and settings.train.dp_clip_quantile:
        raise SettingsError(
            f"dp = 'central' with dp-clip-quantile = {settings.train.dp_clip_quantile:g} and secure-aggregation = "
            "true: the clients add noise for dp-clip, but the server would choose a different norm; set "
            "dp-clip-quantile = 0"
        )
    if run.secure_aggregation and run.secure_neighbours:
        raise SettingsError(
            f"dp = 'central' with secure-neighbours = {run.secure_neighbours}: a client cannot verify how many clients "
            "outside its neighbourhood add their shares of the noise; set secure-neighbours = 0"
        )


def check_network(settings: Settings, network: Architecture) -> None:
    """Raise :class:`SettingsError` if a network does not support the noise that the settings require."""
    if settings.train.dp == OFF:
        return
    advice = "choose a network with GroupNorm, such as resnet18-gn"
    if not all(entry.trainable for entry in network.layout.entries):
        raise SettingsError(
            f"dp = {settings.train.dp!r} with model = {network.model!r}: noise makes BatchNorm's running variances "
            f"negative; {advice}"
        )
    norms = nn.modules.batchnorm._BatchNorm
    if settings.train.dp == SAMPLE and any(isinstance(module, norms) for module in network.build().modules()):
        raise SettingsError(
            f"dp = 'sample' with model = {network.model!r}: BatchNorm mixes the samples of a batch, so a gradient does "
            f"not belong to one sample; {advice}"
        )


def noised(
    arrays: NDArrays, references: NDArrays, settings: Settings, *, clip: float = 0.0, threshold: int = 0
) -> tuple[NDArrays, float]:
    """Clip a reply's arrays, add the client's noise, if any, and return the arrays and the norm of their change.

    The arrays become reference + min(1, C / ‖Δ‖) Δ + noise, where ‖Δ‖ is the norm over all arrays. The result is
    float32, or float64 if it will be masked.

    Parameters
    ----------
    arrays : list of numpy.ndarray
        The arrays of the reply.
    references : list of numpy.ndarray
        The arrays from which the change is measured, with the same shapes.
    settings : Settings
        The settings of the run.
    clip : float
        The clipping norm of the round, or 0 for the setting ``dp-clip``.
    threshold : int
        Minimum number of clients for which the server can unmask a sum, or 0 without masks.
    """
    changes, norm = clipped(arrays, references, clip or settings.train.dp_clip)
    if changes and (deviation := reply_deviation(settings, threshold)):
        changes = with_noise(changes, deviation)
    dtype = np.float64 if threshold else np.float32  # masks need the exact sum of update and noise
    with np.errstate(over="ignore"):
        pairs = zip(references, changes, strict=True)
        noisy = [(reference + change).astype(dtype) for reference, change in pairs]
    return noisy, norm


def _check_sums(settings: Settings) -> None:
    """Raise :class:`SettingsError` if a run needs more than the weighted sum of its clients' updates."""
    run, train = settings.run, settings.train
    setting = "secure-aggregation = true"
    if settings.method.sums:
        raise SettingsError(
            f"{setting} with method = {run.method!r}: {settings.method.sums.why}; set secure-aggregation = false"
        )
    if run.max_update_norm:
        raise SettingsError(
            f"{setting} with max-update-norm = {run.max_update_norm:g}: the server cannot see individual updates, so "
            "it cannot measure their norms; set max-update-norm = 0 (each client limits the change in a parameter to "
            "secure-range)"
        )
    cohort = math.ceil(run.fraction_train * settings.data.num_clients - 1e-9)
    if cohort < 2:
        raise SettingsError(
            f"{setting}: at least two clients must train in a round, because a sum over one client is that client's "
            "update"
        )
    if train.dp not in (LOCAL, CENTRAL) or not train.dp_clip:
        return
    deviation = reply_deviation(settings, threshold_of(cohort, fraction_of(run.secure_threshold)))
    if (smallest_range := train.dp_clip + DEVIATIONS * deviation) > run.secure_range:
        raise SettingsError(
            f"secure-range = {run.secure_range:g} with dp-clip = {train.dp_clip:g}: the noise may exceed the range; "
            f"set secure-range to at least {smallest_range:.4g}"
        )
    word = run.secure_range * cohort / ONE
    if train.dp == CENTRAL and deviation < SMOOTH * word:
        raise SettingsError(
            f"secure-range = {run.secure_range:g} with dp-clip = {train.dp_clip:g}: the standard "
            f"deviation of a client's noise, {deviation:.3g}, is too small for the masked sum's step of {word:.3g}; "
            f"set secure-range to at most {deviation * ONE / (SMOOTH * cohort):.3g}"
        )
