"""Checks of a federation, on the machine where they are typed: `posy doctor`.

Each check yields findings: that something is right, or what is wrong and what to do about it.
"""

import datetime
import shutil
import socket
import ssl
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.proto.fleet_pb2_grpc import FleetStub
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from posy.commands.deploy.certificates import (
    Files,
    hosts_of,
    load_private_key,
    pem_of,
    public_half,
    public_pem,
    read_certificates,
    refused,
)
from posy.commands.deploy.control import control
from posy.commands.deploy.status import TOLERATED, VERSIONS, facts_of_nodes, free_disk, offset, results_of, space
from posy.commands.launch import Connection
from posy.flower import CLOCK_SECONDS, FLOWER, versions
from posy.paths import absolute
from posy.server_app.run_status import read_statuses
from posy.settings import LaunchError, SettingsError

Level = Literal["ok", "warning", "error"]
SOON = datetime.timedelta(days=30)
"""Time before the end of a certificate from which it should be renewed."""
LITTLE_BYTES, LITTLE_SHARE = 1 << 30, 0.05
"""Free disk, in bytes and as a share of it, below which there is little."""
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0
"""How far a node's clock may be ahead of the SuperLink's, and behind it, before Flower refuses what the node signs."""
REACH_SECONDS = 5.0
"""Seconds to wait for an answer of the SuperLink."""


class Finding(NamedTuple):
    """What a check has found."""

    level: Level
    text: str


