"""Start and stop the service: the servers for HTTP and gRPC, their certificates, and the reload of models."""

import asyncio
import contextlib
import ipaddress
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from logging import INFO
from pathlib import Path

import grpc
import uvicorn
from flwr.common.logger import log

from posy.serve.certificate import Certificate
from posy.serve.connections import Connection, close_slow_connections
from posy.serve.endpoints import Endpoint
from posy.serve.limits import Gate, Limits
from posy.serve.meters import Meters
from posy.serve.remote import Remote
from posy.serve.repository import Repository, follow, reload_models
from posy.serve.rest import Rest
from posy.serve.service import Service
from posy.settings import SettingsError

BACKLOG = 2048
"""Maximum number of connections that wait for the HTTP server."""


@dataclass(frozen=True)
class Credentials:
    """The certificates and tokens of a service."""

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    """Certificates that sign the clients' certificates; None: clients need no certificate."""
    tokens: Sequence[str] = ()


@dataclass(frozen=True)
class Options:
    """The options of a service."""

    host: str = "127.0.0.1"
    http_port: int = 8080
    grpc_port: int = 8081
    credentials: Credentials = field(default_factory=Credentials)
    limits: Limits = field(default_factory=Limits)
    reload_seconds: float = 10.0
    """Time between two looks for newer models and certificates; 0: they are loaded once."""
    drain_seconds: float = 0.0
    """Time for which the service still answers after it has reported that it is not ready."""
    grace_seconds: float = 30.0
    """Maximum time to answer the remaining requests."""

    def check(self) -> None:
        """Raise :class:`SettingsError` if other machines could call the service without credentials."""
        credentials = self.credentials
        if (credentials.certificate is None) != (credentials.key is None):
            raise SettingsError("--certificate and --certificate-key: set both, or neither")
        if credentials.ca is not None and credentials.certificate is None:
            raise SettingsError("--client-ca: the service needs its own certificate (--certificate)")
        if _is_loopback(self.host):
            return
        if credentials.certificate is None or not (credentials.tokens or credentials.ca):
            raise SettingsError(
                f"--host {self.host}: other machines could call the service; set --certificate, --certificate-key "
                "and either --tokens or --client-ca, or use --host 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Http(uvicorn.Server):
    """An HTTP server that leaves the signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no handlers."""
        yield


class ModelServer:
    """The service of a run's models in one process.

    Parameters
    ----------
    load : callable
        Reads all models, keyed by name.
    signature : callable
        Returns a value that changes with the models' files.
    options : Options
        The options of the service.
    around : callable
        Returns a context that contains the service, such as the connection to a federation.
    """

    def __init__(
        self,
        load: Callable[[], Mapping[str, Endpoint]],
        signature: Callable[[], object],
        options: Options,
        around: Callable[[], contextlib.AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        options.check()
        self.options = options
        self.http_port = self.grpc_port = 0
        """The ports on which the service listens, as soon as it has started."""
        self.started = threading.Event()
        self._load, self._signature, self._around = load, signature, around
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    def stop(self) -> None:
        """End the service after it has answered the remaining requests. Any thread may call this method."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)

    async def run(self, *, handles_signals: bool = True) -> None:
        """Serve until :meth:`stop` is called, or until SIGINT or SIGTERM arrives."""
        async with self._around():
            await self._run(handles_signals=handles_signals)

    async def _run(self, *, handles_signals: bool) -> None:
        options, self._loop = self.options, asyncio.get_running_loop()
        meters = Meters()
        repository = Repository(self._load)
        meters.watch_waiting(lambda: repository.waiting)
        service = Service(repository, meters)
        gate = Gate(options.limits, options.credentials.tokens, meters)
        certificate = _certificate(options.credentials)
        renewable = certificate.signature() if certificate else None
        loaded = self._signature()  # before the models are read, so that no later change is missed
        await repository.refresh()
        remote = self._grpc_server(Remote(service, gate), certificate)
        listening = _listen(options.host, options.http_port)
        http = self._http_server(Rest(service, gate), certificate)
        await remote.start()
        serving = asyncio.ensure_future(http.serve([listening]))
        self.http_port = listening.getsockname()[1]
        if handles_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                self._loop.add_signal_handler(number, self.stop)
        self._announce(repository.names)
        self.started.set()
        background = [asyncio.ensure_future(close_slow_connections(http))]
        if options.reload_seconds:
            models = follow(partial(reload_models, repository, meters), self._signature, loaded, options.reload_seconds)
            background.append(asyncio.ensure_future(models))
        if options.reload_seconds and certificate:
            renewals = follow(certificate.renew, certificate.signature, renewable, options.reload_seconds)
            background.append(asyncio.ensure_future(renewals))
        try:
            await asyncio.wait([asyncio.ensure_future(self._ended.wait()), serving], return_when="FIRST_COMPLETED")
        finally:
            for task in background:
                task.cancel()
            await service.stop(options.drain_seconds)
            http.should_exit = True
            await asyncio.gather(remote.stop(options.grace_seconds), serving)
            await repository.close()
            log(INFO, "The service has stopped")

    def _announce(self, names: Sequence[str]) -> None:
        credentials = self.options.credentials
        scheme = "https" if credentials.certificate else "http"
        host = _bracketed(self.options.host)
        print(f"models   {', '.join(names)}")
        print(f"REST     {scheme}://{host}:{self.http_port}/v2")
        print(f"gRPC     {host}:{self.grpc_port}", flush=True)

    def _grpc_server(self, remote: Remote, certificate: Certificate | None) -> grpc.aio.Server:
        """Return the gRPC server, bound to its port."""
        options = self.options
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.limits.max_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
            ]
        )
        server.add_generic_rpc_handlers((remote.handler(),))
        address = f"{_bracketed(options.host)}:{options.grpc_port}"
        try:
            if certificate is None:
                self.grpc_port = server.add_insecure_port(address)
            else:
                self.grpc_port = server.add_secure_port(address, certificate.grpc_credentials())
        except RuntimeError as error:
            raise SettingsError(f"--grpc-port {options.grpc_port}: the port cannot be used ({error})") from error
        return server

    def _http_server(self, routes: Rest, certificate: Certificate | None) -> uvicorn.Server:
        """Return the HTTP server."""
        options, credentials = self.options, self.options.credentials
        config = uvicorn.Config(
            routes,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            http=Connection,
            proxy_headers=False,  # a caller could avoid the limit of its rate
            timeout_graceful_shutdown=int(options.grace_seconds) or None,
            ssl_certfile=credentials.certificate,
            ssl_keyfile=credentials.key,
            ssl_ca_certs=str(credentials.ca) if credentials.ca else None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if credentials.ca else ssl.CERT_NONE,
        )
        config.load()
        if certificate is not None and config.ssl is not None:
            certificate.watch(config.ssl)
        return _Http(config)


def _certificate(credentials: Credentials) -> Certificate | None:
    """Return the certificate of a service, or None if it has none."""
    if credentials.certificate is None or credentials.key is None:
        return None
    return Certificate(credentials.certificate, credentials.key, credentials.ca)


def _bracketed(host: str) -> str:
    """Return a host as in an address with a port."""
    return f"[{host}]" if ":" in host else host


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, or raise :class:`SettingsError` if the port cannot be used."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise SettingsError(f"--host {host}: the address is unknown ({error.strerror})") from error
    try:
        # asyncio switches Nagle's algorithm off only if the socket names its protocol.
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # gRPC also accepts IPv4 on the address `::`
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, not socket.has_dualstack_ipv6())
        listening.bind(address)
        listening.listen(BACKLOG)
        return listening
    except OSError as error:
        raise SettingsError(f"--http-port {port}: the port cannot be used ({error.strerror})") from error
