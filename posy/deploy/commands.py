"""The commands of a real federation; each is a thin cover over Flower's own, which it prints."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posy.launch import Connection, flower_environment, free_port, script, toml
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def add_commands(commands: Any) -> None:
    """Add the commands to those of ``posy``."""
    command = commands.add_parser(
        "certificates",
        help="make certificates for a SuperLink and keys for its nodes",
        description=(
            "Make what a directory lacks: an authority (ca.pem, ca.key), the SuperLink's certificate (server.pem, "
            "server.key), and for each node a private key (NAME.key, for that node alone) and a public one (NAME.pub, "
            "for `posy register`). Files that are there stay as they are."
        ),
    )
    command.add_argument("folder", type=Path, metavar="DIR", help="directory to write to")
    command.add_argument("nodes", nargs="*", metavar="NODE", help="names of nodes")
    command.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="name or IP address under which nodes reach the SuperLink, besides localhost; may be repeated",
    )
    command.add_argument("--days", type=int, default=365, help="validity in days (default: 365)")
    command.set_defaults(command=certificates)

    command = commands.add_parser(
        "superlink",
        help="start the server of a federation",
        description=(
            "Start Flower's SuperLink, which nodes connect to, and the process that runs ServerApps. Its state lies in "
            "a database, and it is started again should it die: runs go on. Without --insecure it wants certificates, "
            "and only nodes whose keys are registered (`posy register`) are let in. Whoever reaches --control can run "
            "code on every node, so it listens on this machine alone unless told otherwise."
        ),
    )
    _add_trust(command, "--certificates", "certificates", "directory made by `posy certificates`")
    command.add_argument("--state", type=Path, default=Path("superlink"), metavar="DIR", help="its database and files")
    command.add_argument(
        "--volatile",
        action="store_true",
        help="keep the state in memory: rounds are faster, but runs end with the SuperLink",
    )
    command.add_argument("--fleet", metavar="HOST:PORT", help=f"where nodes connect to (default: {FLEET})")
    command.add_argument(
        "--control", default=CONTROL, metavar="HOST:PORT", help=f"where runs are submitted (default: {CONTROL})"
    )
    command.set_defaults(command=superlink)

    command = commands.add_parser(
        "register",
        help="let nodes take part",
        description="Register the public keys of nodes with a SuperLink, each under the name of its file.",
    )
    command.add_argument("keys", nargs="+", type=Path, metavar="NAME.pub", help="public keys")
    add_connection(command)
    command.set_defaults(command=register)

    command = commands.add_parser(
        "supernode",
        help="start a node of a federation",
        description=(
            "Start a SuperNode that keeps PyTorch, code and data loaded between messages. The words key=value are its "
            "node config: partition-id=0 num-partitions=5 for a share of a benchmark's data, and what else the app "
            "reads from it."
        ),
    )
    command.add_argument("config", nargs="*", metavar="key=value", help="node config")
    command.add_argument("--superlink", default=LOCAL_FLEET, metavar="HOST:PORT", help=f"default: {LOCAL_FLEET}")
    command.add_argument("--key", type=Path, metavar="FILE", help="private key of this node")
    _add_trust(command, "--root-certificates", "certificates/ca.pem", "certificate of the SuperLink's authority")
    command.add_argument(
        "--wait", type=float, metavar="SECONDS", help="end when the SuperLink cannot be reached for so long"
    )
    command.add_argument(
        "--stock", action="store_true", help="start Flower's own command, which starts Python anew for every message"
    )
    command.set_defaults(command=supernode)


def add_connection(command: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the options that name a SuperLink to give orders to."""
    command.add_argument(
        "--superlink",
        default=None if optional else CONTROL,
        metavar="HOST:PORT",
        help="a running SuperLink" + (" to submit the run to" if optional else f" (default: {CONTROL})"),
    )
    _add_trust(command, "--root-certificates", "certificates/ca.pem", "certificate of the SuperLink's authority")


def connection(options: argparse.Namespace) -> Connection:
    """Return the SuperLink that the options name.

    Raises
    ------
    SettingsError
        If it is to be reached without TLS on another machine, or the certificate is missing.
    """
    if options.insecure:
        _check_loopback("--superlink", options.superlink)
        return Connection(options.superlink)
    return Connection(options.superlink, _there(options.root_certificates, "--root-certificates"))


def certificates(options: argparse.Namespace) -> int:
    """`posy certificates`: make certificates and keys."""
    from posy.deploy.certificates import make_certificates  # noqa: PLC0415 - what the other commands do not need

    if options.days < 1:
        raise SettingsError(f"--days {options.days}: it must be 1 or more")
    for path in make_certificates(options.folder, options.host, options.nodes, options.days):
        print(path)
    return 0


