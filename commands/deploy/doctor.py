"""`posy doctor`: check that this machine is ready for a federation.

Each check yields findings. A finding confirms that something works, or names a problem and its remedy.
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
from posy.commands.deploy.options import CERTIFICATES
from posy.commands.deploy.status import TOLERATED, VERSIONS, facts_of_nodes, free_disk, offset, results_of, space
from posy.commands.launch import Connection
from posy.deploy.fleet import code_in, public_pem_of, signature_headers
from posy.deploy.flower_internals import INTERVAL_REFUSED, KEY_REFUSED, fleet_call
from posy.flower import CLOCK_SECONDS, FLOWER, HIGHEST, LOWEST, versions
from posy.paths import absolute
from posy.server_app.run_status import read_statuses
from posy.settings import LaunchError, SettingsError

Level = Literal["ok", "warning", "error"]
SOON = datetime.timedelta(days=30)
"""Posy recommends renewing a certificate if its remaining validity is shorter than this."""
LITTLE_BYTES, LITTLE_SHARE = 1 << 30, 0.05
"""Posy warns if the free disk space is below either limit: a number of bytes, or a fraction of the disk."""
AHEAD_SECONDS, BEHIND_SECONDS = 5.0, 305.0
"""Largest lead and lag of a node's clock, in seconds, at which Flower still accepts the node's signatures."""
REACH_SECONDS = 5.0
"""Timeout for a reply from the SuperLink, in seconds."""


class Finding(NamedTuple):
    """One result of a check."""

    level: Level
    text: str


def safely(findings: Iterator[Finding]) -> Iterator[Finding]:
    """Yield the findings of a check; convert a :class:`SettingsError` to a finding of level ``error``."""
    try:
        yield from findings
    except SettingsError as error:
        yield Finding("error", str(error))


def show(findings: Iterable[Finding]) -> int:
    """Print findings as they arrive, and return the exit status, which is 1 if there is an error."""
    status = 0
    for level, text in findings:
        print(f"{level:<8}{text}", flush=True)
        status |= level == "error"
    return status


def of_server(endpoint: Connection, fleet: str, folder: Path, home: Path) -> Iterator[Finding]:
    """Check the server's machine: certificates, ports, disk space, and the registered nodes."""
    yield from check_flower()
    ca = endpoint.root_certificates
    statuses = read_statuses(home)
    directories = [("the state", home.parent), *(("results", path) for path in results_of(statuses))]
    if ca is not None:
        yield from check_certificates(folder)
    if ca is None or ca.is_file():
        server_certificate = None if ca is None else Files(folder).server
        yield from safely(check_reach("the SuperLink's control API", endpoint.address, ca, server_certificate))
        yield from safely(check_reach("the SuperLink's fleet API", fleet, ca, server_certificate))
        try:
            with control(endpoint) as api:
                nodes = api.nodes()
        except LaunchError as error:
            yield Finding("error", f"the registered nodes could not be listed: {error}")
        else:
            yield from check_nodes(nodes, None if ca is None else folder)
            yield from check_node_reports(nodes, statuses)
    yield from check_disk(directories)


def of_site(endpoint: Connection, key: Path, config: Mapping[str, str]) -> Iterator[Finding]:
    """Check a site's machine: key, connection to the SuperLink, clock, GPU, disk space and data."""
    yield from check_flower()
    yield from check_gpu()
    yield from safely(check_node_key(key))
    reach_findings = list(safely(check_reach("the SuperLink", endpoint.address, endpoint.root_certificates)))
    yield from reach_findings
    if endpoint.root_certificates is not None and all(finding.level != "error" for finding in reach_findings):
        authority = read_certificates(endpoint.root_certificates)[0]
        yield _expiry(f"the authority {endpoint.root_certificates}", authority, "get the new ca.pem from the server")
        yield from safely(check_admission(endpoint.address, endpoint.root_certificates, key))
    directories = [("its clients' states", absolute(config["state-dir"]))] if "state-dir" in config else []
    yield from check_disk(directories)
    if "data" in config:
        yield from check_data(absolute(config["data"]))


