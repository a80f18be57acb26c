"""Who may call the service, and how often: TLS, certificates of clients, tokens, many callers, and the end."""

import asyncio
import datetime
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from test_serve import Running, record  # noqa: F401 - a fixture
from test_serve_limits import message, tensor
from test_serve_reload import wait_for

from posy.commands.deploy.certificates import Files, load_private_key, make_certificates, read_certificates, renew
from posy.commands.serve import read_tokens, serving
from posy.serve.limits import Limits
from posy.serve.server import Credentials, Options
from posy.server_app.record import Record
from posy.settings import SettingsError

Code = grpc.StatusCode
TOKEN = "correct-horse"
BODY = tensor("UINT8", (1, 1, 8, 8), [1] * 64)
MESSAGE = message("UINT8", (1, 1, 8, 8), bytes(64))
HEAD = f"POST /v2/models/client-0/infer HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(BODY)}\r\n\r\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Return an authority and a server's certificate, as `posy certificates` creates them."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder, [], [], 30)
    return Files(folder)


def issue(files: Files, name: str, days: float) -> tuple[Path, Path]:
    """Return a certificate for servers and clients that is valid for some days, or has expired, and its key."""
    key, today = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]
    builder = (
        x509.CertificateBuilder(
            read_certificates(files.ca)[0].subject, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        )
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=10))
        .not_valid_after(today + datetime.timedelta(days=days))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    )
    certificate = builder.sign(load_private_key(files.ca_key.read_bytes()), hashes.SHA256())
    paths = files.folder / f"{name}.pem", files.folder / f"{name}.key"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return paths


class Guarded:
    """A service in a thread, without a client."""

    def __init__(self, run: Path, options: Options) -> None:
        self.server = serving(str(run), options)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.run(handles_signals=False)))
        self.thread.start()
        assert self.server.started.wait(60)

    def __enter__(self) -> "Guarded":
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self.thread.join(30)
        assert not self.thread.is_alive()

    def get(self, path: str, data: bytes | None = None, token: str = "", tls: ssl.SSLContext | None = None) -> int:
        """Return the status for a path."""
        scheme = "https" if tls else "http"
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        request = Request(f"{scheme}://localhost:{self.server.http_port}{path}", data, headers)
        try:
            with urlopen(request, timeout=30, context=tls) as answer:
                return int(answer.status)
        except HTTPError as error:
            assert "/" not in json.load(error).get("error", "")
            return error.code

    def call(self, method: str, token: str = "", tls: grpc.ChannelCredentials | None = None) -> grpc.StatusCode:
        """Return the status of a method; the request for predictions is valid."""
        address = f"localhost:{self.server.grpc_port}"
        with grpc.secure_channel(address, tls) if tls else grpc.insecure_channel(address) as channel:
            metadata = [("authorization", f"Bearer {token}")] if token else []
            content = MESSAGE if method == "ModelInfer" else b""
            answer = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            return answer.future(content, timeout=10, metadata=metadata).code()


def test_tokens(record: Record) -> None:  # noqa: F811
    with Guarded(record.path, Options(http_port=0, grpc_port=0, credentials=Credentials(tokens=("other", TOKEN)))) as s:
        for token in (TOKEN, "", "wrong", TOKEN[:-1], TOKEN + "é"):
            status, code = (200, Code.OK) if token == TOKEN else (401, Code.UNAUTHENTICATED)
            if not token.isascii():  # gRPC's clients refuse it
                assert s.get("/v2", token=token) == status
                continue
            assert s.get("/v2/models/client-0/infer", BODY, token) == status
            assert s.call("ModelInfer", token) == code
            for path in ("/metrics", "/v2", "/v2/models/client-0", "/v2/models/client-0/card"):
                assert s.get(path, token=token) == status
            for method in ("ServerMetadata", "RepositoryIndex"):
                assert s.call(method, token) == code
            assert s.get("/v2/health/live", token=token) == s.get("/v2/health/ready", token=token) == 200
            assert s.call("ServerLive", token) == s.call("ServerReady", token) == Code.OK
        assert s.get("/v2/repository/models/client-0/unload", b"") == 401
        assert s.call("RepositoryModelUnload") == Code.UNAUTHENTICATED
        assert s.get("/v2/models/client-0/ready", token=TOKEN) == 200
        assert s.get("/v2/models/client-0/infer", bytes(10_000_000), "wrong") == 401


