"""The Flower strategy that all methods share: FedAvg, with hooks that a method overrides.

A method's strategy stores the server's state as arrays. It returns the arrays for a client (``serve``) and changes the
state with the replies (``aggregate``). Cohorts, messages, checks of replies, privacy and failures are in
:mod:`posy.strategies.rounds` and :mod:`posy.strategies.exchange`; a method does not see them.
"""

from collections.abc import Callable, Iterable
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from posy.extensions import word_of
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.randomness import model_seed
from posy.settings import SettingsError
from posy.strategies import schedule
from posy.strategies.arrays import Arrays
from posy.strategies.cohorts import members_of, newcomers_of, takes_all
from posy.strategies.exchange import Exchange
from posy.strategies.influence import Influence
from posy.strategies.newcomers import NewcomerPhase
from posy.strategies.replies import (
    ClientInfo,
    RoundRecord,
    Update,
    num_examples,
    stacked,
    unlimited_weights,
    weighted_mean,
)
from posy.strategies.rounds import Rounds
from posy.strategies.server_state import check_state
from posy.strategies.settings import MethodSettings, Settings


class PersonalisedStrategy(Strategy):
    """Base of all strategies.

    A method overrides the hooks between :meth:`initialise` and :meth:`lost`, and may call :meth:`mean`,
    :meth:`initial` and :meth:`restart_clients`.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    plain : Architecture
        The network of the run, before the method changes it.

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
        The clients that have a node, by index.
    members, newcomers : list of int, tuple of int
        The clients from which cohorts are drawn, and the clients that join only after the last round.
    record : RoundRecord
        The record of the round.
    """

    state: ClassVar[tuple[str, ...]] = ("model",)
    """Names of the attributes, all arrays, that later rounds and the pictures need.

    :meth:`initialise` fixes their shapes. Only an array without rows may grow rows.
    """
    resized: ClassVar[frozenset[str]] = frozenset()
    """Names in ``state`` of the arrays whose shape changes during a run."""
    sums_samples: ClassVar[bool] = False
    """Whether :meth:`aggregate` sums over samples, regardless of ``client-weights``."""
    newcomer_phase: ClassVar[type[NewcomerPhase]] = NewcomerPhase
    """The phase in which newcomers join after the last round."""
    method: MethodSettings
    model: FloatArray

    def __init__(self, settings: Settings, plain: Architecture) -> None:
        self.settings = settings
        self.method = settings.method
        self.num_clients = settings.data.num_clients
        self.architecture: Architecture = self.method.network(plain, self.num_clients)
        self.shared = self.architecture.divided(self.method.personal(self.architecture))[0]
        if not self.shared.size:
            raise _nothing_shared(settings, plain)
        self.size = self.architecture.layout.size
        self.clients: dict[int, ClientInfo] = {}
        self.newcomers = newcomers_of(settings)
        self.members = list(members_of(settings))
        self.newcomer_rows: dict[int, dict[str, Any]] = {}
        """Scores of the newcomers, by client."""
        self.record = RoundRecord(0)
        self.resumed_after = 0
        """Rounds that were finished before this process resumed the run."""
        self.dp_clip = np.array([settings.train.dp_clip])
        """The norm to which clients clip their updates in the next round; adaptive clipping changes it."""
        self.class_counts: npt.NDArray[np.int64] | None = None
        """Training samples by client and class ``(M, C)``, for the pictures. None if the server has no partition."""
        self.exchange = Exchange(self)
        self.influence = Influence(self)
        self.rounds = Rounds(self)
        self.initialise()
        check_state(self)

    # -- hooks of a method: by default FedAvg over the shared layers -----------------------------------

    def initialise(self) -> None:
        """Set up the server's state: the initial model, and zeros in its shape for the other arrays of ``state``."""
        self.model = np.ascontiguousarray(self.shared.take(self.initial()))
        for name in self.state:
            if name != "model" and not hasattr(self, name):
                setattr(self, name, np.zeros_like(self.model))

    def serve(self, client: int) -> Arrays:
        """Return the arrays for a client by name; nothing may write to them afterwards.

        By default these are the attributes that the settings' ``sent`` names.
        """
        return {name: getattr(self, name) for name in self.method.sent}

    def returns(self, server_round: int, client: int) -> tuple[str, ...]:
        """Return the names of the arrays in a client's reply; by default all that the settings' ``returned`` names."""
        return tuple(self.method.returned)

    def check(self, client: int, arrays: Arrays) -> None:
        """Raise :class:`BadReplyError` for arrays of the right shapes with values that the method cannot use."""

    def reference(self, client: int, arrays: Arrays) -> Arrays:
        """Return the value from which a client has changed each array of its reply.

        The default calls the settings' ``reference``, so that server and client agree.
        """
        reference: Arrays = self.method.reference(self.architecture, self.serve(client), arrays)
        return reference

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Change the server's state and return the method's quantities for the record.

        ``updates`` is never empty. It is sorted by client, so that sums do not depend on the order of arrival.
        """
        self.model = self.mean(updates)
        return {}

    def mean_weights(self, updates: list[Update]) -> npt.NDArray[np.float64]:
        """Return the clients' weights in the server's mean ``(M,)``, before ``max-client-weight`` limits them."""
        return unlimited_weights(updates)

    def trains_all(self, server_round: int) -> bool:
        """Return whether all clients train in a round, regardless of ``fraction-train``."""
        return takes_all(self.settings.run, server_round)

    def train_config(self, server_round: int, client: int) -> dict[str, Any]:
        """Return further config entries of a message to a client.

        With ``uniform-weights`` true, all clients have the weight 1 in the mean of the round.
        """
        return {}

    def lost(self, clients: list[int]) -> None:
        """Update the server's state at the end of a phase in which clients have lost their states."""

    # -- helpers for methods ---------------------------------------------------------------------------

    def mean(self, updates: list[Update], name: str = "model") -> FloatArray:
        """Return the combination of the clients' models by the rule of the setting ``robust``.

        Parameters
        ----------
        updates : list of Update
            Updates of clients that started from the same model.
        name : str
            The name of the array.
        """
        models, weights = stacked(updates, name), num_examples(updates)
        if self.influence.rule is None:
            return weighted_mean(models, weights)
        start = self.serve(updates[0].client)[name]
        combined: FloatArray = self.influence.combine(models, start, weights, [update.client for update in updates])
        return combined

    def initial(self, number: int = 0) -> FloatArray:
        """Return freshly initialised parameters ``(d,)`` of one of several models."""
        return self.architecture.initial(model_seed(self.settings.run.seed, number))

    def restart_clients(self) -> None:
        """Let all clients start without their states."""
        self.exchange.states.versions = {}

    # -- Flower's Strategy -----------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the configuration of the strategy."""
        run, train = self.settings.run, self.settings.train
        log(INFO, "\t├──> Network: %s, %s parameters", self.architecture.model, f"{self.size:,}")
        log(INFO, "\t├──> Clients: %s, of which %.0f %% train in a round", self.num_clients, 100 * run.fraction_train)
        length = f"{train.local_steps} steps" if train.local_steps else f"{train.local_epochs} epoch(s)"
        log(INFO, "\t├──> Local training: %s, batch %s, lr %g", length, train.batch_size, train.lr)
        log(INFO, "\t└──> Method: %s", self.method)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds from ``resumed_after`` + 1 to ``num_rounds``.

        Flower's ``Strategy.start`` has the same phases and arguments, but always begins with round 1.
        """
        method = word_of(self.settings.run.method)
        log(INFO, "Starting %s: rounds %s to %s", method, self.resumed_after + 1, num_rounds)
        self.summary()
        for notice in self.method.notices(self.settings, self.architecture):
            log(WARNING, "%s: %s", method, notice)
        for notice in schedule.notices(self.settings, num_rounds, self.rounds.cohort):
            log(WARNING, "%s", notice)
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn and not self.resumed_after and (central := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = central
        for server_round in range(self.resumed_after + 1, num_rounds + 1):
            log(INFO, "")
            log(INFO, "[ROUND %s/%s]", server_round, num_rounds)
            messages = self.configure_train(server_round, arrays, train_config, grid)
            _, metrics = self.aggregate_train(server_round, grid.send_and_receive(messages, timeout=timeout))
            messages = self.configure_evaluate(server_round, arrays, evaluate_config, grid)
            scores = self.aggregate_evaluate(server_round, grid.send_and_receive(messages, timeout=timeout))
            central = evaluate_fn(server_round, arrays) if evaluate_fn else None
            for history, values in (
                (result.train_metrics_clientapp, metrics),
                (result.evaluate_metrics_clientapp, scores),
                (result.evaluate_metrics_serverapp, central),
            ):
                if values is not None:
                    history[server_round] = values
        if self.newcomers:
            self.newcomer_phase(self).run(num_rounds, train_config, evaluate_config, grid, timeout)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return one message for each client of the round's cohort."""
        return self.rounds.configure_train(server_round, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, aggregate the accepted updates, and record the round."""
        return self.rounds.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """Return a message to every member with the arrays that it is served now, if the round is evaluated."""
        return self.rounds.configure_evaluate(server_round, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record each client's scores."""
        return self.rounds.aggregate_evaluate(server_round, replies)


def _nothing_shared(settings: Settings, plain: Architecture) -> SettingsError:
    """Return the error of a run whose method keeps all layers on the clients."""
    method, layers = word_of(settings.run.method), getattr(settings.method, "layers", None)
    lower = "" if layers is None else f", or lower {method}-layers = {layers}"
    return SettingsError(
        f"model = {plain.model!r}: {method} keeps all its layers on the clients, so nothing is left to share; "
        f"choose a network with more layers{lower}"
    )
