"""Version names of the clients' states. The server assigns the names, but never receives a state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from posy.flower import record_in
from posy.strategies.replies import UNREADABLE, BadReplyError

T = TypeVar("T")


class LostStateError(BadReplyError):
    """A client's node does not have the state version that a message names."""


@dataclass
class ClientStates:
    """The versions of the clients' states.

    A version is named after the message whose reply may store it. For example, ``2-4-1`` stands for the evaluation of
    round 4 after the run has been resumed twice. A run uses each name once, and the newest version of a client's
    state has the largest numbers.
    """

    attempt: int = 0
    """Number of times the run has been resumed."""
    folders: dict[str, str] = field(default_factory=dict)
    """Config entries that locate the states: ``run``, the name of the run's folder, and in a simulation
    ``state-directory``."""
    versions: dict[int, str] = field(default_factory=dict)
    """The version of each client's state, which changes only with an accepted reply; empty if the client stores
    none."""
    needed: list[Mapping[int, str]] = field(default_factory=list)
    """Versions, keyed by client, that checkpoints or the last round still need."""

    def config(self, phase: str, server_round: int, client: int) -> dict[str, Any]:
        """Return the config entries that describe a client's state."""
        return {
            **self.folders,
            "state-from": self.versions.get(client, ""),
            "state-to": f"{self.attempt}-{server_round}-{int(phase == MessageType.EVALUATE)}",
            "state-keep": sorted({needed.get(client, "") for needed in self.needed} - {""}),
        }


def version_after(message: Message, reply: Message) -> str:
    """Return the version of a client's state after its reply to a message.

    Raises
    ------
    LostStateError
        If the node does not have the version that the message named.
    BadReplyError
        If the reply names a version that the message did not name.
    """
    sent, answer = (record_in(each.content, "config", ConfigRecord) for each in (message, reply))
    start = str(sent["state-from"])
    if "state-missing" in answer:
        round_text = f"of round {start.split('-')[1]} " if start else ""
        raise LostStateError(
            f"its state {round_text}is not on its node (a node keeps it across a restart only with state-dir); the "
            "client starts from scratch"
        )
    version = answer["state"]
    if version not in (start, sent["state-to"]):
        raise BadReplyError(f"state = {version!r}")
    return str(version)


def decoded_reply(
    message: Message, reply: Message, decode: Callable[[RecordDict], T], *, stateful: bool
) -> tuple[str | None, T]:
    """Return the version of a client's state and the decoded content of its reply.

    Raises
    ------
    BadReplyError
        If the reply is malformed.
    """
    try:
        return version_after(message, reply) if stateful else None, decode(reply.content)
    except BadReplyError:
        raise
    except UNREADABLE as error:
        raise BadReplyError(f"malformed reply: {error!r}") from error
