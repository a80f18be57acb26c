"""Minimisation of a convex quadratic over the simplex, for example to find the shortest mixture of gradients."""

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Box = tuple[Float64, Float64, Float64]
"""w, and the lower and upper bounds on points x with Σ w_j x_j = 1."""

STEPS, ROUNDS = 20, 200
"""Number of accelerated steps in a round, before the move to the minimum of a face; maximum number of rounds."""
TOLERANCE, ROUNDING = 1e-12, 1e-15
"""Stopping tolerances: remaining descent relative to αᵀ A α, and a round's descent relative to ||x||²."""
FLATTEST = 1e-12
"""Lower bound on the diagonal entries that scale the coordinates, relative to the largest entry."""


def minimise_on_simplex(
    matrix: npt.ArrayLike, centre: npt.ArrayLike | None = None, radius: float | None = None
) -> Float64:
    """Return the α that minimises αᵀ A α over α ≥ 0, Σ α_j = 1 and, if a radius is given, |α_j − centre_j| ≤ radius.

    The method is accelerated projected gradient descent (Beck and Teboulle, 2009), which restarts when its momentum
    points uphill (O'Donoghue and Candès, 2015). The coordinates are scaled so that A has ones on its diagonal. After
    up to :data:`STEPS` steps, the method moves to the minimum of the current face, or to the first bound on the way. It
    stops when the linearised problem has no descent left, or when the descent is below rounding errors.

    Parameters
    ----------
    matrix : array_like, (M, M)
        A, positive semidefinite. Only its symmetric part is used.
    centre : array_like, (M,), optional
        Centre of the box, by default 1/M.
    radius : float, optional
        Half the width of the box.

    Returns
    -------
    numpy.ndarray, float64, (M,)

    Raises
    ------
    ValueError
        If the box contains no weights that sum to 1.
    """
    a = np.asarray(matrix, np.float64)
    a = (a + a.T) / 2
    count = len(a)
    middle = np.full(count, 1 / count) if centre is None else np.asarray(centre, np.float64)
    lower, upper = np.zeros(count), np.ones(count)
    if radius is not None:
        lower, upper = np.maximum(middle - radius, 0.0), np.minimum(middle + radius, 1.0)
    if not lower.sum() <= 1 + 1e-9 or not upper.sum() >= 1 - 1e-9 or (lower > upper).any():
        raise ValueError(f"no weights between {lower.tolist()} and {upper.tolist()} sum to 1")
    best = projected(middle, np.ones(count), lower, upper)
    if (largest := float(np.diag(a).max())) <= 0:
        return best
    diagonal = np.diag(a) / largest
    # As a function of x = α / w, with Σ w_j x_j = 1, the quadratic's matrix has ones on its diagonal.
    w = 1 / np.sqrt(np.maximum(diagonal, FLATTEST))
    scaled = a / largest * np.outer(w, w)
    length = 1 / float(np.linalg.eigvalsh(scaled)[-1])
    box = (w, lower / w, upper / w)
    point, before = projected(best / w, *box), np.inf
    for _ in range(ROUNDS):
        point = _accelerated(scaled, length, point, box)
        point = _to_the_minimum_of_the_face(scaled, point, box)
        reached, terms = float(point @ scaled @ point), float(point @ point)
        if _gap(scaled, point, box) <= TOLERANCE * reached or before - reached <= ROUNDING * terms:
            break
        before = reached
    return point * w


def projected(vector: Float64, w: Float64, lower: Float64, upper: Float64) -> Float64:
    """Return the point x nearest to a vector such that lower ≤ x ≤ upper and Σ w_j x_j = 1, for positive w.

    Such a point must exist. It is the vector minus τ w, clipped to the bounds. The sum decreases with τ, and is linear
    between the values of τ at which a coordinate meets a bound. Bisection finds the adjacent values that bracket the
    solution, and linear interpolation gives τ.
    """
    knots = np.sort(np.concatenate([(vector - upper) / w, (vector - lower) / w]))
    first, last = 0, len(knots) - 1
    while last - first > 1:
        middle = (first + last) // 2
        if w @ _within(vector - knots[middle] * w, lower, upper) >= 1:
            first = middle
        else:
            last = middle
    high, low = (float(w @ _within(vector - knots[end] * w, lower, upper)) for end in (first, last))
    share = min(max((high - 1) / (high - low), 0.0), 1.0) if high > low else 0.0
    return _within(vector - (knots[first] + share * (knots[last] - knots[first])) * w, lower, upper)


def _within(vector: Float64, lower: Float64, upper: Float64) -> Float64:
    return np.minimum(np.maximum(vector, lower), upper)  # takes less than half the time of np.clip


def _accelerated(a: Float64, length: float, point: Float64, box: Box) -> Float64:
    """Return the point after at most :data:`STEPS` accelerated steps; A x is half the gradient."""
    target, momentum = point, 1.0
    for _ in range(STEPS):
        next_point = projected(target - length * (a @ target), *box)
        if (target - next_point) @ (next_point - point) > 0:
            if momentum == 1.0:
                break
            target, momentum = point, 1.0
            continue
        next_momentum = (1 + np.sqrt(1 + 4 * momentum**2)) / 2
        target = next_point + (momentum - 1) / next_momentum * (next_point - point)
        point, momentum = next_point, next_momentum
    return point


def _to_the_minimum_of_the_face(a: Float64, point: Float64, box: Box) -> Float64:
    """Return the minimum over the free coordinates; a coordinate that meets a bound on the way stays there."""
    w, lower, upper = box
    while True:
        free = np.flatnonzero((point > lower) & (point < upper))
        if len(free) < 2:
            return point
        system = np.zeros((len(free) + 1, len(free) + 1))
        system[:-1, :-1] = a[np.ix_(free, free)]
        system[:-1, -1] = system[-1, :-1] = w[free] / w[free].max()
        # If there are several minima, the nearest one keeps the weights of identical clients equal.
        direction = np.linalg.lstsq(system, np.append(-(a @ point)[free], 0.0), rcond=None)[0][:-1]
        direction -= w[free] * (w[free] @ direction) / (w[free] @ w[free])
        bound = np.where(direction > 0, upper[free], lower[free])
        lengths = np.divide(bound - point[free], direction, out=np.full(len(free), np.inf), where=direction != 0)
        nearest = int(lengths.argmin())
        reached = point.copy()
        reached[free] += min(1.0, lengths[nearest]) * direction
        reached = _within(reached, lower, upper)
        if lengths[nearest] < 1:
            reached[free[nearest]] = bound[nearest]
        if reached @ a @ reached > point @ a @ point:
            return point
        point = reached
        if lengths[nearest] >= 1:
            return point


def _gap(a: Float64, point: Float64, box: Box) -> float:
    """Return half the largest decrease of the linearised objective, which bounds the excess over the minimum."""
    w, lower, upper = box
    gradient = (a @ point) / w
    order = np.argsort(gradient)
    capacities = (w * (upper - lower))[order]
    amounts = np.clip(
        1 - w @ lower - (np.cumsum(capacities) - capacities), 0.0, capacities
    )  # fill coordinates in ascending order of their gradient
    return float(gradient @ (w * (point - lower)) - gradient[order] @ amounts)
