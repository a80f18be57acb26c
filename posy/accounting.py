"""Account for privacy: compute the (ε, δ) of Gaussian mechanisms and their composition, and keep a ledger of past uses.

An :class:`Event` is one use of a mechanism, for example the noise on one reply. Uses without subsampling compose
exactly. Mechanisms with noise multipliers z_1, …, z_T are equivalent to a single Gaussian mechanism with noise
multiplier (Σ z_t⁻²)^(-1/2) (Dong et al., 2022, Corollary 3.3). Theorem 8 of Balle & Wang (2018) gives the (ε, δ) of
this mechanism. Events with Poisson subsampling require the RDP accountant from the library dp-accounting, which the
extra `privacy` installs.

A ledger is a file in JSON Lines format with one event per line; see :func:`ledger_line`. All functions are pure.
"""

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from posy.settings import SettingsError

Unit = Literal["client", "sample"]
"""How two neighbouring data sets differ: in all the data of one client, or in one sample."""
MODES = ("local", "central", "sample")
"""Modes of differential privacy, as in the setting ``dp``."""
CANCELLATION = 1e-6
"""Relative difference between two probabilities below which Posy subtracts them with 50 digits."""
ORDERS = (*np.arange(1.25, 5, 0.25), *range(5, 65), 80, 96, 128, 192, 256, 512, 1024)
"""Orders of the Rényi divergences. A coarser grid is safe: each order gives a valid ε, and Posy takes the smallest."""
TOLERANCE = 1e-9
"""Relative error in ε that Posy ignores when it compares ε with a budget."""


class BudgetError(ValueError):
    """An event is invalid, for example because a ledger line is damaged."""


@dataclass(frozen=True)
class Event:
    """One or more identical uses of a mechanism.

    Parameters
    ----------
    mode : str
        ``local``: noise on a client's reply hides any change to the client's data. ``central``: noise on a sum hides
        whether the sum includes a client. ``sample``: noise on a gradient step hides whether the step uses a sample.
    noise_multiplier : float
        Standard deviation of the noise, divided by the sensitivity.
    count : int
        Number of uses.
    sampling : float
        Probability that a use includes a given sample; 1 without subsampling.
    """

    mode: str
    noise_multiplier: float
    count: int = 1
    sampling: float = 1.0

    def __post_init__(self) -> None:
        """Check the values, which may come from a file."""
        in_range = self.noise_multiplier > 0 and self.count >= 0 and 0 < self.sampling <= 1
        if self.mode not in MODES or not in_range or math.isnan(self.noise_multiplier):
            raise BudgetError(f"{self} is not an event: mode, noise multiplier, count or sampling is out of range")


# -- one Gaussian mechanism ----------------------------------------------------------------------------------


def log_delta(noise_multiplier: float, epsilon: float) -> float:
    """Return ln δ of the Gaussian mechanism at ε (Balle & Wang, 2018, Theorem 8).

    δ = Φ(1/(2z) − εz) − e^ε Φ(−1/(2z) − εz) for the noise multiplier z = σ/Δ.
    """
    from scipy.special import log_ndtr  # noqa: PLC0415 - the settings need no SciPy

    upper = 0.5 / noise_multiplier - epsilon * noise_multiplier
    lower = -0.5 / noise_multiplier - epsilon * noise_multiplier
    first, second = float(log_ndtr(upper)), epsilon + float(log_ndtr(lower))
    if second < first + math.log1p(-CANCELLATION):
        return first + math.log1p(-math.exp(second - first))
    return _log_delta_exact(noise_multiplier, epsilon)


