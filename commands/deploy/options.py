"""Check the options of the federation commands, and build the environment of Flower's commands."""

import os
import shlex
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posy.client_app.node_config import AUDIT, AUDIT_NAME, NODE_NAME, check_node_config
from posy.commands.launch import ENVIRONMENT, Connection, toml, without_proxy
from posy.deploy.addresses import is_loopback
from posy.paths import flwr_home
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
CERTIFICATES = Path("certificates")
HOME, PRIVATE = "flower", "private"
"""Flower's home folder in a SuperLink's state directory, and its subfolder for the processes' secret."""


def connection(superlink: str, root_certificates: Path | None, insecure: bool) -> Connection:
    """Return the connection to the SuperLink that the options specify.

    Raises
    ------
    SettingsError
        If an address is not HOST:PORT, a SuperLink without TLS is not on this machine, or the certificate is missing
        or unusable.
    """
    host_and_port("--superlink", superlink)
    exclude(insecure, "--root-certificates", root_certificates)
    if insecure:
        check_loopback("--superlink", superlink)
        return Connection(superlink)
    from posy.commands.deploy.certificates import check_authority  # noqa: PLC0415 - few commands need it

    ca = file_of(root_certificates or CERTIFICATES / "ca.pem", "--root-certificates")
    check_authority(ca)
    return Connection(superlink, ca)


def node_config(words: Sequence[str]) -> str:
    """Convert key=value words to the format of Flower's node config: TOML values, separated by spaces.

    Raises
    ------
    SettingsError
        If a word does not have the form key=value, its key is unknown to nodes, or its value is not allowed.
    """
    pairs = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"{word!r} is not a node config; use the form key=value, such as partition-id=0")
        try:
            value: Any = parse(text)
        except ValueError:
            value = text
        pairs[key] = value if type(value) in (bool, int, float) else text.strip(chr(34))
    check_node_config(pairs)
    return " ".join(f"{key}={toml(value)}" for key, value in pairs.items())


