"""FedPAC (Xu et al., 2023): clients share a body, align its features with global class means, and combine heads.

In each round, a client first trains the received head. It then trains the body, and pulls the body's features towards
the class means. For each client of the round, the server combines the heads received in that round. The weights of
the heads minimise an estimate of the client's test error. The server computes this estimate from statistics of the
served body's features.

A client that has not yet taken part receives the mean of the last round's heads. A client that is absent from a round
keeps its previous head.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.prototypes import check_class_counts, class_counts, mean_prototypes
from posy.strategies.replies import BadReplyError, Update, mean_of, num_examples, stacked, weighted_mean
from posy.strategies.settings import MethodSettings, cohort_size
from posy.strategies.simplex import minimise_on_simplex

if TYPE_CHECKING:
    from posy.strategies.settings import Settings

SINGLE_REPLIES = "it chooses the heads to combine by the class means of individual clients"
NOISY = "it chooses the heads to combine by class means, and noise makes these means similar"


class FedPACSettings(
    MethodSettings,
    robust="its server also averages class means and combines heads, which a robust rule would not cover",
):
    """Settings of FedPAC."""

    needs_classes = "its clients align features with class means, and its server uses class statistics"

    sent = ("model", "head", "prototypes", "known")
    returned = reply(
        model=model(noise=True, sums=SINGLE_REPLIES),
        head=model(change_of="head", noise=True, sums=SINGLE_REPLIES),
        means=numbers("classes", "features", noise=NOISY, sums=SINGLE_REPLIES),
        counts=numbers("classes", noise=NOISY, sums=SINGLE_REPLIES),
        variance=numbers(noise=NOISY, sums=SINGLE_REPLIES),
        products=numbers("classes", "features", noise=NOISY, sums=SINGLE_REPLIES),
    )

    strength: float = setting(
        1.0,
        "lambda: weight of the distance to the global class means",
        source="options.py of the authors' program: --lam 1.0",
        minimum=0,
        search=Search(0.1, 10.0, log=True),
    )
    head_epochs: int = setting(
        1,
        "epochs for the head, before `local-epochs` for the body; with `local-steps`, both train for `local-steps` "
        "steps",
        source="methods/fedpac.py of the authors' program: epoch_classifier = 1",
        needs="local-steps = 0",
        minimum=1,
    )
    head_lr: float = setting(
        0.1,
        "learning rate of the head, the same in all rounds; 0: the body's rate",
        source="methods/fedpac.py of the authors' program: lr_g = 0.1",
        minimum=0,
        earlier=0.0,
    )

    class_statistics = True
    card = MethodCard(
        paper=Paper(
            "Xu et al.",
            2023,
            "Personalized Federated Learning with Feature Alignment and Classifier Collaboration",
            "ICLR",
            "https://arxiv.org/abs/2306.11867",
        ),
        equations=(
            "head: φ_i ← φ_i − η_g ∇ℓ(θ, φ_i), with the body fixed (Algorithm 1, client)",
            "body: θ_i ← θ_i − η_f ∇(ℓ + λ R_i), with the head fixed, R_i the mean square of f_θ(x) − c_y over samples "
            "and features (Algorithm 1, client)",
            "θ ← Σ_i (n_i / n) θ_i,  c_j ← Σ_i n_ij c_ij / Σ_i n_ij (Algorithm 1, server)",
            "φ_i ← Σ_j α_ij φ_j; α_i minimises Σ_j α_j² V_j + Σ_jk α_j α_k tr((h_i − h_j)ᵀ (h_i − h_k)) on the simplex",
        ),
        sent={
            "model (b,)": "the shared body θ",
            "head (h,)": "the head φ_i that the server combined for the client",
            "prototypes (C, D)": "the global class means c",
            "known (C,)": "1 for each class that has a mean, 0 otherwise",
        },
        returned={
            "model (b,)": "the trained body θ_i",
            "head (h,)": "the trained head",
            "means (C, D)": "class means c_ij of the trained body's features",
            "counts (C,)": "number of training samples n_ij per class",
            "variance ()": "V_i, the variance of the mean of (one-hot label) × feature, for the served body",
            "products (C, D)": "h_i, class means times class shares, for the served body",
        },
        reveals="the client's body and head, the number of samples and the mean features of each class, the variance "
        "of the features, and thus which clients are similar",
        server_state={
            "model": "the shared body θ (b,)",
            "prototypes": "the global class means c (C, D)",
            "known": "1 for each class that has a mean (C,)",
            "heads": "each client's head (M, h)",
            "seen": "1 for each client that has taken part (M,)",
        },
        client_state={},
        scored="The local model. The authors' program prints accuracies before and after local training in each round.",
        deviations=(
            "The program sets weights α below 0.001 to zero. Posy keeps them.",
            "Samples of a class without a global mean do not contribute to R_i. From round 2 on, the program pulls "
            "them towards the client's class mean, computed before training.",
            "The program fixes SGD's momentum at 0.5 and weight decay at 0.0005. Posy has settings for both.",
        ),
        program=Program(
            "JianXu95/FedPAC",
            "5770f4ff8f11ad3be61c2a62b038245fa3f25248",
            "running.py: train_round_fedpac",
            1e-6,
        ),
    )

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Give every client its own head."""
        return ("head",)

    def notices(self, settings: "Settings", network: Architecture) -> tuple[str, ...]:
        """Warn if no round has two or more heads to combine."""
        if cohort_size(settings, last_round=True) > 1:
            return ()
        return (
            "only one client trains in each round, so no heads are combined: the run is equivalent to FedRep with "
            "class means",
        )