# -- this machine ----------------------------------------------------------------------------------------


def check_flower() -> Iterator[Finding]:
    """Check that Posy supports the installed version of Flower."""
    installed = version("flwr")
    release = tuple(int(number) for number in installed.split(".")[:2])
    if installed.startswith(f"{FLOWER}."):
        yield Finding("ok", f"flwr {installed}")
    elif LOWEST <= release <= HIGHEST:
        yield Finding(
            "warning",
            f"Posy has no warm nodes for flwr {installed}, so it starts Flower's own, which are slower; use flwr "
            f"{FLOWER}",
        )
    else:
        remedy = f"pip install 'flwr>={FLOWER},<1.40'"
        yield Finding("error", f"flwr {installed} is installed, but Posy needs {FLOWER} to 1.{HIGHEST[1]}; {remedy}")


def check_gpu() -> Iterator[Finding]:
    """Check that PyTorch sees the GPU of this machine, if there is one."""
    import torch  # noqa: PLC0415 - takes seconds

    if torch.cuda.is_available():
        yield Finding("ok", f"torch {torch.__version__} sees {torch.cuda.get_device_name()}")
    elif shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        about = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        yield Finding("warning", f"torch {torch.__version__} ({about}) does not see the GPU of this machine")
    else:
        yield Finding("ok", f"torch {torch.__version__}, no GPU")


def check_disk(directories: Iterable[tuple[str, Path]]) -> Iterator[Finding]:
    """Check the free space on the disks that contain the directories, given as pairs of a description and a path."""
    for content, path in (*directories, ("temporary files", Path(tempfile.gettempdir()))):
        free, total = free_disk(path)
        is_low = free < LITTLE_BYTES or free < LITTLE_SHARE * total
        yield Finding("warning" if is_low else "ok", f"free disk for {content} ({path}): {space(path)}")


def check_data(path: Path) -> Iterator[Finding]:
    """Check that a site's data is readable and not empty."""
    try:
        with path.open("rb") if path.is_file() else tempfile.TemporaryFile():
            empty = not (path.stat().st_size if path.is_file() else any(path.iterdir()))
    except OSError as error:
        yield Finding("error", f"data={path} cannot be read: {error}")
        return
    if empty:
        yield Finding("error", f"data={path} is empty")
    else:
        yield Finding("ok", f"data={path} can be read; `posy check-site data={path}` checks its content")


# -- certificates and keys -------------------------------------------------------------------------------


def check_certificates(folder: Path) -> Iterator[Finding]:
    """Check the certificates and keys in an output directory of `posy certificates`."""
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
    remedy = f"`posy certificates {files.folder} --renew-authority`, and copy {files.ca.name} to every site"
    newest, *older = read_certificates(files.ca)
    yield _expiry(f"the authority {files.ca}", newest, remedy)
    for authority in older:
        if authority.not_valid_after_utc > _now():
            yield Finding(
                "ok",
                f"{files.ca} also contains an older authority, valid until {authority.not_valid_after_utc:%Y-%m-%d}",
            )
    if files.ca_key.exists():
        yield from _check_pair(files.ca_key, files.ca, lambda: pem_of(newest.public_key()))


def _check_server(files: Files) -> Iterator[Finding]:
    server = read_certificates(files.server)[0]
    yield _expiry(f"the SuperLink's certificate {files.server}", server, f"`posy certificates {files.folder} --renew`")
    yield from safely(_check_pair(files.server_key, files.server, lambda: pem_of(server.public_key())))
    names = ", ".join(sorted(str(name.value) for name in hosts_of(server)))
    if any(_signed_by(server, authority) for authority in read_certificates(files.ca)):
        yield Finding("ok", f"{files.server} is signed by the authority and valid for {names}")
    else:
        yield Finding("error", f"{files.server} is not signed by an authority in {files.ca}: no node accepts it")


