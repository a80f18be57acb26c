"""Control a SuperLink: list its runs and nodes, register keys, and submit, follow and stop runs.

All calls use Flower's Control API. Flower's command line starts a process for each call, and shows neither the names of
registered nodes nor the settings of a run.
"""

import hashlib
import math
import os
import shlex
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from posy.commands.deploy.bundle import bundle
from posy.commands.guide import next_on_superlink, show_next
from posy.commands.launch import INTERRUPTED, Connection, resume_command, without_proxy
from posy.commands.runlog import RunLog
from posy.deploy.flower_internals import (
    MEDIA_TYPE,
    STREAM_MEDIA_TYPE,
    config_of,
    control_call,
    http_path,
    to_config,
)
from posy.settings import LaunchError, Scalar, SettingsError
from posy.strategies.run_settings import RunSettings, name_of

OUTAGE_SECONDS = 600.0
"""Seconds for which a SuperLink may be unreachable while Posy follows a run. Runs can survive such an outage."""
CALL_SECONDS = 30.0
"""Timeout for a call in seconds."""
LOOK_SECONDS = 1.0
"""Seconds between attempts to reach a SuperLink, or between checks of a run that has not ended."""


@dataclass(frozen=True)
class Run:
    """A run that was submitted to a SuperLink."""

    number: str
    config: Mapping[str, Any]
    """The submitted settings."""
    status: str
    """``pending``, ``starting``, ``running``, ``completed``, ``failed`` or ``stopped``."""
    since: str
    """Local time at which the run entered this status."""
    seconds: float
    """Duration of the run in seconds."""
    details: str
    """Reason for a failure."""

    @property
    def name(self) -> str:
        """Name of the results folder; empty if the submitted settings do not contain it."""
        return name_of(self.config) or str(self.config.get("resume") or "")

    @property
    def method(self) -> str:
        """Method of the run; empty if the submitted settings do not determine it."""
        unknown = self.config.get("resume") or self.config.get("experiment")
        return str(self.config.get("method", "" if unknown else RunSettings.method))

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return self.status in ("completed", "failed", "stopped")


class Folds(NamedTuple):
    """A cross-validation in which each fold is a run."""

    name: str
    """Name of the directory that contains the folders of all folds."""
    total: int
    """Number of folds."""
    words: Sequence[str]
    """The command line's settings without ``run-name``, for the command that continues the cross-validation."""