class FedPAC(PersonalisedStrategy):
    """Average bodies and class means; combine heads for each client (Algorithm 1).

    The state holds the body, the class means ``(C, D)`` and the clients' heads ``(M, h)``. It also holds a mask of the
    classes that have a mean ``(C,)``, and a mask of the clients that have taken part ``(M,)``.
    """

    state = ("model", "prototypes", "known", "heads", "seen")
    sums_samples = True

    def initialise(self) -> None:
        """Start from the initial body and head, without class means."""
        super().initialise()
        head = self.architecture.layout.part(("head",))
        classes = self.architecture.task.num_classes
        self.prototypes: FloatArray = np.zeros((classes, self.architecture.embedding_dim), np.float32)
        self.known: FloatArray = np.zeros(classes, np.float32)
        self.heads: FloatArray = np.tile(head.take(self.initial()), (self.num_clients, 1))
        self.seen = np.zeros(self.num_clients, np.int64)

    def serve(self, client: int) -> Arrays:
        """Return the body, the client's head, the class means, and a mask of the classes that have a mean."""
        return {
            "model": self.model, "head": self.heads[client], "prototypes": self.prototypes, "known": self.known
        }  # fmt: skip

    def check(self, client: int, arrays: Arrays) -> None:
        """Reject impossible sample counts, and a negative variance."""
        check_class_counts(arrays["counts"], self.clients[client].num_train)
        if arrays["variance"] < 0:
            raise BadReplyError(f"variance {float(arrays['variance'])}")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average bodies and class means, and combine the heads of the round."""
        self.model = mean_of(updates)
        heads, means, variances, products = (
            stacked(updates, name) for name in ("head", "means", "variance", "products")
        )
        counts = class_counts(updates)
        self.prototypes = mean_prototypes(means, counts, self.prototypes)
        self.known = np.maximum(self.known, counts.any(axis=0)).astype(np.float32)
        weights = combination(products, variances)
        clients = [update.client for update in updates]
        self.seen[clients] = 1
        self.heads = self.heads.copy()
        self.heads[self.seen == 0] = weighted_mean(heads, num_examples(updates))
        self.heads[clients] = weights.astype(np.float32) @ heads
        return {"weight_of_own_head": float(np.diag(weights).mean())}


def combination(products: npt.ArrayLike, variances: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return α ``(M, M)``, whose row i holds the weights of the heads for client i.

    Row i minimises Σ_j α_j² V_j + Σ_{j,k} α_j α_k tr((h_i − h_j)ᵀ (h_i − h_k)) over α ≥ 0, Σ_j α_j = 1.

    Parameters
    ----------
    products : array_like, (M, C, D)
        h_i: a client's class means, each multiplied by the class's share of its samples.
    variances : array_like, (M,)
        V_i: the variance of the mean of (one-hot label) × feature over the client's samples.
    """
    h = np.asarray(products, np.float64).reshape(len(np.asarray(products)), -1)
    h = h - h.mean(axis=0)  # only differences matter, and centring reduces rounding errors
    gram, spread = h @ h.T, np.diag(np.asarray(variances, np.float64))
    rows = []
    for i in range(len(h)):
        bias = gram[i, i] - gram[i][:, None] - gram[i][None, :] + gram
        rows.append(minimise_on_simplex(bias + spread))
    return np.array(rows)
