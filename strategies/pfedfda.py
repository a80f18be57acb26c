"""pFedFDA (McLaughlin and Su, 2024): global and local Gaussians of the features are interpolated to define the head.

All classes share one covariance Σ, so the classifier that the Gaussians define is a linear head. Clients train the body
with the head of the global Gaussians. To predict, each client uses a personal head derived from Gaussians that are
interpolated between the client's estimates and the global ones. ``served`` scores the served body with a head that each
client fits to this body's features, without training.
"""

from typing import ClassVar

import numpy as np

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.randomness import numpy_generator
from posy.settings import Search, setting
from posy.strategies.arrays import Arrays, model, numbers, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import BadReplyError, Update, mean_of
from posy.strategies.settings import MethodSettings

AUTO = "auto"
"""Value of the setting ``pfedfda-beta`` that selects β by cross-validation."""

NOISY = "noise makes the covariance unusable"


class PFedFDASettings(
    MethodSettings,
    point="served",
    robust="its server also averages means and covariances, which the rule would not cover",
):
    """Settings of pFedFDA."""

    needs_classes = "its classifier is a Gaussian model of the features of each class"

    sent = ("model", "means", "covariance")
    returned = reply(
        model=model(noise=True, sums=True),
        means=numbers(change_of="means", noise=NOISY, sums=True),
        covariance=numbers(change_of="covariance", noise=NOISY, sums=True),
    )

    class_statistics = True
    card = MethodCard(
        paper=Paper(
            "McLaughlin and Su",
            2024,
            "Personalized Federated Learning via Feature Distribution Adaptation",
            "NeurIPS",
            "https://openreview.net/forum?id=Wl2optQcng",
        ),
        equations=(
            "h(z) = argmax_c of z·Σ⁻¹μ_c − μ_cᵀΣ⁻¹μ_c / 2 + log π_c, with the client's class shares π",
            "body ← SGD on the cross-entropy under h of the global (μ, Σ), which is fixed (Algorithm 1, client)",
            "μ = β μ_i + (1 − β) μ_g,  Σ = β Σ_i + (1 − β) Σ_g, with β by cross-validation (Algorithm 1, client)",
            "body, μ_g and Σ_g ← means of the clients' values, with weights n_i / n (Algorithm 1, server)",
        ),
        sent={
            "model (s,)": "the shared body",
            "means (C, D)": "the global class means μ_g",
            "covariance (D, D)": "the global covariance Σ_g",
        },
        returned={
            "model (s,)": "the client's body after training",
            "means (C, D)": "the client's class means μ, interpolated between the local and the global means",
            "covariance (D, D)": "the client's covariance Σ, interpolated between the local and the global covariance",
        },
        reveals="the body, the means and covariance of the features (mixed with the global values), and which classes "
        "have more than `pfedfda-folds` samples",
        server_state={
            "model": "the shared body (s,)",
            "means": "the global class means μ_g (C, D)",
            "covariance": "the global covariance Σ_g (D, D)",
        },
        client_state={},
        scored=(
            "The served model, because the authors' program fits every client's head to the averaged body, without "
            "training (server_fedfda.py, evaluate_personalized)."
        ),
        deviations=(
            "Local Gaussians are fitted to the features of the trained body. The authors' program collects the "
            "features of each mini-batch in all epochs, before the optimiser's step (`pfedfda-features=training`).",
            "The means and the covariance share one β. The authors' program uses a separate β for each by default "
            "(`pfedfda-betas=two`).",
            "β is the best of 11 values from 0 to 1 (with two β, the best of 121 pairs). The authors' program uses "
            "L-BFGS.",
            "A class with at most `pfedfda-folds` samples uses its global mean. During training, the authors' program "
            "compares the client's total number of samples instead, so nearly every class uses its local mean.",
            "`pfedfda-ridge` is added to the diagonal of Σ_i. The authors' program adds 1 to the diagonal and 1e-4 to "
            "every element. Its discriminant also shrinks Σ by 1e-4 towards a multiple of the identity.",
            "`class-weights` apply to the training loss. The Gaussians and class shares are unweighted estimates.",
        ),
        program=Program(
            "cj-mclaughlin/pFedFDA",
            "73c7c407a49575636bcda222968a2a4ddf73a68a",
            "servers/server_fedfda.py, ServerFedFDA.train with --local_beta",
            2e-6,
        ),
    )

    ridge: float = setting(
        1.0,
        "value added to the diagonal of a client's covariance",
        minimum=1e-6,
        maximum=1e6,
        search=Search(0.01, 10.0, log=True),
        source="authors' program, client_fedfda.py: the identity",
    )
    folds: int = setting(
        2,
        "number of cross-validation folds for beta; a class with at most as many samples as folds uses its global mean",
        minimum=2,
        maximum=100,
        source="authors' program, client_fedfda.py: num_cv_folds and min_samples",
    )
    beta: float = setting(
        AUTO,
        "weight of the client's own estimates in its Gaussians; `auto`: chosen by cross-validation",
        minimum=0,
        maximum=1,
        number_or=AUTO,
        source="paper: cross-validated; 1 is the program's --local_beta",
    )
    betas: str = setting(
        "one",
        "`one` beta for both means and covariance, or `two` separate ones",
        choices=("one", "two"),
        source="paper: one beta; the program's default is two",
        needs="pfedfda-beta = auto",
    )
    features: str = setting(
        "trained",
        "features to which the local Gaussians are fitted: features of the `trained` body, or features of all "
        "mini-batches during `training`",
        choices=("trained", "training"),
        source="choice: features of the body that is sent; the authors' program uses `training`",
    )

    def personal(self, network: Architecture) -> tuple[str, ...]:
        """Keep the head on the client."""
        return ("head",)


class PFedFDA(PersonalisedStrategy):
    """Average the bodies, means and covariances, all with the same weights (Algorithm 1)."""

    state: ClassVar[tuple[str, ...]] = ("model", "means", "covariance")

    def initialise(self) -> None:
        """Start from means drawn from [0, 1) and an identity covariance, as the authors' program does."""
        head = ("head.weight", "head.bias")
        self.architecture.require(head, "pfedfda writes the discriminant into the head")
        super().initialise()
        classes, size = self.architecture.task.num_classes, self.architecture.embedding_dim
        drawn = numpy_generator(self.settings.run.seed, "means").random(classes * size, np.float32)
        self.means: FloatArray = drawn.reshape(classes, size)
        self.covariance: FloatArray = np.eye(size, dtype=np.float32)

    def check(self, client: int, arrays: Arrays) -> None:
        """Raise :class:`BadReplyError` for a covariance that is not symmetric or not positive semi-definite."""
        covariance = np.asarray(arrays["covariance"], np.float64)
        size = np.abs(covariance).max()
        try:
            np.linalg.cholesky(covariance + 1e-6 * size * np.eye(len(covariance)))
            symmetric = np.allclose(covariance, covariance.T, atol=1e-4 * size)
        except np.linalg.LinAlgError:
            symmetric = False
        if not symmetric:
            raise BadReplyError("an invalid covariance: it must be symmetric and positive semi-definite")

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, float]:
        """Average the clients' bodies, means and covariances."""
        self.model, self.means, self.covariance = (mean_of(updates, name) for name in self.state)
        return {}