def test_a_wrong_token_ends_a_request_before_its_message(record: Record) -> None:  # noqa: F811
    options = Options(http_port=0, grpc_port=0, credentials=Credentials(tokens=(TOKEN,)))
    with Guarded(record.path, options) as s, grpc.insecure_channel(f"localhost:{s.server.grpc_port}") as channel:

        def messages() -> Iterator[bytes]:
            time.sleep(20)
            yield MESSAGE

        started = time.monotonic()
        answer = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer").future(messages(), timeout=60)
        assert answer.code() == Code.UNAUTHENTICATED and time.monotonic() - started < 10


def test_tls(record: Record, files: Files) -> None:  # noqa: F811
    credentials = Credentials(files.server, files.server_key, tokens=(TOKEN,))
    with Guarded(record.path, Options(http_port=0, grpc_port=0, credentials=credentials)) as s:
        trusted = ssl.create_default_context(cafile=str(files.ca))
        channel = grpc.ssl_channel_credentials(files.ca.read_bytes())
        assert s.get("/v2/models/client-0/infer", BODY, TOKEN, trusted) == 200
        assert s.call("ModelInfer", TOKEN, channel) == Code.OK
        assert s.get("/v2/models/client-0/infer", BODY, "wrong", trusted) == 401
        assert s.call("ModelInfer", "wrong", channel) == Code.UNAUTHENTICATED
        with pytest.raises(URLError, match="certificate"):
            s.get("/v2", token=TOKEN, tls=ssl.create_default_context())  # an unknown authority
        assert s.call("ModelInfer", TOKEN, grpc.ssl_channel_credentials()) == Code.UNAVAILABLE
        with pytest.raises(OSError):
            s.get("/v2", token=TOKEN)  # no TLS
        assert s.call("ModelInfer", TOKEN) == Code.UNAVAILABLE
        assert s.get("/v2/health/ready", tls=trusted) == 200


def test_certificates_of_clients(record: Record, files: Files, tmp_path: Path) -> None:  # noqa: F811
    make_certificates(tmp_path, [], [], 30)
    make_certificates(files.folder, [], [], 30, clients=["created"])
    pairs: dict[str, tuple[Path, Path] | None] = {
        "created": (files.client("created"), files.client_key("created")),
        "server": (files.server, files.server_key),
        "valid": issue(files, "valid", 1),
        "expired": issue(files, "expired", -1),
        "foreign": issue(Files(tmp_path), "foreign", 1),
        "none": None,
    }
    accepted = ("created", "valid")
    credentials = Credentials(files.server, files.server_key, files.ca)
    with Guarded(record.path, Options(http_port=0, grpc_port=0, credentials=credentials)) as s:
        for name, pair in pairs.items():
            context, contents = ssl.create_default_context(cafile=str(files.ca)), [None, None]
            if pair:
                context.load_cert_chain(*pair)
                contents = [path.read_bytes() for path in reversed(pair)]  # type: ignore[misc]
            channel = grpc.ssl_channel_credentials(files.ca.read_bytes(), *contents)
            assert s.call("ModelInfer", tls=channel) == (Code.OK if name in accepted else Code.UNAVAILABLE), name
            if name in accepted:
                assert s.get("/v2/models/client-0/infer", BODY, tls=context) == 200
                continue
            with pytest.raises(OSError):
                s.get("/v2/models/client-0/infer", BODY, tls=context)


