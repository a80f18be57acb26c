"""FedAvg (McMahan et al., 2017): one model, averaged with weights n_i / N.

FedAvg does not need an additional strategy or client class: :class:`~posy.strategies.base.PersonalisedStrategy` and
:class:`~posy.client_app.base.PersonalClient` implement it, and other methods override their hooks.
"""

from posy.strategies.card import MethodCard, Paper, Program
from posy.strategies.settings import MethodSettings


class FedAvgSettings(MethodSettings, dp_sgd=True, robust=True, point="served"):
    """Settings of FedAvg, which has only the shared settings."""

    card = MethodCard(
        paper=Paper(
            "McMahan et al.",
            2017,
            "Communication-Efficient Learning of Deep Networks from Decentralized Data",
            "AISTATS",
            "https://proceedings.mlr.press/v54/mcmahan17a.html",
        ),
        equations=(
            "w ← w − η ∇ℓ(w; b) for each mini-batch b (Algorithm 1, ClientUpdate)",
            "w ← Σ_i (n_i / n) w_i over the clients of the round (Algorithm 1, server)",
        ),
        sent={"model (d,)": "the server's model w"},
        returned={"model (d,)": "the trained model w_i"},
        reveals="the client's model",
        server_state={"model": "the server's model w (d,)"},
        client_state={},
        scored="The served model, because the paper evaluates the averaged model on test data, before any local "
        "training.",
        deviations=(
            "BatchNorm's running statistics are averaged with the same weights. The paper does not use BatchNorm.",
        ),
        program=Program(
            "TsingZ0/PFLlib",
            "d832e76f6a23b833038949ec1e4fdefe63a4d350",
            "system/flcore: clientAVG.train, Server.send_models and aggregate_parameters",
            1e-6,
            by_authors=False,
        ),
    )
