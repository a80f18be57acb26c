"""A Flower grid that runs the clients in the ServerApp's process, with the usual messages but no network."""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import uuid4

from flwr.app import Context, Error, Message, MessageType, RecordDict

from posy.client_app.app import Call
from posy.client_app.app import app as client_app
from posy.client_app.engine import Engine
from posy.client_app.state import StateStore
from posy.flower import ErrorCode, identity, with_id
from posy.mistakes import MethodError, is_failure
from posy.server_app.grids import PosyGrid


class InProcessGrid(PosyGrid):
    """Delivers messages to virtual nodes, each with one client, in this process. Arrays are passed by reference."""

    def __init__(self, num_clients: int) -> None:
        run_id = identity()
        self.contexts = {
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
        self._ids = map(f"{uuid4()}-{{}}".format, itertools.count(1))  # unique across grids
        self._engine: Engine | None = None
        self.on_trained: Callable[[int, int, float], object] | None = None
        """Called when a client has been trained, with the arguments of :meth:`Progress.note_trained`."""
        self.states: StateStore | None = None
        """Store for the clients' states. If None, each call chooses a store."""
        self.trusting = True
        """True because the clients run in the server's process, so the server may choose their folders."""

    def end(self) -> None:
        """Stop the engine that trains the clients. The next messages start a new one."""
        if self._engine is not None:
            self._engine.end()
            self._engine = None

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the virtual nodes, 1 to M."""
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients on the messages immediately, and store the replies until the server pulls them."""
        message_list = list(messages)
        self._replies |= {m.metadata.reply_to_message_id: m for m in self._answers(message_list, float("inf"))}
        return [message.metadata.message_id for message in message_list]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to the messages with these ids."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Run the clients and return their replies. No client starts after ``timeout`` seconds."""
        return self._answers(list(messages), time.monotonic() + timeout if timeout is not None else float("inf"))

    def _answers(self, messages: Sequence[Message], end: float) -> list[Message]:
        replies: dict[int, Message] = {}
        calls: dict[int, Call] = {}
        for number, message in enumerate(messages):
            with_id(message, next(self._ids))
            if time.monotonic() >= end:
                continue
            try:
                outcome = self._receive(message)
            except Exception as error:  # becomes an error reply, as on a real node
                outcome = _failure(message, error)
            if isinstance(outcome, Call):
                calls[number] = outcome
            else:
                replies[number] = outcome
        numbers, pending = list(calls), list(calls.values())
        note = self._counter(pending)

        def finish(index: int, result: Any) -> None:
            try:
                reply = pending[index].close(result)
            except Exception as error:
                reply = _failure(pending[index].message, error)
            replies[numbers[index]] = reply
            note(pending[index])

        if pending:
            if self._engine is None or self._engine.workspace is not pending[0].workspace:
                self._engine = Engine(pending[0].workspace)
            self._engine.run(pending, finish, end)
        for reply in replies.values():
            with_id(reply, next(self._ids))
        return [replies[number] for number in sorted(replies)]

    def _counter(self, calls: Sequence[Call]) -> Callable[[Call], object]:
        """Return a function that receives each finished call, and passes the progress of training on."""
        training = calls and calls[0].message.metadata.message_type == MessageType.TRAIN
        if self.on_trained is None or not training:
            return lambda call: None
        on_trained, workers, samples, trained = self.on_trained, calls[0].workspace.workers, 0, 0
        sizes = sorted((call.num_train for call in calls), reverse=True)  # the engine starts with the largest clients

        def note(call: Call) -> None:
            nonlocal samples, trained
            samples, trained = samples + call.num_train, trained + 1
            if trained >= workers and samples:
                half_done = sum(sizes[trained : trained + workers]) / 2  # of the clients that are being trained
                on_trained(trained, len(calls), (samples + half_done) / sum(sizes))

        return note

    def _receive(self, message: Message) -> Message | Call:
        """Return the reply to a query, or the pending call for a training or evaluation message."""
        context = self.contexts[message.metadata.dst_node_id]
        if message.metadata.message_type == MessageType.QUERY:
            return client_app(message, context)
        return Call(message, context, self.states, trusting=self.trusting)


def _failure(message: Message, error: Exception) -> Message:
    """Return an error reply for a client's failure, or raise the error if it is a bug in the method's code."""
    if isinstance(error, MethodError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if not is_failure(error):
        error.add_note(
            f"Client {message.metadata.dst_node_id - 1} raised this error in round {message.metadata.group_id}."
        )
        raise error
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
