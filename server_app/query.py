"""Build the query that asks each node about its clients and data, and check the replies."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import WARNING
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import log

from posy.data.agreement import Description, is_complete, task_of
from posy.data.settings import SITES
from posy.settings import SettingsError
from posy.strategies.client_settings import NOT_SHARED, read_report
from posy.strategies.replies import BadReplyError, ClientInfo, check_count
from posy.strategies.run_settings import SAMPLE
from posy.strategies.settings import Settings
from posy.words import one_line

MAX_NAME = 100
"""Maximum number of characters in a node's name."""
MAX_WARNINGS, MAX_WARNING, MAX_WARNED = 20, 300, 2000
"""Maximum numbers of warnings logged per reply, of characters per warning, and of warnings logged per run."""
TOLERANCE = 1e-3
"""Absolute and relative tolerance for differences between fingerprints of the same tensors on two machines."""


@dataclass(frozen=True)
class NodeClients:
    """The clients that a node claims to host, and the description of its data."""

    clients: tuple[ClientInfo, ...]
    """A site's client may have no index yet (-1)."""
    description: Description | None = None


class NodeQuery:
    """The query that asks a node which clients it hosts and, if the task is incomplete, for a description of its data.

    Parameters
    ----------
    settings : Settings
        The run's settings. The federation replaces them after the sites have agreed on a task.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.fixed_tensors: Sequence[float] = ()
        """Fingerprint of the network's fixed tensors. They are never sent, so all nodes must build the same tensors."""
        self._num_clients = settings.data.num_clients
        self._of_sites = settings.data.dataset == SITES
        self._warned: set[tuple[str, str]] = set()

    @property
    def is_open(self) -> bool:
        """Whether the sites must describe their data to complete the task."""
        return self._of_sites and not is_complete(self.settings.data)

    def message(self, node: int) -> Message:
        """Return the query for a node."""
        describe = {"describe": True} if self.is_open else {}
        config = ConfigRecord({"settings": self.settings.to_json(), **describe})
        return Message(RecordDict({"config": config}), dst_node_id=node, message_type=MessageType.QUERY)

    def clients(self, answer: Mapping[str, Any], node: int, name: str) -> NodeClients:
        """Return the clients that a node reports, and log its warnings; ``name`` is the node's checked name."""
        self._check_fixed_tensors(answer.get("fixed-tensors", []))
        if self._of_sites:
            return self._site(answer, node, name)
        columns = [answer[key] for key in ("clients", "num-train", "num-test")]
        if len(columns[0]) > self._num_clients:
            raise BadReplyError(f"it hosts {len(columns[0])} clients; the run has {self._num_clients}")
        self._log_warnings("a node", answer)
        chosen = self._node_settings(answer)
        return NodeClients(
            tuple(
                ClientInfo(check_index(client, self._num_clients), node, *_counts(*counts), name, node_settings=chosen)
                for client, *counts in zip(*columns, strict=True)
            )
        )

    def _site(self, answer: Mapping[str, Any], node: int, name: str) -> NodeClients:
        """Return the client that a site reports, with index -1 if the node config does not set partition-id."""
        if "client" not in answer and not name:
            raise BadReplyError("its node config has neither name nor partition-id")
        client = check_index(answer["client"], self._num_clients) if "client" in answer else -1
        if self.is_open:
            description = Description.from_answer(answer)
            self._log_warnings(name or f"client {answer['client']}", answer)
            return NodeClients((ClientInfo(client, node, 0, 0, name),), description)
        class_counts = tuple(int(samples) for samples in answer.get("class-counts", ()))
        num_classes, samples = task_of(self.settings.data).num_classes, sum(class_counts)
        if class_counts and (len(class_counts) != num_classes or min(class_counts) < 0 or not samples):
            raise BadReplyError(f"its class-counts have {len(class_counts)} classes and {samples} samples in total")
        fingerprint = answer.get("fingerprint", "")
        if not isinstance(fingerprint, str) or not re.fullmatch(r"([0-9a-f]{16})?", fingerprint):
            raise BadReplyError("its fingerprint does not have 16 hexadecimal digits")
        sizes = _counts(answer["num-train"], answer["num-test"])
        skipped = self._log_warnings(name or f"client {client}", answer)
        chosen = self._node_settings(answer)
        return NodeClients((ClientInfo(client, node, *sizes, name, class_counts, fingerprint, skipped, chosen),))

    def _node_settings(self, answer: Mapping[str, Any]) -> str:
        """Return the settings that a node has chosen; raise :class:`BadReplyError` if the run does not allow them."""
        try:
            report = read_report(answer.get("node-settings", ""), self.settings.train.client_bounds)
        except SettingsError as error:
            raise BadReplyError(str(error)) from error
        if report == NOT_SHARED and self.settings.train.dp == SAMPLE:
            raise BadReplyError(
                "its node config chooses settings, and its policy has share-settings: false; with dp = 'sample', the "
                "server needs these settings to compute epsilon; set share-settings: true, or choose no settings"
            )
        return report

    def _check_fixed_tensors(self, fingerprint: Sequence[float]) -> None:
        is_equal = len(fingerprint) == len(self.fixed_tensors) and np.allclose(
            fingerprint, self.fixed_tensors, TOLERANCE, TOLERANCE
        )
        if self.fixed_tensors and not is_equal:
            raise BadReplyError(
                "its network's fixed tensors differ from the server's; on every node, install the file from which the "
                "model loads them"
            )

    def _log_warnings(self, source: str, answer: Mapping[str, Any]) -> int:
        """Log each of a node's warnings once, and return the number of files that the node has skipped.

        A site's warnings start with its name. Identical warnings from nodes with benchmark data are logged only once.
        """
        warnings, skipped = answer.get("warnings", []), answer.get("skipped", 0)
        if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
            raise BadReplyError("its warnings are not a list of strings")
        check_count("skipped", skipped, 0)
        texts = [one_line(text, MAX_WARNING) for text in warnings[:MAX_WARNINGS]]
        if skipped and not texts:  # a reply from Posy's own code already contains such a warning
            texts.append(f"{int(skipped)} of its files cannot be read and are skipped")
        for text in texts:
            if (source, text) not in self._warned and len(self._warned) < MAX_WARNED:
                self._warned.add((source, text))
                log(WARNING, "%s: %s", source, text)
        return int(skipped)


def name_in(answer: Mapping[str, Any], registered: str) -> str:
    """Return a node's name: the ``registered`` name of its key, or else the name that it reports."""
    claimed = str(answer.get("name", ""))
    if registered and claimed not in ("", registered):
        raise BadReplyError(f"its node config names it {claimed!r:.99}, but its key is registered as {registered!r}")
    name = registered or claimed
    if len(name) > MAX_NAME or not name.isprintable():
        raise BadReplyError(f"its name is not a single line of at most {MAX_NAME} characters")
    return name


def check_index(client: Any, num_clients: int) -> int:
    """Return the client's index, or raise :class:`BadReplyError` if it is out of range."""
    if not isinstance(client, int) or not 0 <= client < num_clients:
        raise BadReplyError(f"partition-id {client}: the run has the clients 0 to {num_clients - 1}")
    return client


def _counts(num_train: Any, num_test: Any) -> tuple[int, int]:
    check_count("num-train", num_train, 1)
    check_count("num-test", num_test, 0)
    return num_train, num_test
