"""The phase after the last round, in which clients that have never trained join the run."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, MessageType
from flwr.serverapp import Grid

from posy.strategies import schedule
from posy.strategies.exchange import Exchange
from posy.strategies.hooks import ServerHooks
from posy.strategies.replies import read_metrics, scores_of
from posy.strategies.rounds import Rounds
from posy.strategies.run_settings import ALL_METRICS


class NewcomerPhase:
    """The phase in which each newcomer evaluates the served model, and trains once without aggregation.

    Parameters
    ----------
    strategy : ServerHooks
        The strategy of the run.
    exchange, rounds : Exchange, Rounds
        The objects that exchange the messages and run the phases of the rounds.
    """

    def __init__(self, strategy: ServerHooks, exchange: Exchange, rounds: Rounds) -> None:
        self.strategy = strategy
        self.exchange = exchange
        self.rounds = rounds

    def run(
        self, server_round: int, train_config: ConfigRecord, evaluate_config: ConfigRecord, grid: Grid, timeout: float
    ) -> None:
        """Run the phase, and write the scores into the strategy's ``newcomer_rows``."""
        strategy, exchange = self.strategy, self.exchange
        last = strategy.record
        exchange.begin_round(server_round)
        present = [client for client in strategy.newcomers if client in strategy.clients]
        all_metrics = schedule.all_metrics_of(strategy.settings) != "none"

        def accept(client: int, metrics: Mapping[str, Any]) -> None:
            row = strategy.newcomer_rows.setdefault(client, {"n_train": strategy.clients[client].num_train})
            row |= self.rounds.recorded(scores_of(metrics))

        for kind, config, flag in (
            (MessageType.EVALUATE, evaluate_config, "evaluate-personal"),
            (MessageType.TRAIN, train_config, "evaluate-local"),
        ):
            if kind == MessageType.TRAIN:
                self.rounds.before_training(server_round, present)
            flags = {client: {flag: True, ALL_METRICS: all_metrics} for client in present}
            messages = exchange.messages(kind, server_round, config, flags)
            exchange.collect(grid.send_and_receive(messages, timeout=timeout), lambda client: read_metrics, accept)
            exchange.report_lost()
        strategy.record = last
