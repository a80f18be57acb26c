"""The base of method settings, from which server and clients derive the same network, layers and references."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, dataclass_transform

from posy.settings import setting

if TYPE_CHECKING:  # settings are read without PyTorch
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt
    from flwr.common.typing import NDArrays
    from torch import Tensor

    from posy.models.architecture import Architecture
    from posy.strategies.card import MethodCard
    from posy.strategies.settings import Settings


class Refused(NamedTuple):
    """The verdict that a method does not support a feature, with the reason."""

    why: str


ALLOWED = None
"""The verdict that a method supports a feature."""
UNDECIDED = Refused("it does not say that the weighted mean of its clients' arrays is all that its server needs")
UNSAMPLED = Refused("it does not say that the gradients of single samples are all that its clients' arrays depend on")
NO_MEAN = Refused("it does not declare that its server step is a weighted mean of models")


def training_clients(settings: "Settings") -> int:
    """Return the number of clients that train in a run: all clients but the newcomers of ``holdout-clients``."""
    clients = settings.data.num_clients
    newcomers = max(1, round(settings.run.holdout_clients * clients)) if settings.run.holdout_clients else 0
    return clients - min(newcomers, clients - 1)


@dataclass_transform(frozen_default=True, field_specifiers=(setting,))
class MethodSettings:
    """Base of every method's settings: a subclass is a frozen dataclass whose fields are declared with ``setting``.

    A subclass must state whether the method supports the noise of differential privacy, for example
    ``class FedPerSettings(MethodSettings, noise=ALLOWED)``. With ``sums=ALLOWED`` it states that its server needs only
    the weighted mean of the clients' arrays, and with ``dp_sgd=ALLOWED`` that DP-SGD protects all that they send. With
    ``robust=ALLOWED`` it states that its server combines whole models by
    :meth:`~posy.strategies.base.PersonalisedStrategy.mean` only. Server and clients both call the methods below.
    """

    noise: ClassVar[Refused | None]
    """Why the method does not support noise on a client's update (``dp = local``); :data:`ALLOWED` if it does. All
    arrays of a reply then have a reference, so that no array is sent without noise."""
    sums: ClassVar[Refused | None]
    """Why the method does not support secure aggregation; :data:`ALLOWED` if it does. It then serves the same arrays
    to all clients of a round, and its server needs only the weighted mean of their arrays."""
    routes: ClassVar[bool] = False
    """Whether :meth:`client_scores` chooses the client that answers a query; otherwise the clients' models vote."""
    per_client: ClassVar[frozenset[str]] = frozenset()
    """Entries of ``train_config`` that differ between the clients of a round. With secure aggregation all other entries
    must be the same, or the masks do not cancel."""
    dp_sgd: ClassVar[Refused | None]
    """Why the method does not support DP-SGD (``dp = sample``); :data:`ALLOWED` if it does. A client's arrays then
    depend on its data only through one local training whose objective is a mean over samples."""
    robust: ClassVar[Refused | None]
    """Why another rule cannot replace the server's mean (setting ``robust``); :data:`ALLOWED` if it can. All clients
    then start from one model, and the server uses their models in the rule only."""
    point: ClassVar[str] = "local"
    """The model that clients predict with: ``served``, or ``local`` if a client first trains the served model."""

    class_statistics: ClassVar[bool] = False
    """Whether clients send statistics of each class, such as mean features; a site refuses them for rare classes."""
    card: "ClassVar[MethodCard | None]" = None
    """The facts of the method's documentation page; None for a custom method without a page."""

    def __init_subclass__(
        cls,
        *,
        noise: Refused | None,
        sums: Refused | None = UNDECIDED,
        dp_sgd: Refused | None = UNSAMPLED,
        robust: Refused | None = NO_MEAN,
        point: Literal["served", "local"] = "local",
    ) -> None:
        """Make the subclass a frozen dataclass."""
        cls.noise, cls.sums, cls.dp_sgd, cls.robust, cls.point = noise, sums, dp_sgd, robust, point
        dataclass(frozen=True)(cls)

    @classmethod
    def refused_privacy(cls, mode: str) -> Refused | None:
        """Return why the method does not support a mode of the setting ``dp``; :data:`ALLOWED` if it does.

        ``central`` needs what local noise and secure aggregation need: an update that noise does not spoil, and a
        server that works with the mean of all updates.
        """
        verdicts = {"off": ALLOWED, "local": cls.noise, "central": cls.noise or cls.sums, "sample": cls.dp_sgd}
        return verdicts[mode]

    @property
    def follows_number_of_rounds(self) -> bool:
        """Whether the method's schedule depends on ``num-server-rounds``, which then cannot change on resuming."""
        return False

    @property
    def sums_logarithms(self) -> bool:
        """Whether an ensemble sums log-probabilities instead of probabilities."""
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
        """Return the network that clients train; by default the plain network of the run."""
        return plain

    def client_scores(self, outputs: "Tensor", weights: "npt.NDArray[np.float64]") -> "Tensor":
        """Return the scores ``(n, M)`` whose largest entry is the client that answers a query; with :attr:`routes`.

        Parameters
        ----------
        outputs : Tensor, (n, M)
            The second output of the network that all clients share.
        weights : numpy.ndarray, (M,)
            The weights of the clients in the server's mean.
        """
        raise NotImplementedError

    def personal(self, network: "Architecture") -> tuple[str, ...]:
        """Return the names of the layers or single tensors that stay on the client; by default none."""
        return ()

    def reference(self, network: "Architecture", sent: "NDArrays", reply: "NDArrays") -> "NDArrays":
        """Return the references of the first arrays of a reply; its further arrays are not models.

        The update is the difference between these arrays and their references. ``max-update-norm`` and
        ``max-norm-ratio`` limit its norm, and ``dp`` clips it and adds noise.

        Parameters
        ----------
        network : Architecture
            The network that clients train.
        sent : list of numpy.ndarray
            The arrays of the server's message, which are the default references.
        reply : list of numpy.ndarray
            The arrays of the reply, with checked shapes.
        """
        return sent
