"""What server and clients of a method must agree on: its settings, and the facts that follow from them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, dataclass_transform

from posy.settings import setting

if TYPE_CHECKING:  # settings are read without PyTorch
    from collections.abc import Mapping

    from flwr.common.typing import NDArrays

    from posy.models.architecture import Architecture
    from posy.strategies.card import MethodCard
    from posy.strategies.settings import Settings


class Refused(NamedTuple):
    """The verdict that something does not go with a method, and why."""

    why: str


ALLOWED = None
"""The verdict that it does."""
UNDECIDED = Refused("it does not say that the weighted mean of its clients' arrays is all that its server needs")


@dataclass_transform(frozen_default=True, field_specifiers=(setting,))
class MethodSettings:
    """Base of every method's settings: a subclass is a frozen dataclass whose fields are declared with ``setting``.

    A subclass states whether the method can bear noise, ``class FedPerSettings(MethodSettings, noise=ALLOWED)``,
    or it does not load; and whether the weighted mean of the clients' arrays is all that its server needs of them,
    ``sums=ALLOWED``. Server and clients both read the methods below.
    """

    noise: ClassVar[Refused | None]
    """Why the method cannot bear the noise of local differential privacy; None (:data:`ALLOWED`) if it can."""
    sums: ClassVar[Refused | None]
    """Why the method needs single replies; None (:data:`ALLOWED`) if it can do with secure aggregation: all clients
    of a round are served the same arrays, and its server needs no more than the weighted mean of theirs."""
    point: ClassVar[str] = "local"
    """The evaluation point at which the method is meant to be used: ``served`` if its clients need no training of their
    own before they predict, else ``local``."""

    card: "ClassVar[MethodCard | None]" = None
    """The facts of the method's documentation page; a custom method may do without it."""

    def __init_subclass__(
        cls, *, noise: Refused | None, sums: Refused | None = UNDECIDED, point: Literal["served", "local"] = "local"
    ) -> None:
        """Make the subclass a frozen dataclass."""
        cls.noise, cls.sums, cls.point = noise, sums, point
        dataclass(frozen=True)(cls)

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether the method's schedule depends on ``num-server-rounds``, which then cannot change half-way."""
        return False

    @property
    def sums_logarithms(self) -> bool:
        """Whether of an ensemble's members the log-probabilities are summed, not the probabilities."""
        return False

    def refusals(self) -> "Mapping[str, str]":
        """Return the shared settings that must keep their defaults, by key, each with the reason.

        For example ``{"momentum": "c_i is a distance divided by the rate, which holds for plain SGD only"}``.
        """
        return {}

    def notices(self, settings: "Settings", network: "Architecture") -> "tuple[str, ...]":
        """Return warnings to log before round 1, for settings under which the method degenerates to another one."""
        return ()

    def network(self, plain: "Architecture", num_clients: int) -> "Architecture":
        """Return the network that is trained; by default the plain one of the run."""
        return plain

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Return the layers, or single tensors, that stay with the client; by default none."""
        return ()

    def reference(self, network: "Architecture", sent: "NDArrays", reply: "NDArrays") -> "NDArrays":
        """Return what the first arrays of a reply are changes of; its further arrays are no models.

        ``max-update-norm`` limits the norm of these changes, ``dp-clip`` clips them and adds noise.

        Parameters
        ----------
        network : Architecture
            The network that is trained.
        sent : list of numpy.ndarray
            What the client was sent: the default, for a reply of trained models.
        reply : list of numpy.ndarray
            What the client sends back, shapes checked.
        """
        return sent