def node_configs(words: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the node config of each node that a command starts, in the order of ``names``.

    The node's name replaces ``{name}`` in a value. By default, n nodes without ``data`` use n partitions, numbered 0
    to n - 1. With ``partition-id``, they use consecutive partitions, starting at this id. Without a name, as with
    --insecure, the command starts one node, and its config stays unchanged.

    Raises
    ------
    SettingsError
        If ``partition-id`` for several nodes is not a number, or ``num-partitions`` is missing.
    """
    if len(names) < 2:
        return [[word.replace(NODE_NAME, name) for word in words] for name in names] or [list(words)]
    config = dict(word.split("=", 1) for word in words if "=" in word)
    first = config.get("partition-id", "0")
    if not first.isdecimal() or ("partition-id" in config and "num-partitions" not in config):
        raise SettingsError(
            f"partition-id={first} for {len(names)} nodes: it must be the number of the first node's partition; also "
            "set num-partitions, the total number of partitions"
        )
    common = [word for word in words if not word.startswith("partition-id=")]
    if "data" not in config and "num-partitions" not in config:
        common.append(f"num-partitions={len(names)}")
    numbered = "data" not in config or "partition-id" in config
    return [
        [*([f"partition-id={int(first) + i}"] if numbered else []), *(word.replace(NODE_NAME, name) for word in common)]
        for i, name in enumerate(names)
    ]


def check_data(node_config: Mapping[str, str], *, stock: bool, signed: bool) -> None:
    """Check the path and the policy of a node's data before the node starts.

    Raises
    ------
    DataError
        If the path is relative or does not exist.
    SettingsError
        If the policy cannot be used, or forbids a stock node.
    """
    from posy.client_app.policy import site_policy  # noqa: PLC0415 - imports Flower
    from posy.data.errors import check_data_path  # noqa: PLC0415 - imports NumPy

    if "data" in node_config:
        check_data_path(Path(node_config["data"]))
    policy = site_policy(node_config)
    if stock and policy is not None and not (policy.code == "any" or (policy.code == "signed" and signed)):
        raise SettingsError(
            f"--stock with data={node_config['data']}: Flower's node runs any code that a run contains, but the policy "
            f"of the site has code = {policy.code}; drop --stock, or set code: any in the policy"
        )


def with_audit(words: Sequence[str], home: Path) -> list[str]:
    """Add the path of an audit log in ``home`` to a node config that sets data, but neither audit nor state-dir."""
    keys = {word.partition("=")[0] for word in words}
    complete = keys & {AUDIT, "state-dir"} or "data" not in keys
    return [*words, *([] if complete else [f"{AUDIT}={home.absolute() / AUDIT_NAME}"])]


def exclude(insecure: bool, option: str, value: object) -> None:
    """Raise :class:`SettingsError` if an option is combined with --insecure."""
    if insecure and value is not None:
        raise SettingsError(f"{option} cannot be combined with --insecure")


def check_loopback(option: str, address: str) -> None:
    """Raise :class:`SettingsError` for an address that other machines can reach."""
    if not is_loopback(address):
        raise SettingsError(
            f"{option} {address} with --insecure: without TLS the address must be 127.0.0.1; for other addresses, use "
            "`posy certificates` and drop --insecure"
        )


def check_control(address: str, *, allowed: bool) -> None:
    """Warn that other machines can connect to --control without a password, or raise an error unless ``allowed``."""
    danger = (
        f"--control {address}: any program that can connect to it and has the public ca.pem can run code on every node"
    )
    port = address.rpartition(":")[2]
    if not allowed:
        raise SettingsError(
            f"{danger}. Use {CONTROL}, and submit runs from other machines through a tunnel (`ssh -L "
            f"{port}:127.0.0.1:{port} SERVER`, then --superlink localhost:{port}); if a firewall protects the port, "
            "add --control-open-to-network"
        )
    print(f"posy: WARNING: {danger}. Protect the port with a firewall", file=sys.stderr, flush=True)


def check_free(option: str, address: str) -> None:
    """Raise :class:`SettingsError` if this process cannot listen on an address (Flower would print a traceback)."""
    host, port = host_and_port(option, address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        raise SettingsError(
            f"{option} {address}: cannot listen on this address ({error}); choose another address"
        ) from error


def host_and_port(option: str, address: str) -> tuple[str, str]:
    """Return the host and the port of an address; raise :class:`SettingsError` if it is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{option} {address}: it must be HOST:PORT, such as {CONTROL}")
    return host.strip("[]"), port


def file_of(path: Path, where: str) -> Path:
    """Return the absolute path of a key or certificate file; ``where`` names the option that set it."""
    if not path.is_file():
        raise SettingsError(f"{path} ({where}) is not a file; make certificates and keys with `posy certificates`")
    return path.absolute()


def write_connection(home: Path, superlink: Connection) -> None:
    """Write the SuperLink's address and certificate into ``home``, the ``FLWR_HOME`` of Flower's commands."""
    ca = superlink.root_certificates
    trust = "insecure = true" if ca is None else f"root-certificates = {toml(str(ca))}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "posy"\n[superlink.posy]\naddress = {toml(superlink.address)}\n{trust}\n',
        encoding="utf-8",
    )


def flower_environment(home: Path) -> dict[str, str]:
    """Return the environment for Flower's commands, which store their files in ``home``."""
    return {
        **os.environ,
        **ENVIRONMENT,
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),
        **without_proxy(),
    }


def print_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print a command so that the user can paste it into the same shell."""
    name = Path(command[0]).name
    program = name if shutil.which(name) == command[0] else command[0]
    # Omit variables that are the same for all commands, such as the variable that disables telemetry.
    home = environment["FLWR_HOME"]
    is_default = str(flwr_home()) == home
    setting = [] if is_default else [f"FLWR_HOME={shlex.quote(home)}"]
    print("$", *setting, shlex.join([program, *command[1:]]), file=sys.stderr, flush=True)
