"""Class prototypes on the server: means of the clients' class means, weighted by number of samples."""

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.strategies.replies import BadReplyError, Update, stacked


def mean_prototypes(prototypes: FloatArray, counts: npt.ArrayLike, before: FloatArray) -> FloatArray:
    """Return Σ_i n_ij c_ij / Σ_i n_ij for each class j; a class without samples keeps its prototype.

    Parameters
    ----------
    prototypes : numpy.ndarray, float32, (M, C, D)
        c_ij; rows of classes that a client lacks are ignored.
    counts : array_like, (M, C)
        n_ij, each client's number of samples per class.
    before : numpy.ndarray, float32, (C, D)
        The prototypes of the previous round.
    """
    n = np.asarray(counts, np.float64)
    total = n.sum(axis=0)[:, None]
    sums = np.einsum("mc,mcd->cd", n, prototypes.astype(np.float64))
    return np.where(total > 0, sums / np.maximum(total, 1), before).astype(np.float32)


def class_counts(updates: list[Update]) -> npt.NDArray[np.float64]:
    """Return each client's number of samples per class ``(M, C)``, limited by ``max-client-weight``."""
    return stacked(updates, "counts") * np.array([[update.samples_factor] for update in updates])


def check_class_counts(counts: npt.ArrayLike, enrolled: int) -> None:
    """Raise :class:`BadReplyError` for impossible sample counts per class ``(C,)``.

    Their sum must equal the client's enrolled number of samples, up to rounding: float32 counts are inexact above 2^24.
    """
    n = np.asarray(counts, np.float64)
    if (n < 0).any() or (n != np.round(n)).any() or not n.any():
        raise BadReplyError(f"samples by class: {n.tolist()}")
    total = float(n.sum())
    if abs(total - enrolled) > 1e-6 * enrolled:
        raise BadReplyError(f"{total:.0f} samples by class, but the client joined with {enrolled}")