def safely(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Turn what a check cannot read into an error that it finds."""
    try:
        yield from findings
    except SettingsError as error:
        yield Finding("error", str(error))


def show(findings: Iterable[Finding]) -> int:
    """Print findings as they come and return the exit status: 1 if there is an error."""
    status = 0
    for level, text in findings:
        print(f"{level:<8}{text}", flush=True)
        status |= level == "error"
    return status


def of_server(reached: Connection, fleet: str, folder: Path, home: Path) -> Iterator[Finding]:
    """Check the server's machine: its certificates, ports and disk, and what it knows of the nodes."""
    yield from check_flower()
    ca = reached.root_certificates
    told = read_statuses(home)
    places = [("the state", home.parent), *(("results", path) for path in results_of(told))]
    if ca is not None:
        yield from check_certificates(folder)
    if ca is None or ca.is_file():
        newest = None if ca is None else Files(folder).server
        yield from safely(check_reach("the SuperLink for orders", reached.address, ca, newest))
        yield from safely(check_reach("the SuperLink for nodes", fleet, ca, newest))
        try:
            with control(reached) as api:
                nodes = api.nodes()
        except LaunchError as error:
            yield Finding("error", f"which nodes are registered is not known: {error}")
        else:
            yield from check_nodes(nodes, None if ca is None else folder)
            yield from check_told(nodes, told)
    yield from check_disk(places)


def of_site(reached: Connection, key: Path, config: Mapping[str, str]) -> Iterator[Finding]:
    """Check a site's machine: its key, the way to the SuperLink, its clock, GPU, disk and data."""
    yield from check_flower()
    yield from check_gpu()
    yield from safely(check_node_key(key))
    way = list(safely(check_reach("the SuperLink", reached.address, reached.root_certificates)))
    yield from way
    if reached.root_certificates is not None and all(found.level != "error" for found in way):
        authority = read_certificates(reached.root_certificates)[0]
        yield _expiry(f"the authority {reached.root_certificates}", authority, "get the new ca.pem from the server")
        yield from safely(check_admission(reached.address, reached.root_certificates, key))
    places = [("its clients' states", absolute(config["state-dir"]))] if "state-dir" in config else []
    yield from check_disk(places)
    if "data" in config:
        yield from check_data(absolute(config["data"]))


# -- this machine ----------------------------------------------------------------------------------------


def check_flower() -> Iterator[Finding]:
    """Check that the installed Flower is one that Posy knows."""
    found = version("flwr")
    if found.startswith(f"{FLOWER}."):
        yield Finding("ok", f"flwr {found}")
    else:
        yield Finding("error", f"flwr {found} is installed, Posy needs {FLOWER}: pip install 'flwr>={FLOWER},<1.40'")


def check_gpu() -> Iterator[Finding]:
    """Check that PyTorch sees the GPU of this machine, if there is one."""
    import torch  # noqa: PLC0415 - seconds

    if torch.cuda.is_available():
        yield Finding("ok", f"torch {torch.__version__} sees {torch.cuda.get_device_name()}")
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        about = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding("warning", f"this machine has a GPU, which torch {torch.__version__} ({about}) does not see")
    else:
        yield Finding("ok", f"torch {torch.__version__}, no GPU")


def check_disk(places: Iterable[tuple[str, Path]]) -> Iterator[Finding]:
    """Check that there is space for what is written to directories, each with what that is."""
    for what, path in (*places, ("temporary files", Path(tempfile.gettempdir()))):
        free, total = free_disk(path)
        little = free < LITTLE_BYTES or free < LITTLE_SHARE * total
        yield Finding("warning" if little else "ok", f"free disk for {what} ({path}): {space(path)}")


def check_data(path: Path) -> Iterator[Finding]:
    """Check that a site's data can be read at all."""
    try:
        with path.open("rb") if path.is_file() else tempfile.TemporaryFile():
            empty = not (path.stat().st_size if path.is_file() else any(path.iterdir()))
    except OSError as error:
        yield Finding("error", f"data={path} cannot be read: {error}")
        return
    if empty:
        yield Finding("error", f"data={path} is empty")
    else:
        yield Finding("ok", f"data={path} can be read; `posy check-site data={path}` looks into it")


# -- certificates and keys -------------------------------------------------------------------------------


def check_certificates(folder: Path) -> Iterator[Finding]:
    """Check a directory of certificates and keys, as `posy certificates` makes it."""
    files = Files(folder)
    yield from safely(_check_authority(files))
    if files.server.exists():
        yield from safely(_check_server(files))
    for public in sorted(folder.glob("*.pub")):
        if (private := public.with_suffix(".key")).exists():
            yield from safely(_check_pair(private, public, partial(public_pem, public)))
    for private in sorted(folder.glob("*.key")):
        yield from check_mode(private)


def _check_authority(files: Files) -> Iterator[Finding]:
    remedy = f"`posy certificates {files.folder} --renew-authority`, and hand {files.ca.name} to every site"
    newest, *others = read_certificates(files.ca)
    yield _expiry(f"the authority {files.ca}", newest, remedy)
    for other in others:
        if other.not_valid_after_utc > _now():
            yield Finding(
                "ok", f"{files.ca} holds the authority before it too, until {other.not_valid_after_utc:%Y-%m-%d}"
            )
    if files.ca_key.exists():
        yield from _check_pair(files.ca_key, files.ca, lambda: pem_of(newest.public_key()))


def _check_server(files: Files) -> Iterator[Finding]:
    server = read_certificates(files.server)[0]
    yield _expiry(f"the SuperLink's certificate {files.server}", server, f"`posy certificates {files.folder} --renew`")
    yield from safely(_check_pair(files.server_key, files.server, lambda: pem_of(server.public_key())))
    names = ", ".join(sorted(str(name.value) for name in hosts_of(server)))
    if any(_signed_by(server, authority) for authority in read_certificates(files.ca)):
        yield Finding("ok", f"{files.server} is signed by the authority, for {names}")
    else:
        yield Finding("error", f"{files.server} is not signed by an authority in {files.ca}: no node accepts it")


def check_mode(private: Path) -> Iterator[Finding]:
    """Check that only its owner can read a private key."""
    if (mode := private.stat().st_mode & 0o777) & 0o077:
        yield Finding("warning", f"{private} can be read by others (mode {mode:o}): chmod 600 {private}")


def check_node_key(key: Path) -> Iterator[Finding]:
    """Check the private key of a node, and that the public one beside it is its other half."""
    public_half(key)
    yield Finding("ok", f"{key} is a private key")
    if (public := key.with_suffix(".pub")).exists():
        yield from _check_pair(key, public, partial(public_pem, public))
    yield from check_mode(key)


# -- the SuperLink ---------------------------------------------------------------------------------------


def check_reach(what: str, address: str, ca: Path | None, server: Path | None = None) -> Iterator[Finding]:
    """Check that somebody listens at an address, with a certificate that ``ca`` trusts; ``server`` is the newest."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), REACH_SECONDS) as line:
            if ca is None:
                yield Finding("ok", f"{what} at {address} can be reached")
                return
            context = ssl.create_default_context(cafile=str(ca))
            context.set_alpn_protocols(["h2", "http/1.1"])
            with context.wrap_socket(line, server_hostname=host) as secured:
                content = secured.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError as error:
        yield Finding("error", f"{what} at {address} is not trusted by {ca}: {error.verify_message}")
        return
    except ssl.SSLError as error:
        yield Finding("error", f"{what} at {address} speaks no TLS that fits: {error.reason or error}")
        return
    except OSError as error:
        hint = "does `posy superlink` run there, and does a firewall let it through?"
        yield Finding("error", f"{what} at {address} cannot be reached ({error}): {hint}")
        return
    shown = x509.load_der_x509_certificate(content)
    yield _expiry(f"{what} at {address} is trusted; its certificate", shown, "renew it on the server")
    if server is not None and server.exists() and shown not in read_certificates(server):
        yield Finding("warning", f"{what} at {address} does not use {server} yet: start the SuperLink again")


def check_admission(address: str, ca: Path, key: Path) -> Iterator[Finding]:
    """Check that the SuperLink admits a node's key, and the clock by which this machine signs; it changes nothing."""
    with refused(f"{key} is not a private key as `posy certificates` makes it"):
        private = load_private_key(key.read_bytes())
    public = public_key_to_bytes(private.public_key())
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes())) as channel:

        def refusal(shift: float = 0.0) -> str:
            """Return what the SuperLink says to a request of this key by a clock that is put forward."""
            stamp = (now() + datetime.timedelta(seconds=shift)).isoformat()
            signature = sign_message(private, stamp.encode("ascii"))
            headers = ((PUBLIC_KEY_HEADER, public), (TIMESTAMP_HEADER, stamp), (SIGNATURE_HEADER, signature))
            # Whether the key is known is looked at first, then the interval, which cannot be: nothing comes of it.
            request = ActivateNodeRequest(public_key=public, heartbeat_interval=0.0)
            try:
                FleetStub(channel).ActivateNode(request, metadata=headers, timeout=REACH_SECONDS)
            except grpc.RpcError as error:
                return str(error.details())
            return "it was taken"

        said = refusal()
        if _BAD_TIME in said:
            yield Finding(
                "error",
                f"this machine's clock is more than {AHEAD_SECONDS:g} s ahead of the SuperLink's, or more than "
                f"{BEHIND_SECONDS:g} s behind, so it refuses what is signed here: set the clock (NTP)",
            )
            return
        if _BAD_TIME in refusal(AHEAD_SECONDS - TOLERATED):
            what = f"ahead of the SuperLink's by more than {TOLERATED:g} s; beyond {AHEAD_SECONDS:g} s it refuses"
            yield Finding("warning", f"this machine's clock is {what} what is signed here: set the clock (NTP)")
        elif _BAD_TIME in refusal(CLOCK_SECONDS - BEHIND_SECONDS):
            what = f"behind the SuperLink's by more than {CLOCK_SECONDS:g} s"
            yield Finding("warning", f"this machine's clock is {what}: messages end too late; set the clock (NTP)")
        else:
            yield Finding("ok", "this machine's clock is that of the SuperLink")
    if _UNKNOWN_KEY in said:
        yield Finding("error", f"{key} is not registered: `posy register {key.stem}.pub` on the server")
    elif _BAD_INTERVAL in said:
        yield Finding("ok", f"{key} is registered")
    else:
        yield Finding("warning", f"whether {key} is registered the SuperLink does not tell: {said}")


