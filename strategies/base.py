"""The Flower strategy that all methods share: FedAvg, with hooks that a method overrides.

A method's strategy stores the server's state as arrays. It returns the arrays to send to a client (``serve``) and
updates the state from the replies (``aggregate``). :mod:`posy.strategies.rounds` and :mod:`posy.strategies.exchange`
handle cohorts, messages, reply checks, privacy and failures, so that a method does not have to.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from logging import INFO, WARNING
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from posy.extensions import key_prefix
from posy.models.architecture import Architecture
from posy.models.parameters import FloatArray
from posy.settings import SettingsError
from posy.strategies import schedule
from posy.strategies.client_settings import method_notices, settings_in
from posy.strategies.cohorts import members_of, newcomers_of
from posy.strategies.exchange import Exchange
from posy.strategies.hooks import ServerHooks
from posy.strategies.influence import Influence
from posy.strategies.newcomers import NewcomerPhase
from posy.strategies.replies import (
    ClientInfo,
    Update,
    stacked,
    weighted_mean,
)
from posy.strategies.rounds import Rounds
from posy.strategies.server_state import check_state
from posy.strategies.settings import Settings
from posy.words import title


class PersonalisedStrategy(ServerHooks, Strategy):
    """Base class of all strategies.

    A method can override the hooks of :class:`ServerHooks`, and call :meth:`mean`, :meth:`initial` and
    :meth:`restart_clients`.

    Parameters
    ----------
    settings : Settings
        The settings of the run.
    plain : Architecture
        The network of the run, before the method changes it.

    """

    newcomer_phase: ClassVar[type[NewcomerPhase]] = NewcomerPhase
    """The phase in which newcomers join after the last round."""

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
        super().__init__()
        self.exchange = Exchange(self)
        self.influence = Influence(self)
        self.rounds = Rounds(self, self.exchange, self.influence)
        self.initialise()
        check_state(self)

    # -- the default rule, and helpers for methods -------------------------------------------------------

    def aggregate(self, server_round: int, updates: list[Update]) -> dict[str, Any]:
        """Update the server's state, and return the method's metrics for the round's record.

        ``updates`` is never empty, and is sorted by client, so that sums do not depend on the order of arrival.
        """
        self.model = self.mean(updates)
        return {}

    def mean(self, updates: list[Update], name: str = "model") -> FloatArray:
        """Combine the clients' models into one model ``(d,)`` with the rule that the setting ``robust`` selects.

        Parameters
        ----------
        updates : list of Update
            Updates of clients that started from the same model.
        name : str
            The name of the array to combine.
        """
        models, weights = stacked(updates, name), self.limited_weights(updates)
        if self.influence.rule is None:
            return weighted_mean(models, weights)
        start = self.serve(updates[0].client)[name]
        combined: FloatArray = self.influence.combine(models, start, weights, [update.client for update in updates])
        return combined

    def restart_clients(self) -> None:
        """Make all clients restart without their stored states."""
        self.exchange.states.versions = {}

    # -- Flower's Strategy -----------------------------------------------------------------------------

    def summary(self) -> None:
        """Log the strategy's configuration."""
        run, train = self.settings.run, self.settings.train
        log(INFO, "\t├──> Network: %s, %s parameters", self.architecture.model, f"{self.size:,}")
        log(INFO, "\t├──> Clients: %s; %.0f %% of them train in a round", self.num_clients, 100 * run.fraction_train)
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
        """Run the rounds from ``resumed_after`` + 1 to ``num_rounds``, or to the round that :meth:`end_after` sets.

        Flower's ``Strategy.start`` has the same phases and arguments, but always begins with round 1.
        """
        method = key_prefix(self.settings.run.method)
        log(INFO, "Starting %s: rounds %s to %s", method, self.resumed_after + 1, num_rounds)
        self.summary()
        chosen = {
            f"node config of {title(client, info.name)}": settings_in(info.node_settings)
            for client, info in sorted(self.clients.items())
        }
        for notice in method_notices(self.settings, self.architecture, chosen):
            log(WARNING, "%s: %s", method, notice)
        for notice in schedule.notices(self.settings, num_rounds, self.rounds.cohort):
            log(WARNING, "%s", notice)
        train_config, evaluate_config = train_config or ConfigRecord(), evaluate_config or ConfigRecord()
        result, arrays = Result(), initial_arrays
        if evaluate_fn and not self.resumed_after and (central := evaluate_fn(0, arrays)) is not None:
            result.evaluate_metrics_serverapp[0] = central
        server_round = self.resumed_after
        while server_round < min(num_rounds, self.settings.run.num_server_rounds):
            server_round += 1
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
            self.newcomer_phase(self, self.exchange, self.rounds).run(
                server_round, train_config, evaluate_config, grid, timeout
            )
        return result

    def end_after(self, server_round: int) -> None:
        """End the run after a round, as if ``num-server-rounds`` were this round. Clients keep the run's settings."""
        settings = replace(self.settings, run=replace(self.settings.run, num_server_rounds=server_round))
        self.settings = self.exchange.settings = self.rounds.settings = settings
        if self.rounds.secure:
            self.rounds.secure.settings = settings

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
        """Return an evaluation message for every member that has joined, or none if the round has no evaluation."""
        return self.rounds.configure_evaluate(server_round, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Record the clients' scores, and return the mean served accuracy."""
        return self.rounds.aggregate_evaluate(server_round, replies)


def _nothing_shared(settings: Settings, plain: Architecture) -> SettingsError:
    """Return the error for a run whose method keeps all layers on the clients."""
    method, layers = key_prefix(settings.run.method), getattr(settings.method, "layers", None)
    lower = "" if layers is None else f", or lower {method}-layers = {layers}"
    return SettingsError(
        f"model = {plain.model!r}: {method} keeps all its layers on the clients, so nothing is left to share; "
        f"choose a network with more layers{lower}"
    )
