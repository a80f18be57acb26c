"""The commands of a real federation. Where they start Flower's own, they print what they start."""

import os
import shlex
import shutil
import socket
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posy.commands.launch import (
    ENVIRONMENT,
    Connection,
    free_port,
    is_loopback,
    resume_command,
    script,
    toml,
    without_proxy,
)
from posy.listing import print_table
from posy.server_app.progress import duration
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
CERTIFICATES = Path("certificates")
MAX_DAYS = 36_500

SuperLink = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink takes orders.")]
RootCertificates = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Certificate of the SuperLink's authority (default: certificates/ca.pem)."),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="No TLS; only on this machine, for experiments.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show the whole log of Flower.")]
RunWord = Annotated[str, typer.Argument(metavar="RUN")]

app = typer.Typer()


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A name or IP address of the SuperLink besides localhost; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, metavar="DAYS", help="How long they are valid.")] = 365,
) -> int:
    """Make certificates for a SuperLink and keys for its nodes.

    Makes what DIR lacks: an authority (ca.pem, ca.key), the SuperLink's certificate (server.pem, server.key), and for
    each NODE a private key (NODE.key, for that node alone) and a public one (NODE.pub, for `posy register`). Files that
    are there stay as they are.
    """
    from posy.commands.deploy.certificates import make_certificates  # noqa: PLC0415 - what few commands need

    for path in make_certificates(folder, host or [], nodes or [], days):
        print(path)
    return 0