def _log_delta_exact(noise_multiplier: float, epsilon: float) -> float:
    """Compute :func:`log_delta` with at least 50 digits."""
    import mpmath  # noqa: PLC0415 - rarely needed; a dependency of PyTorch

    digits = 50 + 2 * int(abs(math.log10(noise_multiplier)) + abs(math.log10(epsilon or 1)))
    with mpmath.workdps(digits):
        z, e = mpmath.mpf(noise_multiplier), mpmath.mpf(epsilon)
        tails = [mpmath.erfc((e * z + sign / (2 * z)) / mpmath.sqrt(2)) / 2 for sign in (-1, 1)]
        difference = tails[0] - mpmath.exp(e) * tails[1]
        return float(mpmath.log(difference)) if difference > 0 else -math.inf


@lru_cache(maxsize=4096)
def noise_multiplier_for(epsilon: float, delta: float) -> float:
    """Return the smallest noise multiplier at which the Gaussian mechanism satisfies (ε, δ).

    This is Algorithm 1 of Balle & Wang (2018). The standard deviation of the noise is the result times the L2
    sensitivity. The result is exact for every ε, except that it is rounded up, so that δ is never exceeded.
    """
    return _least(lambda z: log_delta(z, epsilon) - math.log(delta))


@lru_cache(maxsize=4096)
def epsilon_of(noise_multiplier: float, delta: float) -> float:
    """Return the smallest ε ≥ 0 for which the Gaussian mechanism satisfies (ε, δ)."""
    if noise_multiplier == math.inf or log_delta(noise_multiplier, 0.0) <= math.log(delta):
        return 0.0
    return _least(lambda epsilon: log_delta(noise_multiplier, epsilon) - math.log(delta))


def _least(excess: Callable[[float], float]) -> float:
    """Return the smallest positive number at which a decreasing function is at most 0, rounded up to 13 digits."""
    low = high = 1.0
    while excess(low) <= 0:
        low, high = low / 4, low
    while excess(high) > 0:
        low, high = high, high * 4
    while high > low * (1 + 1e-13):
        middle = math.sqrt(low) * math.sqrt(high)
        if not low < middle < high:
            break
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


def composed(events: Iterable[Event]) -> float:
    """Return the noise multiplier of the single Gaussian mechanism that is equivalent to events without subsampling."""
    precision = math.fsum(event.count / event.noise_multiplier**2 for event in events)
    return precision**-0.5 if precision > 0 else math.inf


# -- composition of events ------------------------------------------------------------------------------------


def as_unit(event: Event, unit: Unit) -> Event | None:
    """Return an event as it applies to a unit of privacy, or None if it guarantees no privacy for this unit.

    A client's reply with local noise hides any change to its data, and therefore also a change to one sample. A central
    event hides whether a client takes part. The client's participation changes the sum by at most the clipping bound C.
    Changing one sample may reverse the client's update and change the sum by up to 2C, so the noise multiplier is
    halved. Noise that hides individual samples does not hide a client.
    """
    if unit == "client":
        return None if event.mode == "sample" else event
    return replace(event, noise_multiplier=event.noise_multiplier / 2) if event.mode == "central" else event


def spent(events: Iterable[Event], delta: float, unit: Unit = "sample") -> float:
    """Return the total ε that events have spent at δ, or infinity if one of them gives no guarantee.

    Parameters
    ----------
    events : iterable of Event
        All uses of one client's data.
    delta : float
        δ for all events combined.
    unit : {"client", "sample"}
        How two neighbouring data sets differ.
    """
    counts: Counter[Event] = Counter()
    for event in events:
        converted = as_unit(event, unit)
        if converted is None and event.count:
            return math.inf
        if converted is not None and converted.count:
            counts[replace(converted, mode="local", count=1)] += converted.count
    return _spent(tuple(replace(event, count=count) for event, count in sorted(counts.items(), key=repr)), delta)


@lru_cache(maxsize=4096)
def _spent(events: tuple[Event, ...], delta: float) -> float:
    if all(event.sampling == 1 for event in events):
        return epsilon_of(composed(events), delta)
    total = sum(event.count * _renyi_divergences(event.noise_multiplier, event.sampling) for event in events)
    epsilon, _ = accountant_library().rdp.compute_epsilon(ORDERS, total, delta)
    return float(epsilon)


