"""Commands that deploy and operate a federation. They print the commands that start Flower's processes."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from posy.commands.deploy.next_steps import after_certificates
from posy.commands.deploy.options import (
    CERTIFICATES,
    CONTROL,
    FLEET,
    HOME,
    LOCAL_FLEET,
    connection,
    exclude,
    file_of,
    host_and_port,
    node_config,
    node_configs,
    print_command,
)
from posy.commands.guide import show_next
from posy.commands.help import SERVER, SITE, commands_in
from posy.commands.launch import Connection, resume_command
from posy.server_app.progress import size
from posy.settings import SettingsError

MAX_DAYS = 36_500
STATE = Path("superlink")

SuperLink = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink (its --control).")]
RootCertificates = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="CA certificate that verifies the SuperLink (PEM; default: certificates/ca.pem)."
    ),
]
State = Annotated[Path, typer.Option(metavar="DIR", help="Directory in which the SuperLink stores its state.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Disable TLS. Only for experiments on a single machine.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show Flower's full log.")]
RunWord = Annotated[str, typer.Argument(metavar="RUN", help="Run id or run-name, as listed by `posy status`.")]
NodeConfig = Annotated[
    list[str] | None, typer.Argument(metavar="[key=value]...", help="Node config, such as data=PATH and policy=FILE.")
]
StateFile = Annotated[Path, typer.Argument(metavar="FILE", help="Copy of the state (an SQLite database).")]

app = typer.Typer()
server, site = commands_in(app, SERVER), commands_in(app, SITE)


@server(
    epilog="""\b
examples:
  posy certificates certificates --host fl.example.org    on the server
  posy certificates certificates hospital-a               at a site
  posy certificates certificates --renew                  a new server.pem"""
)
def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Directory for the files.")],
    nodes: Annotated[
        list[str] | None, typer.Argument(metavar="[NODE]...", help="Names of nodes that receive a key.")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="On the server: a name or IP address of the SuperLink. Repeatable. localhost is always included.",
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="On the server: a client of `posy serve --client-ca`, which receives a certificate. Repeatable.",
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, max=MAX_DAYS, metavar="DAYS", help="Validity of new certificates, in days.")
    ] = 365,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Replace the files of each NODE and --client, or server.pem if there is none."),
    ] = False,
    renew_authority: Annotated[
        bool, typer.Option("--renew-authority", help="Add a new authority to ca.pem and keep the old one.")
    ] = False,
) -> int:
    """Create the server's certificates, and keys for nodes.

    Posy creates the files that are missing in DIR. For each NODE, Posy creates a private key (NODE.key, which must stay
    on the node) and a public key (NODE.pub, for `posy register`). With --host or without a NODE, as on the server, Posy
    also creates a certificate authority (ca.pem, ca.key) and the SuperLink's certificate (server.pem, server.key).
    For each --client, Posy creates a certificate (NAME.pem, NAME.key). Existing files stay unchanged. --renew replaces
    files, and keeps the old files under names that contain the time.
    """
    from posy.commands.deploy import certificates as pki  # noqa: PLC0415 - few commands need it

    if renew_authority and (renew or nodes or host or client):
        raise SettingsError(
            "--renew-authority cannot be combined with NODE, --host, --client or --renew; renew server.pem in a "
            "separate command once every node has the new ca.pem"
        )
    following: list[str] = []
    if renew or renew_authority:
        written = pki.renew(folder, host or [], nodes or [], days, authority=renew_authority, clients=client or [])
    else:
        files = pki.Files(folder)
        on_server = bool(host or client) or not nodes or files.ca_key.exists()
        written = pki.make_certificates(folder, host or [], nodes or [], days, server=on_server, clients=client or [])
        if not on_server and not files.ca.exists():
            hint = "at a site, copy it from the server; on the server, add --host NAME (localhost for a single machine)"
            print(f"posy: {files.ca} is missing; {hint}", file=sys.stderr)
        following = after_certificates(folder, nodes or [], host or [], on_server=on_server)
    for path in written:
        print(path)
    if not written:
        print(f"{folder} already contains all files; --renew replaces them")
    show_next(following)
    return 0


@server(
    epilog="""\b
