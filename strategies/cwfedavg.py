"""cwFedAvg: class-wise federated averaging with a weight distribution regulariser (WDR).

"Class-Wise Federated Averaging for Efficient Personalization": the server keeps a global model for each class. It
averages this model over the clients in proportion to their shares of the class. Each client receives a mix of the class
models, weighted by its own class distribution.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Part
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import BadReplyError, Update, num_examples, stacked, weighted_mean
from posy.strategies.settings import MethodSettings

A = TypeVar("A")  # a NumPy array or a tensor
Float64 = npt.NDArray[np.float64]
SINGLE_REPLIES = "it derives each client's class distribution from the client's output weights"
NOISY = "it derives class distributions from the norms of the output weights, and noise makes these norms similar"


class CwFedAvgSettings(
    MethodSettings,
    robust="its server averages class by class, with weights that it derives from the clients' models",
    point="served",
):
    """Settings of cwFedAvg."""

    needs_classes = "its server aggregates a model for each class, weighted by the clients' class distributions"

    sent = ("model", "classwise")
    returned = reply(
        model=model(shape=("parameters",), noise=NOISY, sums=SINGLE_REPLIES),
        distribution=numbers("classes", noise=NOISY, sums=SINGLE_REPLIES),
    )

    layers: str = setting(
        "output",
        "layers to average class-wise (Table 3); `conv2-fc-output`: all but the first",
        choices=("output", "fc-output", "conv2-fc-output", "all"),
        source="Table 3, where `output` is best",
    )
    distribution: str = setting(
        "approx",
        "class distributions: estimated from the output layer, or empirical distributions that the clients send",
        choices=("approx", "empirical"),
        source="Eq. 4 and Algorithm 1, line 8",
    )
    wdr: bool = setting(
        True, "regularise the clients' weight distribution (Eq. 8)", source="Algorithm 1 and Section 4.2"
    )
    wdr_lambda: float = setting(
        10.0,
        "lambda: weight of the regulariser; 10 for ten classes, 1000-2000 for 100-200 classes",
        minimum=0,
        search=Search(0.1, 100.0, log=True),
        source="Section 5.1: 10 for MNIST and CIFAR-10",
        needs="cwfedavg-wdr = true",
    )

    card = MethodCard(
        paper=Paper(
            "Lee and Choi",
            2025,
            "Class-Wise Federated Averaging for Efficient Personalization",
            "ICCV",
            "https://arxiv.org/abs/2406.07800",
        ),
        equations=(
            "p̃_ij = ‖w_ij‖₂ / Σ_k ‖w_ik‖₂, with w_ij row j of client i's output weights (Eq. 4)",
            "w_j^G = Σ_i q_ij w_i with q_ij = p_i p̃_ij / Σ_i p_i p̃_ij and p_i = n_i / N (Eqs. 5 and 6)",
            "w_i = Σ_j p̃_ij w_j^G, the class-wise layers sent to client i (Eq. 7)",
            "minimise cross-entropy + λ ‖p_i − p̃_i‖₂ on each mini-batch (Eq. 8)",
            "p̃_ij = 1 / C initially (Algorithm 1, line 2)",
        ),
        sent={
            "model (d_a,)": "layers averaged over all clients, the same for each client",
            "classwise (d_cw,)": "the client's mix of the class models (Eq. 7)",
        },
        returned={
            "model (d,)": "the trained model w_i",
            "distribution (C,)": "empirical class distribution p_i; only with `cwfedavg-distribution=empirical`",
        },
        reveals="the client's model, and its share of each class, which the server computes from the output weights; "
        "with `cwfedavg-distribution=empirical`, the client sends the shares",
        server_state={
            "model": "layers averaged over all clients (d_a,)",
            "class_models": "class models w_j^G of the class-wise layers (C, d_cw)",
            "distributions": "class distribution of each client, 1 / C until its first reply (M, C)",
            "local_norms": "norms of the rows of each client's latest output weights, for figures (M, C)",
        },
        client_state={},
        scored="The served model w_i of Eq. 7, because the authors' program evaluates after mixing the class models "
        "and before local training.",
        deviations=(
            "The authors' program multiplies the regulariser by λ / 2, whereas the paper uses λ. To reproduce "
            "the program's runs, set `cwfedavg-wdr-lambda` to half of the program's `-wd`.",
            "The means are taken over the clients of the round (Algorithm 1, line 4). The models of absent "
            "clients are mixed according to these clients' last p̃_i.",
            "A client that `holdout-clients` sets aside has no p̃_i and receives the uniform mean of the class models.",
            "BatchNorm's running statistics are averaged in the same way as their layer. The paper's networks are a "
            "CNN without BatchNorm and a ResNet-18.",
            "With `cwfedavg-distribution=empirical` a class without samples keeps its class model.",
        ),
        program=Program(
            "regulationLee/cwFedAvg",
            "59ed9c1a0e8809520011ec1e1797cd40b2b84e2e",
            "system/flcore/servers/serveravgCW.py, cwFedAvg.train",
            2e-7,
        ),
    )

    def parts(self, network: Architecture) -> tuple[Part, Part]:
        """Return the part of the flat vector that is averaged over all clients, and the class-wise part (Table 3)."""
        names = {
            "output": ("head",),
            "fc-output": network.fully_connected,
            "conv2-fc-output": network.layer_names[1:] or ("head",),
            "all": network.layer_names,
        }[self.layers]
        return network.layout.without(names), network.layout.part(names)

    def assembled(self, network: Architecture, sent: Mapping[str, Any], model: A) -> A:
        """Write the averaged and the class-wise layers into a model ``(d,)``, and return it."""
        for part, values in zip(self.parts(network), (sent["model"], sent["classwise"]), strict=True):
            part.put(model, values)
        return model

    def reference(self, network: Architecture, sent: Arrays, reply: Arrays) -> Arrays:
        """Return the starting values, with ``model`` reassembled from the two parts that the server sent."""
        model = self.assembled(network, sent, np.empty(network.layout.size, np.float32))
        return {**super().reference(network, sent, reply), "model": model}


class CwFedAvg(PersonalisedStrategy):
    """Average some layers class-wise and the remaining layers as in FedAvg (Eqs. 4–7).

    The state holds the averaged layers and the class models ``(C, d_cw)``. It also holds the clients' class
    distributions and the row norms of their output layers, both ``(M, C)``.
    """

    state = ("model", "class_models", "distributions", "local_norms")
    method: CwFedAvgSettings

    def initialise(self) -> None:
        """Start every class model from the common initialisation, with p̃_i = 1/C for every client."""
        self.architecture.require(
            ("head.weight",), "cwfedavg estimates the clients' class distributions from the trained head"
        )
        self.averaged, self.classwise = self.method.parts(self.architecture)
        self.output = self.architecture.weight("head")
        start = self.initial()
        self.num_classes = self.architecture.task.num_classes
        self.model: FloatArray = self.averaged.take(start).copy()
        self.class_models: FloatArray = np.tile(self.classwise.take(start), (self.num_classes, 1))
        self.distributions = np.full((self.num_clients, self.num_classes), 1 / self.num_classes)
        self.local_norms = np.full((self.num_clients, self.num_classes), np.nan)

    def serve(self, client: int) -> Arrays:
        """Return the averaged layers, and the client's class-wise layers w_i = Σ_j p̃_ij w_j^G (Eq. 7)."""
        return {"model": self.model, "classwise": self.distributions[client].astype(np.float32) @ self.class_models}

    def returns(self, server_round: int, client: int) -> tuple[str, ...]:
        """Return the names of the local model and, if the method uses it, of the empirical distribution."""
        return ("model", "distribution") if self.method.distribution == "empirical" else ("model",)

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject an empirical distribution with negative entries or a sum other than 1."""
        if "distribution" in arrays:
            distribution = np.asarray(arrays["distribution"], np.float64)
            if (distribution < 0).any() or abs(float(distribution.sum()) - 1) > 1e-3:
                raise BadReplyError(f"class distribution {distribution.tolist()}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average class-wise (Eqs. 5 and 6) and update the clients' class distributions (Eq. 4)."""
        models = stacked(updates)
        n = num_examples(updates)
        weights = self.output_weights(models)
        norms = np.linalg.norm(weights.astype(np.float64), axis=2)
        if self.method.distribution == "empirical":
            distributions = stacked(updates, "distribution").astype(np.float64)
        else:
            distributions = weight_distribution(weights)
        self.class_models = class_models(self.classwise.take(models), distributions, n, self.class_models)
        self.model = weighted_mean(self.averaged.take(models), n)
        clients = [update.client for update in updates]
        self.distributions[clients] = distributions
        self.local_norms[clients] = norms
        return {"largest_class_share": float(distributions.max(axis=1).mean()), **self._distance(clients)}

    def _distance(self, clients: list[int]) -> dict[str, float]:
        """Return the mean of ||p_i − p̃_i||₂ over the clients (Eq. 8), or nothing if the server does not know p."""
        if self.class_counts is None:
            return {}
        empirical = self.class_counts[clients] / self.class_counts[clients].sum(axis=1, keepdims=True)
        distances = np.linalg.norm(empirical - self.distributions[clients], axis=1)
        return {"distribution_distance": float(distances.mean())}

    def output_weights(self, models: FloatArray) -> FloatArray:
        """Return the output weights ``(M, C, E)`` of models ``(M, d)``."""
        return models[:, self.output.start : self.output.stop].reshape(len(models), *self.output.shape)


