"""The commands of a real federation. A command that starts one of Flower's commands prints it."""

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

from posy.client_app.node_config import AUDIT, AUDIT_NAME, NODE_NAME, check_node_config
from posy.commands.launch import ENVIRONMENT, Connection, resume_command, toml, without_proxy
from posy.deploy.addresses import is_loopback
from posy.server_app.progress import size
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
CERTIFICATES = Path("certificates")
MAX_DAYS = 36_500
STATE = Path("superlink")
HOME, PRIVATE = "flower", "private"
"""Flower's home in the directory of a SuperLink's state, and the directory in it with the secret of the processes."""

SuperLink = Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink's --control address.")]
RootCertificates = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Certificate of the SuperLink's authority (default: certificates/ca.pem)."),
]
State = Annotated[Path, typer.Option(metavar="DIR", help="State of the SuperLink, on its machine.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Use no TLS. For experiments on a single machine.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show Flower's full log.")]
RunWord = Annotated[str, typer.Argument(metavar="RUN")]

app = typer.Typer()


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    nodes: Annotated[list[str] | None, typer.Argument(metavar="[NODE]...")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="On the server: a name or IP address of the SuperLink. Repeatable. localhost is always included.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, metavar="DAYS", help="Validity of the certificates.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Replace the key pair of each NODE; without a NODE, replace server.pem.")
    ] = False,
    renew_authority: Annotated[
        bool, typer.Option("--renew-authority", help="Add a new authority to ca.pem, which keeps the old one.")
    ] = False,
) -> int:
    """Make certificates for a SuperLink and keys for its nodes.

    Makes the files that DIR lacks. Each NODE gets a private key (NODE.key, which only the node may read) and a public
    key (NODE.pub, for `posy register`). On the server, with --host or without a NODE, the command also makes an
    authority (ca.pem, ca.key) and the SuperLink's certificate (server.pem, server.key). Existing files stay unchanged.
    --renew replaces files and keeps the old ones, with the time in their names.
    """
    from posy.commands.deploy import certificates as making  # noqa: PLC0415 - few commands need it

    if renew_authority and (renew or nodes or host):
        raise SettingsError(
            "--renew-authority goes alone: type it without NODE, --host and --renew; renew server.pem when every node "
            "has the new ca.pem"
        )
    if renew or renew_authority:
        written = making.renew(folder, host or [], nodes or [], days, authority=renew_authority)
    else:
        files = making.Files(folder)
        on_server = bool(host) or not nodes or files.ca_key.exists()
        written = making.make_certificates(folder, host or [], nodes or [], days, server=on_server)
        if not on_server and not files.ca.exists():
            hint = "on a site, copy it from the server; on the server, add --host NAME (localhost on a single machine)"
            print(f"posy: {files.ca} is missing: {hint}", file=sys.stderr)
    for path in written:
        print(path)
    return 0


@app.command()
def superlink(
    folder: Annotated[
        Path | None,
        typer.Option("--certificates", metavar="DIR", help="Output of `posy certificates` (default: certificates)."),
    ] = None,
    insecure: Insecure = False,
    state: State = STATE,
    volatile: Annotated[
        bool, typer.Option("--volatile", help="Keep the state in memory. Faster, but runs end with the SuperLink.")
    ] = False,
    fleet: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"Address for nodes (default: {FLEET}).")
    ] = None,
    control: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address for submitting runs.")] = CONTROL,
    control_open_to_network: Annotated[
        bool,
        typer.Option("--control-open-to-network", help="Allow other machines to use --control, and so to run code."),
    ] = False,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's unmodified SuperLink. Its database is slower.")
    ] = False,
) -> int:
    """Start the server of a federation.

    Starts Flower's SuperLink, to which nodes connect, and the process that runs ServerApps. A database stores the
    state. If the SuperLink dies, Posy restarts it and the runs continue. Unless you use --insecure, the SuperLink needs
    certificates and admits only nodes with registered keys (`posy register`).

    Any program that reaches --control can run code on every node. By default, only this machine can reach it.
    """
    from posy.commands.deploy.starting import SuperLinkOptions, start_superlink  # noqa: PLC0415 - imports Flower

    start_superlink(SuperLinkOptions(folder, insecure, state, volatile, fleet, control, control_open_to_network, stock))
    return 0


