"""The certificate of the service, which follows renewals of its files while the service runs."""

import ssl
from logging import INFO, WARNING
from pathlib import Path

import grpc
from flwr.common.logger import log

from posy.serve.repository import signature_of


class Certificate:
    """The certificate of a service and its key.

    Parameters
    ----------
    certificate, key : Path
        The files (PEM).
    ca : Path, optional
        Certificates that sign the clients' certificates. They are read once.
    """

    def __init__(self, certificate: Path, key: Path, ca: Path | None = None) -> None:
        self._paths = certificate, key
        self._authorities = ca.read_bytes() if ca else None
        self._configuration = self._read()
        self._renewed: grpc.ServerCertificateConfiguration | None = None
        self._contexts: list[ssl.SSLContext] = []

    def signature(self) -> object:
        """Return a value that changes with the files."""
        return signature_of(self._paths)

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server, whose new connections use the newest certificate."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration, self._fetch, require_client_authentication=self._authorities is not None
        )

    def watch(self, context: ssl.SSLContext) -> None:
        """Load later certificates into a context, whose new connections then use them."""
        self._contexts.append(context)

    async def renew(self) -> None:
        """Read the files again, or log why the service keeps the current certificate."""
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*self._paths)  # a wrong pair raises an error
            self._renewed = self._read()
            for context in self._contexts:
                context.load_cert_chain(*self._paths)
        except OSError as error:
            text = "%s cannot be loaded, so the service keeps the current certificate: %s"
            log(WARNING, text, self._paths[0], error)
        else:
            log(INFO, "%s is loaded for new connections", self._paths[0])

    def _read(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = (path.read_bytes() for path in self._paths)
        return grpc.ssl_server_certificate_configuration([(key, certificate)], self._authorities)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the newest certificate if gRPC does not have it; gRPC calls this function for each new connection."""
        renewed, self._renewed = self._renewed, None
        return renewed
