"""Certificates for TLS and keys for node authentication, in the forms that Flower reads."""

import datetime
import ipaddress
import os
import re
import ssl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from posy.settings import SettingsError

LOOPBACK = ("localhost", "127.0.0.1")
"""Names that every server certificate holds: Flower's own processes reach the SuperLink under them."""
UNUSABLE = (OSError, ValueError, TypeError, UnsupportedAlgorithm)
"""What reading keys and certificates raises; TypeError: it has a password."""
SKEW = datetime.timedelta(minutes=10)
"""Time before its making from which a certificate is valid, for machines whose clocks are behind."""


class Files:
    """The files of a directory of certificates."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = folder / "ca.pem"
        """Certificate of the authority: every machine gets it, to check the SuperLink."""
        self.ca_key = folder / "ca.key"
        """Key of the authority, for later server certificates; no machine of the federation needs it."""
        self.server, self.server_key = folder / "server.pem", folder / "server.key"
        """Certificate and key of the SuperLink."""

    def node_key(self, name: str) -> Path:
        """Private key of a node, which only that node gets."""
        return self.folder / f"{name}.key"

    def node_public(self, name: str) -> Path:
        """Public key of a node, which is registered with the SuperLink."""
        return self.folder / f"{name}.pub"


def make_certificates(folder: Path, hosts: Sequence[str], nodes: Sequence[str], days: int) -> list[Path]:
    """Make what is missing in a directory: an authority, the SuperLink's certificate, a key pair for each node.

    Nodes reach the SuperLink under the names and IP addresses ``hosts``, besides ``localhost``. The files that are
    written are returned; existing ones stay as they are.

    Raises
    ------
    SettingsError
        If the directory cannot be written to, holds only one half of a pair or a certificate for other hosts, or a
        name is not allowed.
    """
    files, written = Files(folder), []
    for host in hosts:
        _general_name(host)
    for name in nodes:
        if Path(name).name != name or name in ("ca", "server"):
            raise SettingsError(f"{name!r} is no name for a node: it must be a file name, not ca or server")
    with (
        _refused(f"{folder}: certificates cannot be written there", (OSError,)),
        _refused(f"{folder} holds what is no certificate or key under the name of one"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        if _lacks(files.ca, files.ca_key, or_only=files.ca):
            key = ec.generate_private_key(ec.SECP256R1())
            written += [_write_key(files.ca_key, key), _write(files.ca, _certificate(key, "Posy federation", days))]
        if _lacks(files.server, files.server_key):
            if not files.ca_key.exists():
                raise SettingsError(f"{files.ca_key} is missing: it signs {files.server.name}, which is to be made")
            authority_key = serialization.load_pem_private_key(files.ca_key.read_bytes(), None)
            assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
            signer = x509.load_pem_x509_certificate(files.ca.read_bytes()).subject, authority_key
            key = ec.generate_private_key(ec.SECP256R1())
            content = _certificate(key, "Posy SuperLink", days, signer, dict.fromkeys([*LOOPBACK, *hosts]))
            written += [_write_key(files.server_key, key), _write(files.server, content)]
        elif lacking := set(map(_general_name, hosts)) - _hosts(files.server):
            raise SettingsError(
                f"{files.server} is there and is not for {', '.join(sorted(str(name.value) for name in lacking))}; "
                f"delete it and {files.server_key.name} to have them made anew"
            )
        for name in nodes:
            if _lacks(files.node_public(name), files.node_key(name), or_only=files.node_public(name)):
                key = ec.generate_private_key(ec.SECP384R1())
                public = key.public_key().public_bytes(
                    serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
                )
                written += [_write_key(files.node_key(name), key, ssh=True), _write(files.node_public(name), public)]
    return written


def public_pem(path: Path) -> bytes:
    """Return a node's public key as the SuperLink keeps it, PEM; raise :class:`SettingsError` if the file has none."""
    with _refused(f"{path} is not a public key as `posy certificates` makes it"):
        content = path.read_bytes()
        if b"PRIVATE KEY" in content:
            raise SettingsError(f"{path} is a private key, which stays on its node; its public half is needed")
        key = serialization.load_ssh_public_key(content)
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def check_authority(path: Path) -> None:
    """Raise :class:`SettingsError` if a file holds no certificate that others can be checked against."""
    with _refused(f"{path} cannot be used as a certificate"):
        ssl.create_default_context(cafile=str(path))


def check_server(certificate: Path, key: Path) -> None:
    """Raise :class:`SettingsError` if a certificate and a key do not belong together, or it is not valid now."""
    with _refused(f"{certificate} and {key} cannot be used"):
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        end = x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
    if end < datetime.datetime.now(datetime.UTC):
        raise SettingsError(
            f"{certificate} has expired ({end:%Y-%m-%d}); delete it and {key.name} to have them made anew"
        )


def check_node_key(path: Path) -> None:
    """Raise :class:`SettingsError` if a file holds no private key of a node."""
    with _refused(f"--key {path}: it is not a private key as `posy certificates` makes it"):
        content = path.read_bytes()
        load = serialization.load_ssh_private_key if b"OPENSSH" in content else serialization.load_pem_private_key
        load(content, None)


@contextmanager
def _refused(what: str, kinds: tuple[type[Exception], ...] = UNUSABLE) -> Iterator[None]:
    """Turn what reading keys and certificates raises into a :class:`SettingsError` that says what is wrong."""
    try:
        yield
    except SettingsError:
        raise
    except kinds as error:
        raise SettingsError(f"{what}: {error}") from error


def _hosts(certificate: Path) -> set[x509.GeneralName]:
    """Return the hosts that a certificate is for."""
    extensions = x509.load_pem_x509_certificate(certificate.read_bytes()).extensions
    return set(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)


def _lacks(public: Path, private: Path, or_only: Path | None = None) -> bool:
    """Tell whether a pair is missing; the public half alone is enough if it is ``or_only``."""
    there = [path for path in (public, private) if path.exists()]
    if len(there) == 1 and there != [or_only]:
        raise SettingsError(f"{there[0]} is there without its other half; delete it, or bring {public} and {private}")
    return not there


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    name: str,
    days: int,
    signer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None = None,
    hosts: Iterable[str] = (),
) -> bytes:
    """Return a server's certificate for some hosts, by a signer; or, without one, that of an authority."""
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, issuer_key = signer or (subject, key)
    authority = signer is None
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    usage = x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        **dict.fromkeys((*others, "encipher_only", "decipher_only"), False),
    )
    builder = (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    if not authority:
        by = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
        server = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        for extension in (server, x509.SubjectAlternativeName(map(_general_name, hosts)), by):
            builder = builder.add_extension(extension, critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not re.fullmatch(r"[A-Za-z0-9*_-]+(\.[A-Za-z0-9_-]+)*", host):
            raise SettingsError(
                f"--host {host!r}: it must be a name such as server.example.org, in ASCII and without a port, or an IP "
                "address"
            ) from None
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, *, ssh: bool = False) -> Path:
    form = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    return _write(path, key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()), mode=0o600)


def _write(path: Path, content: bytes, mode: int = 0o644) -> Path:
    """Write a new file; it has its mode from the start, so nobody else can read it in between."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)
    return path
