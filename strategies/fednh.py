"""FedNH (Dai et al., 2023): a head of class prototypes, spread evenly at first, then drawn to what clients see.

The prototypes are directions: the logits are the scaled cosines between them and the features. Clients train the body
under prototypes that stand still, and send with it, in place of the head, the mean directions of their classes. Where
it is not the authors' program: bodies are weighed by n_i, not alike; and where there is room the first prototypes are a
simplex, which solves the paper's problem, not an orthonormal set. The scale is fixed, as the program offers.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, SettingsError, setting
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.method_settings import ALLOWED, MethodSettings
from posy.strategies.replies import Update, mean_of, sample_counts, stacked, weighted_mean


class FedNHSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedNH."""

    rho: float = setting(
        0.9, "rho: what is kept of the prototypes in a round", minimum=0, maximum=1, search=Search(0.1, 0.99)
    )
    scale: float = setting(30.0, "what the cosines are multiplied by", above=0, search=Search(5.0, 50.0, log=True))

    def network(self, plain: Architecture, num_clients: int) -> Architecture:
        """Return the network with a head that compares directions."""
        plain.require(("head.weight",), "fednh puts prototypes in place of the head")
        if not plain.layer_names[:-1]:
            raise SettingsError(
                f"model = {plain.model!r}: fednh trains all layers but the head, and it has no other; "
                "it must be a network with more layers"
            )
        return replace(plain, cosine=self.scale)


class FedNH(PersonalisedStrategy):
    """Average the bodies; draw the prototypes to the clients' mean directions (Algorithm 1)."""

    def initialise(self) -> None:
        """Set up the model; raise :class:`SettingsError` where one sum cannot hold two kinds of means."""
        run = self.settings.run
        if run.secure_aggregation and run.client_weights == "uniform":
            raise SettingsError(
                "client-weights = 'uniform' with method = 'fednh' and secure-aggregation = true: the prototypes count "
                "samples, and the server sees one sum only; set one of them to its default"
            )
        super().initialise()

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average both; a client sends each class's direction with its share n_ic / n_i of the samples as length."""
        model, views = mean_of(updates), self.architecture.layout.views
        prototypes = views(model)["head.weight"]
        if self.settings.run.client_weights == "uniform":  # the prototypes count samples all the same
            means = weighted_mean(stacked(updates), sample_counts(updates))
            prototypes[:] = views(means)["head.weight"]
        prototypes[:] = drawn(views(self.model)["head.weight"], prototypes, self.method.rho)
        self.model = model
        cosines = prototypes @ prototypes.T - 2 * np.eye(len(prototypes))
        return {"largest_cosine": float(cosines.max())}


def drawn(prototypes: FloatArray, means: FloatArray, rho: float) -> FloatArray:
    """Return the directions of ρ W_c + (1 − ρ) μ_c / ||μ_c||, where μ_c = Σ_i n_ic μ_ic / N.

    Parameters
    ----------
    prototypes : numpy.ndarray, float32, (C, D)
        W, of length 1.
    means : numpy.ndarray, float32, (C, D)
        μ; a class that no client had has 0, and its prototype stays.
    rho : float
        How much stays of W.
    """
    fresh = np.where(means.any(axis=1, keepdims=True), directions(means), prototypes)
    return directions((rho * prototypes + (1 - rho) * fresh).astype(np.float32))


def directions(rows: FloatArray) -> FloatArray:
    """Return the rows ``(C, D)`` brought to length 1; those of zeros stay."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
