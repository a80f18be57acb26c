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

from posy.client_app.node_config import NODE_NAME, check_node_config
from posy.commands.launch import ENVIRONMENT, Connection, resume_command, script, toml, without_proxy
from posy.deploy.addresses import free_port, is_loopback
from posy.deploy.foreign import REFUSE
from posy.server_app.progress import size
from posy.settings import SettingsError
from posy.yaml12 import parse

CONTROL = "127.0.0.1:8000"
FLEET = "0.0.0.0:9092"
LOCAL_FLEET = "127.0.0.1:9092"
CERTIFICATES = Path("certificates")
MAX_DAYS = 36_500
STATE = Path("superlink")
HOME = "flower"
"""Flower's home in the directory of a SuperLink's state."""

SuperLink = Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink takes orders.")]
RootCertificates = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Certificate of the SuperLink's authority (default: certificates/ca.pem)."),
]
State = Annotated[Path, typer.Option(metavar="DIR", help="Database and files of the SuperLink, on its own machine.")]
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
        typer.Option(
            metavar="NAME",
            help="On the server: a name or IP address of the SuperLink; may be repeated. localhost is always included.",
        ),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=MAX_DAYS, metavar="DAYS", help="How long they are valid.")] = 365,
    renew: Annotated[
        bool, typer.Option("--renew", help="Make anew the key pairs of each NODE, or without any server.pem.")
    ] = False,
    renew_authority: Annotated[
        bool, typer.Option("--renew-authority", help="Make a new authority; ca.pem holds the old one too.")
    ] = False,
) -> int:
    """Make certificates for a SuperLink and keys for its nodes.

    Makes the files that DIR lacks. For each NODE these are a private key (NODE.key, for that node alone) and a public
    key (NODE.pub, for `posy register`). On the server, with --host or without any NODE, these are also an authority
    (ca.pem, ca.key) and the SuperLink's certificate (server.pem, server.key). Existing files stay unchanged. --renew
    replaces files and keeps the old ones, with the time in their names.
    """
    from posy.commands.deploy import certificates as made  # noqa: PLC0415 - what few commands need

    if renew_authority and (renew or nodes or host):
        raise SettingsError("--renew-authority goes alone: renew the rest when every node has the new ca.pem")
    if renew or renew_authority:
        written = made.renew(folder, host or [], nodes or [], days, authority=renew_authority)
    else:
        files = made.Files(folder)
        on_server = bool(host) or not nodes or files.ca_key.exists()
        written = made.make_certificates(folder, host or [], nodes or [], days, server=on_server)
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
        typer.Option("--certificates", metavar="DIR", help="Made by `posy certificates` (default: certificates)."),
    ] = None,
    insecure: Insecure = False,
    state: State = STATE,
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
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's own SuperLink: slower with its database.")
    ] = False,
) -> int:
    """Start the server of a federation.

    Starts Flower's SuperLink, which nodes connect to, and the process that runs ServerApps. Its state lies in a
    database, and it is started again should it die: runs go on. Without --insecure it needs certificates, and admits
    only nodes whose keys are registered (`posy register`). Anyone who reaches --control can run code on every node, so
    it listens on this machine alone unless told otherwise.
    """
    from posy.commands.deploy.backup import DATABASE, held  # noqa: PLC0415
    from posy.deploy.superlink import keep  # noqa: PLC0415
    from posy.forked import cores  # noqa: PLC0415

    cores()  # as many runs start at a time: a number that is none is told here, not when a run is to start
    certificate = None
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
        certificate = None if volatile else server  # to start again would end its runs
        trust = ["--ssl-ca-certfile", str(ca), "--ssl-certfile", str(server), "--ssl-keyfile", str(key)]
        trust += ["--enable-supernode-auth"]
    _, _, *trusted = reached.words()
    home = state.absolute() / HOME
    served = ["--host", host, "--port", port, "--fleet-api-address", fleet, *trust, "--isolation", "process"]
    served += ["--disable-runtime-dependency-installation"]
    served += [] if volatile else ["--database", str(home.parent / DATABASE)]
    executor = [script("flower-superexec"), "--runtime-api-address", address, *trusted]
    ours = [sys.executable, "-P", "-m", "posy.deploy.link"]
    commands = {
        "flower-superlink": [*([script("flower-superlink")] if stock else ours), *served],
        "flower-superexec": [*executor, "--parent-pid", str(os.getpid())],
    }
    with held(state) as lock:
        for option, place in places:
            _check_free(option, place)
        home.mkdir(exist_ok=True)
        _write_connection(home, reached)
        environment = _flower_environment(home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}
        # What can be typed: Flower's own command, and an executor that has no process to watch.
        for command in ([script("flower-superlink"), *served], executor):
            _print_command(command, environment)
        _print_command([script("flwr"), "list"], environment)
        keep(commands, environment, lock, certificate)
    return 0


