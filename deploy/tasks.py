"""The task that a node passes to its worker: a message, the message's run, and the run's code."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict

from posy.deploy.entries import EntrySocket
from posy.deploy.flower_internals import pack, unpack
from posy.deploy.install import default_config
from posy.flower import ErrorCode, decoded, encoded


@dataclass(frozen=True)
class Run:
    """A run, as described by its SuperLink."""

    run_id: int
    submitter: str = ""
    """The account that submitted the run."""
    config: Mapping[str, Any] = field(default_factory=dict)
    series: int = 0
    """Id of the series of runs that share a node's state."""


@dataclass(frozen=True)
class Bundle:
    """A run's code."""

    hash: str
    """SHA-256 of the content, as reported by the SuperLink."""
    content: bytes
    verifications: Mapping[str, str] = field(default_factory=dict)
    """Signatures, keyed by the id of the signing key."""


class Task:
    """A message that the worker has to answer."""

    def __init__(self, connection: EntrySocket, message: Message, context: Context, run: Run, bundle: Bundle) -> None:
        self._connection = connection
        self._input = message, context, run, bundle

    def pull(self) -> tuple[Message, Context, Run, Bundle]:
        """Return the message, the node's context, the run and its code."""
        return self._input

    def push(self, reply: Message) -> None:
        """Send the reply to the node."""
        packed = pack(reply)
        parts = [packed.envelope.SerializeToString(), packed.tree.SerializeToString(), *packed.objects.values()]
        self._connection.send(parts, event="reply", objects=list(packed.objects))

    def finish(self, context: Context) -> None:
        """Finish the task, and let the node store the state in the context."""
        self._connection.send([encoded(context.state)], event="done")


def hand_over(
    connection: EntrySocket,
    number: str,
    objects: Mapping[str, bytes],
    run: Run,
    bundle: Bundle,
    node: tuple[int, Mapping[str, Any]],
    state: bytes,
    *,
    with_code: bool,
) -> None:
    """Send a task to the worker; without ``with_code``, the worker uses the code of its previous task.

    ``node`` contains the node's id and config.
    """
    code = [bundle.content] if with_code else []
    connection.send(
        [state, *code, *objects.values()],
        message=number,
        objects=list(objects),
        run=asdict(run),
        node=[node[0], dict(node[1])],
        bundle={"hash": bundle.hash, "verifications": dict(bundle.verifications)},
        code=with_code,
    )


def take_over(
    connection: EntrySocket, head: Mapping[str, Any], parts: Sequence[bytes], last: Bundle | None
) -> tuple[Task, Bundle]:
    """Return the task in a node's entry, and the code of the task; ``last`` is the code of the previous task."""
    state, *contents = parts
    content = contents.pop(0) if head["code"] else last.content if last else b""
    bundle = Bundle(content=content, **head["bundle"])
    run = Run(**head["run"])
    node_id, node_config = head["node"]
    context = Context(
        run_id=run.run_id,
        node_id=node_id,
        node_config=node_config,
        state=decoded(state) if state else RecordDict(),
        run_config={**default_config(bundle.content), **run.config},
        series_id=run.series,
    )
    message = unpack(head["message"], dict(zip(head["objects"], contents, strict=True)))
    return Task(connection, message, context, run, bundle), bundle


def error_reply(message: Message, reason: str) -> Message:
    """Return an error reply with the reason for the app's failure."""
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