examples:
  posy superlink                           with certificates
  posy superlink --insecure --fleet 127.0.0.1:9092    on one machine"""
)
def superlink(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--certificates", metavar="DIR", help="Output directory of `posy certificates` (default: certificates)."
        ),
    ] = None,
    insecure: Insecure = False,
    state: State = STATE,
    volatile: Annotated[
        bool,
        typer.Option(
            "--volatile", help="Keep the state in memory. This is faster, but all runs are lost if the SuperLink stops."
        ),
    ] = False,
    fleet: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help=f"Address to which nodes connect (default: {FLEET}).")
    ] = None,
    control: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to which runs are submitted.")] = CONTROL,
    control_open_to_network: Annotated[
        bool,
        typer.Option(
            "--control-open-to-network",
            help="Allow other machines to connect to --control, and thus to run code on every node.",
        ),
    ] = False,
    stock: Annotated[
        bool, typer.Option("--stock", help="Start Flower's unmodified SuperLink. Its database is slower.")
    ] = False,
) -> int:
    """Start the server of a federation.

    Posy starts Flower's SuperLink, to which nodes connect, and the process that runs ServerApps. The SuperLink stores
    its state in a database. If the SuperLink dies, Posy restarts it, and the runs continue. Unless you use --insecure,
    the SuperLink needs certificates, and admits only nodes with registered keys (`posy register`).

    Any program that can connect to --control can run code on every node. By default, only programs on this machine can
    connect.
    """
    from posy.commands.deploy.starting import SuperLinkOptions, start_superlink  # noqa: PLC0415 - imports Flower

    start_superlink(SuperLinkOptions(folder, insecure, state, volatile, fleet, control, control_open_to_network, stock))
    return 0


@site(
    epilog="""\b
examples:
  posy supernode --superlink fl.example.org:9092 --key hospital-a.key \\
      data=/data/patients.csv policy=policy.yaml
  posy supernode --insecure partition-id=0 num-partitions=2    on one machine"""
)
def supernode(
    config: NodeConfig = None,
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the SuperLink (its --fleet).")
    ] = LOCAL_FLEET,
    key: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Private key of the node. Repeat the option to start several nodes."),
    ] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=0.1, metavar="SECONDS", help="Exit if the SuperLink is unreachable for this long (default: never)."
        ),
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
        typer.Option(
            metavar="FILE", help="Refuse apps that are not signed with a key in this YAML file (key id: public key)."
        ),
    ] = None,
) -> int:
    """Start the node of a site, which trains on local data.

    Posy starts a SuperNode that keeps PyTorch, the run's code and the data loaded between messages. For a partition of
    a published data set, the node config is for example partition-id=0 num-partitions=5. For a site's files, use
    data=PATH, and add policy=FILE to override the default rules (`posy policy new`).

    Repeat --key to start one node per key. The nodes share the loaded modules. By default, n nodes use n partitions,
    numbered 0 to n - 1. With partition-id, the first node uses this partition, and the other nodes use the partitions
    that follow. In a value, Posy replaces {name} with the name of the node's key, even if there is only one key.
    """
    from posy.commands.deploy.starting import NodeOptions, node_command  # noqa: PLC0415 - imports Flower

    command, environment = node_command(
        NodeOptions(
            config or [], superlink, key or [], root_certificates, insecure, wait, stock, refuse_foreign_code,
            trusted_entities,
        )
    )  # fmt: skip
    print_command(command, environment)
    status_command = "posy status --insecure" if insecure else "posy status"
    show_next([f"{status_command}    # on the server: lists this node once it is connected"], sys.stderr)
    os.execve(command[0], command, environment)


@server(
    epilog="""\b
