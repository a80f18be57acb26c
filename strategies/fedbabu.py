"""FedBABU (Oh et al., 2022): only the body is trained and averaged, and each client then fine-tunes the network.

The head keeps its initial values until fine-tuning. A newcomer receives and fine-tunes the model like any other client.
"""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.fedavg_ft import FedAvgFT, FedAvgFTSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedBABUSettings(FedAvgFTSettings, dp_sgd=True, robust=True):
    """Settings of FedBABU, all of which concern fine-tuning."""

    card = MethodCard(
        paper=Paper(
            "Oh et al.",
            2022,
            "FedBABU: Toward Enhanced Representation for Federated Image Classification",
            "ICLR",
            "https://openreview.net/forum?id=HuaYQfggn5u",
        ),
        equations=(
            "θ_ext ← SGD on the body, with rate 0 for the head θ_cls (Algorithm 1, client update)",
            "θ_ext ← mean of the clients' bodies (Algorithm 1, server)",
            "(θ_ext, θ_cls) ← SGD on the client's samples: fine-tuning before prediction (personalisation)",
        ),
        sent={"model (s,)": "the shared body: all layers but the head"},
        returned={"model (s,)": "the client's body after training; nothing in fine-tuning rounds (`fedbabu-rounds`)"},
        reveals="the body; the head stays on the client",
        server_state={"model": "the shared body (s,)"},
        client_state={},
        scored=(
            "The local model, because the authors report the personalised accuracy after fine-tuning (analysis.ipynb). "
            "The authors' initial accuracy corresponds to the served model."
        ),
        deviations=(
            "Clients are weighted by number of samples, whereas the paper's program weights them equally "
            "(`client-weights=uniform`).",
            "Fine-tuning runs in every evaluation. The authors fine-tune once, starting from the model with the best "
            "test accuracy. Posy does not select models on test data.",
            "With `fedbabu-rounds`, clients store their models and fine-tune them in the last rounds, as in FedDRM's "
            "paper.",
        ),
        program=Program(
            "jhoon-oh/FedBABU",
            "e34c15b4288224f0af1bc13670bc0cdc373c9576",
            "main_fed.py --local_upt_part body --aggr_part body, with LocalUpdate.train in models/Update.py",
            1e-6,
        ),
    )

    epochs: int = setting(
        5,
        "number of fine-tuning passes over the client's training data",
        minimum=1,
        search=Search(1, 10),
        source="authors' program, analysis.ipynb: personalization_epoch = 5",
        needs="{method}-steps = 0 and {method}-rounds = 0",
    )
    steps: int = setting(
        0,
        "number of SGD steps for fine-tuning, instead of epochs; 0: use epochs",
        minimum=0,
        source="choice: epochs, as in the authors' program",
        needs="{method}-rounds = 0",
    )
    lr: float = setting(
        0.0,
        "learning rate for fine-tuning; 0: the round's rate",
        minimum=0,
        search=Search(0.0005, 0.2, log=True),
        source="authors' program, analysis.ipynb: 0.001, the last rate of their schedule",
    )
    rounds: int = setting(
        0,
        "number of final rounds in which clients fine-tune their personal models and the server averages nothing; "
        "0: clients fine-tune the served model at each evaluation instead",
        minimum=0,
        source="choice: fine-tune at evaluation, as the paper does",
    )
    tuned: str = setting(
        "network",
        "layers to fine-tune: the whole network, or only the head, as in FedDRM",
        choices=("network", "head"),
        source="authors' program, analysis.ipynb: body and head",
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the head out of the messages, because it is the same on all clients."""
        return ("head",)


class FedBABU(FedAvgFT):
    """Average the bodies."""
