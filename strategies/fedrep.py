"""FedRep (Collins et al., 2021): a shared body and personal heads."""

from dataclasses import dataclass

from posy.settings import setting
from posy.strategies.base import SingleModelStrategy


@dataclass(frozen=True)
class FedRepSettings:
    """Settings of FedRep."""

    head_epochs: int = setting(1, "epochs on the head, before `local-epochs` on the body", minimum=1)


class FedRep(SingleModelStrategy):
    """Average the body; the head stays with the client (Algorithm 1)."""

    def shared_layers(self) -> tuple[str, ...]:
        """Share all layers but the head."""
        return tuple(layer for layer in self.architecture.layout.layers if layer != "head")
