"""The server-side hooks of a method, and the attributes that they use."""

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray, Part
from posy.randomness import model_seed
from posy.strategies.arrays import Arrays
from posy.strategies.cohorts import takes_all
from posy.strategies.replies import ClientInfo, RoundRecord, Update, unlimited_weights
from posy.strategies.settings import MethodSettings, Settings


class ServerHooks:
    """The functions that a method may override on the server.

    Attributes
    ----------
    settings : Settings
        The settings of the run.
    method : MethodSettings
        The settings of the method.
    architecture : Architecture
        The network that clients train.
    shared : Part
        The part of the network's parameters that clients send and the server aggregates.
    size : int
        Number of parameters d of the network.
    num_clients : int
        Number of clients M.
    clients : dict of int to ClientInfo
        The clients that have a node, keyed by index.
    members, newcomers : list of int, tuple of int
        The clients from which cohorts are drawn, and the clients that join only after the last round.
    record : RoundRecord
        The record of the current round.
    """

    settings: Settings
    method: MethodSettings
    architecture: Architecture
    shared: Part
    size: int
    num_clients: int
    clients: dict[int, ClientInfo]
    members: list[int]
    newcomers: tuple[int, ...]
    record: RoundRecord
    model: FloatArray

    state: ClassVar[tuple[str, ...]] = ("model",)
    """Names of the array attributes that later rounds and the figures need.

    :meth:`initialise` fixes their shapes, but an initially empty array may gain rows (see also :attr:`resized`).
    """
    resized: ClassVar[frozenset[str]] = frozenset()
    """The names in ``state`` whose arrays change shape during a run."""
    sums_samples: ClassVar[bool] = False
    """Whether :meth:`aggregate` weights some arrays by number of samples, regardless of ``client-weights``."""

    def __init__(self) -> None:
        self.newcomer_rows: dict[int, dict[str, Any]] = {}
        """The newcomers' scores, keyed by client."""
        self.record = RoundRecord(0)
        self.resumed_after = 0
        """Number of rounds that were completed before this process resumed the run."""
        self.finished_in: list[int] = []
        """For each array in the list ``sent_once``, the round that completed it."""
        self.dp_clip = np.array([self.settings.train.dp_clip])
        """The norm to which clients clip their updates in the next round; adaptive clipping changes it."""
        self.class_counts: npt.NDArray[np.int64] | None = None
        """Number of training samples per client and class ``(M, C)``, for metrics and figures; None if unknown."""

    def initialise(self) -> None:
        """Set up the server's state: the initial model, and zeros of its shape for the other names in ``state``."""
        self.model = np.ascontiguousarray(self.shared.take(self.initial()))
        for name in self.state:
            if name != "model" and not hasattr(self, name):
                setattr(self, name, np.zeros_like(self.model))

    def serve(self, client: int) -> Arrays:
        """Return the arrays to send to a client, by name. The caller does not modify them afterwards.

        By default, these are the attributes whose names are in the settings' ``sent``.
        """
        return {name: getattr(self, name) for name in self.method.sent}

    def returns(self, server_round: int, client: int) -> tuple[str, ...]:
        """Return the names of the arrays in a client's reply; by default all names in the settings' ``returned``."""
        return tuple(self.method.returned)

    def check(self, client: int, arrays: Arrays) -> None:
        """Raise :class:`BadReplyError` for arrays whose shapes are right but whose values the method cannot use."""

    def reference(self, client: int, arrays: Arrays) -> Arrays:
        """Return the starting value of each array in a client's reply.

        The default calls the settings' ``reference``, so that server and client agree.
        """
        reference: Arrays = self.method.reference(self.architecture, self.serve(client), arrays)
        return reference

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Update the server's state, and return the method's metrics for the round's record.

        ``updates`` is never empty, and is sorted by client, so that sums do not depend on the order of arrival.
        """
        raise NotImplementedError

    def mean_weights(self, updates: list[Update]) -> npt.NDArray[np.float64]:
        """Return the clients' weights in :meth:`~posy.strategies.base.PersonalisedStrategy.mean` ``(M,)``.

        By default, these are the numbers of training samples, or 1 with ``client-weights=uniform``. Afterwards,
        ``max-client-weight`` limits each client's share. With secure aggregation, the clients weight their updates
        themselves. A method that overrides this function therefore declares ``sums`` with a reason.
        """
        return unlimited_weights(updates)

    def limited_weights(self, updates: list[Update]) -> npt.NDArray[np.float64]:
        """Return the weights of :meth:`mean_weights` after ``max-client-weight`` has limited each client's share."""
        return self.mean_weights(updates) * [update.weight_factor for update in updates]

    def trains_all(self, server_round: int) -> bool:
        """Return whether all clients train in a round, regardless of ``fraction-train``."""
        return takes_all(self.settings.run, server_round)

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return extra config entries for a client's training message.

        If the entry ``uniform-weights`` is true, every client has weight 1 in the round's mean.
        """
        return {}

    def lost(self, clients: list[int]) -> None:
        """Update the server's state after a phase in which some clients have lost their states."""

    def initial(self, number: int = 0) -> FloatArray:
        """Return the initial parameters ``(d,)`` of model ``number``, whose seed depends on this number."""
        return self.architecture.initial(model_seed(self.settings.run.seed, number))
