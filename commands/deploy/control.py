"""What a SuperLink tells of its runs and nodes, and the order to stop one, through Flower's own client.

Flower's command line tells neither the names that nodes were registered under nor the settings of a run.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
from flwr.common.serde import user_config_from_proto
from flwr.proto.control_pb2 import ListNodesRequest, ListRunsRequest, StopRunRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from posy.commands.launch import Connection, LaunchError, no_proxy
from posy.settings import SettingsError
from posy.strategies.settings import RunSettings


@dataclass(frozen=True)
class Node:
    """A SuperNode that a SuperLink knows.

    Attributes
    ----------
    name : str
        The name that its key was registered under; the number of the node if it has none.
    status : str
        ``registered`` (not seen yet), ``online`` or ``offline``.
    since : str
        Time of that, in local time; empty if it is not known.
    public_key : bytes
        Its public key as PEM.
    """

    name: str
    status: str
    since: str
    public_key: bytes


@dataclass(frozen=True)
class Run:
    """A run that was submitted to a SuperLink.

    Attributes
    ----------
    number : str
        Flower's number of it.
    config : Mapping
        The settings that were given.
    status : str
        ``pending``, ``starting``, ``running``, ``completed``, ``failed`` or ``stopped``.
    since : str
        When that began, in local time.
    seconds : float
        For how long it has run.
    details : str
        Why it failed.
    """

    number: str
    config: Mapping[str, Any]
    status: str
    since: str
    seconds: float
    details: str

    @property
    def name(self) -> str:
        """The folder of its results, if it was chosen."""
        return str(self.config.get("run-name") or self.config.get("resume") or "")

    @property
    def method(self) -> str:
        """Its method, if the settings that were given tell."""
        unknown = self.config.get("resume") or self.config.get("experiment")
        return str(self.config.get("method", "" if unknown else RunSettings.method))

    @property
    def ended(self) -> bool:
        """Whether it has ended."""
        return self.status in ("completed", "failed", "stopped")


class Control:
    """A SuperLink that takes orders.

    Parameters
    ----------
    client : ControlHttpClient
        Flower's client of it.
    address : str
        Host and port.
    """

    def __init__(self, client: ControlHttpClient, address: str) -> None:
        self._client = client
        self.address = address

    def nodes(self) -> list[Node]:
        """Return the nodes that are registered, by name."""
        found = [
            Node(
                info.name or str(info.node_id),
                info.status,
                _local({"online": info.last_activated_at, "offline": info.last_deactivated_at}.get(info.status, "")),
                info.public_key,
            )
            for info in self._client.ListNodes(ListNodesRequest()).nodes_info
            if info.status != "unregistered"
        ]
        return sorted(found, key=lambda node: node.name)

    def runs(self) -> list[Run]:
        """Return all runs, the newest first."""
        answer = self._client.ListRuns(ListRunsRequest())
        runs = sorted(answer.run_dict.values(), key=lambda run: str(run.pending_at), reverse=True)
        return [
            Run(
                number=str(run.run_id),
                config=user_config_from_proto(run.override_config),
                status=run.status.sub_status or run.status.status,
                since=_local(run.finished_at or run.running_at or run.starting_at or run.pending_at),
                seconds=_seconds(run.running_at, run.finished_at or answer.now),
                details=run.status.details,
            )
            for run in runs
        ]

    def find(self, word: str) -> Run:
        """Return a run by its number, or the newest of a name.

        Raises
        ------
        SettingsError
            If there is none.
        """
        runs = self.runs()
        for run in runs:
            if word in (run.number, run.name):
                return run
        known = ", ".join(run.name or run.number for run in runs[:5]) or "none"
        raise SettingsError(f"{word!r}: no such run at {self.address}; the newest are: {known}")

    def stop(self, run: Run) -> None:
        """Stop a run."""
        self._client.StopRun(StopRunRequest(run_id=int(run.number)))


@contextmanager
def control(superlink: Connection) -> Iterator[Control]:
    """Provide a SuperLink to ask.

    Raises
    ------
    SettingsError, LaunchError
        If it cannot be reached, its certificate is not trusted, or it refuses.
    """
    superlink.check()
    os.environ |= no_proxy()
    ca = superlink.root_certificates
    client = ControlHttpClient.from_server_address(
        superlink.address,
        insecure=ca is None,
        root_certificates=None if ca is None else str(ca),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="posy")],
    )
    try:
        yield Control(client, superlink.address)
    except httpx.HTTPStatusError as error:
        text = " ".join(error.response.text.split())
        raise LaunchError(f"the SuperLink at {superlink.address} refuses: {text[:300] or error}") from error
    except (httpx.HTTPError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        raise LaunchError(f"the SuperLink at {superlink.address} did not answer: {error}") from error
    finally:
        client.close()


def _local(time: str) -> str:
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0
