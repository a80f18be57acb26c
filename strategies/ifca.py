"""IFCA (Ghosh et al., 2020): K cluster models; each client trains the one that fits it best."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.settings import setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.replies import Arrays, BadReplyError, Update, num_examples, stacked, weighted_mean


@dataclass(frozen=True)
class IFCASettings:
    """Settings of IFCA."""

    clusters: int = setting(2, "number K of cluster models", minimum=1, maximum=1000)


class IFCA(PersonalisedStrategy):
    """Send K models; average each over the clients that chose it (Algorithm 1, model averaging)."""

    def initialise(self) -> None:
        """Start from K independent initialisations."""
        self.models: FloatArray = np.stack([self.initial(k) for k in range(self.method.clusters)])

    def serve(self, client: int) -> Arrays:
        """Send all K models ``(K, d)``."""
        return [self.models]

    def expected_shapes(self, client: int) -> list[tuple[int, ...]]:
        """Expect one model ``(d,)`` and the number of the cluster ``()``."""
        return [(self.size,), ()]

    def check(self, arrays: Arrays) -> None:
        """Refuse a cluster that does not exist."""
        if int(arrays[1]) not in range(len(self.models)):
            raise BadReplyError(f"cluster {arrays[1]} of {len(self.models)}")

    def update_of(self, client: int, arrays: Arrays) -> FloatArray:
        """Return what the client has changed of the model of its cluster."""
        return np.asarray(arrays[0], np.float32) - self.models[int(arrays[1])]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average every cluster's model over its clients."""
        clusters = np.array([int(update.arrays[1]) for update in updates])
        self.models = cluster_means(self.models, stacked(updates), num_examples(updates), clusters)
        return {"cluster_sizes": np.bincount(clusters, minlength=len(self.models)).tolist()}

    def server_state(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the K models."""
        return {"models": self.models}

    def load_server_state(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Take up K models."""
        self.models = np.asarray(arrays["models"], np.float32)


def cluster_means(
    models: FloatArray, rows: FloatArray, weights: npt.NDArray[np.float64], clusters: npt.NDArray[np.int64]
) -> FloatArray:
    """Return the models ``(K, d)`` averaged over their clients; a cluster that nobody chose stays.

    Parameters
    ----------
    models : numpy.ndarray, float32, (K, d)
        Cluster models before the round.
    rows : numpy.ndarray, float32, (M, d)
        Trained models.
    weights : numpy.ndarray, (M,)
        Numbers of training samples.
    clusters : numpy.ndarray of int, (M,)
        Chosen cluster of each client.

    Raises
    ------
    ValueError
        If a client names a cluster that does not exist.
    """
    if ((clusters < 0) | (clusters >= len(models))).any():
        raise ValueError(f"clusters must be 0..{len(models) - 1}, got {clusters.tolist()}")
    result = models.copy()
    for k in np.unique(clusters):
        chosen = clusters == k
        result[k] = weighted_mean(rows[chosen], weights[chosen])
    return result
