"""Differential privacy: determine the noise that a run's settings require, clip updates, and add the noise.

The setting ``dp`` names the party that adds the noise, and ``dp-epsilon`` is the ε of the whole run:

- ``local``: each client clips its update to the norm C (``dp-clip``) and adds noise. The distance between a client's
  updates for any two data sets is at most 2C.
- ``central``: each client clips its update to C, and the server adds noise to the sum. A client changes the sum by at
  most C. With secure aggregation, the clients add shares of the noise, and the server never sees a sum without noise.
- ``sample``: DP-SGD (Abadi et al., 2016). Each client clips the gradient of each sample, and adds noise to their sum.

All clients know the seed, which determines the cohorts, so Posy does not claim privacy amplification by client sampling
in any mode. A client spends privacy budget only in the rounds in which it trains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.accounting import Event, noise_multiplier_for, sampled_noise_multiplier
from posy.noise import SecureGenerator, from_steps, to_steps
from posy.strategies.cohorts import most_trainings
from posy.strategies.replies import changes, norm_of
from posy.strategies.run_settings import CENTRAL, LOCAL, OFF, SAMPLE
from posy.strategies.settings import Settings

CLIP_RATE = 0.2
"""Learning rate η_C of the adaptive clipping norm (Andrew et al., 2021, Section 3)."""
COUNT_NOISE = 0.05
"""Standard deviation σ_b of the noise on the number of unclipped updates, as a fraction of the cohort (Andrew et al.,
2021, Section 3)."""
BELOW = "dp-below-clip"
"""Metric in a reply with adaptive clipping: 1 if the norm of the update is at most the clipping norm, else 0."""


@dataclass(frozen=True)
class Sampling:
    """The DP-SGD steps of a client's local training in one round."""

    probability: float
    """Probability that a step includes a given sample."""
    steps: int
    noise_multiplier: float
    clip: float
    """L2 norm to which the gradient of each sample is clipped."""
    batch_size: float
    """Expected number of samples in a step, by which the sum of the gradients is divided."""


# -- the plan of a run ----------------------------------------------------------------------------------------


def event_of(settings: Settings, num_train: int) -> Event:
    """Return the privacy event of one round of training for a client with ``num_train`` training samples."""
    mode = settings.train.dp
    if mode == SAMPLE:
        sampling = sampling_of(settings, num_train)
        return Event(mode, sampling.noise_multiplier, sampling.steps, sampling.probability)
    return Event(mode, noise_multiplier(settings))


def planned_events(settings: Settings, num_train: int) -> list[Event]:
    """Return the privacy events of a whole run for a client with ``num_train`` training samples; empty without noise.

    The list is for the client that trains in the most rounds, so it is an upper bound for every client.
    """
    if settings.train.dp == OFF:
        return []
    event = event_of(settings, num_train)
    return [Event(event.mode, event.noise_multiplier, event.count * most_trainings(settings), event.sampling)]


@lru_cache(maxsize=64)
def noise_multiplier(settings: Settings) -> float:
    """Return the noise multiplier per update at which the run as a whole satisfies (ε, δ).

    T Gaussian mechanisms with noise multiplier z are equivalent to a single mechanism with z/√T.
    """
    train = settings.train
    return math.sqrt(most_trainings(settings)) * noise_multiplier_for(train.dp_epsilon, train.dp_delta)


def sampling_of(settings: Settings, num_train: int) -> Sampling:
    """Return the DP-SGD steps of one round of local training on ``num_train`` samples.

    The probability is rounded up to two digits, so that clients with a similar number of samples share a cached noise
    multiplier.
    """
    train = settings.train
    probability = _rounded_up(min(1.0, train.batch_size / num_train))
    steps = train.local_steps or train.local_epochs * math.ceil(1 / probability - 1e-9)
    count = steps * most_trainings(settings)
    multiplier = sampled_noise_multiplier(train.dp_epsilon, train.dp_delta, probability, count)
    return Sampling(probability, steps, multiplier, train.dp_clip, probability * num_train)