def check_mode(private: Path) -> Iterator[Finding]:
    """Check that only the owner of a private key can read it."""
    if (mode := private.stat().st_mode & 0o777) & 0o077:
        yield Finding("warning", f"{private} can be read by other users (mode {mode:o}): chmod 600 {private}")


def check_node_key(key: Path) -> Iterator[Finding]:
    """Check a node's private key; if the same directory contains a public key, check that the two match."""
    public_half(key)
    yield Finding("ok", f"{key} is a private key")
    if (public := key.with_suffix(".pub")).exists():
        yield from _check_pair(key, public, partial(public_pem, public))
    yield from check_mode(key)


# -- the SuperLink ---------------------------------------------------------------------------------------


def check_reach(service: str, address: str, ca: Path | None, server: Path | None = None) -> Iterator[Finding]:
    """Check that ``service`` listens on an address, and that an authority in ``ca`` has signed its certificate.

    If the file ``server`` exists, also check that it contains this certificate.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        with socket.create_connection((host, int(port)), REACH_SECONDS) as connection:
            if ca is None:
                yield Finding("ok", f"{service} at {address} can be reached")
                return
            context = ssl.create_default_context(cafile=str(ca))
            context.set_alpn_protocols(["h2", "http/1.1"])
            with context.wrap_socket(connection, server_hostname=host) as secured:
                content = secured.getpeercert(binary_form=True) or b""
    except ssl.SSLCertVerificationError as error:
        reason = error.verify_message
        yield Finding("error", f"{ca} does not verify the certificate of {service} at {address}: {reason}")
        return
    except ssl.SSLError as error:
        yield Finding(
            "error", f"{service} at {address} does not support a compatible version of TLS: {error.reason or error}"
        )
        return
    except OSError as error:
        hint = "check that `posy superlink` runs there, and that no firewall blocks the port"
        yield Finding("error", f"{service} at {address} cannot be reached ({error}); {hint}")
        return
    certificate = x509.load_der_x509_certificate(content)
    yield _expiry(f"{service} at {address} is trusted; its certificate", certificate, "renew it on the server")
    if server is not None and server.exists() and certificate not in read_certificates(server):
        yield Finding("warning", f"{service} at {address} does not use {server} yet: restart the SuperLink")


def check_admission(address: str, ca: Path, key: Path) -> Iterator[Finding]:
    """Check, without side effects, that the SuperLink admits a node's key and that this machine's clock is correct."""
    with refused(f"{key} is not a private key in the format of `posy certificates`"):
        private = load_private_key(key.read_bytes())
    path, request, response = fleet_call("ActivateNode")
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(ca.read_bytes())) as channel:

        def refusal(shift: float = 0.0) -> str:
            """Return the SuperLink's reply to a request signed with this key, timestamped ``shift`` seconds ahead."""
            headers = signature_headers(private, datetime.timedelta(seconds=shift))
            call = channel.unary_unary(path, request.SerializeToString, response.FromString)
            # The SuperLink first checks the key, and then refuses the interval, so the request has no effect.
            try:
                call(
                    request(public_key=public_pem_of(private), heartbeat_interval=0.0),
                    metadata=headers,
                    timeout=REACH_SECONDS,
                )
            except grpc.RpcError as error:
                return str(error.details())
            return "the request was accepted"

        reply = refusal()
        if _BAD_TIME in reply:
            yield Finding(
                "error",
                f"this machine's clock is more than {AHEAD_SECONDS:g} s ahead of the SuperLink's, or more than "
                f"{BEHIND_SECONDS:g} s behind, so the SuperLink refuses its signatures: set the clock (NTP)",
            )
            return
        if _BAD_TIME in refusal(AHEAD_SECONDS - TOLERATED):
            yield Finding(
                "warning",
                f"this machine's clock is ahead of the SuperLink's by more than {TOLERATED:g} s; beyond "
                f"{AHEAD_SECONDS:g} s the SuperLink refuses its signatures: set the clock (NTP)",
            )
        elif _BAD_TIME in refusal(CLOCK_SECONDS - BEHIND_SECONDS):
            yield Finding(
                "warning",
                f"this machine's clock is behind the SuperLink's by more than {CLOCK_SECONDS:g} s, so messages expire "
                "too late: set the clock (NTP)",
            )
        else:
            yield Finding("ok", "this machine's clock agrees with the SuperLink's clock")
    if code_in(reply) == KEY_REFUSED:
        public = CERTIFICATES / f"{key.stem}.pub"
        yield Finding(
            "error", f"{key} is not registered: `posy register {public}` on the server, with a copy of the file"
        )
    elif code_in(reply) == INTERVAL_REFUSED:
        yield Finding("ok", f"{key} is registered")
    else:
        yield Finding("warning", f"the SuperLink does not report whether {key} is registered; its reply: {reply}")


