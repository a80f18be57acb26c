"""FedUV (Son et al., 2024): two regularisers let clients train as if their data were IID.

The classifier's probabilities are to vary over a mini-batch as those of evenly mixed classes would, and the features to
lie evenly. The server is FedAvg's.
"""

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings


class FedUVSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED, point="served"):
    """Settings of FedUV."""

    variance: float = setting(
        2.5,
        "mu: strength of the regulariser of the classifier's variance",
        minimum=0,
        search=Search(0.05, 5.0, log=True),
    )
    uniformity: float = setting(
        0.5, "lambda: strength of that of the features' uniformity", minimum=0, search=Search(0.01, 5.0, log=True)
    )
