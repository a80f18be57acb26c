"""Per-FedAvg (Fallah et al., 2020): one model from which a gradient step or two lead to each client's own.

The learning rate of the run is the paper's beta. Clients count by their samples, not all alike as in the paper.
"""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class PerFedAvgSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of Per-FedAvg."""

    alpha: float = setting(
        0.01,
        "learning rate of the adaptation, in training and in evaluation",
        minimum=0,
        search=Search(0.001, 0.2, log=True),
    )
    hessian: str = setting(
        "fo",
        "product with the Hessian in the meta-gradient: left out (`fo`), or a difference of gradients (`hf`)",
        choices=("fo", "hf"),
    )
    hessian_delta: float = setting(0.001, "`hf`: step of the difference, in units of the gradient", above=0)
    steps: int = setting(1, "SGD steps of adaptation that make the local model", minimum=1, search=Search(1, 10))