@app.command()
def supernode(
    config: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The SuperLink's --fleet address.")] = LOCAL_FLEET,
    key: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Private key of the node. Repeat to start several nodes.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="Exit after the SuperLink has been unreachable for this long."),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's unmodified SuperNode. Every message is slower.")
    ] = False,
    refuse_foreign_code: Annotated[
        bool,
        typer.Option("--refuse-foreign-code", help="Refuse runs whose code differs from the installed Posy's code."),
    ] = False,
    trusted_entities: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Refuse apps that no key in this YAML file (key id: public key) has signed."),
    ] = None,
) -> int:
    """Start a node of a federation.

    Starts a SuperNode that keeps PyTorch, code and data loaded between messages. The key=value words are the node
    config. For a part of a benchmark's data, type partition-id=0 num-partitions=5. For a site's files, type
    data=PATH, and policy=FILE for rules other than the defaults (`posy policy new`).

    Repeat --key to start one node per key. The nodes share the loaded code and data. By default, n nodes hold the
    partitions 0 to n - 1 of n; partition-id sets the partition of the first node. Posy replaces
    {name} in a value with the name of the node's key, also with a single key.
    """
    from posy.commands.deploy.starting import NodeOptions, node_command  # noqa: PLC0415 - imports Flower

    command, environment = node_command(
        NodeOptions(
            config or [], superlink, key or [], root_certificates, insecure, wait, stock, refuse_foreign_code,
            trusted_entities,
        )
    )  # fmt: skip
    print_command(command, environment)
    os.execve(command[0], command, environment)


