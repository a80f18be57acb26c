"""`posy serve`: offer the models of a run as a service."""

import asyncio
import gc
import resource
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from uvicorn.loops.auto import auto_loop_factory

from posy.commands.deploy.certificates import check_authority, check_server
from posy.commands.deploy.control import control
from posy.commands.launch import Connection
from posy.serve.endpoints import Endpoint
from posy.serve.federation import Link
from posy.serve.repository import signature_of
from posy.serve.run_models import load_endpoints, load_router
from posy.serve.server import ModelServer, Options
from posy.server_app.record import Record
from posy.settings import SettingsError


def serve(server: ModelServer) -> None:
    """Run a service until SIGINT or SIGTERM arrives."""
    # With Python's thresholds, the search for circular references takes a fifth of the time of a small request.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each connection is an open file
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(server.run())


def serving(
    run: str,
    options: Options,
    superlink: Connection | None = None,
    answer_seconds: float = 10.0,
    *,
    site: bool = False,
) -> ModelServer:
    """Return the service of a run's models.

    With ``superlink``, the service offers only the router, and the nodes of the federation answer the queries, each
    within ``answer_seconds``. With ``site``, ``run`` must be the folder of a node.

    Raises
    ------
    SettingsError
        If the run has no models, an option is not valid, or a certificate has expired.
    DamagedFileError
        If a model cannot be read.
    """
    if site:
        _check_site(run, superlink)
    link = None if superlink is None else Link(partial(_start, Record.find(run).path, superlink), answer_seconds)

    def load() -> Mapping[str, Endpoint]:
        record = Record.find(run)
        return load_endpoints(record) if link is None else load_router(record, link)

    def signature() -> object:
        return signature_of(_files(Record.find(run)))

    server = ModelServer(load, signature, options, *([] if link is None else [link.running]))
    credentials = options.credentials
    if credentials.certificate is not None and credentials.key is not None:
        check_server(credentials.certificate, credentials.key)
    if credentials.ca is not None:
        check_authority(credentials.ca)
    return server


def _check_site(run: str, superlink: Connection | None) -> None:
    """Raise :class:`SettingsError` if the arguments do not mean the models in the folder of a node."""
    if superlink is not None:
        raise SettingsError("--site: a node offers its own models, so --superlink has no effect; use one of the two")
    record = Record.find(run)
    if record.library is None:
        raise SettingsError(
            f"--site: {record.path} is a run's folder on the server; name the state-dir or models folder of a node, or "
            "drop --site"
        )


def _files(record: Record) -> list[Path]:
    """Return the files with the models that the service offers."""
    if record.library is not None:
        return [model.path for _, model in record.library.current_models]
    return sorted(record.models.glob("*.safetensors"))


def _start(run: Path, superlink: Connection, socket: Path) -> Callable[[], str]:
    """Submit a run that passes queries to the nodes, and return a function that returns why it has ended, or ""."""
    settings = {"resume": run.name, "output-dir": str(run.parent), "queries-from": str(socket)}
    with control(superlink) as api:
        number = api.submit(settings)

    def ended() -> str:
        with control(superlink) as api:
            run_on_superlink = api.find(number)
        return f"{run_on_superlink.status}: {run_on_superlink.details}" if run_on_superlink.ended else ""

    return ended


def read_tokens(path: Path) -> list[str]:
    """Return the tokens in a file with one token per line, which only its owner may read.

    Raise :class:`SettingsError` if the file has no tokens, or if other users may read it.
    """
    try:
        if path.stat().st_mode & 0o077:
            raise SettingsError(f"--tokens {path}: other users may read the file; run `chmod 600 {path}`")
        tokens = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--tokens {path}: the file cannot be read ({error})") from error
    tokens = [token for token in tokens if token and not token.startswith("#")]
    if not tokens:
        raise SettingsError(f"--tokens {path}: the file has no token; write one token per line")
    if any(not token.isascii() or not token.isprintable() or " " in token for token in tokens):
        raise SettingsError(f"--tokens {path}: a token contains a space or a character beyond ASCII; replace it")
    return tokens
