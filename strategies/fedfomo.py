"""FedFomo (Zhang et al., 2021): each client moves towards models that have a lower loss on its validation samples.

A client compares the candidates with the model that it had before its last local training. The first candidate is its
own trained model, and the others are models of other clients. Clients need validation samples: the run's validation
split (``validation-fraction``), or a part of their training samples that they set aside (``fedfomo-validation``).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.models.parameters import FloatArray
from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.latest import LatestModels
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings, training_clients

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings

NONE = -1
"""Marker for an unused entry in a row of client indices."""

SINGLE_REPLIES = "its clients receive each other's models"


class FedFomoSettings(MethodSettings, robust="its server passes individual models to other clients", point="served"):
    """Settings of FedFomo."""

    sent = ("models",)
    returned = reply(
        model=model(shape=("parameters",), noise=True, sums=SINGLE_REPLIES),
        weights=numbers(
            shape_from=lambda sent: (1 + len(sent["models"]),),
            noise="its clients send the weights of the other clients' models, and these weights do not tolerate noise",
            sums=SINGLE_REPLIES,
        ),
    )

    card = MethodCard(
        paper=Paper(
            "Zhang et al.",
            2021,
            "Personalized Federated Learning with First Order Model Optimization",
            "ICLR",
            "https://arxiv.org/abs/2012.08565",
        ),
        equations=(
            "w_n = (L_i(θ_i before training) − L_i(θ_n)) / ||θ_n − θ_i before training|| on validation samples (Eq. 3)",
            "w_n ← max(w_n, 0) / Σ_m max(w_m, 0) (Eq. 5)",
            "θ_i ← θ_i before training + Σ_n w_n (θ_n − θ_i before training) (Eq. 4)",
            "P_i ← P_i + w_i, with w_i before normalisation; P starts as the identity (Section 3.3)",
            "A client receives the models with the largest P_ij; "
            "each is replaced by a random model with probability ε (Section 3.3)",
        ),
        sent={"models (k, d)": "the latest models of other clients"},
        returned={
            "model (d,)": "the trained model",
            "weights (1 + k,)": "the weights w_n of Eq. 3: the client's own model first, then the models it received",
        },
        reveals="the client's model, which the server stores and sends to other clients, and weights of the other "
        "clients' models, which show which clients are similar",
        server_state={
            "seen": "the clients that have trained (m,)",
            "models": "their latest models (m, d)",
            "stateless": "1 for each client that has lost its state since its last update (M,)",
            "starts": "with `max-update-norm` or `max-norm-ratio`: the model that each client's last training started "
            "from (M, d)",
            "affinity": "the affinity matrix P (M, M)",
            "sent": "the clients whose models each client receives next (M, k), -1 in unused entries",
        },
        client_state={"model": "the trained model (d,)", "start": "the model before the last training (d,)"},
        scored="The served model, because the authors' program scores the model after the federated update, before "
        "training.",
        deviations=(
            "A client keeps its model from before training if no candidate is better, as in the authors' program.",
            "The authors' program divides the weights by |Σ_n w_n| before adding them to P, whereas Posy adds Eq. 3's "
            "weights.",
            "The distance is the L2 norm, whereas the authors' program uses the L1 norm by default "
            "(`fedfomo-distance=l1`).",
            "With `validation-fraction` the same samples determine both the models' weights and the best round.",
            "A client with one training sample and no validation samples compares models on that training sample.",
        ),
        program=Program(
            "NVlabs/FedFomo",
            "fe04f6641407bce4fc58ea3fbf8cb314f9af8629",
            "federation.py: Federation.compute_client_weights, Federation.federate",
            1e-6,
        ),
    )
    models: int = setting(
        4,
        "maximum number of other clients' models that a client receives",
        source="the authors' README, --num_update_clients 4: five models including the client's own",
        minimum=0,
        maximum=1000,
        limit="num-clients - 1",
        search=Search(1, 10),
    )
    epsilon: float = setting(
        0.3,
        "probability, before any decay, that a model is drawn at random instead of by affinity",
        source="the authors' README, --client_weight_epsilon 0.3",
        needs="fedfomo-models > 0",
        minimum=0,
        maximum=1,
    )
    epsilon_decay: float = setting(
        0.05,
        "amount by which epsilon decreases in each round, down to 0; the first models that clients receive, in round "
        "2, are drawn with fedfomo-epsilon - fedfomo-epsilon-decay",
        source="the authors' README, --client_weight_epsilon_decay 0.05; client.py: epsilon - epoch * epsilon_decay, "
        "with epochs from 0, in the first of which clients receive no models",
        needs="fedfomo-models > 0 and fedfomo-epsilon > 0",
        minimum=0,
        maximum=1,
    )
    validation: float = setting(
        0.2,
        "fraction of the training samples that each client sets aside for comparing models; 0: compare models on the "
        "training samples",
        source="the authors' README, --train_split 0.8",
        needs="validation-fraction = 0",
        minimum=0,
        maximum=0.9,
    )
    distance: str = setting(
        "l2",
        "norm that measures the distance between two models in Eq. 3",
        needs="fedfomo-models > 0",
        source="Eq. 3; the authors' program uses the L1 norm by default",
        choices=("l2", "l1"),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the validation losses determine the weights."""
        reason = "each client weights the other clients' models by their losses"
        return {"client-weights": reason, "max-client-weight": reason}

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Report the samples on which clients compare models, and warn if the run is close to local training."""
        notices = []
        num_others = training_clients(settings) - 1
        if self.models > num_others and self.models != FedFomoSettings.models:
            notices.append(
                f"fedfomo-models = {self.models}: {num_others} other clients train, so a client receives at most "
                f"{num_others} models; set fedfomo-models = {num_others}"
            )
        if not self.models:
            notices.append(
                "with fedfomo-models = 0, clients receive no models, so the run is equivalent to local training"
            )
        if settings.data.validation_fraction:
            return tuple(notices)
        if self.validation:
            notices.append(
                f"validation-fraction = 0: each client compares models on {100 * self.validation:g} % of its training "
                "samples (fedfomo-validation), and trains on the rest"
            )
        else:
            notices.append(
                "without validation samples clients compare models on their training samples, which favours their own "
                "models: the run is close to local training; set validation-fraction or fedfomo-validation to 0.2"
            )
        return tuple(notices)


class FedFomo(LatestModels):
    """Send client i the models of the clients j with the largest affinities P_ij (Section 3.3)."""

    state = (*LatestModels.state, "starts", "affinity", "sent")
    method: FedFomoSettings

    def initialise(self) -> None:
        """Start without client models, and with the identity matrix as P."""
        super().initialise()
        rows = self.num_clients if self.settings.run.max_update_norm or self.influence.norm_ratio else 0
        self.starts: FloatArray = np.tile(self.initial(), (rows, 1))
        self.affinity = np.eye(self.num_clients)
        width = min(self.method.models, self.num_clients - 1)
        self.sent: npt.NDArray[np.int64] = np.full((self.num_clients, width), NONE)

    def serve(self, client: int) -> Arrays:
        """Return other clients' models ``(k, d)``; k is 0 until another client has trained."""
        return {"models": self.latest(self._sent_to(client))}

    def reference(self, client: int, arrays: Arrays) -> Arrays:
        """Return the model that the client's training started from: the mix of its candidates (Eq. 4)."""
        start = self.starts[client] if len(self.starts) else self.initial()
        trained = self.client_model(client, self.initial())
        candidates = np.concatenate([trained[None], self.latest(self._sent_to(client))])
        return {"model": mixed(start, candidates, np.asarray(arrays["weights"], np.float32))}

    def lost(self, clients: list[int]) -> None:
        """Record that the clients start again from the initial model."""
        super().lost(clients)
        if len(self.starts):
            self.starts[clients] = self.initial()

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Store the models, update the affinities (P_ij ← P_ij + w_ij), and choose each client's next models."""
        if len(self.starts):
            start_models = [self.reference(update.client, update.arrays)["model"] for update in updates]
            self.starts[[update.client for update in updates]] = start_models
        self.affinity = self.affinity.copy()
        for update in updates:
            candidates = np.append(update.client, self._sent_to(update.client))
            self.affinity[update.client, candidates] += update.arrays["weights"]
        self.store(updates)
        self.sent = np.full_like(self.sent, NONE)
        epsilon = max(self.method.epsilon - server_round * self.method.epsilon_decay, 0.0)
        for client in range(self.num_clients):
            generator = numpy_generator(self.settings.run.seed, "fedfomo", server_round, client)
            senders = self.seen[self.seen != client]
            chosen_indices = chosen(self.affinity[client, senders], self.sent.shape[1], epsilon, generator)
            self.sent[client, : len(chosen_indices)] = senders[chosen_indices]
        other_weights = [update.arrays["weights"][1:] for update in updates]
        helpful_fractions = [float((weights > 0).mean()) for weights in other_weights if len(weights)]
        return {"helpful_models": float(np.mean(helpful_fractions))} if helpful_fractions else {}

    def _sent_to(self, client: int) -> npt.NDArray[np.int64]:
        """Return the clients ``(k,)`` whose models a client receives."""
        row = self.sent[client]
        return row[row != NONE]