def superlink(options: argparse.Namespace) -> int:
    """`posy superlink`: run the SuperLink and the process that runs ServerApps."""
    from posy.deploy.superlink import keep  # noqa: PLC0415

    fleet = options.fleet or (LOCAL_FLEET if options.insecure else FLEET)
    host, port = _split("--control", options.control)
    _split("--fleet", fleet)
    served = ["--host", host, "--port", port, "--fleet-api-address", fleet]
    reached = f"{'127.0.0.1' if host in ('0.0.0.0', *LOOPBACK) else host}:{port}"
    if options.insecure:
        for option, address in (("--control", options.control), ("--fleet", fleet)):
            _check_loopback(option, address)
        trust = asked = ["--insecure"]
    else:
        from posy.deploy.certificates import Files  # noqa: PLC0415

        files = Files(options.certificates)
        ca, server, key = (_there(path, "--certificates") for path in (files.ca, files.server, files.server_key))
        trust = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key)]
        trust += ["--enable-supernode-auth"]
        asked = ["--root-certificates", str(ca)]
    state = options.state.absolute()
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    kept = ["--isolation", "process", "--disable-runtime-dependency-installation"]
    if not options.volatile:
        kept += ["--database", str(state / "state.db")]
    commands = [
        [script("flower-superlink"), *served, *trust, *kept],
        [script("flower-superexec"), "--runtime-api-address", reached, *asked, "--parent-pid", str(os.getpid())],
    ]
    for command in commands:
        _tell(command)
    environment = flower_environment(state / "flower") | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    keep(commands, environment)
    return 0


def register(options: argparse.Namespace) -> int:
    """`posy register`: make keys known to the SuperLink."""
    keys = [_there(path, "the command line") for path in options.keys]
    with connection(options).open() as flower:
        known = {node["name"] for node in flower.ask("supernode", "list")["nodes"]}
        for key in keys:
            if key.stem in known:
                print(f"{key.stem} is registered already")
                continue
            words = ["supernode", "register", str(key), "--name", key.stem]
            _tell(["flwr", *words])
            flower.ask(*words)
    return 0


def supernode(options: argparse.Namespace) -> int:
    """`posy supernode`: become a SuperNode."""
    words = ["--superlink", options.superlink]
    if options.insecure:
        _check_loopback("--superlink", options.superlink)
        words.append("--insecure")
    else:
        words += ["--root-certificates", str(_there(options.root_certificates, "--root-certificates"))]
        if options.key is not None:
            words += ["--auth-supernode-private-key", str(_there(options.key, "--key"))]
    if options.wait is not None:
        words += ["--max-wait-time", f"{options.wait:g}"]
    if config := node_config(options.config):
        words += ["--node-config", config]
    environment = flower_environment(Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")))
    if options.stock:
        command = [script("flower-supernode"), *words, "--host", "127.0.0.1", "--port", str(free_port())]
    else:
        command = [sys.executable, "-P", "-m", "posy.deploy.node", *words]
    _tell(command)
    os.execve(command[0], command, environment)


def node_config(words: Sequence[str]) -> str:
    """Return key=value words as Flower reads a node config: values are TOML, apart by spaces.

    Raises
    ------
    SettingsError
        If a word is not of that form.
    """
    pairs = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"{word!r}: node config is given as key=value")
        try:
            value: Any = parse(text)
        except ValueError:
            value = text
        pairs.append(f"{key}={toml(value if type(value) in (bool, int, float) else text.strip(chr(34)))}")
    return " ".join(pairs)


def _add_trust(command: argparse.ArgumentParser, option: str, default: str, what: str) -> None:
    trust = command.add_mutually_exclusive_group()
    trust.add_argument(option, type=Path, default=Path(default), metavar="PATH", help=f"{what} (default: {default})")
    trust.add_argument("--insecure", action="store_true", help="no TLS; only on this machine, for experiments")


def _check_loopback(option: str, address: str) -> None:
    if address.rpartition(":")[0] not in LOOPBACK:
        raise SettingsError(f"{option} {address} with --insecure: without TLS it must be 127.0.0.1")


def _split(option: str, address: str) -> tuple[str, str]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{option} {address}: it must be HOST:PORT, such as {CONTROL}")
    return host.strip("[]"), port


def _there(path: Path, where: str) -> Path:
    if not path.is_file():
        raise SettingsError(f"there is no file {path} ({where}); `posy certificates` makes certificates and keys")
    return path.absolute()


def _tell(command: Sequence[str]) -> None:
    """Print a command as it may be typed."""
    print("$", shlex.join([Path(command[0]).name, *command[1:]]), file=sys.stderr, flush=True)
