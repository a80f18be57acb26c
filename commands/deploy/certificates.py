"""Certificates for TLS and keys for node authentication, in the formats that Flower reads."""

import datetime
import ipaddress
import os
import re
import ssl
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from posy.settings import SettingsError

LOOPBACK = ("localhost", "127.0.0.1")
"""Names in every server certificate, because Flower's own processes connect to the SuperLink under these names."""
UNUSABLE = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
"""Exceptions that can occur when reading keys and certificates. A TypeError means that the key has a password."""
SKEW = datetime.timedelta(minutes=10)
"""Certificates are backdated by this time, for machines whose clocks are slow."""


class Files:
    """The files in a directory of certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        """Certificate of the authority. Every machine needs it to verify the SuperLink."""
        self.ca_key = folder / "ca.key"
        """Key of the authority, which signs server certificates. The running federation does not need it."""
        self.server, self.server_key = folder / "server.pem", folder / "server.key"
        """Certificate and key of the SuperLink."""

    def client(self, name: str) -> Path:
        """Return the path of the certificate of a client of ``posy serve``."""
        return self.folder / f"{name}.pem"

    def client_key(self, name: str) -> Path:
        """Return the path of the key of a client's certificate."""
        return self.folder / f"{name}.key"

    def node_key(self, name: str) -> Path:
        """Return the path of a node's private key, which stays on the node."""
        return self.folder / f"{name}.key"

    def node_public(self, name: str) -> Path:
        """Return the path of a node's public key, which the SuperLink registers."""
        return self.folder / f"{name}.pub"


