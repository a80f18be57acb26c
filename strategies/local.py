"""Local only: every client trains alone, and the server does not send or receive a model.

Only ``local`` scores are reported, because the server does not serve a model.
"""

from collections.abc import Mapping
from typing import Any

from posy.strategies.arrays import reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Program
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings


class LocalSettings(MethodSettings, robust="its clients do not send a model"):
    """Settings of local training, which has only the shared settings."""

    sent = ()
    returned = reply()

    card = MethodCard(
        paper=None,
        equations=("w_i ← w_i − η ∇f_i(w_i; b) for each mini-batch b; every round starts from the last w_i",),
        sent={},
        returned={},
        reveals="only the values in every reply",
        server_state={},
        client_state={"model": "the client's model w_i (d,)"},
        scored="The local model, because it is a client's only model.",
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientAVG.train without a server, as in servers/serverlocal.py",
            1e-6,
            by_authors=False,
        ),
    )

    def refusals(self) -> Mapping[str, str]:
        """Reject settings that concern the server's mean or updates, because clients send nothing."""
        return {
            "client-weights": "the server averages nothing",
            "max-update-norm": "clients send no update",
            "max-norm-ratio": "clients send no update",
            "max-client-weight": "the server averages nothing",
        }


class Local(PersonalisedStrategy):
    """Have the clients train, and aggregate nothing."""

    state = ()

    def initialise(self) -> None:
        """Skip the setup, because the server has no state."""

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Return no metrics, because the server aggregates nothing."""
        return {}