examples:
  posy register hospital-a.pub hospital-b.pub"""
)
def register(
    keys: Annotated[
        list[Path], typer.Argument(metavar="NAME.pub...", help="Public keys that `posy certificates` has created.")
    ],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    renew: Annotated[bool, typer.Option("--renew", help="Replace the registered keys of these nodes.")] = False,
) -> int:
    """Admit nodes by registering their public keys.

    The SuperLink admits only nodes with registered keys. Posy registers each key under the name of its file.

    To replace a node's key, run this command with --renew, start the node with the new key, and run the command again.
    The first command registers the new key, and the old key stays valid. The second command revokes the old key.
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
                    hint = "start the node with the new key, then run this command again"
                    print(
                        f"posy: {name} keeps its old key, because it has not been online with the new key; {hint}",
                        file=sys.stderr,
                    )
                    status = 1
                    continue
                for node in old:
                    api.unregister(node.node_id)
                print(f"{name} now has only its new key; the old key is revoked")
            elif registered is not None:
                print(f"{name} is already registered" + ("" if registered.name == name else f" as {registered.name}"))
            elif old and not renew:
                hint = "if this is a new key of the same node, add --renew"
                print(f"posy: {name} is not registered, because another key has this name; {hint}", file=sys.stderr)
                status = 1
            else:
                api.register(name, pem)
                hint = (
                    "; both keys are valid. Start the node with the new key, then run this command again" if old else ""
                )
                print(f"{name} is registered{hint}")
    return status


@server()
def unregister(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of nodes, as listed by `posy status`.")],
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Revoke the keys of nodes.

    The SuperLink permanently refuses a revoked key. To admit the node again, create a new key and register it.
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


@server()
def backup(file: StateFile, state: State = STATE) -> int:
    """Copy the state of a SuperLink, which may be running.

    FILE contains the registered keys and the list of runs, but no results, checkpoints or certificates. Also copy runs/
    and the output directory of `posy certificates`.
    """
    from posy.commands.deploy.backup import back_up  # noqa: PLC0415

    back_up(state, file)
    print(f"{file}: {size(file.stat().st_size)}")
    return 0


@server()
def restore(file: StateFile, state: State = STATE) -> int:
    """Restore the state of a stopped SuperLink.

    FILE is the output of `posy backup`. Nodes reconnect automatically. Runs that were in progress at the time of the
    backup end with the status `failed`. Resume them from their checkpoints. A key that was revoked after the backup is
    valid again.
    """
    from posy.commands.deploy.backup import restore as restore_database  # noqa: PLC0415

    old = restore_database(state, file)
    print(f"{state} is restored" + (f"; the previous state is in {old}" if old else ""))
    print("keys that were revoked after the backup are valid again: repeat each `posy register` and `posy unregister`")
    return 0


@server()
def status(
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
    state: State = STATE,
) -> int:
    """List the runs and nodes of a federation.

    The newest run comes first. Nodes are sorted by name. On the SuperLink's machine, Posy also reads --state to show
    the activity of each run and node, the versions and clock errors of the nodes, and the free disk space.
    """
    from posy.commands.deploy import status as listing  # noqa: PLC0415
    from posy.commands.deploy.control import control  # noqa: PLC0415
    from posy.server_app.run_status import read_statuses  # noqa: PLC0415

    statuses = read_statuses(state / HOME)
    with control(connection(superlink, root_certificates, insecure)) as api:
        runs, nodes = api.runs(), api.nodes()
    listing.show(runs, nodes, statuses)
    if (state / HOME).is_dir():
        for use, path in (("the state", state), *(("results", path) for path in listing.results_of(statuses))):
            print(f"free disk for {use} ({path}): {listing.space(path)}")
    else:
        print(f"--state {state} contains no state of a SuperLink; `posy status` on the SuperLink's machine shows more")
    return 0


@server(
    epilog="""\b
examples:
  posy doctor                              on the server
  posy doctor --superlink fl.example.org:9092 --key hospital-a.key \\
      data=/data/patients.csv              at a site"""
)
def doctor(
    config: NodeConfig = None,
    folder: Annotated[
        Path, typer.Option("--certificates", metavar="DIR", help="Output directory of `posy certificates`.")
    ] = CERTIFICATES,
    state: State = STATE,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help=f"Address of the SuperLink: its --control (default: {CONTROL}) or, with --key, its --fleet (default: "
            f"{LOCAL_FLEET}).",
        ),
    ] = None,
    fleet: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="On the server: the SuperLink's --fleet address.")
    ] = LOCAL_FLEET,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="At a site: the private key of its node.")] = None,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Check that a server or a site is ready for a federation.

    On the server, Posy checks certificates, keys, ports, disk space, registered keys, and the versions and clocks of
    the nodes. At a site, pass --key and the node config. Posy then checks the key, the connection to the SuperLink, the
    clock, the GPU, the disk space and the data. It changes nothing. The exit status is 1 if a check finds an error.
    """
    from posy.commands.deploy import doctor as checks  # noqa: PLC0415

    exclude(insecure, "--key", key)
    exclude(insecure, "--root-certificates", root_certificates)
    ca = root_certificates or folder / "ca.pem"
    if key is not None:
        [node_words] = node_configs(config or [], [key.stem])
        node_config(node_words)
        words = dict(word.partition("=")[::2] for word in node_words)
        endpoint = connection(superlink or LOCAL_FLEET, ca, insecure=False)
        return checks.show(checks.of_site(endpoint, file_of(key, "--key"), words))
    if config:
        raise SettingsError(f"{config[0]}: only a site's node has a node config; add --key with the node's key")
    host_and_port("--fleet", fleet)
    host_and_port("--superlink", superlink or CONTROL)
    endpoint = Connection(superlink or CONTROL, None if insecure else ca)
    return checks.show(checks.of_server(endpoint, fleet, folder, state / HOME))


@site(
    epilog="""\b