def serial_of(port: int, files: Files, client: str = "") -> int:
    """Return the serial number of the certificate that a port presents to a new connection."""
    context = ssl.create_default_context(cafile=str(files.ca))
    context.set_alpn_protocols(["h2", "http/1.1"])
    if client:
        context.load_cert_chain(files.client(client), files.client_key(client))
    with (
        socket.create_connection(("localhost", port), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as encrypted,
    ):
        certificate = encrypted.getpeercert(binary_form=True)
        assert certificate is not None
        return x509.load_der_x509_certificate(certificate).serial_number


@pytest.mark.parametrize("client", ["", "app"])
def test_a_renewed_certificate_fails_no_request(
    record: Record,  # noqa: F811
    tmp_path: Path,
    client: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_certificates(tmp_path, [], [], 30, clients=["app"])
    files = Files(tmp_path)
    credentials = Credentials(files.server, files.server_key, files.ca if client else None)
    options = Options(http_port=0, grpc_port=0, reload_seconds=0.1, credentials=credentials)
    context = ssl.create_default_context(cafile=str(files.ca))
    pair = (files.client_key("app"), files.client("app"))
    context.load_cert_chain(*reversed(pair))
    channel = grpc.ssl_channel_credentials(files.ca.read_bytes(), *(path.read_bytes() for path in pair))
    with Guarded(record.path, options) as s:
        ports = s.server.http_port, s.server.grpc_port

        def present(serial: int) -> bool:
            assert s.get("/v2/models/client-0/infer", BODY, tls=context) == 200
            assert s.call("ModelInfer", tls=channel) == Code.OK
            return {serial_of(port, files, client) for port in ports} == {serial}

        [first] = read_certificates(files.server)
        assert present(first.serial_number)
        content = files.server.read_bytes()
        files.server.write_text("no certificate")
        wait_for(lambda: present(first.serial_number) and "so the service keeps the current certificate" in caplog.text)
        files.server.write_bytes(content)
        with grpc.secure_channel(f"localhost:{ports[1]}", channel) as connection:
            call = connection.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            call(MESSAGE, timeout=30)
            renew(tmp_path, [], [], 60)
            [second] = read_certificates(files.server)
            assert second.serial_number != first.serial_number
            wait_for(lambda: present(second.serial_number))
            call(MESSAGE, timeout=30)  # on the connection with the first certificate
        if client:
            with pytest.raises(OSError):  # clients still need a certificate
                s.get("/v2", tls=ssl.create_default_context(cafile=str(files.ca)))
            assert s.call("ModelInfer", tls=grpc.ssl_channel_credentials(files.ca.read_bytes())) == Code.UNAVAILABLE


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "10.0.0.1", "127.0.0.1.example.org", "::ffff:127.0.0.1", "127.1"]
)
def test_other_addresses_need_credentials(record: Record, files: Files, host: str) -> None:  # noqa: F811
    for credentials in (
        Credentials(),
        Credentials(tokens=(TOKEN,)),
        Credentials(files.server, files.server_key),
    ):
        with pytest.raises(SettingsError, match="other machines could call"):
            serving(str(record.path), Options(host, credentials=credentials))


def test_certificates_are_checked_at_the_start(record: Record, files: Files) -> None:  # noqa: F811
    certificate, key = issue(files, "late", -1)
    for credentials, text in (
        (Credentials(certificate, key), "has expired"),
        (Credentials(files.server, key), "cannot be used"),
        (Credentials(files.server, files.folder / "missing"), "cannot be used"),
        (Credentials(files.server), "set both"),
        (Credentials(files.server, files.server_key, files.server_key), "cannot be used"),
        (Credentials(ca=files.ca), "its own certificate"),
    ):
        with pytest.raises(SettingsError, match=text):
            serving(str(record.path), Options(credentials=credentials))


def test_both_transports_listen_on_ipv6(record: Record) -> None:  # noqa: F811
    try:  # a sandbox may offer the address and refuse the connections
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
            socket.create_connection(listening.getsockname()[:2], timeout=10).close()
    except OSError:
        pytest.skip("this machine has no connections over IPv6")
    with Guarded(record.path, Options("::1", 0, 0)) as s:
        with urlopen(f"http://[::1]:{s.server.http_port}/v2/health/ready", timeout=30) as answer:
            assert answer.status == 200
        with grpc.insecure_channel(f"[::1]:{s.server.grpc_port}") as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=10) == b"\x08\x01"


def test_the_file_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for text, mode, fault in (
        ("a\n# b\n\n c \n", 0o600, ""),
        ("a", 0o644, "other users"),
        ("#a\n\n", 0o600, "no token"),
        ("a b", 0o600, "a space"),
        ("pässword", 0o600, "beyond ASCII"),
    ):
        path.write_text(text, encoding="utf-8")
        path.chmod(mode)
        if fault:
            with pytest.raises(SettingsError, match=fault):
                read_tokens(path)
        else:
            assert read_tokens(path) == ["a", "c"]
    with pytest.raises(SettingsError, match="cannot be read"):
        read_tokens(tmp_path / "missing")