@lru_cache(maxsize=1024)
def _renyi_divergences(noise_multiplier: float, sampling: float) -> npt.NDArray[np.float64]:
    """Return the Rényi divergences of one use at :data:`ORDERS`, with infinity where the library cannot compute one."""
    library = accountant_library()
    gaussian = library.GaussianDpEvent(noise_multiplier)
    mechanism = gaussian if sampling == 1 else library.PoissonSampledDpEvent(sampling, gaussian)
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the library warns about each order that it skips, but the other orders suffice
    try:
        return library.rdp.RdpAccountant(ORDERS).compose(mechanism).rdp
    finally:
        logger.setLevel(level)


def accountant_library() -> Any:
    """Import and return the library dp-accounting; raise :class:`SettingsError` if it is not installed."""
    try:
        import dp_accounting  # noqa: PLC0415 - an extra
        import dp_accounting.rdp  # noqa: PLC0415
    except ImportError as error:
        raise SettingsError(
            f"dp = 'sample' needs the package dp-accounting for its privacy accountant ({error}); install it with "
            "pip install 'posy[privacy]', on the server and on each node"
        ) from error
    return dp_accounting


@lru_cache(maxsize=4096)
def sampled_noise_multiplier(epsilon: float, delta: float, sampling: float, count: int) -> float:
    """Return the smallest noise multiplier at which ``count`` uses with Poisson subsampling satisfy (ε, δ) in total.

    The result exceeds the exact value by at most 0.1 %.
    """
    if sampling == 1:
        return math.sqrt(count) * noise_multiplier_for(epsilon, delta)

    def excess(z: float) -> float:
        return spent([Event("sample", z, count, sampling)], delta) - epsilon

    high = 1.0
    while excess(high) > 0:
        high *= 2
    low = high / 2
    while excess(low) <= 0:
        low, high = low / 2, low
    while high > 1.001 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return high


# -- the ledger of a site -------------------------------------------------------------------------------------


def ledger_line(event: Event, **facts: Any) -> str:
    """Format an event as a ledger line, with additional facts such as the run and the round."""
    entry = {
        "mode": event.mode,
        "noise-multiplier": event.noise_multiplier,
        "count": event.count,
        "sampling": event.sampling,
    }
    return json.dumps({**facts, **entry}, allow_nan=False, ensure_ascii=False) + "\n"


def read_ledger(text: str) -> list[tuple[Event, Mapping[str, Any]]]:
    """Return the events of a ledger with their additional facts.

    An interrupted write may leave an incomplete last line. This line is ignored: callers complete a line before they
    release the result that it describes.

    Raises
    ------
    BudgetError
        If any other line is not an event. A budget cannot be computed from a damaged ledger.
    """
    events: list[tuple[Event, Mapping[str, Any]]] = []
    for number, line in enumerate(text.splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            entry = json.loads(line)
            event = Event(
                entry.pop("mode"),
                float(entry.pop("noise-multiplier")),
                int(entry.pop("count")),
                float(entry.pop("sampling")),
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BudgetError(f"line {number} of the ledger is not an event ({error!r})") from error
        events.append((event, entry))
    return events


def fits(past: Sequence[Event], planned: Sequence[Event], epsilon: float, delta: float, unit: Unit = "sample") -> bool:
    """Return whether a budget (ε, δ) covers a site's past events and the events of a planned run.

    Parameters
    ----------
    past : sequence of Event
        The events in the site's ledger.
    planned : sequence of Event
        The events of the planned run; see ``planned_events`` in :mod:`posy.strategies.privacy`.
    epsilon, delta : float
        The budget for all runs combined.
    unit : {"client", "sample"}
        How two neighbouring data sets differ.
    """
    return spent([*past, *planned], delta, unit) <= epsilon * (1 + TOLERANCE)