@app.command()
def register(
    keys: Annotated[list[Path], typer.Argument(metavar="NAME.pub...")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the registered keys of these nodes.")] = False,
) -> int:
    """Register the public keys of nodes.

    The SuperLink admits nodes with registered keys. Posy registers each key under the name of its file.

    To replace a node's key, use --renew twice. The first call registers the new key, and the old key stays valid. Start
    the node with the new key. The second call then revokes the old key.
    """
    from posy.commands.deploy.certificates import public_pem  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    pems = [(path.stem, public_pem(file_of(path, "the command line"))) for path in keys]
    status = 0
    with control(connection(superlink, root_certificates, insecure)) as api:
        nodes = api.nodes()
        for name, pem in pems:
            registered = next((node for node in nodes if node.public_key == pem), None)
            old = [node for node in nodes if node.name == name and node.public_key != pem]
            if registered is not None and registered.name == name and old and renew:
                if not registered.last_activated_at:
                    hint = "start the node with the new key, then type this again"
                    print(
                        f"posy: {name} keeps its old key: its node was not online with the new key; {hint}",
                        file=sys.stderr,
                    )
                    status = 1
                    continue
                for node in old:
                    api.unregister(node.node_id)
                print(f"{name} has only its new key; the old key is revoked")
            elif registered is not None:
                print(f"{name} is already registered" + ("" if registered.name == name else f" as {registered.name}"))
            elif old and not renew:
                hint = "if it is a new key of the same node, add --renew"
                print(f"posy: {name} is not registered: another key has this name; {hint}", file=sys.stderr)
                status = 1
            else:
                api.register(name, pem)
                hint = ": both keys are valid; start the node with the new key, then type this again" if old else ""
                print(f"{name} is registered{hint}")
    return status


@app.command()
def unregister(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Revoke the keys of nodes.

    The SuperLink refuses a revoked key for ever. To admit the node again, make a new key and register it.
    """
    from posy.commands.deploy.control import control  # noqa: PLC0415

    with control(connection(superlink, root_certificates, insecure)) as api:
        nodes = api.nodes()
        if missing := [name for name in names if all(node.name != name for node in nodes)]:
            raise SettingsError(f"no key is registered as {', '.join(missing)}; `posy status` lists all names")
        for node in nodes:
            if node.name in names:
                api.unregister(node.node_id)
                print(f"{node.name} is unregistered; its key is revoked")
    return 0


@app.command()
def backup(file: Annotated[Path, typer.Argument(metavar="FILE")], state: State = STATE) -> int:
    """Copy the state of a SuperLink, even a running one.

    FILE holds the registered keys and the list of runs. It holds no results, checkpoints or certificates: also copy
    runs/ and the directory that `posy certificates` made.
    """
    from posy.commands.deploy.backup import back_up  # noqa: PLC0415

    back_up(state, file)
    print(f"{file}: {size(file.stat().st_size)}")
    return 0


@app.command()
def restore(file: Annotated[Path, typer.Argument(metavar="FILE")], state: State = STATE) -> int:
    """Restore the state of a stopped SuperLink.

    FILE is a file written by `posy backup`. Nodes reconnect by themselves. Runs that were running at the time of the
    backup have failed; resume them from their checkpoints.
    """
    from posy.commands.deploy.backup import restore as restore_database  # noqa: PLC0415

    old = restore_database(state, file)
    print(f"{state} is restored" + (f"; the previous state is in {old}" if old else ""))
    return 0


@app.command()
def status(
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    state: State = STATE,
) -> int:
    """List the runs and nodes of a federation.

    The newest run comes first. Nodes are in the order of their names. On the SuperLink's machine, where --state is, the
    lists also show the activity of each run and node, the versions and clock errors of nodes, and the free disk space.
    """
    from posy.commands.deploy import status as lists  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415
    from posy.server_app.run_status import read_statuses  # noqa: PLC0415

    statuses = read_statuses(state / HOME)
    with control(connection(superlink, root_certificates, insecure)) as api:
        runs, nodes = api.runs(), api.nodes()
    lists.show(runs, nodes, statuses)
    if (state / HOME).is_dir():
        for use, path in (("the state", state), *(("results", path) for path in lists.results_of(statuses))):
            print(f"free disk for {use} ({path}): {lists.space(path)}")
    else:
        print(f"--state {state} holds no SuperLink's state; `posy status` on the SuperLink's machine shows more")
    return 0


@app.command()
def doctor(
    config: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    folder: Annotated[
        Path, typer.Option("--certificates", metavar="DIR", help="Output of `posy certificates`.")
    ] = CERTIFICATES,
    state: State = STATE,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="The SuperLink's --control address; with --key, its --fleet address."),
    ] = None,
    fleet: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="On the server: the SuperLink's --fleet address.")
    ] = LOCAL_FLEET,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="On a site: private key of its node.")] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Check this machine for a federation.

    On the server, it checks certificates, keys, ports, disk space, registered keys, and the versions and clocks of the
    nodes. On a site, type --key and the node config: it then checks the key, the connection to the SuperLink, clock,
    GPU, disk space and data. It changes nothing. The exit status is 1 after an error.
    """
    from posy.commands.deploy import doctor as checks  # noqa: PLC0415

    exclude(insecure, "--key", key)
    exclude(insecure, "--root-certificates", root_certificates)
    ca = root_certificates or folder / "ca.pem"
    if key is not None:
        [named] = node_configs(config or [], [key.stem])
        node_config(named)
        words = dict(word.partition("=")[::2] for word in named)
        reached = connection(superlink or LOCAL_FLEET, ca, insecure=False)
        return checks.show(checks.of_site(reached, file_of(key, "--key"), words))
    if config:
        raise SettingsError(f"{config[0]}: only a site has a node config; add the --key of its node")
    host_and_port("--fleet", fleet)
    host_and_port("--superlink", superlink or CONTROL)
    reached = Connection(superlink or CONTROL, None if insecure else ca)
    return checks.show(checks.of_server(reached, fleet, folder, state / HOME))


@app.command(
    epilog="""\b
examples:
  posy audit /srv/posy-state                                  check the log and print it
  posy audit /srv/posy-state --run my-run --since 2026-01-31
  posy audit /srv/posy-state --anchor                         print what to keep on another machine
  posy audit /srv/posy-state --contains 1234:5f0c...          check the log against such an anchor"""
)
def audit(
    path: Annotated[Path, typer.Argument(metavar="[PATH]")] = Path(),
    run: Annotated[str, typer.Option(metavar="RUN", help="Print the events of this run only (id or run-name).")] = "",
    since: Annotated[str, typer.Option(metavar="TIME", help="Print the events since this UTC time only.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the number of events and the last hash, to keep elsewhere.")
    ] = False,
    anchored: Annotated[
        str, typer.Option("--contains", metavar="ANCHOR", help="Check that the log still has the events of an anchor.")
    ] = "",
) -> int:
    """Check and print the audit log of a node.

    PATH is the log, or the state-dir of the node (default: the current directory). The log has one line for each
    message that the node has answered or refused. The exit status is 1 if the chain of lines is broken. Posy then
    prints the first broken line.
    """
    from posy.commands import audit as showing  # noqa: PLC0415 - imports Flower

    if anchor:
        return showing.print_anchor(path)
    return showing.show(path, run, since, anchored, as_json=as_json)


@app.command()
def log(
    run: RunWord,
    verbose: Verbose = False,
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Show the log of a run of a federation.

    Shows the log from its beginning until the run ends. Ctrl-C ends the output, not the run. RUN is the run id or
    run-name, which `posy status` lists.
    """
    from posy.commands.deploy.control import show_run  # noqa: PLC0415

    return show_run(connection(superlink, root_certificates, insecure), run, verbose=verbose)


@app.command()
def stop(
    run: RunWord, superlink: SuperLink = CONTROL, root_certificates: RootCertificates = None, insecure: Insecure = False
) -> int:
    """Stop a run of a federation.

    The results stay, and you can resume the run from its last checkpoint. RUN is the run id or run-name, which
    `posy status` lists.
    """
    from posy.commands.deploy.control import control  # noqa: PLC0415

    reached = connection(superlink, root_certificates, insecure)
    with control(reached) as api:
        record = api.find(run)
        if record.ended:
            raise SettingsError(f"run {run} has already ended ({record.status}, {record.since})")
        api.stop(record.number)
    folder = [f"output-dir={record.config['output-dir']}"] if "output-dir" in record.config else []
    command = resume_command(record.name or "RUN-NAME", *folder, *reached.words())
    print(f"run {record.number} is stopped\nresume it from its last checkpoint with: {command}")
    return 0


def connection(superlink: str, root_certificates: Path | None, insecure: bool) -> Connection:
    """Return the SuperLink that the options name.

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
    """Return key=value words in the form of Flower's node config: TOML values, separated by spaces.

    Raises
    ------
    SettingsError
        If a word is not of the form key=value, nodes do not use its key, or a value is not allowed.
    """
    pairs = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"{word!r}: node config has the form key=value, such as partition-id=0")
        try:
            value: Any = parse(text)
        except ValueError:
            value = text
        pairs[key] = value if type(value) in (bool, int, float) else text.strip(chr(34))
    check_node_config(pairs)
    return " ".join(f"{key}={toml(value)}" for key, value in pairs.items())


def node_configs(words: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the node config of each node that a command starts, in the order of the names of their keys.

    The node's name replaces ``{name}`` in a value. By default, n nodes without ``data`` get the partitions 0 to n - 1
    of n. With ``partition-id``, they get consecutive partitions from this one. Without a name, as with --insecure, the
    command starts one node, and its config stays unchanged.

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
            f"partition-id={first} for {len(names)} nodes: it must be the partition number of the first node; also set "
            "num-partitions, the number of all partitions"
        )
    common = [word for word in words if not word.startswith("partition-id=")]
    if "data" not in config and "num-partitions" not in config:
        common.append(f"num-partitions={len(names)}")
    numbered = "data" not in config or "partition-id" in config
    return [
        [*([f"partition-id={int(first) + i}"] if numbered else []), *(word.replace(NODE_NAME, name) for word in common)]
        for i, name in enumerate(names)
    ]


def check_policy(node_config: Mapping[str, str], *, stock: bool, signed: bool) -> None:
    """Check the policy of a node with data before the node starts, and refuse a stock node that it does not allow."""
    from posy.client_app.policy import site_policy  # noqa: PLC0415 - imports Flower

    policy = site_policy(node_config)
    if stock and policy is not None and not (policy.code == "any" or (policy.code == "signed" and signed)):
        raise SettingsError(
            f"--stock with data={node_config['data']}: Flower's node runs all code that a run brings, but the policy "
            f"of the site has code = {policy.code}; drop --stock, or set code: any in the policy"
        )


def with_audit(words: Sequence[str], home: Path) -> list[str]:
    """Return a node config that names an audit log in ``home`` if the node has data and no place for the log."""
    named = {word.partition("=")[0] for word in words}
    placed = named & {AUDIT, "state-dir"} or "data" not in named
    return [*words, *([] if placed else [f"{AUDIT}={home.absolute() / AUDIT_NAME}"])]


def exclude(insecure: bool, option: str, value: object) -> None:
    """Refuse an option that has no meaning with --insecure."""
    if insecure and value is not None:
        raise SettingsError(f"{option} does not go with --insecure")


def check_loopback(option: str, address: str) -> None:
    """Refuse an address that other machines can reach without TLS."""
    if not is_loopback(address):
        raise SettingsError(
            f"{option} {address} with --insecure: without TLS it must be 127.0.0.1; otherwise use `posy certificates`"
        )


def check_control(address: str, *, allowed: bool) -> None:
    """Refuse or warn if other machines can reach --control: Flower has no passwords there, and ca.pem is public."""
    danger = f"--control {address}: any program that reaches it and has the public ca.pem can run code on every node"
    port = address.rpartition(":")[2]
    if not allowed:
        raise SettingsError(
            f"{danger}. Use {CONTROL}, and submit runs from other machines through a tunnel (`ssh -L "
            f"{port}:127.0.0.1:{port} SERVER`, then --superlink localhost:{port}); if a firewall protects the port, "
            "add --control-open-to-network"
        )
    print(f"posy: WARNING: {danger}. Protect the port with a firewall", file=sys.stderr, flush=True)


def check_free(option: str, address: str) -> None:
    """Raise :class:`SettingsError` if this process cannot listen at an address. Flower would print a traceback."""
    host, port = host_and_port(option, address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen()
    except OSError as error:
        raise SettingsError(f"{option} {address}: cannot listen there: {error}; choose another") from error


def host_and_port(option: str, address: str) -> tuple[str, str]:
    """Return the host and the port of an address; raise :class:`SettingsError` if it is not HOST:PORT."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SettingsError(f"{option} {address}: it must be HOST:PORT, such as {CONTROL}")
    return host.strip("[]"), port


def file_of(path: Path, where: str) -> Path:
    """Return the absolute path of a file of keys or certificates; ``where`` names the option that set it."""
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
    """Print a command that the user can type into the same shell."""
    name = Path(command[0]).name
    program = name if shutil.which(name) == command[0] else command[0]
    # The other variables are the same for all commands: no telemetry, no search for updates.
    home = environment["FLWR_HOME"]
    usual = os.environ.get("FLWR_HOME", str(Path.home() / ".flwr")) == home
    setting = [] if usual else [f"FLWR_HOME={shlex.quote(home)}"]
    print("$", *setting, shlex.join([program, *command[1:]]), file=sys.stderr, flush=True)