def test_the_rate_of_an_address_counts_both_transports(record: Record) -> None:  # noqa: F811
    with Guarded(record.path, Options(http_port=0, grpc_port=0, limits=Limits(rate=0.01))) as s:
        assert s.get("/v2/models/client-0/infer", BODY) == 200
        assert s.get("/v2/models/client-0/infer", BODY) == 429
        request = Request(f"http://localhost:{s.server.http_port}/v2", headers={"X-Forwarded-For": "192.0.2.7"})
        with pytest.raises(HTTPError, match="429"):
            urlopen(request, timeout=30)
        with grpc.insecure_channel(f"127.0.0.1:{s.server.grpc_port}") as channel:
            answer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(MESSAGE, timeout=10)
            assert answer.code() == Code.RESOURCE_EXHAUSTED
        assert s.get("/v2/health/ready") == s.get("/metrics") == 200


async def ask(port: int) -> int:
    """Return the status of one request on a separate connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD.encode() + BODY)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


async def call_often(port: int, count: int) -> Counter[grpc.StatusCode]:
    """Return the statuses of calls that start at the same time, on 50 connections."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) for _ in range(50)]
    methods = [channel.unary_unary("/inference.GRPCInferenceService/ModelInfer") for channel in channels]
    calls = [methods[number % 50](MESSAGE, timeout=60) for number in range(count)]
    codes = Counter([await answer.code() for answer in calls])
    for channel in channels:
        await channel.close()
    return codes


@pytest.mark.parametrize("concurrency", [1024, 20])
def test_a_thousand_callers(record: Record, concurrency: int) -> None:  # noqa: F811
    async def callers(s: Guarded) -> tuple[Counter[int], Counter[grpc.StatusCode]]:
        http, grpc_codes = await asyncio.wait_for(
            asyncio.gather(
                asyncio.gather(*(ask(s.server.http_port) for _ in range(1000))),
                call_often(s.server.grpc_port, 1000),
            ),
            120,
        )
        return Counter(http), grpc_codes

    with Guarded(record.path, Options(http_port=0, grpc_port=0, limits=Limits(concurrency=concurrency))) as s:
        http, codes = asyncio.run(callers(s))
        assert sum(http.values()) == sum(codes.values()) == 1000
        assert set(http) <= {200, 429} and set(codes) <= {Code.OK, Code.RESOURCE_EXHAUSTED}
        assert http[200] + codes[Code.OK] >= 20
        assert s.get("/v2/models/client-0/infer", BODY) == 200 and s.call("ModelInfer") == Code.OK


@pytest.fixture
def process(record: Record) -> Iterator[tuple["subprocess.Popen[str]", int, int]]:  # noqa: F811
    """Start `posy serve` as a process, and return it with its ports."""
    command = [sys.executable, "-m", "posy", "serve", str(record.path), "--http-port", "0", "--grpc-port", "0"]
    with subprocess.Popen([*command, "--drain", "2"], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            ports: list[int] = []
            for line in started.stdout:
                ports += map(int, re.findall(r"127\.0\.0\.1:(\d+)", line))
                if len(ports) == 2:
                    break
            yield started, ports[0], ports[1]
        finally:
            started.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_service_after_its_requests(
    process: tuple["subprocess.Popen[str]", int, int], number: signal.Signals
) -> None:
    service, http_port, grpc_port = process
    with socket.create_connection(("127.0.0.1", http_port), 30) as slow:
        slow.sendall(HEAD.encode() + BODY[:10])  # a request in progress
        time.sleep(0.5)
        service.send_signal(number)
        time.sleep(0.5)
        with pytest.raises(HTTPError, match="503"):
            urlopen(f"http://127.0.0.1:{http_port}/v2/health/ready", timeout=30)
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            assert channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=10) == b""
            answer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer").future(MESSAGE, timeout=10)
            assert answer.code() == Code.OK  # load balancers still send requests
        time.sleep(2.5)  # the service refuses connections
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", http_port), 5)
        slow.sendall(BODY[10:])
        assert slow.recv(1000).startswith(b"HTTP/1.1 200")
    assert service.wait(30) == 0


def test_a_port_in_use_is_named(record: Record, tmp_path: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for option, other in (("--http-port", "--grpc-port"), ("--grpc-port", "--http-port")):
            command = [sys.executable, "-m", "posy", "serve", str(record.path), option, str(port), other, "0"]
            ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert ended.returncode == 2 and f"{option} {port}: the port cannot be used" in ended.stderr
            assert "Traceback" not in ended.stderr
