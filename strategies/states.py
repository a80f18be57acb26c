"""Which version of its own state each client has: the server names the versions and never sees what is in them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, MessageType

from posy.strategies.replies import BadReplyError

PHASES = (MessageType.TRAIN, MessageType.EVALUATE)
"""The messages of a round, in their order."""


class LostStateError(BadReplyError):
    """The node of a client does not have the version that a message named."""


@dataclass
class ClientStates:
    """The versions of the clients' states.

    A version is named after the message that may write it, as in ``0-4-1``: before the run was resumed for the first
    time, round 4, evaluation. No name is given twice in a run, and of two names of a client the larger is newer.

    Attributes
    ----------
    attempt : int
        How often the run has been resumed.
    places : dict
        Where the clients keep their states: ``run``, the name of the folder of the run, and in a simulation
        ``state-directory``.
    versions : dict of int to str
        The version that each client has; it advances with a good reply only. A client that keeps nothing has none.
    needed : list of Mapping of int to str
        Versions that must stay, by client: those of the checkpoints, and of the last round, of which one may be made.
    """

    attempt: int = 0
    places: dict[str, str] = field(default_factory=dict)
    versions: dict[int, str] = field(default_factory=dict)
    needed: list[Mapping[int, str]] = field(default_factory=list)

    def config(self, phase: str, server_round: int, client: int) -> dict[str, Any]:
        """Return what a message tells a client about its state."""
        return {
            **self.places,
            "state-from": self.versions.get(client, ""),
            "state-to": f"{self.attempt}-{server_round}-{PHASES.index(phase)}",
            "state-keep": sorted({versions[client] for versions in self.needed if client in versions}),
        }

    def advance(self, client: int, version: str) -> None:
        """Take note of the version that a client has after a good reply."""
        if version:
            self.versions[client] = version


def version_after(asked: Message, reply: Message) -> str:
    """Return the version that a client has after it has answered a message, as its reply says.

    Raises
    ------
    LostStateError
        If its node does not have the version from which it was to start.
    BadReplyError
        If the message names no such version.
    """
    sent, told = (message.content.config_records["config"] for message in (asked, reply))
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
