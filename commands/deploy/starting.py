"""Start a SuperLink and nodes from the options of `posy superlink` and `posy supernode`."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from posy.commands.deploy import options as shared
from posy.commands.deploy.backup import DATABASE, locked_state
from posy.commands.deploy.certificates import Files, check_authority, check_node_key, check_server
from posy.commands.deploy.next_steps import after_superlink
from posy.commands.guide import show_next
from posy.commands.launch import Connection, script
from posy.deploy.addresses import is_loopback
from posy.deploy.foreign import REFUSE
from posy.deploy.secret import OPTION, write_secret
from posy.deploy.superlink import keep
from posy.flower import FLOWER
from posy.forked import cores
from posy.paths import flwr_home
from posy.settings import SettingsError


@dataclass(frozen=True)
class SuperLinkOptions:
    """The options of `posy superlink`."""

    certificates: Path | None
    insecure: bool
    state: Path
    volatile: bool
    fleet: str | None
    control: str
    open_to_network: bool
    stock: bool


@dataclass(frozen=True)
class NodeOptions:
    """The options of `posy supernode`."""

    config: Sequence[str]
    superlink: str
    keys: Sequence[Path]
    root_certificates: Path | None
    insecure: bool
    wait: float | None
    stock: bool
    refuse_foreign_code: bool
    trusted_entities: Path | None


def has_warm_nodes() -> bool:
    """Return whether Posy's nodes and SuperLink support the protocol of the installed version of Flower."""
    return version("flwr").startswith(f"{FLOWER}.")


# -- the SuperLink ---------------------------------------------------------------------------------------


def start_superlink(options: SuperLinkOptions) -> None:
    """Start a SuperLink and the process that runs ServerApps, and restart them if they die, until interrupted."""
    cores()  # report an invalid limit on parallel runs now, rather than when a run starts
    warm = has_warm_nodes()
    fleet = options.fleet or (shared.LOCAL_FLEET if options.insecure else shared.FLEET)
    listening = [("--control", options.control), *([("--fleet", fleet)] if warm else [])]
    for option, address in listening:
        shared.host_and_port(option, address)
    if not is_loopback(options.control):
        shared.check_control(options.control, allowed=options.open_to_network)
    shared.exclude(options.insecure, "--certificates", options.certificates)
    if options.insecure:
        for option, address in listening:
            shared.check_loopback(option, address)
    endpoint, trust, certificate = _trust(options)
    home = options.state.absolute() / shared.HOME
    secret = home / shared.PRIVATE / "superexec-secret"
    superlink_words = [*_words(options, fleet if warm else "", trust), OPTION, str(secret)]
    superexec_words = ["--runtime-api-address", endpoint.address, *endpoint.words()[2:], OPTION, str(secret)]
    link, superexec = ([sys.executable, "-P", "-m", f"posy.deploy.{name}"] for name in ("link", "superexec"))
    stock = [script("flower-superlink")]
    commands = {
        "flower-superlink": [*(stock if options.stock or not warm else link), *superlink_words],
        "flower-superexec": [*superexec, *superexec_words, "--parent-pid", str(os.getpid())],
    }
    with locked_state(options.state) as lock:
        for option, address in listening:
            shared.check_free(option, address)
        home.mkdir(exist_ok=True)
        shared.write_connection(home, endpoint)
        write_secret(secret)
        environment = shared.flower_environment(home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        # Print commands that also work in a shell: Flower's own SuperLink, and an executor without --parent-pid.
        for command in ([*stock, *superlink_words], [script("flower-superexec"), *superexec_words]):
            shared.print_command(command, environment)
        shared.print_command([script("flwr"), "list"], environment)
        show_next(after_superlink(endpoint, fleet if warm else options.control), sys.stderr)
        if not warm:
            _warn_of_http(options)
        keep(commands, environment, lock, certificate)


def _trust(options: SuperLinkOptions) -> tuple[Connection, list[str], Path | None]:
    """Return this machine's connection to the SuperLink, the SuperLink's TLS options, and the certificate to watch."""
    host, port = shared.host_and_port("--control", options.control)
    local_host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"[{local_host}]:{port}" if ":" in local_host else f"{local_host}:{port}"
    if options.insecure:
        return Connection(address), ["--insecure"], None
    files = Files(options.certificates or shared.CERTIFICATES)
    ca, server, key = (shared.file_of(path, "--certificates") for path in (files.ca, files.server, files.server_key))
    check_authority(ca)
    check_server(server, key)
    trust = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key)]
    # Posy restarts the SuperLink when its certificate changes, which would end the runs of a volatile SuperLink.
    return Connection(address, ca), [*trust, "--enable-supernode-auth"], None if options.volatile else server


