"""The commands of a real federation: covers over Flower's own, which are printed where they can be typed as well."""

import argparse
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posy.commands.launch import (
    INTERRUPTED,
    Connection,
    flower_environment,
    free_port,
    is_loopback,
    script,
    show_run,
    toml,
    write_connection,
)
from posy.listing import print_table
from posy.server_app.progress import duration
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
MAX_DAYS = 36_500


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
    command.add_argument(
        "--control-open-to-network",
        action="store_true",
        help="let --control be an address that other machines reach: whoever does can run code on every node",
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
        "status",
        help="list the runs and nodes of a federation",
        description="List the runs that were submitted to a SuperLink, the newest first, and its nodes by name.",
    )
    add_connection(command)
    command.set_defaults(command=status)

    command = commands.add_parser(
        "log",
        help="show the log of a run of a federation",
        description="Show the log of a run from its beginning on, until it ends. Ctrl-C leaves the run alone.",
    )
    command.add_argument("run", metavar="RUN", help="its run id, or its run-name: `posy status` lists both")
    command.add_argument("-v", "--verbose", action="store_true", help="show the whole log of Flower")
    add_connection(command)
    command.set_defaults(command=log)

    command = commands.add_parser(
        "stop",
        help="stop a run of a federation",
        description="Stop a run. What it has done is kept, and it can be resumed from its last checkpoint.",
    )
    command.add_argument("run", metavar="RUN", help="its run id, or its run-name: `posy status` lists both")
    add_connection(command)
    command.set_defaults(command=stop)

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
    _split("--superlink", options.superlink)
    if options.insecure:
        _check_loopback("--superlink", options.superlink)
        return Connection(options.superlink)
    return Connection(options.superlink, _there(options.root_certificates, "--root-certificates"))


def certificates(options: argparse.Namespace) -> int:
    """`posy certificates`: make certificates and keys."""
    from posy.commands.deploy.certificates import make_certificates  # noqa: PLC0415 - what the other commands do not need

    if not 1 <= options.days <= MAX_DAYS:
        raise SettingsError(f"--days {options.days}: it must be 1 to {MAX_DAYS}")
    for path in make_certificates(options.folder, options.host, options.nodes, options.days):
        print(path)
    return 0