@app.command()
def supernode(
    config: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the SuperLink takes nodes.")] = LOCAL_FLEET,
    key: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Private key of this node; repeated: one node for each.")
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    wait: Annotated[
        float | None,
        typer.Option(min=0.1, metavar="SECONDS", help="End when the SuperLink has been out of reach for this long."),
    ] = None,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's own SuperNode: slower for every message.")
    ] = False,
    refuse_foreign_code: Annotated[
        bool,
        typer.Option("--refuse-foreign-code", help="Take no run with other code than that of the Posy installed here."),
    ] = False,
) -> int:
    """Start a node of a federation.

    Starts a SuperNode that keeps PyTorch, code and data loaded between messages. The words key=value are its node
    config: partition-id=0 num-partitions=5 for a share of a benchmark's data, and what else the app reads from it.

    With --key repeated this command starts one node for each key, and they share the loaded code and data. By default
    node i has partition i of as many partitions as there are nodes; partition-id is the first node's. {name} in a value
    is replaced by the name of the node's key, also for a single key.
    """
    reached = connection(superlink, root_certificates, insecure)
    words = reached.words()
    keys = [_file(path, "--key") for path in key or []]
    if keys:
        from posy.commands.deploy.certificates import check_node_key  # noqa: PLC0415

        for path in keys:
            check_node_key(path)
    words += [] if wait is None else ["--max-wait-time", f"{wait:g}"]
    several = len(keys) > 1
    if len({path.stem for path in keys}) < len(keys):
        raise SettingsError(f"--key: nodes are told apart by the names of their keys: {', '.join(map(str, keys))}")
    configs = node_configs(config or [], [path.stem for path in keys])
    own = keys if several or not insecure else []
    words += [word for path in own for word in ("--auth-supernode-private-key", str(path))]
    words += [word for one in configs if one for word in ("--node-config", node_config(one))]
    environment = _flower_environment(Path(os.environ.get("FLWR_HOME", Path.home() / ".flwr")))
    if stock and several:
        raise SettingsError("--stock starts one node, but --key is given more than once")
    if stock and refuse_foreign_code:
        raise SettingsError("--refuse-foreign-code does not go with --stock: Flower's own node takes any code")
    environment |= {REFUSE: "1"} if refuse_foreign_code else {}
    if stock:
        command = [script("flower-supernode"), *words, "--host", "127.0.0.1", "--port", str(free_port())]
    else:
        command = [sys.executable, "-P", "-m", "posy.deploy.node", *words]
    _print_command(command, environment)
    os.execve(command[0], command, environment)