def _words(options: SuperLinkOptions, fleet: str, trust: list[str]) -> list[str]:
    """Return the SuperLink's command-line arguments, except the path of its secret.

    ``fleet`` is empty if nodes do not use gRPC.
    """
    host, port = shared.host_and_port("--control", options.control)
    words = ["--host", host, "--port", port, *(["--fleet-api-address", fleet] if fleet else []), *trust]
    words += ["--isolation", "process", "--disable-runtime-dependency-installation"]
    return words + ([] if options.volatile else ["--database", str(options.state.absolute() / DATABASE)])


def _warn_of_http(options: SuperLinkOptions) -> None:
    print(
        f"posy: WARNING: with Flower {version('flwr')}, nodes connect over HTTP to --control {options.control}, "
        f"--fleet has no effect, and Posy starts Flower's own SuperLink; Flower {FLOWER} is faster",
        file=sys.stderr,
        flush=True,
    )


# -- nodes -----------------------------------------------------------------------------------------------


def node_command(options: NodeOptions) -> tuple[list[str], Mapping[str, str]]:
    """Return the command that starts one or more nodes, and its environment."""
    endpoint = shared.connection(options.superlink, options.root_certificates, options.insecure)
    keys = [shared.file_of(path, "--key") for path in options.keys]
    for path in keys:
        check_node_key(path)
    if len({path.stem for path in keys}) < len(keys):
        raise SettingsError(
            f"--key {' --key '.join(map(str, keys))}: two key files have the same name, but the file name is also the "
            "node's name; rename one of the files"
        )
    stock = options.stock or not has_warm_nodes()
    _check_stock(options, len(keys), stock=stock)
    home = flwr_home()
    names = [path.stem for path in keys]
    configs = [shared.with_audit(pairs, home) for pairs in shared.node_configs(options.config, names)]
    words = endpoint.words()
    words += [] if options.wait is None else ["--max-wait-time", f"{options.wait:g}"]
    used_keys = keys if len(keys) > 1 or not options.insecure else []
    words += [word for path in used_keys for word in ("--auth-supernode-private-key", str(path))]
    words += [word for pairs in configs if pairs for word in ("--node-config", shared.node_config(pairs))]
    if options.trusted_entities is not None:
        from posy.deploy.trusted import read_entities  # noqa: PLC0415 - imports Flower

        read_entities(options.trusted_entities)
        words += ["--trusted-entities", str(options.trusted_entities.absolute())]
    signed = options.trusted_entities is not None
    for pairs in configs:
        shared.check_data(dict(pair.split("=", 1) for pair in pairs), stock=stock, signed=signed)
    environment = shared.flower_environment(home) | ({REFUSE: "1"} if options.refuse_foreign_code else {})
    return [sys.executable, "-P", "-m", f"posy.deploy.{'stock' if stock else 'node'}", *words], environment


def _check_stock(options: NodeOptions, keys: int, *, stock: bool) -> None:
    """Reject options that Flower's own node does not support, and warn if Posy has no warm nodes for this version."""
    cause = "--stock" if options.stock else f"Flower {version('flwr')} (without warm nodes)"
    if stock and keys > 1:
        hint = "drop --stock, or start" if options.stock else "start"
        raise SettingsError(f"{cause} starts one node, but --key is repeated; {hint} each node separately")
    if stock and options.refuse_foreign_code:
        hint = "drop --stock" if options.stock else f"install 'flwr>={FLOWER},<1.40'"
        raise SettingsError(
            f"--refuse-foreign-code cannot be combined with {cause}: Flower's node runs any code; {hint}"
        )
    if stock and not options.stock:
        print(
            f"posy: WARNING: Posy has no warm nodes for Flower {version('flwr')}, and starts Flower's own node, which "
            f"needs more time for each message; Flower {FLOWER} is faster",
            file=sys.stderr,
            flush=True,
        )
