"""FedRep (Collins et al., 2021): a shared body and personal heads (Algorithm 1)."""

from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedRepSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedRep."""

    head_epochs: int = setting(
        1,
        "epochs on the head, before `local-epochs` on the body; with `local-steps` both take as many steps",
        minimum=1,
        search=Search(1, 10),
    )

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the head."""
        return ("head",)