@app.command()
def register(
    keys: Annotated[list[Path], typer.Argument(metavar="NAME.pub...")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the keys that nodes of these names have.")] = False,
) -> int:
    """Let nodes take part.

    Registers their public keys with the SuperLink, each under the name of its file. To replace a node's key, --renew
    registers the new one beside the old; when the node has been online with it, --renew again excludes the old one.
    """
    from posy.commands.deploy.certificates import public_pem  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415 - imports Flower

    pems = [(path.stem, public_pem(_file(path, "the command line"))) for path in keys]
    status = 0
    with control(connection(superlink, root_certificates, insecure)) as api:
        nodes = api.nodes()
        for name, pem in pems:
            known = next((node for node in nodes if node.public_key == pem), None)
            others = [node for node in nodes if node.name == name and node.public_key != pem]
            if known is not None and known.name == name and others and renew:
                if not known.last_activated_at:
                    print(f"posy: {name} keeps its old key: its node was not online with the new one", file=sys.stderr)
                    status = 1
                    continue
                for node in others:
                    api.unregister(node.node_id)
                print(f"{name} has its new key only")
            elif known is not None:
                print(f"{name} is registered already" + ("" if known.name == name else f", as {known.name}"))
            elif others and not renew:
                more = "--renew is for a new key of the same node"
                print(f"posy: {name} is not registered: another key has this name; {more}", file=sys.stderr)
                status = 1
            else:
                api.register(name, pem)
                end = "; start its node with it, and then type this again" if others else ""
                print(f"{name} is registered" + (f" with its new key beside the old{end}" if others else ""))
    return status


@app.command()
def unregister(
    names: Annotated[list[str], typer.Argument(metavar="NAME...")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Exclude nodes, by their names.

    From now on the SuperLink refuses their keys, for good: a node that is to come back needs a new one.
    """
    from posy.commands.deploy.control import control  # noqa: PLC0415

    with control(connection(superlink, root_certificates, insecure)) as api:
        nodes = api.nodes()
        if missing := [name for name in names if all(node.name != name for node in nodes)]:
            raise SettingsError(f"no key is registered as {', '.join(missing)}; `posy status` lists those that are")
        for node in nodes:
            if node.name in names:
                api.unregister(node.node_id)
                print(f"{node.name} is excluded")
    return 0


@app.command()
def backup(file: Annotated[Path, typer.Argument(metavar="FILE")], state: State = STATE) -> int:
    """Copy the state of a SuperLink, also while it is at work.

    FILE then holds the keys that are registered and the list of runs. Results and checkpoints are in runs/, keys and
    certificates where `posy certificates` has made them: copy both beside it.
    """
    from posy.commands.deploy.backup import back_up  # noqa: PLC0415

    back_up(state, file)
    print(f"{file}: {size(file.stat().st_size)}")
    return 0


@app.command()
def restore(file: Annotated[Path, typer.Argument(metavar="FILE")], state: State = STATE) -> int:
    """Put back the state of a SuperLink, which must not be at work, from what `posy backup` has written.

    Nodes come back by themselves. Runs that were going on then count as failed; they are resumed from their
    checkpoints.
    """
    from posy.commands.deploy.backup import restore as put_back  # noqa: PLC0415

    old = put_back(state, file)
    print(f"{state} is restored" + (f"; what was there is in {old}" if old else ""))
    return 0


@app.command()
def status(
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    state: State = STATE,
) -> int:
    """List the runs of a federation, the newest first, and its nodes by name.

    On the SuperLink's machine, where --state is, it also tells what runs wait for, what nodes do, what is installed on
    them, how far their clocks are off, and how much disk is free.
    """
    from posy.commands.deploy import status as known  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415
    from posy.server_app.run_status import read_statuses  # noqa: PLC0415

    told = read_statuses(state / HOME)
    with control(connection(superlink, root_certificates, insecure)) as api:
        runs, nodes = api.runs(), api.nodes()
    known.show(runs, nodes, told)
    if (state / HOME).is_dir():
        for what, path in (("the state", state), *(("results", path) for path in known.results_of(told))):
            print(f"free disk for {what} ({path}): {known.space(path)}")
    else:
        print(f"what runs and nodes do is known on the SuperLink's machine, where --state is; here is no {state}")
    return 0


@app.command()
def doctor(
    config: Annotated[list[str] | None, typer.Argument(metavar="[key=value]...")] = None,
    folder: Annotated[
        Path, typer.Option("--certificates", metavar="DIR", help="Made by `posy certificates`.")
    ] = CERTIFICATES,
    state: State = STATE,
    superlink: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where it takes nodes, with --key; else where it takes orders."),
    ] = None,
    fleet: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="On the server: where nodes connect to.")
    ] = LOCAL_FLEET,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="On a site: private key of its node.")] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Check what a federation needs, on this machine.

    On the server: certificates, keys, ports, disk, which keys are registered, and versions and clocks of the nodes. On
    a site, with --key and the node config: its key, the way to the SuperLink, its clock, GPU, disk and data. Changes
    nothing. The exit status is 1 if there is an error.
    """
    from posy.commands.deploy import doctor as checks  # noqa: PLC0415

    _exclude(insecure, "--key", key)
    _exclude(insecure, "--root-certificates", root_certificates)
    ca = root_certificates or folder / "ca.pem"
    if key is not None:
        [named] = node_configs(config or [], [key.stem])
        node_config(named)
        words = dict(word.partition("=")[::2] for word in named)
        reached = connection(superlink or LOCAL_FLEET, ca, insecure=False)
        return checks.show(checks.of_site(reached, _file(key, "--key"), words))
    if config:
        raise SettingsError(f"{config[0]}: node config is checked on a site; name its --key too")
    _host_and_port("--fleet", fleet)
    _host_and_port("--superlink", superlink or CONTROL)
    reached = Connection(superlink or CONTROL, None if insecure else ca)
    return checks.show(checks.of_server(reached, fleet, folder, state / HOME))


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
    """Return key=value words as Flower reads a node config: TOML values, separated by spaces.

    Raises
    ------
    SettingsError
        If a word is not of the form key=value, a node does not read its key, or a value is not allowed.
    """
    pairs = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.replace("-", "").replace("_", "").isalnum():
            raise SettingsError(f"{word!r}: node config is given as key=value")
        try:
            value: Any = parse(text)
        except ValueError:
            value = text
        pairs[key] = value if type(value) in (bool, int, float) else text.strip(chr(34))
    check_node_config(pairs)
    return " ".join(f"{key}={toml(value)}" for key, value in pairs.items())


def node_configs(words: Sequence[str], names: Sequence[str]) -> list[list[str]]:
    """Return the node config of each node of one command, by the names of their keys.

    ``{name}`` in a value is replaced by the node's name. Several nodes without data of their own have the partitions
    0, 1, … of as many as there are nodes, or the partitions from the given ``partition-id`` on. Without a name, as with
    --insecure, there is one node, and its config is returned unchanged.

    Raises
    ------
    SettingsError
        If ``partition-id`` for several nodes is not a number, or comes without ``num-partitions``.
    """
    if len(names) < 2:
        return [[word.replace(NODE_NAME, name) for word in words] for name in names] or [list(words)]
    given = dict(word.split("=", 1) for word in words if "=" in word)
    first = given.get("partition-id", "0")
    if not first.isdecimal() or ("partition-id" in given and "num-partitions" not in given):
        raise SettingsError(
            f"partition-id={first} for {len(names)} nodes: it must be a number, that of the first node, and come with "
            "num-partitions, the number of all partitions"
        )
    others = [word for word in words if not word.startswith("partition-id=")]
    if "data" not in given and "num-partitions" not in given:
        others.append(f"num-partitions={len(names)}")
    numbered = "data" not in given or "partition-id" in given
    return [
        [*([f"partition-id={int(first) + i}"] if numbered else []), *(word.replace(NODE_NAME, name) for word in others)]
        for i, name in enumerate(names)
    ]


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