def mixed(start: FloatArray, candidates: FloatArray, weights: FloatArray) -> FloatArray:
    """Return θ + Σ_n w_n (θ_n − θ), with the positive weights normalised; θ if no weight is positive (Eqs. 4 and 5).

    Parameters
    ----------
    start : numpy.ndarray, float32, (d,)
        θ, the client's model from before its last local training.
    candidates : numpy.ndarray, float32, (k, d)
        Models θ_n.
    weights : numpy.ndarray, float32, (k,)
        Weights of Eq. 3.
    """
    positive = np.maximum(weights, 0)
    total = positive.sum()
    return start + (positive / total) @ (candidates - start) if total > 0 else start


def chosen(affinity: npt.NDArray[np.float64], count: int, epsilon: float, generator: np.random.Generator) -> list[int]:
    """Return the indices of the largest affinities; each is replaced by a random index with probability ε.

    Ties are broken at random.

    Parameters
    ----------
    affinity : numpy.ndarray, (m,)
        A client's affinities for m other clients.
    count : int
        Maximum number of indices.
    epsilon : float
        ε.
    generator : numpy.random.Generator
        Source of randomness.

    Returns
    -------
    list of int
    """
    shuffled = generator.permutation(len(affinity))
    order = shuffled[np.argsort(-affinity[shuffled], kind="stable")].tolist()
    indices: list[int] = []
    while order and len(indices) < count:
        is_random = generator.random() < epsilon
        indices.append(order.pop(int(generator.integers(len(order))) if is_random else 0))
    return indices