@app.command()
def superlink(
    folder: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="DIR", help="Made by `posy certificates` (default: certificates)."),
    ] = None,
    insecure: Insecure = False,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Its database and files.")] = Path("superlink"),
    volatile: Annotated[
        bool, typer.Option("--volatile", help="Keep the state in memory: faster, but runs end with the SuperLink.")
    ] = False,
    fleet: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"Where nodes connect to (default: {FLEET}).")
    ] = None,
    control: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where runs are submitted.")] = CONTROL,
    control_open_to_network: Annotated[
        bool,
        typer.Option("--control-open-to-network", help="Let other machines reach --control, and so run code on nodes."),
    ] = False,
) -> int:
    """Start the server of a federation.

    Starts Flower's SuperLink, which nodes connect to, and the process that runs ServerApps. Its state lies in a
    database, and it is started again should it die: runs go on. Without --insecure it needs certificates, and admits
    only nodes whose keys are registered (`posy register`). Anyone who reaches --control can run code on every node, so
    it listens on this machine alone unless told otherwise.
    """
    from posy.commands.deploy.superlink import keep  # noqa: PLC0415

    fleet = fleet or (LOCAL_FLEET if insecure else FLEET)
    places = (("--control", control), ("--fleet", fleet))
    (host, port), _ = (_host_and_port(option, place) for option, place in places)
    if not is_loopback(control):
        _check_control(control, allowed=control_open_to_network)
    near = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"[{near}]:{port}" if ":" in near else f"{near}:{port}"
    _exclude(insecure, "--certificates", folder)
    if insecure:
        for option, place in places:
            _check_loopback(option, place)
        reached = Connection(address)
        trust = ["--insecure"]
    else:
        from posy.commands.deploy.certificates import Files, check_authority, check_server  # noqa: PLC0415

        files = Files(folder or CERTIFICATES)
        ca, server, key = (_file(path, "--certificates") for path in (files.ca, files.server, files.server_key))
        check_authority(ca)
        check_server(server, key)
        reached = Connection(address, ca)
        trust = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key)]
        trust += ["--enable-supernode-auth"]
    _, _, *trusted = reached.words()
    home = state.absolute() / "flower"
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.parent.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"--state {state}: it must be a directory that you own: {error}") from error
    served = ["--host", host, "--port", port, "--fleet-api-address", fleet, *trust, "--isolation", "process"]
    served += ["--disable-runtime-dependency-installation"]
    served += [] if volatile else ["--database", str(home.parent / "state.db")]
    commands = [
        [script("flower-superlink"), *served],
        [script("flower-superexec"), "--runtime-api-address", address, *trusted, "--parent-pid", str(os.getpid())],
    ]
    for option, place in places:
        _check_free(option, place)
    _write_connection(home, reached)
    environment = _flower_environment(home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
    for command in (commands[0], commands[1][:-2]):  # whoever types the second has another process to watch
        _print_command(command, environment)
    _print_command([script("flwr"), "list"], environment)
    keep(commands, environment)
    return 0


@app.command()
def supernode(
    config: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink takes nodes.")] = LOCAL_FLEET,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Private key of this node.")] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="End when the SuperLink has been out of reach for this long."),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's own SuperNode: slower for every message.")
    ] = False,
) -> int:
    """Start a node of a federation.

    Starts a SuperNode that keeps PyTorch, code and data loaded between messages. The words key=value are its node
    config: partition-id=0 num-partitions=5 for a share of a benchmark's data, and what else the app reads from it.
    """
    reached = connection(superlink, root_certificates, insecure)
    words = reached.words()
    if key is not None:
        from posy.commands.deploy.certificates import check_node_key  # noqa: PLC0415

        key = _file(key, "--key")
        check_node_key(key)
        words += [] if insecure else ["--auth-supernode-private-key", str(key)]
    words += [] if wait is None else ["--max-wait-time", f"{wait:g}"]
    words += ["--node-config", node_config(config)] if config else []
    environment = _flower_environment(Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")))
    if stock:
        command = [script("flower-supernode"), *words, "--host", "127.0.0.1", "--port", str(free_port())]
    else:
        command = [sys.executable, "-P", "-m", "posy.commands.deploy.node", *words]
    _print_command(command, environment)
    os.execve(command[0], command, environment)


@app.command()
def register(
    keys: Annotated[list[Path], typer.Argument(metavar="NAME.pub...")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Let nodes take part.

    Registers their public keys with the SuperLink, each under the name of its file.
    """
    from posy.commands.deploy.certificates import public_pem  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    pems = [(path.stem, public_pem(_file(path, "the command line"))) for path in keys]
    status = 0
    with control(connection(superlink, root_certificates, insecure)) as api:
        nodes = api.nodes()
        for name, pem in pems:
            known = next((node.name for node in nodes if node.public_key == pem), None)
            if known is not None:
                print(f"{name} is registered already" + ("" if known == name else f", as {known}"))
            elif any(node.name == name for node in nodes):
                print(f"posy: {name} is not registered: another key has this name", file=sys.stderr)
                status = 1
            else:
                api.register(name, pem)
                print(f"{name} is registered")
    return status


@app.command()
def status(
    superlink: SuperLink = CONTROL, root_certificates: RootCertificates = None, insecure: Insecure = False
) -> int:
    """List the runs of a federation, the newest first, and its nodes by name."""
    from posy.commands.deploy.control import control, local_time  # noqa: PLC0415

    with control(connection(superlink, root_certificates, insecure)) as api:
        runs, nodes = api.runs(), api.nodes()
    columns = ("run id", "run-name", "method", "status", "since", "time")
    rows = [(run.number, run.name, run.method, run.status, run.since, duration(run.seconds)) for run in runs]
    print_table("runs" if rows else "no run was submitted", columns, rows)
    # Nodes that were never online have no time.
    since = [{"online": n.last_activated_at, "offline": n.last_deactivated_at}.get(n.status, "") for n in nodes]
    states = [(node.name, node.status, local_time(time)) for node, time in zip(nodes, since, strict=True)]
    print_table("nodes" if nodes else "no node is registered", ("name", "status", "since"), states)
    return 0


@app.command()
def log(
    run: RunWord,
    verbose: Verbose = False,
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Show the log of a run of a federation.

    From its beginning until the run ends; Ctrl-C leaves the run alone. RUN is its run id or run-name, which
    `posy status` lists.
    """
    from posy.commands.deploy.control import show_run  # noqa: PLC0415

    return show_run(connection(superlink, root_certificates, insecure), run, verbose=verbose)


@app.command()
def stop(
    run: RunWord, superlink: SuperLink = CONTROL, root_certificates: RootCertificates = None, insecure: Insecure = False
) -> int:
    """Stop a run of a federation.

    What it has done is kept, and it can be resumed from its last checkpoint. RUN is its run id or run-name, which
    `posy status` lists.
    """
    from posy.commands.deploy.control import control  # noqa: PLC0415

    reached = connection(superlink, root_certificates, insecure)
    with control(reached) as api:
        found = api.find(run)
        if found.ended:
            raise SettingsError(f"run {run} has ended already ({found.status}, {found.since})")
        api.stop(found.number)
    folder = [f"output-dir={found.config['output-dir']}"] if "output-dir" in found.config else []
    command = resume_command(found.name or "RUN-NAME", *folder, *reached.words())
    print(f"run {found.number} is stopped\nfrom its last checkpoint it goes on with: {command}")
    return 0


def connection(superlink: str, root_certificates: Path | None, insecure: bool) -> Connection:
    """Return the SuperLink that the options name.

    It is a :class:`SettingsError` without TLS on another machine, and if the certificate is missing or none.
    """
    _host_and_port("--superlink", superlink)
    _exclude(insecure, "--root-certificates", root_certificates)
    if insecure:
        _check_loopback("--superlink", superlink)
        return Connection(superlink)
    from posy.commands.deploy.certificates import check_authority  # noqa: PLC0415 - what few commands need

    ca = _file(root_certificates or CERTIFICATES / "ca.pem", "--root-certificates")
    check_authority(ca)
    return Connection(superlink, ca)


def node_config(words: Sequence[str]) -> str:
    """Return key=value words as Flower reads a node config: values are TOML, apart by spaces.

    A word that is not of that form raises :class:`SettingsError`.
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


def _exclude(insecure: bool, option: str, value: object) -> None:
    if insecure and value is not None:
        raise SettingsError(f"{option} does not go with --insecure")


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
    host, port = _host_and_port(option, address)
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen()
    except OSError as error:
        raise SettingsError(f"{option} {address}: one cannot listen there: {error}") from error


def _host_and_port(option: str, address: str) -> tuple[str, str]:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{option} {address}: it must be HOST:PORT, such as {CONTROL}")
    return host.strip("[]"), port


def _file(path: Path, where: str) -> Path:
    """Return the absolute path of a file of keys or certificates that was named in an option."""
    if not path.is_file():
        raise SettingsError(f"there is no file {path} ({where}); `posy certificates` makes certificates and keys")
    return path.absolute()


def _write_connection(home: Path, superlink: Connection) -> None:
    """Write which SuperLink Flower's commands talk to, into the directory that they know as ``FLWR_HOME``."""
    ca = superlink.root_certificates
    trust = "insecure = true" if ca is None else f"root-certificates = {toml(str(ca))}"
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "posy"\n[superlink.posy]\naddress = {toml(superlink.address)}\n{trust}\n',
        encoding="utf-8",
    )


def _flower_environment(home: Path) -> dict[str, str]:
    """Return the environment for Flower's commands, which keep their own files in ``home``."""
    return {
        **os.environ,
        **ENVIRONMENT,
        "FLWR_HOME": str(home),
        "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath))),
        **without_proxy(),
    }


def _print_command(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Print a command as it may be typed into the shell that this one was typed into."""
    name = Path(command[0]).name
    program = name if shutil.which(name) == command[0] else command[0]
    # The rest of what is set is the same everywhere: no telemetry, no search for updates.
    home = environment["FLWR_HOME"]
    usual = os.environ.get("FLWR_HOME", str(Path.home() / ".flwr")) == home
    setting = [] if usual else [f"FLWR_HOME={shlex.quote(home)}"]
    print("$", *setting, shlex.join([program, *command[1:]]), file=sys.stderr, flush=True)