def weight_distribution(output_weights: FloatArray) -> Float64:
    """Return p̃_ij = ||w_ij||₂ / Σ_k ||w_ik||₂ (Eq. 4).

    Parameters
    ----------
    output_weights : numpy.ndarray, float32, (M, C, E)
        Weights of the last linear layer of M models; row j belongs to class j.

    Returns
    -------
    numpy.ndarray, float64, (M, C)
        Each row sums to 1; the entries for a layer of zeros are 1/C.
    """
    norms = np.linalg.norm(np.asarray(output_weights, np.float64), axis=2)
    total = norms.sum(axis=1, keepdims=True)
    return np.divide(norms, total, out=np.full_like(norms, 1 / norms.shape[1]), where=total > 0)


def class_weights(distributions: Float64, n: Float64) -> Float64:
    """Return q_ji = p_i p̃_ij / Σ_i p_i p̃_ij (Eqs. 5 and 6).

    Parameters
    ----------
    distributions : numpy.ndarray, (M, C)
        p̃.
    n : numpy.ndarray, (M,)
        Number of training samples of each client; p_i = n_i / N.

    Returns
    -------
    numpy.ndarray, (C, M)
        Each row sums to 1, or is zero if no client has the class.
    """
    joint = (n / n.sum())[:, None] * distributions
    total = joint.sum(axis=0)
    return np.divide(joint, total, out=np.zeros_like(joint), where=total > 0).T


def class_models(rows: FloatArray, distributions: Float64, n: Float64, before: FloatArray) -> FloatArray:
    """Return w_j^G = Σ_i q_ij w_i ``(C, d)`` as one matrix product; a class that no client has keeps its model.

    Parameters
    ----------
    rows : numpy.ndarray, float32, (M, d)
        Class-wise layers of the local models.
    distributions, n
        As for :func:`class_weights`.
    before : numpy.ndarray, float32, (C, d)
        Class models of the previous round.
    """
    weights = class_weights(distributions, n)
    models: FloatArray = weights.astype(np.float32) @ rows
    absent = ~weights.any(axis=1)
    models[absent] = before[absent]
    return models
