"""Ditto (Li et al., 2021): a global model, and a personal one pulled towards it."""

from dataclasses import dataclass

from posy.settings import setting
from posy.strategies.base import SingleModelStrategy


@dataclass(frozen=True)
class DittoSettings:
    """Settings of Ditto."""

    strength: float = setting(0.1, "lambda: strength of the pull of the personal model", minimum=0)
    epochs: int = setting(0, "epochs on the personal model; 0: as many as on the global one", minimum=0)


class Ditto(SingleModelStrategy):
    """Average the global model as FedAvg does; `served` reports it, `local` the personal model."""