def _rounded_up(probability: float) -> float:
    """Round a probability up to two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(probability)) - 1)
    return min(1.0, round(math.ceil(probability / unit - 1e-9) * unit, 12))


def reply_deviation(settings: Settings, threshold: int = 0) -> float:
    """Return the standard deviation of the noise that a client adds to each element of its update; 0 means none.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    threshold : int
        With central noise and secure aggregation, the minimum number t of clients whose sum the server can unmask. Each
        client adds noise of variance (zC)²/t, so the noise in the sum of t or more updates has variance at least (zC)².
    """
    train = settings.train
    if train.dp == LOCAL:
        return 2 * train.dp_clip * noise_multiplier(settings)
    if train.dp == CENTRAL and settings.run.secure_aggregation:
        return train.dp_clip * noise_multiplier(settings) / math.sqrt(threshold)
    return 0.0


# -- clipping and noise ---------------------------------------------------------------------------------------


def clipped(arrays: NDArrays, references: NDArrays, clip: float) -> tuple[list[npt.NDArray[np.float64]], float]:
    """Return min(1, C / ‖Δ‖) Δ for the change Δ of the arrays, and the norm ‖Δ‖ over all arrays.

    A change that contains NaN or infinite values becomes 0, because an error would reveal that training has diverged.
    """
    changed = changes(arrays, references)
    norm = norm_of(changed)
    if not math.isfinite(norm):
        return [np.zeros_like(change) for change in changed], math.inf
    factor = 1.0 if norm <= clip else clip / norm
    return [factor * change for change in changed], norm


def with_noise(changed: Sequence[npt.NDArray[np.float64]], deviation: float) -> list[npt.NDArray[np.float64]]:
    """Add Gaussian noise from a cryptographic generator to the changes; see :mod:`posy.noise`."""
    return noisy_sum([changed], deviation)


def noisy_sum(
    changes_of: Sequence[Sequence[npt.NDArray[np.float64]]], deviation: float
) -> list[npt.NDArray[np.float64]]:
    """Return the sum of the clients' changes and Gaussian noise, computed exactly on the noise's grid.

    Parameters
    ----------
    changes_of : sequence of list of numpy.ndarray
        The clipped change of each client.
    deviation : float
        Standard deviation of the noise on the sum.
    """
    total = [np.zeros(change.shape, np.int64) for change in changes_of[0]]
    for changed in changes_of:
        for number, change in enumerate(changed):
            total[number] += to_steps(change, deviation)
    generator = SecureGenerator()
    noisy = [array + generator.gaussian(array.size).reshape(array.shape) for array in total]
    return [from_steps(array, deviation) for array in noisy]


# -- adaptive clipping (Andrew et al., 2021) ------------------------------------------------------------------


def split_noise(multiplier: float, cohort: int) -> tuple[float, float]:
    """Return noise levels z_Δ for the sum and σ_b for the count whose combined cost equals that of ``multiplier`` (z).

    z⁻² = z_Δ⁻² + (2σ_b)⁻² (Andrew et al., 2021, Theorem 1): the sum of the b_i − 1/2 has sensitivity 1/2. σ_b is a
    twentieth of the cohort but at least z, so that at least three quarters of the budget remain for the sum.
    """
    count_deviation = max(COUNT_NOISE * cohort, multiplier)
    return (multiplier**-2 - (2 * count_deviation) ** -2) ** -0.5, count_deviation


def adapted_clip(clip: float, below: float, quantile: float) -> float:
    """Return C exp(−η_C (b − γ)), the clipping norm of the next round (Andrew et al., 2021, Section 2.2).

    Parameters
    ----------
    clip : float
        The clipping norm C.
    below : float
        The noisy fraction b of clients whose updates had a norm of at most C.
    quantile : float
        The target γ for this fraction.
    """
    return clip * math.exp(-CLIP_RATE * (min(max(below, 0.0), 1.0) - quantile))


def noisy_fraction(below: Sequence[float], cohort: int, deviation: float) -> float:
    """Return 1/2 + (Σ (b_i − 1/2) + N(0, σ_b²)) / m for the indicators b_i of a cohort of m clients."""
    total = np.array([float(sum(value - 0.5 for value in below))])
    noisy = from_steps(to_steps(total, deviation) + SecureGenerator().gaussian(1), deviation)
    return 0.5 + float(noisy[0]) / cohort