class Control:
    """A client of the Control API of a SuperLink at ``host:port``."""

    def __init__(self, client: httpx.Client, address: str) -> None:
        self._client = client
        self.address = address

    def call(self, name: str, /, **fields: Any) -> Any:
        """Return the response to a call, or raise an httpx error if the call fails."""
        request = self._request(name, MEDIA_TYPE, fields)
        response = self._client.send(request)
        response.raise_for_status()
        return control_call(name).response.FromString(response.content)

    def stream(self, name: str, /, **fields: Any) -> Iterator[Any]:
        """Yield the responses to a call as they arrive, or raise an httpx error if the call fails."""
        request = self._request(name, STREAM_MEDIA_TYPE, fields)
        request.extensions["timeout"] |= {"read": None}  # a run may log nothing for a long time
        response = self._client.send(request, stream=True)
        try:
            if response.is_error:
                response.read()
            response.raise_for_status()
            unread = b""
            for chunk in response.iter_bytes():
                unread += chunk
                while len(unread) >= 4 and len(unread) >= (end := 4 + int.from_bytes(unread[:4])):
                    yield control_call(name).response.FromString(unread[4:end])
                    unread = unread[end:]
        finally:
            response.close()

    def _request(self, name: str, accept: str, fields: Mapping[str, Any]) -> httpx.Request:
        content = control_call(name).request(**fields).SerializeToString(deterministic=True)
        headers = {"content-type": MEDIA_TYPE, "accept": accept, "accept-encoding": "identity"}
        return self._client.build_request("POST", http_path("control", name), content=content, headers=headers)

    def nodes(self) -> list[Any]:
        """Return the registered nodes, sorted by name; the name of an unnamed node is its number."""
        nodes = self.call("ListNodes").nodes_info
        for node in nodes:
            node.name = node.name or str(node.node_id)
        return sorted((node for node in nodes if node.status != "unregistered"), key=lambda node: node.name)

    def runs(self) -> list[Run]:
        """Return all runs, newest first."""
        answer = self.call("ListRuns")
        runs = sorted(answer.run_dict.values(), key=lambda run: str(run.pending_at), reverse=True)
        return [
            Run(
                number=str(run.run_id),
                config=config_of(run.override_config),
                status=run.status.sub_status or run.status.status,
                since=local_time(run.finished_at or run.running_at or run.starting_at or run.pending_at),
                seconds=_seconds(run.running_at, run.finished_at or answer.now),
                details=run.status.details,
            )
            for run in runs
        ]

    def find(self, word: str) -> Run:
        """Return the newest run whose number or name is ``word``, or the newest of all runs if ``word`` is empty.

        Raises :class:`SettingsError` if the SuperLink has no matching run.
        """
        runs = self.runs()
        for run in runs:
            if word in ("", run.number, run.name):
                return run
        if not word:
            raise SettingsError(f"the SuperLink at {self.address} has no runs")
        newest = ", ".join(run.name or run.number for run in runs[:5]) or "none"
        raise SettingsError(f"{word!r}: no run at {self.address} has this name or number; newest runs: {newest}")

    def register(self, name: str, public_key: bytes) -> None:
        """Register the public key (PEM) of a node under a name, so that the SuperLink admits the node."""
        self.call("RegisterNode", public_key=public_key, name=name)

    def unregister(self, number: int) -> None:
        """Unregister a node by its number; its key cannot be registered again."""
        self.call("UnregisterNode", node_id=number)

    def submit(self, settings: Mapping[str, Scalar]) -> str:
        """Bundle this code (see :func:`bundle`), submit a run with these settings, and return the run's number.

        Raises :class:`LaunchError` if the SuperLink rejects the code.
        """
        content, config = bundle(settings)
        fab = {"hash_str": hashlib.sha256(content).hexdigest(), "content": content}
        answer = self.call("StartRun", fab=fab, override_config=to_config(config))
        if not answer.run_id:
            raise LaunchError(
                f"the SuperLink at {self.address} rejects the app ({len(content)} bytes); see the SuperLink's log"
            )
        return str(answer.run_id)

    def stop(self, number: str) -> None:
        """Stop a run."""
        self.call("StopRun", run_id=int(number))

    def follow(self, number: str, show: Callable[[str], object], patience: float = OUTAGE_SECONDS) -> Run:
        """Pass each line of a run's log to ``show`` until the run ends, and return the run.

        Each outage of the SuperLink may last up to ``patience`` seconds.
        """
        timestamp, unfinished, deadline = 0.0, "", None
        while True:
            try:
                for part in self.stream("StreamLogs", run_id=int(number), after_timestamp=timestamp):
                    timestamp, deadline = part.latest_timestamp, None
                    *lines, unfinished = (unfinished + part.log_output).split("\n")
                    for line in lines:
                        show(line + "\n")
                run = self.find(number)
                deadline = None
                if run.ended:
                    if unfinished:
                        show(unfinished + "\n")
                    return run
            except httpx.TransportError:
                deadline = deadline or time.monotonic() + patience
                if time.monotonic() >= deadline:
                    raise
            time.sleep(LOOK_SECONDS)


class Online:
    """A callable that describes how many nodes are online, with at most one query per :data:`LOOK_SECONDS`."""

    def __init__(self, api: Control) -> None:
        self._api = api
        self._text, self._queried_at = "", -math.inf

    def __call__(self) -> str:
        """Return a string such as ``3 of 4 nodes online``."""
        if time.monotonic() - self._queried_at > LOOK_SECONDS:
            nodes = self._api.nodes()
            online = sum(node.status == "online" for node in nodes)
            self._text, self._queried_at = f"{online} of {len(nodes)} nodes online", time.monotonic()
        return self._text


