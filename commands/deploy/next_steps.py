"""List the commands that follow the commands of a federation."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from posy.commands.deploy.options import CERTIFICATES, CONTROL, LOCAL_FLEET
from posy.commands.launch import Connection

PORT = LOCAL_FLEET.rpartition(":")[2]
"""Default port to which nodes connect."""


def after_certificates(folder: Path, nodes: Sequence[str], hosts: Sequence[str], *, on_server: bool) -> list[str]:
    """Return the commands that use new certificates and keys in a folder.

    Parameters
    ----------
    folder : Path
        Output directory of `posy certificates`.
    nodes : sequence of str
        Names of the nodes that have received a key.
    hosts : sequence of str
        Names and addresses of the SuperLink.
    on_server : bool
        Whether the folder contains the SuperLink's certificate.
    """
    is_default = folder == CERTIFICATES
    server_words = [] if is_default else ["--certificates", str(folder)]
    node_words = [] if is_default else ["--root-certificates", str(folder / "ca.pem")]
    address = f"{next(iter(hosts), '127.0.0.1' if on_server else 'SERVER')}:{PORT}"
    commands = [_command("superlink", *server_words)] if on_server else []
    if nodes:
        public = [str((folder if on_server else CERTIFICATES) / f"{node}.pub") for node in nodes]
        if on_server:
            register = _command("register", *public, *node_words)
        else:
            register = f"{_command('register', *public)}    # on the server, with a copy from {folder}"
        start = _command("supernode", "--superlink", address, "--key", str(folder / f"{nodes[0]}.key"), *node_words)
        return [*commands, register, f"{start} data=PATH"]
    node = _command("certificates", str(folder), "NODE")
    return [*commands, f"{node}    # at a site, with a copy of {folder / 'ca.pem'}"]


def after_superlink(endpoint: Connection, fleet: str) -> list[str]:
    """Return the commands that use a SuperLink with this endpoint for runs and this address for nodes."""
    if endpoint.root_certificates is None:
        address = [] if fleet == LOCAL_FLEET else ["--superlink", fleet]
        node = _command("supernode", "--insecure", *address, "partition-id=0", "num-partitions=2")
        return [f"{node}    # and partition-id=1", _command("run", *endpoint.words(), "num-clients=2")]
    is_default = endpoint.root_certificates == CERTIFICATES.absolute() / "ca.pem"
    words = endpoint.words()[:2] if is_default else endpoint.words()
    register = _command("register", "NODE.pub", *(words[2:] if endpoint.address == CONTROL else words))
    node = f"posy supernode --superlink SERVER:{fleet.rpartition(':')[2]} --key NODE.key data=PATH    # at a site"
    return [register, node, _command("run", *words, "dataset=sites", "num-clients=2")]


def after_check_site(words: Sequence[str], settings: Sequence[str] = ()) -> list[str]:
    """Return the commands that start the node of a site and a run.

    Parameters
    ----------
    words : sequence of str
        The node config, as ``key=value``.
    settings : sequence of str
        The settings of a run for which the data was checked, as ``key=value``. The run needs them too.
    """
    policy = [] if any(word.startswith("policy=") for word in words) else ["posy policy new    # optional rules"]
    run = _command("run", "--superlink", CONTROL, "dataset=sites", "num-clients=N", *settings)
    return [
        *policy,
        _command("supernode", "--superlink", f"SERVER:{PORT}", "--key", "NODE.key", *words),
        *([f"{run}    # on the server"] if settings else []),
    ]


def _command(*words: str) -> str:
    return shlex.join(["posy", *words])
