"""Which version of its own state each client has: the server names the versions and never sees what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType

from posy.flower import record_in
from posy.strategies.replies import BadReplyError


class LostStateError(BadReplyError):
    """The node of a client does not have the version that a message named."""


@dataclass
class ClientStates:
    """The versions of the clients' states.

    A version is named after the message that may write it: ``2-4-1`` by the evaluation of round 4 after the run has
    been resumed twice. So no name is given twice in a run, and a client's newest has the largest numbers.
    """

    attempt: int = 0
    """How often the run has been resumed."""
    places: dict[str, str] = field(default_factory=dict)
    """Where the clients keep their states: ``run``, the name of its folder, and in a simulation ``state-directory``."""
    versions: dict[int, str] = field(default_factory=dict)
    """The version that each client has; only a good reply changes it. It is empty where a client keeps nothing."""
    needed: list[Mapping[int, str]] = field(default_factory=list)
    """Versions that checkpoints need, each of a checkpoint or of the last round, by client."""

    def config(self, phase: str, server_round: int, client: int) -> dict[str, Any]:
        """Return what a message tells a client about its state."""
        return {
            **self.places,
            "state-from": self.versions.get(client, ""),
            "state-to": f"{self.attempt}-{server_round}-{int(phase == MessageType.EVALUATE)}",
            "state-keep": sorted({needed.get(client, "") for needed in self.needed} - {""}),
        }


def version_after(asked: Message, reply: Message) -> str:
    """Return the version that a client has after it has answered a message, as its reply says.

    Raises :class:`LostStateError` if its node does not have the version to start from, :class:`BadReplyError` for one
    that is none of the two that the message has named.
    """
    sent, told = (record_in(message.content, "config", ConfigRecord) for message in (asked, reply))
    start = str(sent["state-from"])
    if "state-missing" in told:
        since = f"of round {start.split('-')[1]} " if start else ""
        raise LostStateError(
            f"its state {since}is not on its node (a node keeps it over a restart only with state-dir); it begins anew"
        )
    version = told["state"]
    if version not in (start, sent["state-to"]):
        raise BadReplyError(f"state = {version!r}")
    return str(version)