def check_nodes(nodes: Sequence[Any], folder: Path | None) -> Iterator[Finding]:
    """Compare the registered keys with the keys in a directory, and report nodes that have never been online."""
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
            hint = f"revoke it with `posy unregister {node.name}`, unless the node belongs to the federation"
            yield Finding("warning", f"the key registered as {node.name} is not in {folder}: {hint}")
        if not node.last_activated_at:
            yield Finding("warning", f"{node.name} has never been online: run `posy doctor --key ...` on its machine")
    online = sum(node.status == "online" for node in nodes)
    yield Finding("ok", f"{online} of {len(nodes)} registered nodes are online")


def check_node_reports(nodes: Sequence[Any], statuses: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    """Compare the nodes' versions and clocks, as recorded by runs, with the server's."""
    node_facts = facts_of_nodes(statuses)
    server_versions = versions()
    compared = 0
    for node in nodes:
        if not (facts := node_facts.get(str(node.node_id))):
            continue
        compared += 1
        node_versions = facts.get("versions", {})
        for name in VERSIONS:
            node_version, server_version = node_versions.get(name), server_versions[name]
            if node_version and _release(node_version, name) != _release(server_version or "", name):
                yield Finding("warning", f"{node.name} has {name} {node_version}, but the server has {server_version}")
        clock = facts.get("clock") or 0.0
        if clock > TOLERATED or clock < -CLOCK_SECONDS:
            level: Level = "error" if clock > AHEAD_SECONDS or clock < -BEHIND_SECONDS else "warning"
            yield Finding(level, f"the clock of {node.name} is {offset(clock)}: set the clock on its machine (NTP)")
    yield Finding("ok", f"runs have recorded the versions and clocks of {compared} of {len(nodes)} nodes")


# -- helpers ---------------------------------------------------------------------------------------------

_BAD_TIME = "Invalid timestamp"
"""Part of the error message of Flower's SuperLink for a request with a wrong timestamp."""


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _expiry(subject: str, certificate: x509.Certificate, remedy: str) -> Finding:
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if begin > _now():
        return Finding("error", f"{subject} is not valid before {begin:%Y-%m-%d %H:%M} UTC: check this machine's clock")
    if end < _now():
        return Finding("error", f"{subject} expired on {end:%Y-%m-%d}: {remedy}")
    days = (end - _now()).days
    if end < _now() + SOON:
        return Finding("warning", f"{subject} expires in {days} days, on {end:%Y-%m-%d}: {remedy}")
    return Finding("ok", f"{subject} is valid until {end:%Y-%m-%d}")


def _signed_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _check_pair(private: Path, counterpart: Path, public: Callable[[], bytes]) -> Iterator[Finding]:
    if public_half(private) != public():
        yield Finding("error", f"{private} and {counterpart} do not belong together")


def _release(version: str, name: str) -> str:
    """Return the part of a version that must match, without PyTorch's build tag and Python's patch release."""
    return ".".join(version.split(".")[:2]) if name == "python" else version.partition("+")[0]
