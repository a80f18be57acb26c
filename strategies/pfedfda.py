"""pFedFDA (McLaughlin and Su, 2024): Gaussians of the classes' features make up the head, between global and local.

All classes share one covariance Σ, so that the Gaussians' classifier is a linear head. Clients train the body under the
global one's, and each predicts with its own, between its own estimates and the global ones. ``served`` is the served
body with the head that the client fits to it without training.
"""

from typing import Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.replies import BadReplyError


class PFedFDASettings(MethodSettings, noise=Refused("a covariance with noise is none"), sums=ALLOWED):
    """Settings of pFedFDA."""

    ridge: float = setting(
        1.0,
        "what is added to the diagonal of a client's covariance",
        minimum=1e-6,
        maximum=1e6,
        search=Search(0.01, 10.0, log=True),
    )
    folds: int = setting(2, "parts of the training data on which beta is cross-validated", minimum=2, maximum=100)

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the head."""
        return ("head",)

    def parts(self, network: Architecture, flat: Any) -> tuple[Any, Any, Any]:
        """Return what a message holds: the body, the means ``(C, D)`` and the covariance ``(D, D)``."""
        classes, size = network.task.num_classes, network.embedding_dim
        start = len(flat) - (classes + size) * size
        body, means, covariance = flat[:start], flat[start : start + classes * size], flat[start + classes * size :]
        return body, means.reshape(classes, size), covariance.reshape(size, size)


class PFedFDA(PersonalisedStrategy):
    """Average body, means and covariances, all with weights n_i (Algorithm 1)."""

    def initialise(self) -> None:
        """Start from means drawn from [0, 1) and the identity, as the authors' program does."""
        head = ("head.weight", "head.bias")
        self.architecture.require(head, "pfedfda writes the discriminant into the head")
        super().initialise()
        classes, size = self.architecture.task.num_classes, self.architecture.embedding_dim
        means = numpy_generator(self.settings.run.seed, "means").random(classes * size, np.float32)
        self.model = np.concatenate([self.model, means, np.eye(size, dtype=np.float32).ravel()])

    def check(self, arrays: NDArrays) -> None:
        """Refuse a covariance that is none."""
        _, _, covariance = self.method.parts(self.architecture, np.asarray(arrays[0], np.float64))
        size = np.abs(covariance).max()
        try:
            np.linalg.cholesky(covariance + 1e-6 * size * np.eye(len(covariance)))  # as fast as can be
            symmetric = np.allclose(covariance, covariance.T, atol=1e-4 * size)
        except np.linalg.LinAlgError:
            symmetric = False
        if not symmetric:
            raise BadReplyError("a covariance that is none")
