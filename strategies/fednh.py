"""FedNH (Dai et al., 2023): the head's class prototypes start evenly spread and are pulled towards the features.

The prototypes are unit vectors, and the logits are their scaled cosines with the features. Clients train the body with
the prototypes fixed. They send the trained body and the mean direction of each class's features.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, SettingsError, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import BadReplyError, Update, mean_of, sample_counts, stacked, weighted_mean
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.strategies.settings import Settings

ROUNDING = 0.01
"""Maximum rounding error of the sum of the class shares, for features in bfloat16."""


class FedNHSettings(
    MethodSettings, robust="its server also averages class directions, which a robust rule would not cover"
):
    """Settings of FedNH."""

    needs_classes = "its head consists of one prototype for each class"

    returned = reply(
        model=model(noise=True, sums=True), directions=numbers("classes", "features", noise=True, sums=True)
    )

    rho: float = setting(
        0.9,
        "rho: weight of the previous round's prototypes",
        source="experiments/*.yaml of the authors' program: FedNH_smoothing 0.9",
        minimum=0,
        maximum=1,
        search=Search(0.1, 0.99),
    )
    scale: float = setting(
        30.0,
        "factor by which cosines are multiplied to give logits",
        source="FedUH.py of the authors' program: 30 with FedNH_fix_scaling",
        above=0,
        search=Search(5.0, 50.0, log=True),
    )

    class_statistics = True
    card = MethodCard(
        paper=Paper(
            "Dai et al.",
            2023,
            "Tackling Data Heterogeneity in Federated Learning with Class Prototypes",
            "AAAI",
            "https://arxiv.org/abs/2212.02758",
        ),
        equations=(
            "logits: s · cos(f_θ(x), W_c) (Section 3)",
            "client: θ_i ← θ_i − η ∇ℓ(θ_i, W), with W fixed; μ_ic is the direction of the mean normalised feature of "
            "class c (Algorithm 1, client)",
            "server: θ ← mean_i θ_i,  W_c ← ρ W_c + (1 − ρ) μ_c / ‖μ_c‖ with μ_c = Σ_i n_ic μ_ic / Σ_i n_ic, then "
            "normalised (Algorithm 1, server)",
        ),
        sent={"model (d,)": "the body θ, and the prototypes W as its head"},
        returned={
            "model (d,)": "the trained body θ_i, with the received head",
            "directions (C, D)": "n_ic / n_i · μ_ic, the mean direction of each class times the class's share",
        },
        reveals="the body, and for each class its share of the samples and the mean direction of its features",
        server_state={"model": "the body θ, and the prototypes W as its head (d,)"},
        client_state={},
        scored="The local model, which is the trained body with the prototypes used in training. The paper reports it "
        "as the personalised model, and the served model as the global model.",
        deviations=(
            "Bodies are weighted by n_i, whereas the program weights them equally (`client-weights=uniform`).",
            "For up to D + 1 classes the initial prototypes are the vertices of a simplex, which minimises the paper's "
            "largest cosine. The program draws an orthonormal set.",
            "The scale s is fixed, as with the program's option FedNH_fix_scaling. By default the program trains it.",
        ),
        program=Program(
            "Yutong-Dai/FedNH",
            "60c3161412d576cddc8187af318cdc8a91a8709f",
            "src/flbase/strategies: FedNHClient.training, FedNHClient.upload, FedNHServer.aggregate",
            1e-5,
        ),
    )

    def network(self, plain: Architecture, num_clients: int) -> Architecture:
        """Return the network with a head that computes cosines."""
        plain.require(("head.weight",), "fednh replaces the head with prototypes")
        if not plain.layer_names[:-1]:
            raise SettingsError(
                f"model = {plain.model!r}: fednh trains all layers but the head, and this network has only a head; "
                f"choose a network with more layers"
            )
        from posy.models.chain import with_cosine_head  # noqa: PLC0415 - the settings do not need PyTorch

        return plain.extended(with_cosine_head, classes=plain.task.num_classes, scale=self.scale)

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if the prototypes would never change."""
        return ("fednh-rho = 1: the prototypes never change",) if self.rho == 1 else ()


class FedNH(PersonalisedStrategy):
    """Average the bodies; pull the prototypes towards the clients' mean directions (Algorithm 1)."""

    sums_samples = True
    method: FedNHSettings

    def initialise(self) -> None:
        """Set up the model; raise :class:`SettingsError` if a masked sum would need two sets of weights."""
        run = self.settings.run
        if run.secure_aggregation and run.client_weights == "uniform":
            raise SettingsError(
                "client-weights = 'uniform' with method = 'fednh' and secure-aggregation = true: the prototypes are "
                "weighted by number of samples, but the server sees only one sum; set one of the two settings to its "
                "default"
            )
        super().initialise()

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject mean directions whose lengths, which are the class shares, sum to more than 1.

        With ``dp-clip``, noise changes the lengths, so they are not checked.
        """
        total = float(np.linalg.norm(np.asarray(arrays["directions"], np.float64), axis=1).sum())
        if not self.settings.train.dp_clip and total > 1 + ROUNDING:
            raise BadReplyError(f"the class shares sum to {total:.6g} instead of 1")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the bodies, and pull each prototype towards the mean direction of its class's samples."""
        model, head = mean_of(updates), self.architecture.layout.part(("head",))
        directions = stacked(updates, "directions")
        means = weighted_mean(directions.reshape(len(directions), -1), sample_counts(updates))
        shape = directions.shape[1:]
        prototypes = drawn(head.take(self.model).reshape(shape), means.reshape(shape), self.method.rho)
        self.model = head.put(model, prototypes.ravel())
        cosines = prototypes @ prototypes.T - 2 * np.eye(len(prototypes))
        return {"largest_cosine": float(cosines.max())}


def drawn(prototypes: FloatArray, means: FloatArray, rho: float) -> FloatArray:
    """Return the directions of ρ W_c + (1 − ρ) μ_c / ||μ_c||, where μ_c = Σ_i n_ic μ_ic / N.

    Parameters
    ----------
    prototypes : numpy.ndarray, float32, (C, D)
        W, with rows of length 1.
    means : numpy.ndarray, float32, (C, D)
        μ. A row of zeros means that the class has no samples, so its prototype does not change.
    rho : float
        The weight of W.
    """
    fresh = np.where(means.any(axis=1, keepdims=True), directions(means), prototypes)
    return directions((rho * prototypes + (1 - rho) * fresh).astype(np.float32))


def directions(rows: FloatArray) -> FloatArray:
    """Return the rows ``(C, D)`` normalised to length 1; rows of zeros stay zero."""
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
