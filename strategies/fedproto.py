"""FedProto (Tan et al., 2022): clients share class prototypes instead of a model.

A prototype is the mean of a class's features, which are the inputs of the head (Eq. 3). The server averages the
clients' prototypes for each class. A client pulls its features towards these averages (Eq. 7), and predicts the class
of the nearest average (Eq. 4).

``served`` scores a client's network with the prototypes just received. ``local`` scores the network with the prototypes
received before its last training. For a class without a received prototype, ``local`` uses the
client's own prototype.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.prototypes import check_class_counts, class_counts, mean_prototypes
from posy.strategies.replies import Update, stacked
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.strategies.settings import Settings

SINGLE_REPLIES = "it weights each client's prototypes by the client's number of samples in the class"


class FedProtoSettings(
    MethodSettings, robust="its server averages class prototypes and does not receive a model", point="served"
):
    """Settings of FedProto."""

    needs_classes = "its clients send prototypes, the mean features of each class"

    sent = ("prototypes", "known")
    returned = reply(
        prototypes=numbers(change_of="prototypes", limited=True, noise=True, sums=SINGLE_REPLIES),
        counts=numbers(
            "classes",
            noise="its clients send their sample counts per class without noise",
            sums=SINGLE_REPLIES,
        ),
    )

    strength: float = setting(
        1.0,
        "lambda: weight of the distance to the prototypes",
        source="README of the authors' program: --ld 1 for MNIST and FEMNIST (0.1 for CIFAR-10)",
        minimum=0,
        search=Search(0.1, 10.0, log=True),
    )

    class_statistics = True
    card = MethodCard(
        paper=Paper(
            "Tan et al.",
            2022,
            "FedProto: Federated Prototype Learning across Heterogeneous Clients",
            "AAAI",
            "https://arxiv.org/abs/2105.00243",
        ),
        equations=(
            "c_ij = mean of f_i(x) over the samples of class j (Eq. 3)",
            "ŷ = argmin_j ‖f_i(x) − c_j‖ (Eq. 4)",
            "c_j = Σ_i n_ij c_ij / Σ_i n_ij over the clients that have class j (Eq. 6 without its factor 1 / |N_j|)",
            "ℓ + λ · mean square of f_i(x) − c_y over samples and features (Eq. 7)",
        ),
        sent={
            "prototypes (C, D)": "the global prototypes c",
            "known (C,)": "1 for each class that has a prototype, 0 otherwise",
        },
        returned={
            "prototypes (C, D)": "the client's prototypes c_ij; the served prototype for a class that the client lacks",
            "counts (C,)": "number of training samples n_ij per class",
        },
        reveals="the number of samples and the mean features of each class; no model",
        server_state={
            "prototypes": "the global prototypes c (C, D)",
            "known": "1 for each class that has a prototype (C,)",
        },
        client_state={
            "model": "the client's network (d,)",
            "prototypes": "the prototypes that the local model predicts with (C, D)",
            "known": "1 for each class that has such a prototype (C,)",
        },
        scored="The served model, because the authors' program tests the trained networks with the new global "
        "prototypes.",
        deviations=(
            "Posy omits the factor 1 / |N_j| of Eq. 6, which would shorten the prototypes of classes with many "
            "clients. The program averages clients with equal weights.",
            "The distance is computed for each sample, as in the program. Eq. 7 computes it for each class mean.",
            "Prototypes are features of the trained network. The program collects them during the last epoch.",
            "A client predicts one of the classes that have a prototype. The program considers only the client's own "
            "classes.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientProto.train, clientProto.collect_protos, serverproto.proto_aggregation",
            1e-6,
            by_authors=False,
        ),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject ``client-weights``, because the sample counts per class determine the weights."""
        return {"client-weights": "prototypes are weighted by the number of samples per class"}

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if training ignores the prototypes of other clients."""
        if not network.layer_names[:-1]:
            return (
                f"model = {settings.train.model}: the network has no layer below the head that could learn from "
                "the prototypes",
            )
        if not self.strength:
            return ("fedproto-strength = 0: clients train alone, and share prototypes for predictions only",)
        return ()


class FedProto(PersonalisedStrategy):
    """Store the prototypes ``(C, D)``, and a mask of the classes that have one ``(C,)`` (Algorithm 1)."""

    state = ("prototypes", "known")
    sums_samples = True

    def initialise(self) -> None:
        """Start without prototypes."""
        head = ("head.weight", "head.bias")
        self.architecture.require(head, "fedproto writes the prototypes into the head")
        classes = self.architecture.task.num_classes
        self.prototypes: FloatArray = np.zeros((classes, self.architecture.embedding_dim), np.float32)
        self.known: FloatArray = np.zeros(classes, np.float32)

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject impossible sample counts."""
        check_class_counts(arrays["counts"], self.clients[client].num_train)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the prototypes of each class over the clients that have the class."""
        counts = class_counts(updates)
        self.prototypes = mean_prototypes(stacked(updates, "prototypes"), counts, self.prototypes)
        self.known = np.maximum(self.known, counts.any(axis=0)).astype(np.float32)
        return {"known_classes": int(self.known.sum())}