@contextmanager
def control(superlink: Connection) -> Iterator[Control]:
    """Yield a client of a SuperLink's Control API.

    Raises :class:`LaunchError` if the SuperLink is unreachable or refuses a call, or its certificate is not trusted.
    """
    os.environ |= without_proxy()
    ca = superlink.root_certificates
    client = httpx.Client(
        base_url=f"{'http' if ca is None else 'https'}://{superlink.address}",
        verify=True if ca is None else ssl.create_default_context(cafile=str(ca)),
        timeout=CALL_SECONDS,
        headers={
            "flwr-package-name": "flwr",
            "flwr-package-version": version("flwr"),
            "flwr-component-name": "posy",
        },
    )
    try:
        yield Control(client, superlink.address)
    except httpx.HTTPStatusError as error:
        text = " ".join(error.response.text.split())
        raise LaunchError(f"the SuperLink at {superlink.address} refuses the call: {text[:300] or error}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LaunchError(_unreached(superlink, error)) from error
    finally:
        client.close()


def run_on_superlink(settings: Mapping[str, Scalar], superlink: Connection, *, verbose: bool = False) -> int:
    """Submit a run to a SuperLink with SuperNodes, follow it, and return the exit status; Ctrl-C stops the run.

    Paths in the settings refer to the SuperLink's machine. Raises the same errors as :func:`control`.
    """
    log = RunLog(verbose)
    with control(superlink) as api:
        status, outcome = _run_to_end(api, settings, log)
    folder = [f"output-dir={settings['output-dir']}"] if "output-dir" in settings else []
    if not status and log.undelivered:
        command = resume_command(Path(log.results).name, *folder, *superlink.words())
        print(f"posy: deliver the final model to the clients without it: {command}", file=sys.stderr)
    elif not status:
        show_next(next_on_superlink(Path(log.results), settings, superlink.words()))
    if status and settings.get("part-of"):
        print(f"posy: {outcome}; repeat the command to continue with this fold", file=sys.stderr)
    elif status:  # read the progress from the log, because the checkpoints are on the SuperLink's machine
        if log.rounds or (log.results and settings.get("resume")):
            position = f" after round {log.rounds}" if log.rounds else ""
            command = resume_command(Path(log.results).name, *folder, *superlink.words())
            print(f"posy: {outcome}{position}; resume with: {command}", file=sys.stderr)
        elif status == INTERRUPTED:
            print("posy: stopped before the first round ended; start a new run", file=sys.stderr)
    return status


def run_folds_on_superlink(
    settings: Mapping[str, Scalar], folds: Folds, superlink: Connection, *, verbose: bool = False
) -> int:
    """Submit a run for each fold of a cross-validation, one after the other, and return the exit status.

    The function stops at the first run that fails. The ServerApp of each run updates the summary, and skips a fold that
    has finished before. Raises the same errors as :func:`control`.
    """
    settings = {key: value for key, value in settings.items() if key != "run-name"}
    status, outcome, fold = 1, "failed", 1
    try:
        with control(superlink) as api:
            for fold in range(1, folds.total + 1):
                status, outcome = 1, "failed"  # unless the run ends otherwise; the SuperLink may be lost
                print(f"posy: fold {fold} of {folds.total} of {folds.name}", flush=True)
                of_fold: dict[str, Scalar] = {"part-of": folds.name, "fold": fold}
                log = RunLog(verbose)
                status, outcome = _run_to_end(api, {**settings, **of_fold}, log)
                if status:
                    break
        if not status:
            show_next(next_on_superlink(Path(log.results).parent, settings, superlink.words()))
    finally:
        if status:
            command = shlex.join(["posy", "run", *superlink.words(), *folds.words, f"run-name={folds.name}"])
            print(f"posy: {outcome} in fold {fold} of {folds.total}; continue with: {command}", file=sys.stderr)
    return status


def _run_to_end(api: Control, settings: Mapping[str, Scalar], log: RunLog) -> tuple[int, str]:
    """Submit and follow a run, and return the exit status and the run's status; Ctrl-C stops the run."""
    number = api.submit(settings)
    try:
        run = api.follow(number, log.add)
    except KeyboardInterrupt:
        log.end()
        print("\nposy: stopping the run", file=sys.stderr)
        api.stop(number)
        return INTERRUPTED, "stopped"
    return _exit_status(run, log), run.status


def show_run(superlink: Connection, word: str, *, verbose: bool = False, nodes: bool = False) -> int:
    """Show the log of a run until the run ends, and return the exit status; Ctrl-C does not stop the run.

    An empty ``word`` selects the newest run. With ``nodes``, each round replaces the line of the previous round and
    shows the number of online nodes.
    """
    with control(superlink) as api:
        run = api.find(word)
        log = RunLog(verbose, Online(api) if nodes else None)
        try:
            return _exit_status(api.follow(run.number, log.add), log)
        except KeyboardInterrupt:
            log.end()
            command = " ".join(["posy", "stop", run.number, *superlink.words()])
            print(f"\nposy: the run continues; stop it with: {command}", file=sys.stderr)
            return INTERRUPTED


def local_time(time: str) -> str:
    """Convert a time from the SuperLink to local time; an empty string stays empty."""
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S") if time else ""


def _exit_status(run: Run, log: RunLog) -> int:
    """Show the end of a log, and the run's status unless it completed; return the exit status."""
    completed = run.status == "completed"
    log.end(failed=not completed)
    if not completed:
        reason = log.reason or run.details
        print(
            f"posy: run {run.number} ended with status {run.status}{f': {reason}' if reason else ''}", file=sys.stderr
        )
    return 0 if completed else 1


def _unreached(superlink: Connection, error: BaseException) -> str:
    """Return an error message that explains why a SuperLink cannot be reached."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        hint = "" if superlink.root_certificates else ", and that it runs without TLS (--insecure)"
        return f"no SuperLink answers at {superlink.address} ({error}); check that `posy superlink` runs there{hint}"
    if cause.reason == "WRONG_VERSION_NUMBER":
        return f"the SuperLink at {superlink.address} does not use TLS; it may have been started with --insecure"
    reason = getattr(cause, "verify_message", "") or cause.reason or str(cause)
    ca = superlink.root_certificates
    return f"{ca} does not verify the certificate of the SuperLink at {superlink.address}: {reason}"


def _seconds(begin: str, end: str) -> float:
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds() if begin and end else 0.0
