"""The process that runs a node's tasks, and loads PyTorch, code and data only once.

:class:`posy.deploy.node.Worker` starts the process with a socket (:mod:`posy.deploy.entries`). The process reports the
event ``ready``. For each task (:mod:`posy.deploy.tasks`), it then sends a ``reply``, and ``done`` with the state that
the node stores for the series of runs. The process terminates when the socket closes.
"""

import importlib
import os
import queue
import shutil
import signal
import socket
import threading
from collections.abc import Mapping
from logging import ERROR, INFO
from typing import Any, NoReturn

from flwr.app import Context, Message, MessageType, RecordDict
from flwr.common.logger import log

from posy.client_app import audit
from posy.client_app.policy import policy_of, shared_text
from posy.deploy.apps import Apps
from posy.deploy.entries import EntrySocket, read_entry
from posy.deploy.foreign import ForeignCodeError, code_rule
from posy.deploy.sessions import Sessions
from posy.deploy.tasks import Task, error_reply, take_over

PRELOADED = (
    *("torch", "torch._dynamo", "torch.optim", "safetensors.numpy"),
    *("uvicorn.loops.auto", "uvicorn.lifespan.on", "uvicorn.protocols.http.auto", "uvicorn.protocols.websockets.auto"),
)
"""Modules that are slow to import and not part of a run's code."""
SHARED = ("sklearn.datasets", "flwr_datasets.partitioner")
"""Further modules, needed only for benchmark data; several nodes share them if they are loaded before the fork."""


def preload(nodes: int) -> None:
    """Import slow modules before this process forks ``nodes`` nodes and their workers."""
    for name in PRELOADED + (SHARED if nodes > 1 else ()):
        importlib.import_module(name)


def main(connection: socket.socket, entities: Mapping[str, str] | None = None) -> None:
    """Serve a node's tasks until the node closes the socket.

    ``entities`` maps ids of trusted entities to public keys. If it is set, the worker runs only signed code.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # only the node may terminate its worker
        signal.signal(number, signal.SIG_IGN)
    node, apps, last, sessions, bundle = EntrySocket(connection), Apps(entities), LastAnswer(), Sessions(), None
    tasks: queue.Queue[tuple[dict[str, Any], list[bytes]]] = queue.Queue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    node.send(event="ready", process=os.getpid())
    while True:
        task, bundle = take_over(node, *tasks.get(), bundle)
        serve(task, apps, last, sessions)


def _listen(connection: socket.socket, tasks: "queue.Queue[tuple[dict[str, Any], list[bytes]]]") -> None:
    """Put the node's tasks into a queue, and exit the process at once when the node exits."""
    try:
        with connection.makefile("rb") as stream:
            while entry := read_entry(stream):
                tasks.put(entry)
    finally:
        _end()


class LastAnswer:
    """The last reply. For a copy of the message, the worker sends this reply instead of running the app again."""

    def __init__(self) -> None:
        self._asked: object = None
        self._content = RecordDict()

    def find(self, message: Message) -> Message | None:
        """Return the stored reply if the message is a copy of the last message, else None."""
        return Message(self._content, reply_to=message) if self._asked == _asked(message) else None

    def keep(self, message: Message, reply: Message) -> None:
        """Store a reply, unless it is an error or the reply to a query."""
        if reply.has_content() and message.metadata.message_type != MessageType.QUERY:
            self._asked, self._content = _asked(message), reply.content


def _asked(message: Message) -> object:
    """Return the run, phase and config of a message, which identify its copies."""
    configs = {name: dict(record) for name, record in message.content.config_records.items()}
    return message.metadata.run_id, message.metadata.message_type, configs


def serve(task: Task, apps: Apps, last: LastAnswer, sessions: Sessions) -> None:
    """Run one task; an exception from the ClientApp becomes an error reply."""
    message, context, run, bundle = task.pull()
    audit.note(context, submitter=run.submitter, code=bundle.hash)
    try:
        if reply := last.find(message):
            log(INFO, "this message is a copy, so the worker sends the stored reply")
        else:
            metadata = message.metadata
            server_round = f" of round {metadata.group_id}" if metadata.group_id else ""
            log(INFO, "processing the %s message%s", metadata.message_type, server_round)
            sessions.restore(context)
            client_app = apps.load(bundle, code_rule(policy_of(context.node_config)))
            audit.note(context, signers=apps.signers)
            reply = client_app(message, context)
        outcome: Message | Exception = reply
    except Exception as error:
        is_explained = getattr(error, "shareable", False)  # a traceback would bury the message
        if not getattr(error, "logged", False):
            log(ERROR, "the ClientApp raised an exception: %s", error, exc_info=None if is_explained else error)
        reply, outcome = error_reply(message, f"{type(error).__name__}: {_text_for_server(error, context)}"), error
    try:
        record(message, context, outcome)
    except audit.AuditError as error:
        reply = error_reply(message, str(error))
    sessions.take(context)  # before the reply is sent, so that a client remembers which shares it has revealed
    task.push(reply)
    # The node needs the context even after an error: the context records which shares the client may still reveal.
    task.finish(context)
    last.keep(message, reply)  # only after the node has received the context, which contains the client's state


def _text_for_server(error: Exception, context: Context) -> str:
    """Return an error's message for the server; on a node with data, the message reveals nothing about the data."""
    return shared_text(error) if "data" in context.node_config else str(error)


def record(message: Message, context: Context, outcome: Message | Exception) -> None:
    """Record the outcome of a message in the node's audit log, unless the run's ClientApp has already done so.

    The ClientApp records nothing if the node refuses to load its code, or if the worker answers a copy of a message.
    """
    audit_log = audit.log_of(context.node_config)
    if audit_log is None or audit.notes_on(context).get("recorded"):
        return
    if isinstance(outcome, ForeignCodeError):
        audit.note(context, rule="code")
    audit.record(audit_log, message, context, outcome)


def _end() -> NoReturn:
    """Remove this worker's Flower home, and exit at once."""
    shutil.rmtree(os.environ["FLWR_HOME"], ignore_errors=True)
    os._exit(0)