def superlink(options: argparse.Namespace) -> int:
    """`posy superlink`: run the SuperLink and the process that runs ServerApps."""
    from posy.commands.deploy.superlink import keep  # noqa: PLC0415

    fleet = options.fleet or (LOCAL_FLEET if options.insecure else FLEET)
    host, port = _split("--control", options.control)
    _split("--fleet", fleet)
    served = ["--host", host, "--port", port, "--fleet-api-address", fleet]
    if not is_loopback(options.control):
        _check_control(options.control, allowed=options.control_open_to_network)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    reached = f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
    if options.insecure:
        for option, address in (("--control", options.control), ("--fleet", fleet)):
            _check_loopback(option, address)
        trust = asked = ["--insecure"]
    else:
        from posy.commands.deploy.certificates import Files, check_authority, check_server  # noqa: PLC0415

        files = Files(options.certificates)
        ca, server, key = (_there(path, "--certificates") for path in (files.ca, files.server, files.server_key))
        check_authority(ca)
        check_server(server, key)
        trust = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key)]
        trust += ["--enable-supernode-auth"]
        asked = ["--root-certificates", str(ca)]
    state = options.state.absolute()
    try:
        state.mkdir(parents=True, exist_ok=True)
        state.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"--state {options.state}: it must be a directory of one's own: {error}") from error
    kept = ["--isolation", "process", "--disable-runtime-dependency-installation"]
    if not options.volatile:
        kept += ["--database", str(state / "state.db")]
    commands = [
        [script("flower-superlink"), *served, *trust, *kept],
        [script("flower-superexec"), "--runtime-api-address", reached, *asked, "--parent-pid", str(os.getpid())],
    ]
    for option, address in (("--control", options.control), ("--fleet", fleet)):
        _check_free(option, address)
    home = state / "flower"
    home.mkdir(exist_ok=True)
    superlink = Connection(reached, None if options.insecure else ca)
    write_connection(home, superlink)
    environment = flower_environment(home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    for command in (commands[0], commands[1][:-2]):  # whoever types the second has another process to watch
        _tell(command, environment)
    _tell([script("flwr"), "list"], environment)
    keep(commands, environment)
    return 0


def register(options: argparse.Namespace) -> int:
    """`posy register`: make keys known to the SuperLink."""
    from posy.commands.deploy.certificates import public_pem  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    keys = {path: public_pem(path) for path in (_there(path, "the command line") for path in options.keys)}
    superlink = connection(options)
    with control(superlink) as asked:
        nodes = asked.nodes()
    status = 0
    with superlink.open() as flower:
        for key, content in keys.items():
            known = next((node for node in nodes if node.public_key == content), None)
            if known is not None:
                print(f"{key.stem} is registered already" + ("" if known.name == key.stem else f", as {known.name}"))
            elif any(node.name == key.stem for node in nodes):
                print(f"posy: {key.stem} is not registered: another key has this name", file=sys.stderr)
                status = 1
            else:
                flower.ask("supernode", "register", str(key), "--name", key.stem)
                print(f"{key.stem} is registered")
    return status


def status(options: argparse.Namespace) -> int:
    """`posy status`: list runs and nodes."""
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    with control(connection(options)) as asked:
        runs, nodes = asked.runs(), asked.nodes()
    columns = ("run id", "run-name", "method", "status", "since", "time")
    rows = [(run.number, run.name, run.method, run.status, run.since, duration(run.seconds)) for run in runs]
    print_table("runs" if rows else "no run was submitted", columns, rows)
    known = [(node.name, node.status, node.since) for node in nodes]
    print_table("nodes" if nodes else "no node is registered", ("name", "status", "since"), known)
    return 0


def log(options: argparse.Namespace) -> int:
    """`posy log`: show the log of a run."""
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    superlink = connection(options)
    with control(superlink) as asked:
        run = asked.find(options.run)
    result = show_run(superlink, run.number, verbose=options.verbose)
    if result == INTERRUPTED:
        print(f"posy: this stops it: {_typed(['posy', 'stop', run.number, *superlink.words()])}", file=sys.stderr)
    return result


def stop(options: argparse.Namespace) -> int:
    """`posy stop`: stop a run."""
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    superlink = connection(options)
    with control(superlink) as asked:
        run = asked.find(options.run)
        if run.ended:
            raise SettingsError(f"run {options.run} has ended already ({run.status}, {run.since})")
        asked.stop(run)
    print(f"run {run.number} is stopped")
    name = run.name or "RUN-NAME"
    folder = [f"output-dir={run.config['output-dir']}"] if "output-dir" in run.config else []
    words = ["posy", "run", *superlink.words(), f"resume={name}", *folder]
    print(f"from its last checkpoint it goes on with: {_typed(words)}")
    return 0


def supernode(options: argparse.Namespace) -> int:
    """`posy supernode`: become a SuperNode."""
    _split("--superlink", options.superlink)
    if options.wait is not None and not options.wait > 0:
        raise SettingsError(f"--wait {options.wait:g}: it must be more than 0 seconds")
    words = ["--superlink", options.superlink]
    if options.insecure:
        _check_loopback("--superlink", options.superlink)
        words.append("--insecure")
    else:
        from posy.commands.deploy.certificates import check_authority, check_node_key  # noqa: PLC0415

        ca = _there(options.root_certificates, "--root-certificates")
        check_authority(ca)
        words += ["--root-certificates", str(ca)]
        if options.key is not None:
            key = _there(options.key, "--key")
            check_node_key(key)
            words += ["--auth-supernode-private-key", str(key)]
    if options.wait is not None:
        words += ["--max-wait-time", f"{options.wait:g}"]
    if config := node_config(options.config):
        words += ["--node-config", config]
    environment = flower_environment(Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")))
    if options.stock:
        command = [script("flower-supernode"), *words, "--host", "127.0.0.1", "--port", str(free_port())]
    else:
        command = [sys.executable, "-P", "-m", "posy.commands.deploy.node", *words]
    _tell(command, environment)
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
    if not is_loopback(address):
        raise SettingsError(f"{option} {address} with --insecure: without TLS it must be 127.0.0.1")


def _check_control(address: str, *, allowed: bool) -> None:
    """Refuse to take orders from the network, or warn of it: Flower has no passwords there, and ca.pem is public."""
    danger = f"--control {address}: whoever reaches it and has ca.pem, which is no secret, can run code on every node"
    port = address.rpartition(":")[2]
    if not allowed:
        raise SettingsError(
            f"{danger}. Leave it at {CONTROL}, and submit runs from elsewhere through a tunnel (`ssh -L "
            f"{port}:127.0.0.1:{port} SERVER`, then --superlink localhost:{port}); if a firewall keeps all others "
            "away, say --control-open-to-network"
        )
    print(f"posy: WARNING: {danger}. Only a firewall keeps others away", file=sys.stderr, flush=True)


def _check_free(option: str, address: str) -> None:
    """Raise :class:`SettingsError` if one cannot listen at an address; Flower's processes tell it in a traceback."""
    host, port = _split(option, address)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        raise SettingsError(f"{option} {address}: one cannot listen there: {error}") from error


def _split(option: str, address: str) -> tuple[str, str]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{option} {address}: it must be HOST:PORT, such as {CONTROL}")
    return host.strip("[]"), port


def _there(path: Path, where: str) -> Path:
    if not path.is_file():
        raise SettingsError(f"there is no file {path} ({where}); `posy certificates` makes certificates and keys")
    return path.absolute()


def _tell(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print a command as it may be typed into the shell that this one was typed into."""
    name = Path(command[0]).name
    program = name if shutil.which(name) == command[0] else command[0]
    # The rest of what is set is the same everywhere: no telemetry, no search for updates.
    home = environment["FLWR_HOME"]
    setting = (
        [] if os.environ.get("FLWR_HOME", str(Path.home() / ".flwr")) == home else [f"FLWR_HOME={shlex.quote(home)}"]
    )
    print("$", *setting, _typed([program, *command[1:]]), file=sys.stderr, flush=True)


def _typed(words: Sequence[str]) -> str:
    return shlex.join(words)
