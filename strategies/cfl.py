"""CFL (Sattler et al., 2020): clients form clusters, and a cluster splits in two when its clients' updates diverge.

A cluster splits only in a round in which all its members reply, because the criterion compares updates of the same
model. If some members do not reply and the remaining members meet the criterion, Posy logs a warning.

The splits form a binary tree. If the run has hold-out clients, the server stores, for each split, the model
before the split and the updates on both sides. After the last round, each hold-out client (newcomer) descends the tree
from the root. At each split, the newcomer trains the stored model, and follows the side with the update most similar to
its own. At the end of the descent, the server sends the newcomer the model of the cluster that the newcomer has
reached.
"""

import math
from logging import WARNING
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, MessageType
from flwr.common.logger import log
from flwr.serverapp import Grid

from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.fedacs import cosine_similarity
from posy.strategies.newcomers import NewcomerPhase
from posy.strategies.replies import Update, mean_of, num_examples, stacked, weighted_mean
from posy.strategies.settings import MethodSettings, cohort_size, training_clients

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class CFLSettings(
    MethodSettings,
    robust="it splits clusters by the mean of the updates and the angles between them, which an attacker can steer",
    point="served",
):
    """Settings of CFL."""

    returned = reply(
        model=model(
            noise="it splits clusters by the cosine similarity of individual updates, which noise drives to zero",
            sums="it splits clusters by the cosine similarity of individual updates",
        )
    )

    card = MethodCard(
        paper=Paper(
            "Sattler et al.",
            2020,
            "Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization Under Privacy Constraints",
            "IEEE Transactions on Neural Networks and Learning Systems",
            "https://doi.org/10.1109/TNNLS.2020.3015958",
        ),
        equations=(
            "θ_c ← θ_c + mean of Δθ_i over the clients i of cluster c (clustered aggregation)",
            "α_ij = <Δθ_i, Δθ_j> / (||Δθ_i|| ||Δθ_j||) (cosine similarity of updates)",
            "c splits only if ||mean of Δθ_i|| < ε1 and max_i ||Δθ_i|| > ε2 (stopping and splitting criterion)",
            "c1, c2 = the bipartition of c with the smallest max α_ij over i in c1, j in c2",
            "c splits only if γ_max < sqrt((1 − max α_ij) / 2) over i in c1, j in c2",
            "At each split, a newcomer follows the side with the stored update most similar to its own (largest α)",
        ),
        sent={"model (d,)": "the model θ_c of the client's cluster"},
        returned={"model (d,)": "the trained model θ_c + Δθ_i"},
        reveals="the client's model, and thus which clients are similar",
        server_state={
            "model": "the model of cluster 0 (d,)",
            "split_off": "the models of the other clusters (k, d), in the order of the splits that created them",
            "cluster": "the cluster of each client (M,)",
            "parents": "the cluster that each split divided (k,); split s created cluster s + 1",
            "split_models": "with hold-out clients: the divided cluster's model before each split (k, d)",
            "split_updates": "with hold-out clients: the updates before each split (r, p), without running statistics",
            "split_sides": "for each of these updates: the split, and 1 if the client left the old cluster (r, 2)",
        },
        client_state={},
        scored="The served model, because the authors' notebook scores the model of each client's cluster after "
        "aggregation.",
        deviations=(
            "Clients are weighted by number of samples, whereas the authors' program weights them equally "
            "(`client-weights=uniform`).",
            "The bipartition minimises the largest similarity between its parts, as in the paper. The notebook uses "
            "complete linkage, which need not find this bipartition.",
            "A cluster may split in any round and at any size, whereas the notebook waits 20 rounds and does not split "
            "clusters of two clients.",
            "`cfl-gamma-max` is 0 by default, because the notebook does not apply this criterion.",
            "A cluster with an absent member does not split. The paper assumes that all members reply.",
            "The norms and similarities exclude BatchNorm's running statistics, which are averaged as in FedAvg.",
        ),
        program=Program(
            "felisat/clustered-federated-learning",
            "23a1c3887ed151a9c6340370337804766d11c69c",
            "fl_devices.py: Client.compute_weight_update, Server.cluster_clients, Server.aggregate_clusterwise",
            1e-6,
        ),
    )
    eps1: float = setting(
        0.4,
        "a cluster splits only if the norm of its mean update is below this bound",
        source="the authors' notebook, EPS_1",
        minimum=0,
        search=Search(0.05, 2.0, log=True),
    )
    eps2: float = setting(
        0.9,
        "a cluster splits only if the norm of its largest update exceeds this bound",
        source="cwFedAvg's Table 5; the authors' notebook uses 1.6 (EPS_2)",
        needs="cfl-eps1 > 0 and cfl-gamma-max < 1",
        minimum=0,
        search=Search(0.1, 5.0, log=True),
    )
    gamma_max: float = setting(
        0.0,
        "bound on the clients' relative deviation: a cluster splits only if this bound is below sqrt((1 - a) / 2), "
        "where a is the largest similarity across the two parts; 0 allows any split into parts that differ",
        source="choice: the authors' notebook does not apply this criterion",
        needs="cfl-eps1 > 0",
        minimum=0,
        maximum=1,
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if no cluster can split, because of the bounds or because each round samples only some clients."""
        if not self.eps1 or self.gamma_max == 1:
            bound = "cfl-eps1 = 0" if not self.eps1 else "cfl-eps1 has no effect with cfl-gamma-max = 1"
            return (f"{bound}: no cluster can split, so the run is equivalent to FedAvg",)
        run, members = settings.run, training_clients(settings)
        if cohort_size(settings, last_round=True) == members:
            return ()
        return (
            "a cluster splits only when all its clients reply in one round, and fraction-train = "
            f"{run.fraction_train:g} excludes some clients: the run is equivalent to FedAvg; set fraction-train = 1",
        )


class Descent(NewcomerPhase):
    """The newcomers' descent through the tree of splits, before they are evaluated.

    At each split of its cluster, a newcomer trains the model from before the split. It then joins the side that has the
    update most similar to its own.
    """

    strategy: "CFL"

    def run(
        self, server_round: int, train_config: ConfigRecord, evaluate_config: ConfigRecord, grid: Grid, timeout: float
    ) -> None:
        """Choose a cluster for each newcomer, then evaluate the newcomers."""
        strategy, exchange, last = self.strategy, self.exchange, self.strategy.record
        exchange.begin_round(server_round)
        exchange.saving = False
        reached = {client: 0 for client in strategy.newcomers if client in strategy.clients}
        while descending := self._next_splits(reached):
            strategy.descending = descending
            messages = exchange.messages(MessageType.TRAIN, server_round, train_config, {c: {} for c in descending})
            replies = grid.send_and_receive(messages, timeout=timeout)
            exchange.collect(replies, self.rounds.decoder, self._choose_side, stateful=False)
            reached = {client: index + 1 for client, index in descending.items()}
        strategy.descending, strategy.record = {}, last
        super().run(server_round, train_config, evaluate_config, grid, timeout)

    def _next_splits(self, reached: dict[int, int]) -> dict[int, int]:
        """Return the next split, if any, for each newcomer; ``reached`` holds the first split to consider."""
        following = {}
        for client, start in reached.items():
            splits = np.flatnonzero(self.strategy.parents[start:] == self.strategy.cluster[client])
            if len(splits):
                following[client] = start + int(splits[0])
        return following

    def _choose_side(self, client: int, update: Update) -> None:
        """Move a newcomer to the new cluster if that side has the update most similar to the newcomer's."""
        cfl = self.strategy
        index = cfl.descending[client]
        change = cfl.parameters.take(update.arrays["model"] - cfl.split_models[index])
        rows = cfl.split_sides[:, 0] == index
        if nearest_side(change, cfl.split_updates[rows], cfl.split_sides[rows, 1]):
            cfl.cluster[client] = index + 1


class CFL(PersonalisedStrategy):
    """Average each cluster separately, and split the clusters that meet the criterion."""

    state = ("model", "split_off", "cluster", "parents", "split_models", "split_updates", "split_sides")
    newcomer_phase: ClassVar[type[NewcomerPhase]] = Descent
    method: CFLSettings

    def initialise(self) -> None:
        """Start with one cluster."""
        super().initialise()
        self.parameters = self.architecture.layout.trainable
        self.split_off: FloatArray = np.empty((0, self.size), np.float32)
        self.cluster: npt.NDArray[np.int64] = np.zeros(self.num_clients, np.int64)
        self.parents: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self.split_models: FloatArray = np.empty((0, self.size), np.float32)
        self.split_updates: FloatArray = np.empty((0, self.parameters.size), np.float32)
        self.split_sides: npt.NDArray[np.int64] = np.empty((0, 2), np.int64)
        self.descending: dict[int, int] = {}
        """Index of the split at which each newcomer trains during its descent, keyed by client."""

    def serve(self, client: int) -> Arrays:
        """Return the model of the client's cluster or, during a newcomer's descent, the model from before the split."""
        if client in self.descending:
            return {"model": self.split_models[self.descending[client]]}
        return {"model": self._models()[self.cluster[client]]}

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Split the clusters that meet the criterion, then average each cluster."""
        models, cluster = self._models(), self.cluster.copy()
        for number in range(len(models)):
            replies = [update for update in updates if self.cluster[update.client] == number]
            absent = {c for c in self.members if self.cluster[c] == number} - {update.client for update in replies}
            if not replies or not absent <= set(self.rounds.cohort(server_round)):
                continue
            changes = self.parameters.take(stacked(replies) - models[number])
            leaving = split(changes, num_examples(replies), *self._limits)
            if not leaving.any():
                continue
            if absent:
                text = "round %s: cluster %s meets the criterion but does not split: clients %s did not reply"
                log(WARNING, text, server_round, number, sorted(absent))
                continue
            cluster[[update.client for update, leaves in zip(replies, leaving, strict=True) if leaves]] = len(models)
            self._store_split(number, models[number], changes, leaving)
            models.append(models[number])
        for number in range(len(models)):
            if replies := [update for update in updates if cluster[update.client] == number]:
                models[number] = mean_of(replies)
        self.model, self.cluster = models[0], cluster
        self.split_off = np.array(models[1:], np.float32).reshape(-1, self.size)
        return {"cluster_sizes": np.bincount(cluster[self.members], minlength=len(models)).tolist()}

    def _store_split(self, number: int, model: FloatArray, changes: FloatArray, leaving: npt.NDArray[np.bool_]) -> None:
        """Add a split of cluster ``number`` to the tree."""
        index = len(self.parents)
        self.parents = np.append(self.parents, number)
        if self.newcomers:
            sides = np.column_stack([np.full(len(leaving), index), leaving]).astype(np.int64)
            self.split_models = np.concatenate([self.split_models, model[None]])
            self.split_updates = np.concatenate([self.split_updates, changes])
            self.split_sides = np.concatenate([self.split_sides, sides])

    # -- helpers ---------------------------------------------------------------------------------------

    @property
    def _limits(self) -> tuple[float, float, float]:
        return self.method.eps1, self.method.eps2, self.method.gamma_max

    def _models(self) -> list[FloatArray]:
        return [self.model, *self.split_off]


def split(
    changes: FloatArray, n: npt.NDArray[np.float64], eps1: float, eps2: float, gamma_max: float = 0.0
) -> npt.NDArray[np.bool_]:
    """Return a mask of the clients that leave a cluster: none, unless ||Σ (n_i / n) Δ_i|| < ε1 and max ||Δ_i|| > ε2.

    Parameters
    ----------
    changes : numpy.ndarray, float32, (m, p)
        Updates Δ_i of the clients.
    n : numpy.ndarray, (m,)
        The clients' weights in the mean.
    eps1, eps2 : float
        Bounds ε1 and ε2.
    gamma_max : float
        Bound γ_max: clients leave only if γ_max < sqrt((1 − a) / 2), where a is the largest similarity across parts.

    Returns
    -------
    numpy.ndarray, bool, (m,)
    """
    stationary = np.linalg.norm(weighted_mean(changes, n).astype(np.float64)) < eps1
    if len(changes) < 2 or not stationary or not np.linalg.norm(changes.astype(np.float64), axis=1).max() > eps2:
        return np.zeros(len(changes), np.bool_)
    similarity = cosine_similarity(changes)
    leaving = bipartition(similarity)
    cross_similarity = float(similarity[np.ix_(leaving, ~leaving)].max())
    return leaving if gamma_max < math.sqrt((1 - cross_similarity) / 2) else np.zeros(len(changes), np.bool_)


def bipartition(similarity: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Return the mask ``(m,)`` of the second part of the bipartition with the smallest maximum similarity across parts.

    The function considers the pairs of clients in order of decreasing similarity. For each pair, it merges the two
    clients' parts, until only two parts remain. The first client is in the first part.

    Parameters
    ----------
    similarity : numpy.ndarray, (m, m)
        Symmetric similarities of the clients.

    Returns
    -------
    numpy.ndarray, bool, (m,)
    """
    rows, columns = np.triu_indices(len(similarity), 1)
    part, parts = np.arange(len(similarity)), len(similarity)
    for pair in np.argsort(-similarity[rows, columns], kind="stable"):
        if parts == 2:
            break
        first, second = part[rows[pair]], part[columns[pair]]
        if first != second:
            part[part == second] = first
            parts -= 1
    return part != part[0]


def nearest_side(change: FloatArray, updates: FloatArray, sides: npt.NDArray[np.int64]) -> bool:
    """Return whether the update most similar to a newcomer's update is on side 1; ties go to side 0.

    Parameters
    ----------
    change : numpy.ndarray, float32, (p,)
        The newcomer's update.
    updates : numpy.ndarray, float32, (m, p)
        Updates of the cluster's clients before the split.
    sides : numpy.ndarray, (m,)
        0 or 1: the side of each update.
    """
    similarity = cosine_similarity(np.concatenate([change[None], updates]))[0, 1:]
    return bool(similarity[sides == 1].max() > similarity[sides == 0].max())
