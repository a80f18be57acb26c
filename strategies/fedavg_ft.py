"""FedAvg with fine-tuning: every client adapts FedAvg's model before using it."""

from typing import Any

from posy.settings import Search, SettingsError, setting
from posy.strategies.arrays import model, reply
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.replies import Update
from posy.strategies.settings import MethodSettings

PROGRAM = Program(
    "zijianwang0510/FedDRM",
    "3479abf07c8c4eb50e9aa47c5719b4b6cfa0a00e",
    "algorithms/fedavgft.py: FedAvgFT.local_train, aggregate and spread_model",
    1e-6,
    by_authors=False,
)
CARD = MethodCard(
    paper=Paper(
        "McMahan et al.",
        2017,
        "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        "AISTATS",
        "https://proceedings.mlr.press/v54/mcmahan17a.html",
    ),
    equations=(
        "w ← w − η ∇f_i(w; b) for each mini-batch b (Algorithm 1, ClientUpdate)",
        "w ← Σ_i (n_i / n) w_i over the clients of the round (Algorithm 1, server)",
        "w_i ← w_i − η ∇f_i(w_i; b) from the served w, before each evaluation or in the last rounds (fine-tuning)",
    ),
    sent={"model (d,)": "the server's model w"},
    returned={"model (d,)": "the trained model w_i; nothing in fine-tuning rounds"},
    reveals="the client's model",
    server_state={"model": "the server's model w (d,)"},
    client_state={"model": "the fine-tuned model w_i (d,), in fine-tuning rounds"},
    scored="The local model, because the papers on FedDRM, PPFE and cwFedAvg score the model after fine-tuning.",
    deviations=("The paper does not fine-tune. FedDRM (2025, Section 3.1) fine-tunes in the last rounds.",),
    program=PROGRAM,
)


class FedAvgFTSettings(MethodSettings, dp_sgd=True, robust=True):
    """Settings of FedAvg with fine-tuning."""

    returned = reply(model=model(noise=True, sums=True))

    epochs: int = setting(
        1,
        "number of fine-tuning passes over the client's training data",
        source="choice: one pass",
        needs="{method}-steps = 0 and {method}-rounds = 0",
        minimum=1,
        search=Search(1, 10),
    )
    steps: int = setting(
        0,
        "number of SGD steps for fine-tuning, instead of epochs; 0: use epochs",
        source="choice: epochs, as in local training",
        needs="{method}-rounds = 0",
        minimum=0,
    )
    lr: float = setting(
        0.0,
        "learning rate for fine-tuning; 0: the round's rate",
        source="algorithms/fedavgft.py of FedDRM's program: fine-tuning follows the schedule of the rounds",
        minimum=0,
        search=Search(0.0005, 0.2, log=True),
    )
    rounds: int = setting(
        0,
        "number of final rounds in which clients fine-tune their personal models and the server averages nothing; "
        "0: clients fine-tune the served model at each evaluation instead",
        source="choice: fine-tuning at evaluation; FedDRM's Section 3.1 uses the last 100 of 800 rounds",
        minimum=0,
    )

    card = CARD

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether the run ends with fine-tuning rounds."""
        return self.rounds > 0

    def tunes(self, server_round: int, num_rounds: int) -> bool:
        """Return whether a round is one of the final rounds, in which clients fine-tune."""
        return server_round > num_rounds - self.rounds


class FedAvgFT(PersonalisedStrategy):
    """Average as FedAvg does; freeze the server's model while the clients fine-tune theirs (FedDRM, Section 3.1)."""

    method: FedAvgFTSettings

    def initialise(self) -> None:
        """Set up the model; raise :class:`SettingsError` for an invalid number of fine-tuning rounds."""
        run, key = self.settings.run, f"{self.settings.run.method}-rounds = {self.method.rounds}"
        if self.method.rounds >= run.num_server_rounds:
            raise SettingsError(f"{key}: it must be less than num-server-rounds = {run.num_server_rounds}")
        if self.method.rounds and run.secure_aggregation:
            raise SettingsError(
                f"{key} cannot be combined with secure-aggregation = true: clients send nothing in these rounds; set "
                "one of the two settings to its default"
            )
        if 0 < self.method.rounds < run.average_rounds:
            raise SettingsError(
                f"average-rounds = {run.average_rounds}: it must be at most {key}, because before these rounds the "
                "clients have no personal models"
            )
        super().initialise()

    def returns(self, server_round: int, client: int) -> tuple[str, ...]:
        """Return the name of the model's array, or no names while the clients fine-tune."""
        return () if self._tunes(server_round) else super().returns(server_round, client)

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Average the models, except in fine-tuning rounds."""
        return {} if self._tunes(server_round) else super().aggregate(server_round, updates)

    def _tunes(self, server_round: int) -> bool:
        return self.method.tunes(server_round, self.settings.run.num_server_rounds)
