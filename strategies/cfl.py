"""CFL (Sattler et al., 2020): clusters of clients, split in two where their updates point apart.

As in the paper's experiments a cluster may split in any round; only one of which all clients have replied does.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.common.typing import NDArrays

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.fedacs import cosine_similarity
from posy.strategies.method_settings import MethodSettings, Refused
from posy.strategies.replies import Update, mean_of, num_examples, stacked, weighted_mean


class CFLSettings(
    MethodSettings,
    noise=Refused("it splits clusters by the cosine similarity of single updates, which noise brings to zero"),
    sums=Refused("it splits clusters by the cosine similarity of single updates"),
    point="served",
):
    """Settings of CFL."""

    eps1: float = setting(
        0.4,
        "a cluster may split when the norm of its mean update is smaller",
        minimum=0,
        search=Search(0.05, 2.0, log=True),
    )
    eps2: float = setting(
        0.9, "and the largest norm of an update is larger", minimum=0, search=Search(0.1, 5.0, log=True)
    )


class CFL(PersonalisedStrategy):
    """Average every cluster by itself, and split those that have come to rest while their clients have not.

    The state holds the first cluster's model ``(d,)``, those of the clusters that were split off ``(k, d)``, and the
    cluster of every client ``(M,)``.
    """

    state = ("model", "split_off", "cluster")

    def initialise(self) -> None:
        """Start with one cluster."""
        super().initialise()
        self.split_off: FloatArray = np.empty((0, self.size), np.float32)
        self.cluster: npt.NDArray[np.int64] = np.zeros(self.num_clients, np.int64)

    def serve(self, client: int) -> NDArrays:
        """Send the model of the client's cluster."""
        return [self._models()[self.cluster[client]]]

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Split the clusters that are to be split, then average each."""
        models, cluster = self._models(), self.cluster.copy()
        for number in range(len(models)):
            own = [update for update in updates if self.cluster[update.client] == number]
            if len(own) == int((self.cluster == number).sum()):
                moved = stacked(own) - models[number]
                apart = split(self.architecture.layout.trainable.take(moved), num_examples(own), *self._limits)
                cluster[[update.client for update, other in zip(own, apart, strict=True) if other]] = len(models)
                if apart.any():
                    models.append(models[number])
        for number in range(len(models)):
            if own := [update for update in updates if cluster[update.client] == number]:
                models[number] = mean_of(own)
        self.model, self.cluster = models[0], cluster
        self.split_off = np.array(models[1:], np.float32).reshape(-1, self.size)
        return {"cluster_sizes": np.bincount(cluster, minlength=len(models)).tolist()}

    @property
    def _limits(self) -> tuple[float, float]:
        return self.method.eps1, self.method.eps2

    def _models(self) -> list[FloatArray]:
        return [self.model, *self.split_off]


def split(moved: FloatArray, n: npt.NDArray[np.float64], eps1: float, eps2: float) -> npt.NDArray[np.bool_]:
    """Return which clients of a cluster leave it: none, unless ||Σ (n_i / n) Δ_i|| < ε1 and max ||Δ_i|| > ε2.

    Parameters
    ----------
    moved : numpy.ndarray, float32, (m, d)
        Updates Δ_i of all its clients.
    n : numpy.ndarray, (m,)
        Numbers of training samples.
    """
    at_rest = np.linalg.norm(weighted_mean(moved, n).astype(np.float64)) < eps1
    if len(moved) < 2 or not at_rest or not np.linalg.norm(moved.astype(np.float64), axis=1).max() > eps2:
        return np.zeros(len(moved), np.bool_)
    return bipartition(cosine_similarity(moved))


def bipartition(similarity: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return the second of the two parts ``(m,)`` between which the largest similarity ``(m, m)`` is smallest.

    The most similar pairs are joined until two parts are left; the first client is in the first part.
    """
    rows, columns = np.triu_indices(len(similarity), 1)
    part, left = np.arange(len(similarity)), len(similarity)
    for pair in np.argsort(-similarity[rows, columns], kind="stable"):
        if left == 2:
            break
        one, other = part[rows[pair]], part[columns[pair]]
        if one != other:
            part[part == other] = one
            left -= 1
    return part != part[0]
