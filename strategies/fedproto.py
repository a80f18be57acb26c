"""FedProto (Tan et al., 2022): clients share class prototypes, and no model.

A prototype is the mean of what the head sees of a class (Eq. 3). The server averages those of a class, weighted by
samples: Eq. 6 without its further factor 1/|N_j|, which would shorten the means of many clients. A client pulls its
features towards the prototypes (Eq. 7), and predicts by the nearest one (Eq. 4). The distance is that of each sample to
its prototype, the mean square over samples and features, where the paper has that of the client's own prototypes.

``served`` reports a client's own network with the prototypes just received; ``local`` with those it had received
before training, and its own of classes that were not known yet.
"""

from typing import Any

import numpy as np
from flwr.common.typing import NDArrays

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings, Refused
from posy.strategies.prototypes import check_counts, mean_prototypes
from posy.strategies.replies import Update, stacked


class FedProtoSettings(
    MethodSettings,
    noise=ALLOWED,
    sums=Refused("it weighs each client's prototypes by that client's samples of the class"),
):
    """Settings of FedProto."""

    strength: float = setting(
        1.0, "lambda: weight of the distance to the prototypes", minimum=0, search=Search(0.1, 10.0, log=True)
    )

    def reference(self, network: Architecture, sent: NDArrays, reply: NDArrays) -> NDArrays:
        """Return the prototypes that were sent; the numbers of samples are changes of nothing."""
        return [sent[0]]


class FedProto(PersonalisedStrategy):
    """Keep the prototypes ``(C, D)``, and which of the classes have one ``(C,)`` (Algorithm 1)."""

    state = ("prototypes", "known")

    def initialise(self) -> None:
        """Know no class."""
        head = ("head.weight", "head.bias")
        self.architecture.require(head, "fedproto writes the prototypes into the head")
        classes = self.architecture.task.num_classes
        self.prototypes: FloatArray = np.zeros((classes, self.architecture.embedding_dim), np.float32)
        self.known: FloatArray = np.zeros(classes, np.float32)

    def serve(self, client: int) -> NDArrays:
        """Send the prototypes, and 1 for each class that has one."""
        return [self.prototypes, self.known]

    def check(self, arrays: NDArrays) -> None:
        """Refuse numbers of samples that cannot be."""
        check_counts(arrays[1])

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the prototypes of each class over the clients that have it."""
        counts = stacked(updates, 1)
        self.prototypes = mean_prototypes(stacked(updates), counts, self.prototypes)
        self.known = np.maximum(self.known, counts.any(axis=0)).astype(np.float32)
        return {"known_classes": int(self.known.sum())}
