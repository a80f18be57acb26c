"""FedAvg (McMahan et al., 2017): one model, averaged with weights n_i / N."""

from dataclasses import dataclass

from posy.strategies.base import SingleModelStrategy


@dataclass(frozen=True)
class FedAvgSettings:
    """FedAvg has no settings of its own."""


class FedAvg(SingleModelStrategy):
    """Send one model, average what comes back by the number of training samples."""
