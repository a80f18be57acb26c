"""FedCP (Zhang et al., 2023): a policy divides each sample's features between a personal and a global head.

Body, policy and global head are shared, the personal head stays. A client holds the global head fixed and sends the
mean of both heads in its place. Its features are kept near those of the served body by their maximum mean discrepancy,
with the kernels of the authors' program. The program draws the policy's shares at random (Gumbel-softmax); here they
are the softmax itself. v, by which the policy knows the client, is that of the head as it is now, not as it was when
the round began.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from posy.settings import Search, setting
from posy.strategies.method_settings import ALLOWED, MethodSettings

if TYPE_CHECKING:
    from posy.models.architecture import Architecture


class FedCPSettings(MethodSettings, noise=ALLOWED, sums=ALLOWED):
    """Settings of FedCP."""

    strength: float = setting(
        5.0,
        "lambda: weight of the discrepancy to the served body's features",
        minimum=0,
        search=Search(0.1, 20.0, log=True),
    )

    def network(self, plain: "Architecture", num_clients: int) -> "Architecture":
        """Add the policy and the global head."""
        return replace(plain, conditional=True)

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Keep the personal head."""
        return ("head",)
