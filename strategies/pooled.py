"""Pooled: one model is trained on the training samples of all clients, as if they were in one place.

Pooled training is the baseline that shows the cost of federation. In each round, the first client trains for
``local-epochs`` passes over all samples. The clients must share a file system, so sites cannot use it.
"""

from collections.abc import Mapping

from posy.strategies.settings import MethodSettings


class PooledSettings(MethodSettings, robust="one client trains the only model", point="served"):
    """Settings of pooled training, which has only the shared settings."""

    pools_data = True

    def refusals(self) -> Mapping[str, str]:
        """Reject settings that concern several trained models, or that protect clients' data from the server."""
        one_model = "only one client trains, on the data of all clients"
        return {
            "client-bounds": one_model,
            "client-settings": one_model,
            "client-weights": one_model,
            "evaluate-training": "the training samples do not belong to individual clients",
            "fraction-train": one_model,
            "holdout-clients": one_model,
            "max-client-weight": one_model,
            "max-norm-ratio": one_model,
            "min-train-replies": one_model,
            "dp": "the data of all clients is in one place",
            "secure-aggregation": "the data of all clients is in one place",
        }