def make_certificates(
    folder: Path,
    hosts: Sequence[str],
    nodes: Sequence[str],
    days: int,
    *,
    server: bool = True,
    clients: Sequence[str] = (),
) -> list[Path]:
    """Create the missing files: an authority, the SuperLink's certificate, and a key pair for each node.

    Without ``server``, as at a site, create only the key pairs, because the authority is on another machine. ``hosts``
    contains the names and IP addresses under which nodes reach the SuperLink, in addition to ``localhost``. ``clients``
    are names of clients of ``posy serve``, which receive certificates. Existing files stay unchanged. Return the paths
    of the new files.

    Raises
    ------
    SettingsError
        If the directory is not writable, if it contains only one file of a pair, if its certificate is not valid for
        all hosts, or if a name is not allowed.
    """
    files, written = Files(folder), []
    for host in hosts:
        _general_name(host)
    for name in (*nodes, *clients):
        if Path(name).name != name or name in ("ca", "server"):
            raise SettingsError(
                f"{name!r} cannot be the name of a node or client; choose a file name other than ca and server"
            )
    with (
        refused(f"{folder}: certificates cannot be written there", (OSError,)),
        refused(f"{folder} contains a file that is named like a certificate or key but has other content"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if server and _lacks(files.ca, files.ca_key, or_only=files.ca):
            written += _write(_new_authority(files, days))
        if server and _lacks(files.server, files.server_key):
            written += _write(_new_server(files, map(_general_name, (*LOOPBACK, *hosts)), days))
        elif server and (
            missing_hosts := set(map(_general_name, hosts)) - hosts_of(read_certificates(files.server)[0])
        ):
            raise SettingsError(
                f"{files.server} exists, but is not valid for "
                f"{', '.join(sorted(str(name.value) for name in missing_hosts))}; --renew replaces it and adds these "
                "hosts"
            )
        for name in nodes:
            if _lacks(files.node_public(name), files.node_key(name), or_only=files.node_public(name)):
                written += _write(_new_pair(files, name))
        for name in clients:
            if _lacks(files.client(name), files.client_key(name)):
                written += _write(_new_client(files, name, days))
    return written


def renew(
    folder: Path,
    hosts: Sequence[str],
    nodes: Sequence[str],
    days: int,
    *,
    authority: bool = False,
    clients: Sequence[str] = (),
) -> list[Path]:
    """Renew the files of some nodes and clients, the SuperLink's certificate, or the authority.

    With ``authority``, put a new authority into ca.pem, before the old authorities that are still valid. Machines with
    this file trust certificates from all these authorities. Without ``authority``, replace the key pairs of ``nodes``
    and the certificates of ``clients``. If there are neither, replace the SuperLink's certificate. The new certificate
    is valid for the old hosts and for ``hosts``. Append the time to the name of each old file. Return the paths of the
    new files.

    Raises
    ------
    SettingsError
        If a file to replace is missing, or the directory is not writable.
    """
    files = Files(folder)
    with (
        refused(f"{folder}: certificates cannot be written there", (OSError,)),
        refused(f"{folder} contains a file that is named like a certificate or key but has other content"),
    ):
        contents: dict[Path, bytes] = {}
        if authority:
            contents = _new_authority(files, days)
            today = datetime.datetime.now(datetime.UTC)
            valid = [old for old in read_certificates(files.ca) if old.not_valid_after_utc > today]
            contents[files.ca] += b"".join(old.public_bytes(serialization.Encoding.PEM) for old in valid)
        elif nodes or clients:
            for name in clients:
                if not files.client(name).exists():
                    raise SettingsError(f"{files.client(name)} does not exist; drop --renew to create it")
                contents |= _new_client(files, name, days)
            for name in nodes:
                if not (files.node_key(name).exists() or files.node_public(name).exists()):
                    raise SettingsError(f"{files.node_key(name)} does not exist; drop --renew to create it")
                contents |= _new_pair(files, name)
        else:
            old_hosts = sorted(hosts_of(read_certificates(files.server)[0]), key=lambda name: str(name.value))
            contents = _new_server(files, [*old_hosts, *map(_general_name, hosts)], days)
        return _write(contents, keep=True)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """Return the certificates in a file; raise :class:`SettingsError` for a file without certificates."""
    with refused(f"{path} cannot be used as a certificate"):
        return x509.load_pem_x509_certificates(path.read_bytes())


def public_half(path: Path) -> bytes:
    """Return the public key for a private key (PEM); raise :class:`SettingsError` for a file without a private key."""
    with refused(f"{path} is not a private key in the format of `posy certificates`"):
        return pem_of(load_private_key(path.read_bytes()).public_key())


def load_private_key(content: bytes) -> ec.EllipticCurvePrivateKey:
    """Load a private key in a format of ``posy certificates``; raise one of :data:`UNUSABLE` for other content."""
    load = serialization.load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
    key = load(content, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("it is not an elliptic-curve key")
    return key


def public_pem(path: Path) -> bytes:
    """Return a node's public key as the SuperLink stores it (PEM); raise :class:`SettingsError` for other files."""
    with refused(f"{path} is not a public key in the format of `posy certificates`"):
        content = path.read_bytes()
        if b"PRIVATE KEY" in content:
            raise SettingsError(f"{path} is a private key, which stays on its node; pass its public key (.pub)")
        return pem_of(serialization.load_ssh_public_key(content))


def pem_of(key: CertificatePublicKeyTypes) -> bytes:
    """Return a public key as the SuperLink stores it."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def hosts_of(certificate: x509.Certificate) -> set[x509.GeneralName]:
    """Return the hosts for which a certificate is valid."""
    return set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def check_authority(path: Path) -> None:
    """Raise :class:`SettingsError` if a file contains no CA certificate."""
    with refused(f"{path} cannot be used as a certificate"):
        ssl.create_default_context(cafile=str(path))


def check_server(certificate: Path, key: Path) -> None:
    """Raise :class:`SettingsError` if a certificate has expired or does not match the key."""
    with refused(f"{certificate} and {key} cannot be used"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise SettingsError(
            f"{certificate} has expired ({end:%Y-%m-%d}); `posy certificates {certificate.parent} --renew` replaces it"
        )


def check_node_key(path: Path) -> None:
    """Raise :class:`SettingsError` if a file contains no private key of a node."""
    with refused(f"--key {path}: it is not a private key in the format of `posy certificates`"):
        load_private_key(path.read_bytes())


@contextmanager
def refused(problem: str, kinds: tuple[type[Exception], ...] = UNUSABLE) -> Iterator[None]:
    """Convert errors in reading keys and certificates into a :class:`SettingsError` that begins with ``problem``."""
    try:
        yield
    except SettingsError:
        raise
    except kinds as error:
        raise SettingsError(f"{problem}: {error}") from error


def _lacks(public: Path, private: Path, or_only: Path | None = None) -> bool:
    """Return whether both files of a pair are missing.

    Raise :class:`SettingsError` if only one of the files exists, unless this file is ``or_only``.
    """
    existing = [path for path in (public, private) if path.exists()]
    if len(existing) == 1 and existing != [or_only]:
        missing = public if existing == [private] else private
        raise SettingsError(f"{existing[0]} exists, but {missing} is missing; add this file, or delete the first one")
    return not existing


def _new_authority(files: Files, days: int) -> dict[Path, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    return {files.ca_key: _key(key), files.ca: _certificate(key, "Posy federation", days)}


def _new_server(files: Files, hosts: Iterable[x509.GeneralName], days: int) -> dict[Path, bytes]:
    """Return a new key for the SuperLink, and a certificate signed by the existing authority."""
    signer = _signer(files, files.server)
    key = ec.generate_private_key(ec.SECP256R1())
    # The certificate comes last: a running SuperLink loads both files when the certificate changes.
    return {
        files.server_key: _key(key),
        files.server: _certificate(key, "Posy SuperLink", days, signer, dict.fromkeys(hosts)),
    }


def _new_client(files: Files, name: str, days: int) -> dict[Path, bytes]:
    """Return a new key for a client of ``posy serve``, and a certificate signed by the existing authority."""
    signer = _signer(files, files.client(name))
    key = ec.generate_private_key(ec.SECP256R1())
    return {files.client_key(name): _key(key), files.client(name): _certificate(key, name, days, signer)}


def _signer(files: Files, certificate: Path) -> tuple[x509.Name, ec.EllipticCurvePrivateKey]:
    """Return the name and the key of the authority, which must sign a certificate."""
    if not files.ca_key.exists():
        raise SettingsError(f"{files.ca_key} is missing, but {certificate.name} must be signed with it; copy it there")
    return read_certificates(files.ca)[0].subject, load_private_key(files.ca_key.read_bytes())


def _new_pair(files: Files, node: str) -> dict[Path, bytes]:
    """Return a new key pair for a node."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return {files.node_key(node): _key(key, ssh=True), files.node_public(node): public}


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    days: int,
    signer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None = None,
    hosts: Collection[x509.GeneralName] = (),
) -> bytes:
    """Return a certificate signed by ``signer``, or a CA certificate if ``signer`` is None.

    It is a server's certificate for ``hosts``, or without hosts, the certificate of a client.
    """
    start = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, issuer_key = signer or (subject, key)
    authority = signer is None
    unused = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        **dict.fromkeys((*unused, "encipher_only", "decipher_only"), False),
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(start - SKEW)
        .not_valid_after(start + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if not authority:
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
        names = [x509.SubjectAlternativeName(hosts)] if hosts else []
        for extension in (x509.ExtendedKeyUsage([purpose]), *names, authority_id):
            builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*_-]+(\.[A-Za-z0-9_-]+)*", host):
            raise SettingsError(
                f"--host {host!r}: it must be an IP address or a name such as server.example.org, in ASCII and without "
                "a port"
            ) from None
        return x509.DNSName(host)


def _key(key: ec.EllipticCurvePrivateKey, *, ssh: bool = False) -> bytes:
    form = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _write(contents: Mapping[Path, bytes], *, keep: bool = False) -> list[Path]:
    """Write files in the given order and return their paths; with ``keep``, keep old files under new names.

    Create each key with its final mode, so that other users can never read the key.
    """
    suffix = time.strftime(".%Y%m%d-%H%M%S")
    for path, content in contents.items():
        part = path.with_name(f".{path.name}.part") if keep else path
        mode = 0o600 if path.suffix == ".key" else 0o644
        if keep:
            part.unlink(missing_ok=True)
            if path.exists():
                os.link(path, path.with_name(path.name + suffix))
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
        if keep:
            part.replace(path)
    return [*contents]