examples:
  posy audit /srv/posy-state               check the log and print it
  posy audit /srv/posy-state --run my-run --since 2026-01-31T08:00
  posy audit /srv/posy-state --anchor      print an anchor to store elsewhere
  posy audit /srv/posy-state --contains 1234:5f0c...    check such an anchor"""
)
def audit(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="[PATH]", help="Audit log, or the state-dir of the node (default: the current directory)."
        ),
    ] = Path(),
    run: Annotated[
        str,
        typer.Option(metavar="RUN", help="Print only the events of this run (id or run-name).", show_default=False),
    ] = "",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="Print only the events since this time (UTC).", show_default=False)
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per event.")] = False,
    anchor: Annotated[
        bool, typer.Option("--anchor", help="Print only the number of events and the last hash, for storage elsewhere.")
    ] = False,
    anchored: Annotated[
        str,
        typer.Option(
            "--contains",
            metavar="ANCHOR",
            help="Check that the log still contains the events of this anchor.",
            show_default=False,
        ),
    ] = "",
) -> int:
    """Check and print the audit log of a node.

    The log has one line for each message that the node has answered or refused. Each line contains the hash of the
    previous line. If this chain is broken, Posy reports the first broken line, and the exit status is 1.
    """
    from posy.commands import audit as audit_log  # noqa: PLC0415 - imports Flower

    if anchor:
        return audit_log.print_anchor(path)
    return audit_log.show(path, run, since, anchored, as_json=as_json)


@server()
def log(
    run: RunWord,
    verbose: Verbose = False,
    superlink: SuperLink = CONTROL,
    root_certificates: RootCertificates = None,
    insecure: Insecure = False,
) -> int:
    """Show the log of a run in a federation.

    Posy prints the log from the start and follows it until the run ends. Ctrl-C stops the output, but not the run.
    """
    from posy.commands.deploy.control import show_run  # noqa: PLC0415

    return show_run(connection(superlink, root_certificates, insecure), run, verbose=verbose)


@server()
def stop(
    run: RunWord, superlink: SuperLink = CONTROL, root_certificates: RootCertificates = None, insecure: Insecure = False
) -> int:
    """Stop a run in a federation.

    Posy keeps the results, and you can resume the run from its last checkpoint.
    """
    from posy.commands.deploy.control import control  # noqa: PLC0415

    endpoint = connection(superlink, root_certificates, insecure)
    with control(endpoint) as api:
        record = api.find(run)
        if record.ended:
            raise SettingsError(f"run {run} has already ended ({record.status}, {record.since})")
        api.stop(record.number)
    folder = [f"output-dir={record.config['output-dir']}"] if "output-dir" in record.config else []
    command = resume_command(record.name or "RUN-NAME", *folder, *endpoint.words())
    print(f"run {record.number} is stopped\nto resume it from its last checkpoint: {command}")
    return 0
