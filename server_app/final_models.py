"""Deliver the final models of a completed run to clients that were absent at its end."""

from logging import INFO

from flwr.app import ConfigRecord, MessageType
from flwr.common.logger import log

from posy.server_app.checkpoints import Resumption
from posy.server_app.federation import Federation
from posy.server_app.grids import WaveGrid
from posy.server_app.progress import WITHOUT_MODEL_TITLE
from posy.server_app.record import Record
from posy.server_app.results import RunDirectory
from posy.server_app.resume import WITHOUT_MODEL, read_summary
from posy.settings import RunError
from posy.strategies import schedule
from posy.strategies.base import PersonalisedStrategy
from posy.strategies.run_settings import ALL_METRICS, DELIVERY
from posy.words import title


class Delivery:
    """The delivery of a completed run's final models. It changes no result of the run.

    A client receives the message of the last round's evaluation. It stores its model with its scores, keeps its state,
    and replies without scores.

    Parameters
    ----------
    resumed : Resumption
        The run, with the clients that lack its final model.
    strategy : PersonalisedStrategy
        The strategy with the run's final state.
    federation : Federation
        The run's clients.
    """

    def __init__(self, resumed: Resumption, strategy: PersonalisedStrategy, federation: Federation) -> None:
        self.directory: RunDirectory = resumed.directory
        self._strategy, self._federation = strategy, federation
        self.settings = strategy.settings
        self._clients, self._last_round = resumed.deliver_to, resumed.checkpoint.server_round
        strategy.end_after(self._last_round)
        exchange = strategy.exchange
        exchange.models_folder = self.directory.models
        if strategy.settings.run.save_predictions:
            exchange.predictions_folder = self.directory.predictions
        states = exchange.states
        states.attempt, states.versions = len(resumed.history), resumed.checkpoint.versions
        states.needed = [*resumed.checkpoints.versions.values()]
        states.folders["run"] = f"{self.directory.path.name}-{self.directory.id}"

    def run(self, grid: WaveGrid, *, one_file_system: bool) -> None:
        """Send the models to the clients that are connected, and update the list of clients in ``summary.json``.

        ``one_file_system`` states whether the run's directory contains the clients' states.

        Raises
        ------
        RunError
            If no client has accepted its model.
        """
        strategy, exchange, number = self._strategy, self._strategy.exchange, self._last_round
        log(INFO, "Results of this run: %s", self.directory.path)
        if one_file_system:
            exchange.states.folders["state-directory"] = str(self.directory.state)
        exchange.begin_round(number)
        all_metrics = schedule.reports_all_metrics(strategy.settings, number)
        entries = {"evaluate-personal": True, ALL_METRICS: all_metrics, DELIVERY: True}
        present = [client for client in self._clients if client in strategy.clients]
        messages = exchange.messages(MessageType.EVALUATE, number, ConfigRecord(), dict.fromkeys(present, entries))
        replies = grid.send_and_receive(messages, timeout=strategy.settings.run.timeout)
        delivered = exchange.collect(replies, lambda client: lambda content: None, lambda client, _: client)
        remaining = [client for client in self._clients if client not in delivered]
        summary = read_summary(self.directory.path)
        self.directory.write_summary({**summary, WITHOUT_MODEL: remaining})
        if delivered:
            print(f"final models of round {number} delivered to {self._titles(sorted(delivered))}", flush=True)
        if remaining:
            print(f"{WITHOUT_MODEL_TITLE}: {self._titles(remaining)}", flush=True)
        if not delivered:
            reasons = "; ".join(dict.fromkeys(reason for _, reason in strategy.record.dropped))
            raise RunError(f"no final model was delivered: {reasons}")

    def record(self) -> Record:
        """Return the record of the run."""
        return Record(self.directory.path, self._strategy)

    def _titles(self, clients: list[int]) -> str:
        owners, names = self._federation.owners, self._strategy.exchange.client_names
        return ", ".join(title(client, names.get(client, owners.get(client, ""))) for client in clients)