def check_nodes(nodes: Sequence[NodeInfo], folder: Path | None) -> Iterator[Finding]:
    """Compare the keys that are registered with those in a directory, and tell nodes that were never online."""
    keys = {}
    for path in sorted(folder.glob("*.pub")) if folder else ():
        try:
            keys[public_pem(path)] = path
        except SettingsError as error:
            yield Finding("error", str(error))
    registered = {node.public_key for node in nodes}
    for pem, path in keys.items():
        if pem not in registered:
            yield Finding("warning", f"{path} is not registered: `posy register {path}`")
    for node in nodes:
        if keys and node.public_key not in keys:
            out = f"exclude it with `posy unregister {node.name}`, if it is not to take part"
            yield Finding("warning", f"the key registered as {node.name} is not in {folder}: {out}")
        if not node.last_activated_at:
            yield Finding("warning", f"{node.name} was never online: run `posy doctor --key ...` on its machine")
    online = sum(node.status == "online" for node in nodes)
    yield Finding("ok", f"{online} of {len(nodes)} registered nodes are online")


def check_told(nodes: Sequence[NodeInfo], told: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare versions and clocks of the nodes with the server's, as runs have noted them."""
    known = facts_of_nodes(told)
    here = versions()
    compared = 0
    for node in nodes:
        if not (facts := known.get(str(node.node_id))):
            continue
        compared += 1
        there = facts.get("versions", {})
        for name in VERSIONS:
            if there.get(name) and _release(there[name], name) != _release(here[name] or "", name):
                yield Finding("warning", f"{node.name} has {name} {there[name]}, the server {here[name]}")
        clock = facts.get("clock") or 0.0
        if clock > TOLERATED or clock < -CLOCK_SECONDS:
            bad: Level = "error" if clock > AHEAD_SECONDS or clock < -BEHIND_SECONDS else "warning"
            yield Finding(bad, f"the clock of {node.name} is {offset(clock)}: set it there (NTP)")
    yield Finding("ok", f"versions and clocks of {compared} of {len(nodes)} nodes are known, from their last run")


# -- helpers ---------------------------------------------------------------------------------------------

_BAD_TIME = "Invalid timestamp"
_UNKNOWN_KEY = "2004"
_BAD_INTERVAL = "2003"
"""What Flower's SuperLink says to a request to take part."""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _expiry(what: str, certificate: x509.Certificate, remedy: str) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin > _now():
        return Finding(
            "error", f"{what} is valid from {begin:%Y-%m-%d %H:%M} UTC on only: is this machine's clock right?"
        )
    if end < _now():
        return Finding("error", f"{what} has expired on {end:%Y-%m-%d}: {remedy}")
    days = (end - _now()).days
    if end < _now() + SOON:
        return Finding("warning", f"{what} expires in {days} days, on {end:%Y-%m-%d}: {remedy}")
    return Finding("ok", f"{what} is valid until {end:%Y-%m-%d}")


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_pair(private: Path, whose: Path, public: Callable[[], bytes]) -> Iterator[Finding]:
    if public_half(private) != public():
        yield Finding("error", f"{private} and {whose} do not belong together")


def _release(version: str, name: str) -> str:
    """Return what of a version must be the same: PyTorch for another GPU and a repair of Python are no difference."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]
