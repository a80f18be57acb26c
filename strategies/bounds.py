"""Bounds on each client's influence: on the norm of its update, and on its weight in a mean."""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]

NORM_RATIO = 3.0
"""Default maximum norm of an update in a run with sites, as a multiple of the round's median norm."""
LARGEST_SHARE, FAIR_SHARES = 0.5, 3.0
"""Default bounds on a site's weight in a mean: as a fraction of the total, and as a multiple of an equal share."""


def clipping_factors(norms: npt.ArrayLike, ratio: float) -> Float64:
    """Return min(1, ratio · median / norm) for each norm ``(M,)``, and 1 for a norm of 0.

    For an even number of norms, the median is the smaller of the two middle norms. A minority of clients therefore
    cannot raise the median above the largest norm of the majority.

    Parameters
    ----------
    norms : array_like, (M,)
        L2 norms of the updates of a round.
    ratio : float
        Maximum norm, as a multiple of the median.
    """
    lengths = np.asarray(norms, np.float64)
    bound = ratio * np.sort(lengths)[(len(lengths) - 1) // 2]
    return np.where(lengths > bound, bound / np.where(lengths > 0, lengths, 1.0), 1.0)


def share_factors(weights: npt.ArrayLike, largest: float) -> Float64:
    """Return factors ``(M,)`` that scale the weights so that no weight exceeds a given fraction of their sum.

    Only the weights that would exceed this fraction change, and each becomes exactly this fraction of the new sum. If
    no factors achieve this, all positive weights become equal.

    Parameters
    ----------
    weights : array_like, (M,)
        Non-negative weights.
    largest : float
        Maximum fraction of the sum, above 0.
    """
    w = np.asarray(weights, np.float64)
    falling = np.sort(w[w > 0])[::-1]
    if largest >= 1 or not len(falling):
        return np.ones(len(w))
    limit = falling[-1]
    if len(falling) * largest > 1:
        for above in range(len(falling)):  # the `above` largest weights are at the limit
            limit = largest * falling[above:].sum() / (1 - above * largest)
            if falling[above] <= limit:
                break
    return np.where(w > limit, limit / np.where(w > 0, w, 1.0), 1.0)


def site_share(clients: int) -> float:
    """Return a site's maximum weight, as a fraction of the total: three times an equal share, but at most one half."""
    return min(LARGEST_SHARE, FAIR_SHARES / clients)
