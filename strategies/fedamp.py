"""FedAMP (Huang et al., 2021): attentive message passing between similar clients."""

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.attention import AttentionStrategy
from posy.strategies.method_settings import MethodSettings, Refused

SMALLEST = 1e-30
"""The smallest sigma: below it only equal models attend to each other, as at 0, and a quotient might overflow."""


class FedAMPSettings(
    MethodSettings,
    noise=Refused("it decides who collaborates by the distance of single models, which noise makes all alike"),
    sums=Refused("it decides who collaborates by the distance of single models"),
):
    """Settings of FedAMP."""

    alpha: float = setting(1000.0, "step size alpha of the server's gradient step", above=0)
    strength: float = setting(
        1.0, "lambda of the clients' proximal term", minimum=0, search=Search(0.01, 100.0, log=True)
    )
    distance: str = setting(
        "squared",
        "distance in the proximal term: squared as in Eq. 4, or the plain norm as in PFLlib",
        choices=("squared", "norm"),
    )
    sigma: float = setting(
        0.1,
        "sigma of the attention-inducing function 1 - exp(-x / sigma)",
        above=0,
        search=Search(0.01, 100.0, log=True),
    )


class FedAMP(AttentionStrategy):
    """Send client i u_i = Σ_j ξ_ij w_j (Eq. 6); clients pull their models towards it (Eq. 4)."""

    def attention(self, models: FloatArray) -> npt.NDArray[np.float64]:
        """Return ξ ``(M, M)``."""
        return message_weights(models, self.method.alpha, self.method.sigma)


def message_weights(models: FloatArray, alpha: float, sigma: float) -> npt.NDArray[np.float64]:
    """Return ξ_ij = α A'(||w_i − w_j||²) for j ≠ i and ξ_ii = 1 − Σ_j ξ_ij, with A(x) = 1 − exp(−x/σ).

    The paper takes α small enough for ξ_ii ≥ 0; where a row's others exceed 1 they are scaled to 1, so
    that u_i stays a convex combination.

    Parameters
    ----------
    models : numpy.ndarray, float32, (M, d)
        The clients' models.
    """
    squared, sigma = squared_distances(models), max(sigma, SMALLEST)
    weights = alpha * np.exp(-squared / sigma) / sigma
    np.fill_diagonal(weights, 0.0)
    others = weights.sum(axis=1, keepdims=True)
    weights /= np.maximum(others, 1.0)
    np.fill_diagonal(weights, 1.0 - weights.sum(axis=1))
    return weights


def squared_distances(models: FloatArray) -> npt.NDArray[np.float64]:
    """Return ||w_i − w_j||² ``(M, M)``, never negative.

    The mean is subtracted before the inner products: models that have hardly parted
    would lose all digits of their distance in ||w_i||² + ||w_j||² − 2 <w_i, w_j>.
    """
    centred = models - models.mean(axis=0)
    gram = (centred @ centred.T).astype(np.float64)
    norms = np.diag(gram)
    return np.maximum(norms[:, None] + norms[None, :] - 2 * gram, 0.0)
