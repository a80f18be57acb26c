"""A Flower grid inside the ServerApp's own process: the same messages, clients and state, no transport."""

import time
from collections.abc import Iterable
from logging import ERROR
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from client_app.app import answer
from client_app.app import app as client_app
from posy.state import StateStore


class InProcessGrid(Grid):
    """Delivers messages to virtual clients in this process, one after the other.

    Parameters
    ----------
    num_clients : int
        Number of virtual nodes, each with one client.
    """

    def __init__(self, num_clients: int) -> None:
        try:
            run_id = TaskIdentity.run_id
        except RuntimeError:  # not started by Flower: messages need an identity all the same
            TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = run_id = 0
        self._contexts = {
            node: Context(
                run_id=run_id,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": num_clients},
                state=RecordDict(),
                run_config={},
            )
            for node in range(1, num_clients + 1)
        }
        self._replies: dict[str, Message] = {}
        self.states: StateStore | None = None
        """Where the clients' states are kept; None: in the contexts of their nodes."""

    def get_node_ids(self) -> Iterable[int]:
        """Return the virtual nodes 1..M."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Let the clients answer the messages at once; replies wait to be pulled."""
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid4())
            self._replies[message.metadata.message_id] = self._answer(message)
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to some messages."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push messages and return the replies; after ``timeout`` seconds no further client is asked."""
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        replies: list[Message] = []
        for message in messages:
            if time.monotonic() >= end:
                break
            replies += self.pull_messages(self.push_messages([message]))
        return replies

    def _answer(self, message: Message) -> Message:
        try:
            if self.states is None or message.metadata.message_type == MessageType.QUERY:
                reply = client_app(message, self._contexts[message.metadata.dst_node_id])
            else:
                reply = answer(message, self.states)
        except Exception as error:  # whatever a client raises is its reply, as on a real node
            log(ERROR, "client on node %s: %r", message.metadata.dst_node_id, error)
            reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, repr(error)), reply_to=message)
        reply.metadata.__dict__["_message_id"] = str(uuid4())
        return reply

    def set_run(self, run: Any) -> None:
        """Ignore the run: there is one."""

    @property
    def run(self) -> Any:
        """No run information."""
        raise NotImplementedError("the in-process grid belongs to no run of a SuperLink")

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Create a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)
