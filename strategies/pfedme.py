"""pFedMe (T. Dinh et al., 2020): a global model minimises the mean Moreau envelope of the clients' losses.

Each client's personal model stays near the global model. The learning rate of the run is the paper's η. ``served``
scores the global model w, and ``local`` the personal model θ.
"""

from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.common.logger import log

from posy.models.parameters import FloatArray
from posy.settings import Search, SettingsError, setting
from posy.strategies.arrays import model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.cohorts import cohort_of
from posy.strategies.replies import Update
from posy.strategies.run_settings import CENTRAL
from posy.strategies.settings import MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture
    from posy.strategies.settings import Settings


class PFedMeSettings(MethodSettings, robust=True):
    """Settings of pFedMe."""

    returned = reply(model=model(noise=True, sums=True))

    strength: float = setting(
        15.0,
        "lambda: strength of the personal model's pull towards w",
        source="README of the authors' program: --lamda 15 on MNIST",
        above=0,
        search=Search(1.0, 50.0, log=True),
    )
    steps: int = setting(
        5,
        "K: number of steps per mini-batch that approximate the personal model",
        source="main.py of the authors' program: --K 5",
        minimum=1,
    )
    personal_lr: float = setting(
        0.09,
        "learning rate of the steps that approximate the personal model",
        source="README of the authors' program: --personal_learning_rate 0.09 for the MNIST network",
        above=0,
        search=Search(0.005, 0.2, log=True),
    )
    beta: float = setting(
        1.0,
        "beta: step size of the server's model towards the clients' mean; a value above 1 overshoots the mean",
        source="README of the authors' program: --beta 1",
        above=0,
    )
    clients: str = setting(
        "all",
        "clients that train in a round: only the `cohort` that the server aggregates, or `all`, which updates every "
        "personal model but takes 1 / fraction-train times as much training",
        source="Algorithm 1: all clients train, and a uniform sample sends its model",
        needs="fraction-train < 1",
        choices=("all", "cohort"),
        earlier="cohort",
    )
    scored: str = setting(
        "theta",
        "model scored as the local model: the personal `theta` of the last mini-batch, or the client's `w`, which the "
        "authors' program scores as the personal model",
        source="Section 3: θ_i is the personalized model",
        choices=("theta", "w"),
    )

    def notices(self, settings: "Settings", network: "Architecture") -> tuple[str, ...]:
        """Warn if the steps towards the personal model would diverge."""
        if self.strength * self.personal_lr < 2:
            return ()
        return (
            f"pfedme-strength * pfedme-personal-lr = {self.strength * self.personal_lr:g}: at 2 or more, the steps "
            "towards the personal model diverge; lower one of the two settings",
        )

    card = MethodCard(
        paper=Paper(
            "T. Dinh, Tran and Nguyen",
            2020,
            "Personalized Federated Learning with Moreau Envelopes",
            "NeurIPS",
            "https://proceedings.neurips.cc/paper/2020/hash/f4f1f13c8289ac1b1ee0ff176b56fc60-Abstract.html",
        ),
        equations=(
            "θ ← θ − η_p (∇f_i(θ; D) + λ (θ − w)), K times on each mini-batch D (Eqs. 7, 8)",
            "w_i ← w_i − η λ (w_i − θ) for each mini-batch (Algorithm 1, line 8)",
            "w ← (1 − β) w + β Σ_i (n_i / n) w_i over the sampled clients (Algorithm 1, line 12)",
        ),
        sent={"model (d,)": "the global model w"},
        returned={"model (d,)": "the client's w_i; nothing if the client is not in the round's sample"},
        reveals="the client's model",
        server_state={"model": "the global model w (d,)"},
        client_state={"model": "the personal model θ_i (d,), or w_i with `pfedme-scored=w`"},
        scored=(
            "The local model θ_i, because the paper scores the personalised model. The variable that the authors' "
            "program scores contains w_i at the time of scoring (`pfedme-scored=w`)."
        ),
        deviations=(
            "The mean over clients is weighted by number of samples, as in the authors' program. The paper weights "
            "clients equally (`client-weights=uniform`).",
            "θ starts at w and continues from mini-batch to mini-batch, as in the authors' program. The paper does not "
            "specify the starting point.",
            "`weight-decay` is part of f_i. The authors' program uses a weight decay of 0.001 for θ. The paper uses 0, "
            "and so does Posy.",
            "`local-epochs` counts passes over the data. In the paper and its program, R counts mini-batches "
            "(`local-steps`).",
            "If the network has BatchNorm layers, w_i uses θ's running statistics, because the method never runs a "
            "forward pass with w_i.",
        ),
        program=Program(
            "CharlieDinh/pFedMe",
            "caf24b1f954d4381bd9b4d104ee7eff389e1489b",
            "FLAlgorithms: UserpFedMe.train, Server.send_parameters and persionalized_aggregate_parameters",
            1e-6,
        ),
    )


class PFedMe(PersonalisedStrategy):
    """Step from the global model towards the clients' mean, or beyond it (Algorithm 1)."""

    method: PFedMeSettings

    def initialise(self) -> None:
        """Set up the model; raise :class:`SettingsError` if secure aggregation or central noise forbids sampling."""
        run = self.settings.run
        if run.secure_aggregation and self.samples:
            raise SettingsError(
                f"pfedme-clients = 'all' with secure-aggregation = true and fraction-train = {run.fraction_train:g}: "
                "the server cannot choose whose masked models it adds up; set pfedme-clients = 'cohort' or "
                "fraction-train = 1"
            )
        if self.settings.train.dp == CENTRAL and self.samples:
            raise SettingsError(
                f"pfedme-clients = 'all' with dp = 'central' and fraction-train = {run.fraction_train:g}: clients "
                "outside the sample send no update, so the noise cannot cover them; set pfedme-clients = 'cohort' or "
                "fraction-train = 1"
            )
        super().initialise()

    @property
    def samples(self) -> bool:
        """Whether all clients train, but only a sample of them sends models."""
        return self.method.clients == "all" and self.settings.run.fraction_train < 1

    def trains_all(self, server_round: int) -> bool:
        """Return True if only a sample of the members sends models; otherwise, return the default."""
        return self.samples or super().trains_all(server_round)

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return the config entry ``sampled``: whether a client sends its model."""
        return {"sampled": client in cohort_of(self.settings, server_round)} if self.samples else {}

    def returns(self, server_round: int, client: int) -> tuple[str, ...]:
        """Return the names of the arrays in a client's reply; a client outside the sample sends none."""
        sampled = not self.samples or client in cohort_of(self.settings, server_round)
        return super().returns(server_round, client) if sampled else ()

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Move the model towards the mean of the sampled clients."""
        sent = [update for update in updates if update.arrays]
        if len(sent) < self.influence.least_replies:
            log(WARNING, "round %s: %s; the model does not change", server_round, self.influence.too_few(len(sent)))
            return {}
        self.model = relaxed(self.model, self.mean(sent), self.method.beta)
        return {}


def relaxed(before: FloatArray, mean: FloatArray, beta: float) -> FloatArray:
    """Return (1 - β) w + β Σ_i (n_i / n) w_i ``(d,)``.

    Parameters
    ----------
    before, mean : numpy.ndarray, float32, (d,)
        The server's model w, and the mean of the clients' models.
    beta : float
        β.
    """
    return (1 - beta) * before + beta * mean
