"""Collect labels and statistics of the sites' data with secure aggregation, before the first round."""

from collections.abc import Callable, Mapping
from functools import partial
from logging import WARNING
from typing import Any

import numpy as np
import numpy.typing as npt
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log

from posy.data.agreement import open_encoder, open_values, statistics_count
from posy.data.columns import names_in
from posy.data.pooled import Pooled, count_of, pooled
from posy.flower import failure, record_in
from posy.server_app.grids import WaveGrid
from posy.settings import SettingsError
from posy.strategies.masking import LIMBS
from posy.strategies.replies import UNREADABLE, BadReplyError, client_of
from posy.strategies.secure_aggregation import STATISTICS, Answer, SecureRound, common_digest
from posy.strategies.settings import Settings
from posy.words import one_line

ROUND = f"0-0-{STATISTICS}"
"""Name of the secure round. A site takes part in this round only once per run."""
MAX_REASON = 500


def pooled_statistics(grid: WaveGrid, settings: Settings, nodes: Mapping[int, int], names: Mapping[int, str]) -> Pooled:
    """Return labels and statistics over all sites without learning the values of any individual site.

    Parameters
    ----------
    grid : WaveGrid
        The grid.
    settings : Settings
        The settings, including the kind, shape and columns of the samples.
    nodes, names : mapping
        Flower's id for each client's node, and the name of each client's site.

    Raises
    ------
    SettingsError
        If too few sites reply, or their sum cannot be unmasked.
    """
    sites = SiteQueries(grid, nodes, names, settings.run.timeout)
    values = len(names_in("classes", settings.data.classes)) if open_values(settings.data) else 0
    features = statistics_count(settings.data)
    parts = {"classes": not settings.data.classes, "table": open_encoder(settings.data, settings.data.sample_kind)}
    numbers = count_of(features, values, **parts)
    secure = SecureRound(ROUND, settings.run, dict.fromkeys(nodes, 1), sites.ask, sites.drop)
    message = {"settings": settings.to_json(), "server-round": 0}
    requests = {client: {**message, **entries} for client, entries in secure.opened().items()}
    answers = sites.ask(STATISTICS, requests, partial(_check_statistics, numbers=numbers))
    masked = {client: _words(answer) for client, answer in answers.items()}
    total = None
    if masked:
        config = {"secure-stage": STATISTICS, **requests[min(masked)]}
        total = secure.unmasked(masked, common_digest(config, []), numbers)
    if total is None:
        raise SettingsError(
            f"secure-aggregation = true: the sites' statistics could not be summed: {secure.refusal or 'no answer'}; "
            "start the run again, or set classes, feature-mean and feature-std, and target-mean and target-std"
        )
    return pooled(total[1], features, values, **parts)


class SiteQueries:
    """Exchanges the messages of the secure round with the sites.

    Parameters
    ----------
    grid : WaveGrid
        The grid.
    nodes, names : mapping
        Flower's id for each client's node, and the name of each client's site.
    timeout : float or None
        Seconds to wait for the replies in a stage, or None for no limit.
    """

    def __init__(
        self, grid: WaveGrid, nodes: Mapping[int, int], names: Mapping[int, str], timeout: float | None
    ) -> None:
        self._grid = grid
        self._nodes = nodes
        self._names = names
        self._timeout = timeout

    def ask(
        self, stage: str, requests: Mapping[int, Mapping[str, Any]], check: Callable[[int, Answer], None]
    ) -> dict[int, Answer]:
        """Send a stage's requests to the clients, and return the replies that ``check`` accepts."""
        config = {"secure-round": ROUND, "secure-stage": stage}
        messages = [
            Message(
                RecordDict({"config": ConfigRecord({"client": client, **config, **entries})}),
                dst_node_id=self._nodes[client],
                message_type=MessageType.QUERY,
            )
            for client, entries in requests.items()
        ]
        answers = {}
        replies = self._grid.send_and_receive(messages, timeout=self._timeout)
        # The SuperLink itself replies for a lost node, so only the message id identifies the client.
        clients = {message.metadata.message_id: client_of(message) for message in messages}
        for reply in replies:
            client = clients[reply.metadata.reply_to_message_id]
            try:
                if reply.has_error():
                    raise BadReplyError(failure(reply.error))
                answer: Any = record_in(reply.content, "config", ConfigRecord)["answer"]
                check(client, answer)
                answers[client] = answer
            except UNREADABLE as error:
                self.drop(client, str(error) if isinstance(error, BadReplyError) else f"malformed reply: {error!r}")
        return dict(sorted(answers.items()))

    def drop(self, client: int, reason: str) -> None:
        """Log that a client does not take part in the statistics."""
        log(WARNING, "%s does not contribute statistics: %s", self._names[client], one_line(reason, MAX_REASON))


def _check_statistics(client: int, answer: Answer, *, numbers: int) -> None:
    """Raise :class:`BadReplyError` unless a reply contains the masked words of ``numbers`` integers."""
    if not isinstance(answer, list) or [type(text) for text in answer] != [bytes]:
        raise BadReplyError("the statistics are not a single byte string")
    if len(answer[0]) != 4 * (1 + LIMBS * numbers):
        raise BadReplyError(f"the statistics have {len(answer[0])} bytes instead of {4 * (1 + LIMBS * numbers)}")


def _words(answer: Answer) -> npt.NDArray[np.uint32]:
    return np.frombuffer(answer[0], "<u4").astype(np.uint32)
